"""Snapshots of an external probe at steps whose loss or gradient norm jumps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.probe_models import D, batch_of, probed
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.records import Run
from deepstack.runs.spikes import spike_sentence, spikes_of

BAD_STEP, STEPS = 31, 45
USUAL = {0, 1, 2, 3, 5, 8, 13, 21, 34}


class Residual(nn.Module):
    """Three layers x + 3 tanh(W x / 3) without a norm, whose output moves with each W."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 3 * torch.tanh(layer(x) / 3)
        return x


def sgd(model: Residual) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": one.parameters(), "lr": 0.02} for one in model.layers])


def spiked(out: Path, bad_batch: bool = False, bad_layer: int | None = None, **options: Any) -> Run:
    """A run of SGD with a batch of large targets, or with one layer's rate raised, at step 31."""
    model = Residual()
    optimizer = sgd(model)
    options = {"layers_on": "spike", "layers_every": "log", "attribution_every": 0} | options
    with deepstack.probe(model, batch_of(0), optimizer, out=out, **options) as probe:
        train(probe, model, optimizer, range(1, STEPS + 1), bad_batch, bad_layer)
    return probe.run


def train(
    probe: Any, model: nn.Module, optimizer: Any, steps: range, bad_batch: bool, bad_layer: Any
) -> None:
    for step in steps:
        x = batch_of(step)
        target: Tensor = x.flip(1) * (40 if bad_batch and step == BAD_STEP else 1)
        for number, group in enumerate(optimizer.param_groups, 1):
            group["lr"] = 300.0 if number == bad_layer and step == BAD_STEP else 0.02
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        probe.step(loss)


@pytest.mark.parametrize("every", [1, 7])
def test_a_bad_batch_gives_a_snapshot_at_its_step(tmp_path: Path, every: int) -> None:
    run = spiked(tmp_path / "run", bad_batch=True, every=every)
    row, *_ = spikes_of(run)
    assert row["step"] == row["moved_step"] == BAD_STEP
    assert row["loss_deviations"] > 8 and row["grad_norm_factor"] > 4
    steps, changes = run.layers("param_update_norm")
    assert {*steps.tolist()} >= USUAL | {BAD_STEP}
    (at_spike,), (before,) = changes[steps == BAD_STEP], changes[steps == 21]
    assert (at_spike > 3 * before).all()
    assert "loss and gradient norm jump at step 31" in (spike_sentence(run) or "").lower()
    assert set(row) <= set(run.columns["columns"])


@pytest.mark.parametrize("layer", [1, 2])
def test_the_layer_whose_rate_jumps_is_named(tmp_path: Path, layer: int) -> None:
    run = spiked(tmp_path / "run", bad_layer=layer)
    row, *_ = spikes_of(run)
    assert BAD_STEP < row["step"] <= BAD_STEP + 5
    assert (row["moved_layer"], row["moved_step"]) == (layer, BAD_STEP)
    assert f"layer {layer} moved first, at step 31" in (spike_sentence(run) or "")


def test_a_smooth_loop_has_no_spike_and_the_rows_of_a_probe_without(tmp_path: Path) -> None:
    one = spiked(tmp_path / "one")
    two = spiked(tmp_path / "two", layers_on=None)
    assert spikes_of(one) == [] and spike_sentence(one) is None
    for name in ("steps.csv", *(f"layers/{n}.npy" for n in two.layer_names())):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()
    assert not (two.path / "spikes.csv").exists()
    assert "layers_on" not in (two.path / "config.yaml").read_text()
    assert {*two.layers("stream_norm")[0].tolist()} == USUAL


@pytest.mark.parametrize("stop", [25, 31, 40])
def test_a_resumed_loop_has_the_same_spike(tmp_path: Path, stop: int) -> None:
    whole = spiked(tmp_path / "whole", bad_batch=True)

    def setup() -> tuple[nn.Module, Any, Any]:
        model = Residual()
        optimizer = sgd(model)
        given: Any = {"layers_on": "spike", "attribution_every": 0, "out": tmp_path / "parts"}
        return model, optimizer, deepstack.probe(model, batch_of(0), optimizer, **given)

    model, optimizer, probe = setup()
    with probe:
        train(probe, model, optimizer, range(1, stop + 1), True, None)
        saved = probe.state_dict()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer, probe = setup()
    model.load_state_dict(weights)
    probe.load_state_dict(saved)
    with probe:
        train(probe, model, optimizer, range(stop + 1, STEPS + 1), True, None)
    for name in ("steps.csv", "spikes.csv", "layers/steps.npy", "layers/param_update_norm.npy"):
        assert (probe.run.path / name).read_bytes() == (whole.path / name).read_bytes(), name


OTHERS: list[dict[str, Any]] = [{"layers_on": "loss"}, {"layers_every": 0}, {"layers": ()}]


@pytest.mark.parametrize("options", OTHERS)
def test_other_values_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"layers_on: found .*; allowed "):
        probed(tmp_path / "run", **({"layers_on": "spike"} | options))
