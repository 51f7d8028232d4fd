"""The values of a run: the last match, NaN where a number may stand, steps, and files."""

import json
import math
from pathlib import Path

import pytest

from deepstack.tools.own_trainer.metric import (
    MetricFile,
    Value,
    number_at,
    parse_pattern,
    read_metric,
)

STEPS = r"step (?P<step>\d+): .*val loss ([0-9.]+)"


def values(pattern: str, *lines: str) -> list[tuple[int, float]]:
    return [tuple(one) for one in parse_pattern(pattern).values(lines)]


def test_values_without_a_step_are_numbered() -> None:
    assert values("val loss ([0-9.]+)", "val loss 3.5", "x", "val loss 2.5, val loss 2.25") == [
        (1, 3.5), (2, 2.5), (3, 2.25)
    ]  # fmt: skip


def test_a_step_is_read_where_the_pattern_names_it() -> None:
    lines = ("step 0: train loss 4.0, val loss 4.1", "step 250: train loss 2, val loss 2.5.")
    assert values(STEPS, *lines) == [(0, 4.1), (250, 2.5)]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1.2e-05", 1.2e-5), ("3E+2", 300.0), ("7", 7.0), (".5", 0.5), ("2.50.", 2.5)],
)
def test_a_number_is_read_to_its_end(text: str, number: float) -> None:
    assert values("val loss ([0-9.]+)", f"val loss {text} end") == [(1, number)]


def test_a_sign_before_the_group_belongs_to_the_number() -> None:
    assert values("reward[ =]*-?([0-9.]+)", "reward -1.5")[-1][1] == -1.5
    assert values("loss.([0-9.]+)", "val loss-1.5")[-1][1] == 1.5  # a hyphen after a word


@pytest.mark.parametrize("word", ["nan", "NaN", "inf", "-inf", "Infinity"])
def test_a_value_that_is_not_finite_is_the_last_one(word: str) -> None:
    found = values("val loss:? ?([0-9.]+)", "val loss 2.5", f"val loss {word}")
    assert len(found) == 2 and not math.isfinite(found[-1][1])


@pytest.mark.parametrize(
    "pattern", [r"(?:a|b)\((?P<step>\d+)\) [)(] ([\d.]+)", r"x[]()]?(?P<value>(?:\d+\.?)+) ?\)?"]
)
def test_a_nan_is_read_whatever_the_pattern_holds(pattern: str) -> None:
    lines = ("a(3) ( 2.5", "a(4) ) nan", "x(2.5", "x)nan")
    first, last = values(pattern, *lines)
    assert first[1] == 2.5 and math.isnan(last[1])


def test_a_trainer_that_begins_again_at_a_step_replaces_its_later_values() -> None:
    lines = [f"step {n}: val loss {loss}" for n, loss in ((0, 4), (10, 3), (20, 2), (10, 2.9))]
    assert values(STEPS.replace(".*", ""), *lines) == [(0, 4.0), (10, 2.9)]


FILES = {
    "m.json": (json.dumps({"eval": {"loss": 2.5}}), "eval.loss", [(1, 2.5)]),
    "m.jsonl": ('{"step": 5, "loss": 3}\n{"step": 9, "loss": NaN}\n', "loss", [(5, 3.0), None]),
    "m.csv": ("step,loss\n1,3.5\n2,\n3,2.5\n", "loss", [(1, 3.5), (3, 2.5)]),
}


@pytest.mark.parametrize("name", FILES)
def test_values_are_read_from_a_file(name: str, tmp_path: Path) -> None:
    text, key, expected = FILES[name]
    (tmp_path / name).write_text(text)
    found = read_metric(MetricFile(name, key), tmp_path / "output.txt", tmp_path, 0)
    assert len(found) == len(expected)
    for one, wanted in zip(found, expected, strict=True):
        assert one == (9, pytest.approx(math.nan, nan_ok=True)) if wanted is None else one == wanted


def test_a_file_of_an_earlier_start_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"loss": 2.5}')
    since = path.stat().st_mtime_ns
    metric = MetricFile("m.json", "loss")
    assert read_metric(metric, tmp_path / "o", tmp_path, since) == [Value(1, 2.5)]
    with pytest.raises(ValueError, match=r"has not written m\.json into \{run\}"):
        read_metric(metric, tmp_path / "o", tmp_path, since + 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"loss": "x"}', '{"other": 1}'])
def test_a_file_without_the_value_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ValueError, match=r"m\.json"):
        read_metric(MetricFile("m.json", "loss"), tmp_path / "o", tmp_path, 0)


@pytest.mark.parametrize("before", [" ", "\t", ":", "=", "(", ","])
def test_a_sign_after_a_separator_belongs_to_the_number(before: str) -> None:
    line = f"loss{before}-0.5"
    assert number_at(line, 6) == -0.5
    assert number_at("step3-0.5", 6) == 0.5


@pytest.mark.parametrize(("text", "number"), [("1e39", math.inf), ("4.5e281", math.inf)])
def test_a_value_that_float32_does_not_hold_is_infinite(text: str, number: float) -> None:
    """The loss of a trainer in float64 that diverges; logs refuse it as a number."""
    assert values("val loss ([0-9.]+)", "val loss 3e38", f"val loss {text}")[1] == (2, number)
