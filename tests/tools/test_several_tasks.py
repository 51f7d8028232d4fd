"""Losses of other data, families or settings of the task are not compared, by no command."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import succeed, typed
from helpers.plot_runs import make_run
from helpers.sampling import some

from deepstack.cli.finding import sweep_finding
from deepstack.records import RunFolder
from deepstack.runs import Runs, validation_notes
from deepstack.tools.answer.answer import answer
from deepstack.tools.report.finding import best_of_depths, finding_of

OTHER: list[dict[str, Any]] = [
    {"task.name": "markov"},
    {"task.mask_rate": 0.6},
    {"task.seq_len": 64},
    {"model.family": "decoder"},
    {"task.path": "other.txt"},
]


def make_study(root: Path, other: dict[str, Any], digests: tuple[str, str] = ("", "")) -> None:
    """Make three seeds each of two schemes, the second with another task and lower losses."""
    known = {"task.mask_rate": 0.1, "task.seq_len": 32, "model.family": "encoder"}
    known |= {"task.path": "one.txt"}
    for scheme, loss, settings, digest in zip(
        ("deepnorm", "post_ln"), (2.6, 2.4), (known, known | other), digests, strict=True
    ):
        for seed in range(3):
            path = make_run(
                root, scheme=scheme, seed=seed, masked=loss + seed / 100, config=settings
            )
            if digest:
                meta = json.loads((path / "meta.json").read_text())
                RunFolder(path).write_meta(meta | {"data": {"sha256": digest}})


@pytest.mark.parametrize("other", some(OTHER, 4), ids=str)
def test_losses_of_other_tasks_are_not_compared(other: dict[str, Any], tmp_path: Path) -> None:
    make_study(tmp_path / "s", other)
    [key] = other
    assert f"Losses are not compared: {key} differs." in typed("compare", tmp_path / "s").stderr
    assert f"Losses are not compared: {key} differs." in answer(tmp_path / "s").found.details
    assert "better than" not in answer(tmp_path / "s").sentence
    runs = Runs.below(tmp_path / "s")
    assert best_of_depths(runs) == []
    assert f"Losses are not compared: {key} differs." in finding_of(runs, [], None)["sentences"]
    rows = json.loads(succeed("compare", tmp_path / "s", "--against", "post_ln", "--json"))
    assert [(row["difference"], row["pairs"]) for row in rows] == [(None, 0)] * 2
    assert sweep_finding(runs)[-1] == f"Losses are not compared: {key} differs."


@pytest.mark.parametrize("digests", [("a", "a"), ("a", "b")])
def test_a_text_is_known_by_its_contents(digests: tuple[str, str], tmp_path: Path) -> None:
    make_study(tmp_path / "s", {"task.path": "moved.txt"}, digests)
    is_one = digests[0] == digests[1]
    assert ("better than" in answer(tmp_path / "s").sentence) == is_one
    assert ("data differs" in typed("compare", tmp_path / "s").stderr) != is_one


def test_validation_sets_of_several_sizes_are_named(tmp_path: Path) -> None:
    make_study(tmp_path, {"train.batch_size": 32})
    assert "positions" not in typed("compare", tmp_path).stderr
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        meta = json.loads((path / "meta.json").read_text())
        RunFolder(path).write_meta(meta | {"validation": {"positions": 1280 * (1 + number // 3)}})
    note = "the validation sets have 1,280 to 2,560 positions"
    assert note in typed("compare", tmp_path).stderr.replace("\n", " ")
    found = answer(tmp_path)
    assert "better than" in found.sentence and any(note in line for line in found.left_out)


def test_a_task_that_differs_between_depths_is_compared_at_each(tmp_path: Path) -> None:
    for depth in (6, 12):
        for scheme, loss in (("deepnorm", 2.6), ("post_ln", 2.4)):
            for seed in range(3):
                settings = {"task.n": depth}
                make_run(
                    tmp_path, scheme=scheme, depth=depth, seed=seed, config=settings,
                    masked=loss + seed / 100,
                )  # fmt: skip
    runs = Runs.below(tmp_path)
    found = [*sweep_finding(runs), answer(tmp_path).sentence, *answer(tmp_path).found.details]
    found += [typed("compare", tmp_path).stderr, *finding_of(runs, [], None)["sentences"]]
    assert "not compared" not in " ".join(found)
    assert sum("Post-LN" in text and "better than DeepNorm" in text for text in found) >= 3
    assert [row["depth"] for row in best_of_depths(runs)] == [6, 12]


@pytest.mark.parametrize(("rate", "number"), [(0.15, 1), (0.6, 0)])
def test_sizes_of_validation_sets_are_compared_within_a_task(
    rate: float, number: int, tmp_path: Path
) -> None:
    for seed, (mask_rate, positions) in enumerate([(0.15, 1280), (rate, 2560)]):
        path = make_run(tmp_path, seed=seed, config={"task.mask_rate": mask_rate})
        meta = json.loads((path / "meta.json").read_text())
        RunFolder(path).write_meta(meta | {"validation": {"positions": positions}})
    assert len(validation_notes(Runs.below(tmp_path))) == number
