"""Records of layers at spikes: the rule on planted and on smooth numbers, and the runs' records."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_runs import data_of, interrupted, logs_of, small

import deepstack
import deepstack.training.run as training_run
from deepstack.base.errors import ConfigError
from deepstack.cli.finding import run_finding
from deepstack.diagnostics.spikes import Spike, SpikeFinder
from deepstack.fast import Step
from deepstack.model.build import Built
from deepstack.records import Run
from deepstack.runs import Runs
from deepstack.runs.spikes import spike_sentence, spike_sentences, spikes_of
from deepstack.training import parent_of
from deepstack.training.timing import timed_steps

PLANTED = 40


def spikes_in(
    losses: Sequence[float], norms: Sequence[float] | None = None, changes: Any = None
) -> list[Spike]:
    """The spikes that a finder names, one step after the other."""
    finder, found = SpikeFinder(), []
    for index, loss in enumerate(losses):
        norm = 1.0 if norms is None else norms[index]
        finder.follow(index + 1, loss, norm, [1.0] if changes is None else changes[index])
        found += [finder.spike] if finder.spike else []
    return found


def noisy(steps: int, seed: int = 0, noise: float = 0.05) -> list[float]:
    """A smooth loss with normal noise."""
    falling = 1.5 + 2.5 * np.exp(-np.arange(steps) / 60)
    return list(falling + noise * np.random.default_rng(seed).standard_normal(steps))


def test_a_raised_loss_is_one_spike_with_its_size_in_robust_deviations() -> None:
    losses = noisy(100)
    losses[60:64] = [5.0, 4.5, 4.0, 3.5]  # a jump that lasts is one spike
    (spike,) = spikes_in(losses)
    before = np.array(losses[40:60])
    middle = np.quantile(before, 0.5)
    spread = 1.4826 * np.quantile(np.abs(before - middle), 0.5)
    assert spike.step == 61
    assert spike.loss_deviations == pytest.approx((5.0 - middle) / spread)
    assert spike.grad_norm_factor == 1.0 and spike.moved_layer is None


def test_a_gradient_norm_above_four_times_its_median_is_a_spike() -> None:
    norms = [1.0 + 0.1 * (i % 3) for i in range(80)]
    assert not spikes_in([2.0] * 80, [n * (3.9 if i == 51 else 1) for i, n in enumerate(norms)])
    (spike,) = spikes_in([2.0] * 80, [n * (6.0 if i == 51 else 1) for i, n in enumerate(norms)])
    assert spike.step == 52 and spike.grad_norm_factor == pytest.approx(6 * norms[51] / 1.1)


def test_the_rule_knows_nothing_of_later_steps() -> None:
    losses = noisy(120)
    losses[50], losses[100] = 9.0, 9.0
    whole = spikes_in(losses)
    assert [spike.step for spike in whole] == [51, 101]
    for end in range(30, 120, 7):
        assert spikes_in(losses[:end]) == [spike for spike in whole if spike.step <= end]


def test_the_first_steps_and_the_twenty_after_a_spike_have_none() -> None:
    losses = [2.0] * 100
    for index in (10, 19, 30, 45, 50, 60):
        losses[index] = 8.0
    assert [spike.step for spike in spikes_in(losses)] == [31, 61]


@pytest.mark.parametrize(("jump", "spikes"), [(0.15, 0), (0.17, 1)])
def test_calm_losses_have_a_spike_above_eight_percent(jump: float, spikes: int) -> None:
    """The robust deviation is at least 1 % of the median, here of 2."""
    losses = [2.0 + 1e-6 * (step % 3) for step in range(60)]
    losses[40] += jump
    assert len(spikes_in(losses)) == spikes


@pytest.mark.parametrize(("second", "steps"), [(50, [31]), (51, [31, 52])])
def test_the_twenty_first_step_after_a_spike_may_be_one(second: int, steps: list[int]) -> None:
    losses = [2.0] * 100
    losses[30] = losses[second] = 8.0
    assert [spike.step for spike in spikes_in(losses)] == steps


def test_numbers_that_are_not_finite_are_left_out() -> None:
    losses = [2.0 + 0.01 * (i % 5) for i in range(60)]
    losses[30], losses[45] = math.nan, math.inf
    assert spikes_in(losses) == []


def test_the_first_step_with_a_moved_layer_counts_and_there_the_largest_factor() -> None:
    changes = [[1.0, 1.0, 1.0, 1.0] for _ in range(60)]
    changes[37] = [1.1, 1.0, 9.0, 4.0]  # step 38: layer 3
    changes[39] = [50.0, 50.0, 50.0, 50.0]
    losses = [2.0] * 60
    losses[39] = 8.0
    (spike,) = spikes_in(losses, None, changes)
    moved = spike.moved_layer, spike.moved_step, spike.moved_factor, spike.moved_factor_median
    assert moved == (3, 38, 9.0, pytest.approx((1.1 + 4.0) / 2))


def test_a_finder_that_goes_on_knows_of_the_spike_before() -> None:
    first, second = SpikeFinder(), SpikeFinder()
    for step in range(1, 33):
        first.follow(step, 8.0 if step == 31 else 2.0, 1.0, [1.0])
    second.load(first.state())
    second.follow(33, 8.0, 1.0, [1.0])
    assert second.spike is None  # within twenty steps


def test_a_finder_goes_on_from_its_state() -> None:
    losses = noisy(100)
    losses[60] = 9.0
    for stop in (1, 30, 59, 61, 70):
        first, second, found = SpikeFinder(), SpikeFinder(), []
        for step, loss in enumerate(losses[:stop], 1):
            first.follow(step, loss, 1.0, [1.0, 2.0])
            found += [first.spike] if first.spike else []
        second.load(first.state())
        for step, loss in enumerate(losses[stop:], stop + 1):
            second.follow(step, loss, 1.0, [1.0, 2.0])
            found += [second.spike] if second.spike else []
        assert [spike.step for spike in found] == [61], stop


@pytest.mark.slow
def test_fewer_than_one_in_a_hundred_smooth_noisy_losses_has_a_spike() -> None:
    """1,000 losses of 300 steps with normal noise and lognormal gradient norms: the stated rate."""
    false = 0
    for seed in range(1000):
        random = np.random.default_rng(10_000 + seed)
        norms = np.exp(0.25 * random.standard_normal(300))
        false += bool(spikes_in(noisy(300, seed), list(norms)))
    assert false < 10, f"{false} of 1000"


def planted(layer: int | None, rate: float = 40.0) -> Callable[..., Any]:
    """`make_step` whose step 40 also multiplies the matrices of one layer, or of all."""

    def make(loss: Any, built: Built, *rest: Any, **options: Any) -> Any:
        return PlantedStep(real_step(loss, built, *rest, **options), built, layer, rate)

    real_step = training_run.make_step
    return make


class PlantedStep:
    def __init__(self, step: Step, built: Built, layer: int | None, rate: float) -> None:
        self.step, self.built, self.layer, self.rate, self.calls = step, built, layer, rate, 0

    def __call__(self, *batch: Any) -> Any:
        measured = self.step(*batch)
        self.calls += 1
        if self.calls == PLANTED:
            rows = slice(None) if self.layer is None else self.layer - 1
            with torch.no_grad():
                for bank in self.built.banks:
                    if bank.in_layers and bank.start == "matrix":
                        bank.parameters[0][rows] *= self.rate
        return measured

    def release(self) -> None:
        self.step.release()


def config(**changes: Any) -> Any:
    return small(**({"model__scheme": "pre_ln", "train__steps": 60} | changes))


@pytest.fixture
def spiked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose layer 3 of 4 is changed after step 40."""
    monkeypatch.setattr(training_run, "make_step", planted(3))
    return deepstack.train(config(log__layers_on="spike"), study="spiked", out=tmp_path)


def test_a_planted_change_gives_a_record_at_its_spike_and_names_its_layer(
    spiked: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (row,) = spikes_of(spiked)
    step = int(row["step"])
    assert PLANTED < step <= PLANTED + 5, "the gradient norm rises a few steps after the change"
    norms = spiked.steps.grad_norm.to_numpy()
    assert norms[step - 1] > 4 * np.quantile(norms[step - 21 : step - 1], 0.5)
    assert (row["moved_layer"], row["moved_step"]) == (3, PLANTED)
    usual = {0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 60}
    for name in spiked.layer_names():
        assert {*spiked.layers(name)[0].tolist()} == usual | {step}, name
    # the record at the spike has the change of that very step
    steps, values = spiked.layers("param_update_norm")
    assert np.isfinite(values[steps == step]).all() and (values[steps == step] > 0).all()
    text = f"The gradient norm jumps at step {step}"
    assert (spike_sentence(spiked) or "").startswith(text)
    assert "layer 3 moved first, at step 40" in (spike_sentence(spiked) or "")
    (sentence,) = spike_sentences(Runs([spiked]))
    assert sentence.startswith("1 run has spikes: Pre-LN, N = 4, seed 0: the gradient norm jumps")
    assert set(spiked.columns["columns"]) >= set(row)
    assert run_finding(spiked)


def test_a_change_of_all_layers_is_said_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "make_step", planted(None))
    run = deepstack.train(config(log__layers_on="spike"), out=tmp_path)
    assert "all layers moved at step 40" in (spike_sentence(run) or "")


def test_the_option_changes_no_other_byte_of_a_smooth_run(tmp_path: Path) -> None:
    plain = deepstack.train(config(), out=tmp_path / "plain")
    run = deepstack.train(config(log__layers_on="spike"), out=tmp_path / "spike")
    assert spikes_of(run) == [] and spike_sentence(run) is None
    assert data_of(run) == data_of(plain)
    assert not (plain.path / "spikes.csv").exists()
    assert "layers_on" not in (plain.path / "config.yaml").read_text()
    assert "layers_on: spike" in (run.path / "config.yaml").read_text()


def raise_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the learning rate of step 40 so large that the loss of step 41 jumps."""
    usual_rate = training_run.learning_rate
    monkeypatch.setattr(
        training_run, "learning_rate", lambda train, t: usual_rate(train, t) * 1e5 ** (t == PLANTED)
    )


@pytest.mark.parametrize("at", [30, *(pytest.param(at, marks=pytest.mark.slow) for at in (41, 50))])
def test_a_resumed_run_has_the_same_spikes_and_records(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_one_rate(monkeypatch)
    settings = config(log__layers_on="spike", train__max_loss=1e6)
    whole = deepstack.train(settings, out=tmp_path / "whole")
    interrupted(settings, tmp_path / "parts", at)
    resumed = deepstack.train(settings, study="runs", out=tmp_path / "parts")
    assert spikes_of(whole)[0]["step"] == PLANTED + 1, "the rate jumps at step 40"
    assert logs_of(resumed) == logs_of(whole) and data_of(resumed) == data_of(whole)


@pytest.mark.slow(turn=32)
def test_an_extended_run_keeps_the_record_of_a_spike_at_the_last_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_one_rate(monkeypatch)
    settings = {"train__schedule": "constant", "train__max_loss": 1e6}
    settings |= {"train__steps": PLANTED + 1, "runtime__keep_optimizer": True}
    for more, kept in (({"log__layers_on": "spike"}, True), ({}, False)):
        run = deepstack.train(config(**settings, **more), out=tmp_path / str(kept))
        parent = parent_of(run.path, 4, ())
        longer = deepstack.train(parent.config, out=tmp_path / str(kept), parent=parent)
        assert spikes_of(longer)[:1] == spikes_of(run) and len(spikes_of(run)) == kept
        assert (PLANTED + 1 in longer.layers("grad_norm")[0]) == kept


def test_records_at_spikes_need_records() -> None:
    with pytest.raises(ConfigError, match="layers_on"):
        config(log__layers_on="spike", log__layers_every=0)


@pytest.mark.parametrize("key", ["layers_on", "stream_update", "streams"])
def test_a_plan_is_timed_with_any_option_of_records(key: str) -> None:
    value: Any = "spike" if key == "layers_on" else True
    steps = timed_steps(config(**{f"log__{key}": value}, train__steps=2))
    assert len(list(steps)) == 2
