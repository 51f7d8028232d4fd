"""The coordinate check: exponents in width and depth, and their verdicts."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import typed
from helpers.plot_runs import caption, make_chart, make_run, rows
from helpers.small_runs import small
from safetensors.torch import load_file
from torch import Tensor

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.model import build_model
from deepstack.records import RunFolder, find_runs
from deepstack.tasks import task_of
from deepstack.tools.coordinates.table import coordinates, verdict


def test_exponents_and_verdicts_follow_from_the_values(tmp_path: Path) -> None:
    """Changes of coordinates grow as d^(1/2) N^(1/2), 1 % apart between seeds."""
    widths = (32, 64, 128)
    for d, depth, seed in product(widths, (4, 16), (0, 1, 2)):
        at = {"model.d_model": d, "train.lr": 1e-3}
        path = make_run(tmp_path, depth=depth, seed=seed, lr=d, d_ff=4 * d, config=at)
        noise = 1 + 0.01 * seed * (d / 32)
        update = np.linspace(0.5, 1, depth) * (d * depth) ** 0.5 * noise
        size = np.full(depth, d**0.5)
        records = {"stream_norm": [size, size], "stream_update": [0 * size, update * d**0.5]}
        RunFolder(path).write_layers({k: np.array(v) for k, v in records.items()}, [0, 5])
    table = json.loads(typed("compare", tmp_path, "--coordinates", "--json").stdout)
    by_key = {
        (row["quantity"], row["layer"], row["over"], row.get("depth", row.get("width"))): row
        for row in table
    }
    update = by_key["update", "last", "width", 16]
    assert update["exponent"] == pytest.approx(0.5, abs=0.03)
    assert update["low"] < update["exponent"] < update["high"]
    known = {"step": 5, "seeds": 3, "verdict": "grows with width"}
    assert update | known == update
    assert by_key["size", "middle", "width", 4]["verdict"] == "does not depend on width"
    assert by_key["update", "last", "depth", 32]["exponent"] == pytest.approx(0.5)
    assert {row["layer"] for row in table} == {"first", "middle", "last", "F"}
    chart = make_chart("coordinate_check", tmp_path)
    assert "update of the last layer: depth 4 grows with width: " in caption(chart)
    printed = [row["exponent"] for row in table if row["over"] == "width"]
    assert sorted(rows(chart, kind="fit")["exponent"]) == pytest.approx(sorted(printed))
    lines = rows(chart, kind="point", series="depth 16, last")
    assert lines["x"].tolist() == [*widths, *widths] and lines["n"].tolist() == [3] * 6


def test_values_per_coordinate_are_of_the_first_the_middle_and_the_last_layer(
    tmp_path: Path,
) -> None:
    for depth in (4, 5):
        path = make_run(tmp_path, depth=depth, config={"model.d_model": 25})
        norms = np.arange(1.0, depth + 1) * 5
        values = {"stream_norm": np.array([norms]), "stream_update": np.array([10 * norms])}
        RunFolder(path).write_layers(values, [5])
    table = coordinates(find_runs(tmp_path), 5).set_index(["quantity", "depth", "layer"])["value"]
    for depth, wanted in {4: (1.0, 2.0, 4.0), 5: (1.0, 3.0, 5.0)}.items():  # 5 is the root of 25
        for layer, value in zip(("first", "middle", "last"), wanted, strict=True):
            assert table["size", depth, layer] == pytest.approx(value)
            assert table["update", depth, layer] == pytest.approx(10 * value)


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((0.02, -0.01, 0.05), "does not depend on width"), ((0.05, 0.01, 0.09), "does not depend"),
        ((0.3, 0.2, 0.4), "grows"), ((-0.3, -0.5, -0.1), "falls"), ((0.0, -0.2, 0.2), "undecided"),
        ((0.0, float("nan"), float("nan")), "undecided"),
    ],
)  # fmt: skip
def test_a_verdict_needs_an_interval(interval: tuple[float, float, float], words: str) -> None:
    assert verdict(*interval, "width").startswith(words)


def outputs_of_layers(built: Any, tokens: Tensor) -> list[Tensor]:
    states: list[Tensor] = []
    for layer in built.model.layers:
        layer.register_forward_hook(lambda module, args, out: states.append(out))
    with torch.no_grad(), built.model.unfused():
        built.model.eval()(tokens)
    return states


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_the_change_of_the_stream_equals_two_passes(family: str, tmp_path: Path) -> None:
    config = small(
        model__family=family, model__scheme="post_ln", task__name="reverse",
        log__stream_update=True, train__lr=0.01,
    )  # fmt: skip
    run = deepstack.train(config, out=tmp_path)
    steps, values = run.layers("stream_update")
    assert steps[-1] == 12 and (values[0] == 0).all()
    task = task_of(config)
    tokens = torch.from_numpy(task.probe_batch(2).inputs)
    start, end = (build_model(config, vocab_size=task.vocab_size) for _ in range(2))
    end.load(load_file(run.path / "checkpoint" / "12" / "weights.safetensors"))
    pairs = zip(outputs_of_layers(end, tokens), outputs_of_layers(start, tokens), strict=True)
    expected = [float((after - before).norm(dim=-1).mean()) for after, before in pairs]
    assert values[-1] == pytest.approx(expected, rel=1e-4) and min(expected) > 0.01
    with pytest.raises(ConfigError, match=r"stream_update: found true, unused under"):
        small(log__stream_update=True, log__layers_every=0)
