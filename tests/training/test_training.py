"""Training: same config, same bytes; divergence is a result; costs grow with the length."""

import math
import resource
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.configs import every_instrument
from helpers.record_runs import python
from helpers.sampling import some
from helpers.small_runs import data_of, only_run, small, step_of, stop_at
from safetensors.torch import load_file

import deepstack
from deepstack.base.errors import Interrupted, ResourceError
from deepstack.config import disk_estimate, machine_memory, with_overrides
from deepstack.fast import make_step
from deepstack.model import build_model
from deepstack.model.build import Built
from deepstack.records import RunFolder
from deepstack.schemes import SCHEMES
from deepstack.tasks import task_of
from deepstack.training import make_optimizer, mean_loss, to_device
from deepstack.training.recorder import Recorder
from deepstack.training.resources import memory_limit
from deepstack.training.schedule import learning_rate
from deepstack.training.snapshot_writer import LayerRecords


def test_a_run_folder_explains_itself(tmp_path: Path) -> None:
    run = deepstack.train(small(), out=tmp_path, command="deepstack train x.yaml")
    assert list(run.steps.columns) == [
        "step", "loss", "lr", "grad_norm", "model_update", "model_update_step",
        "model_update_fro", "model_update_rel",
    ]  # fmt: skip
    assert run.meta["command"] == "deepstack train x.yaml"
    assert run.meta["data"]["sha256"] and run.meta["references"]["unigram_entropy"] > 3
    parameters = run.meta["parameters"]
    assert parameters["total"] == sum(v for k, v in parameters.items() if k != "total")
    assert set(run.steps.columns) <= set(run.columns["columns"])
    assert set(run.layer_names()) <= set(run.columns["layers"])
    assert run.columns["defaults"]["task.mask_rate"] == 0.15
    assert run.columns["scheme"]["equation"] == SCHEMES["deepnorm"].equation
    assert list(run.evals["step"]) == [0, 4, 8, 12]
    bits = run.evals["loss"] / math.log(2)
    assert run.evals["bits_per_token"].tolist() == pytest.approx(bits.tolist())
    steps, values = run.layers("grad_norm")
    assert list(steps) == [0, 1, 2, 3, 5, 8, 12] and values.shape == (7, 4)
    moved = run.layers("param_update_norm")[1]
    assert (moved[0] == 0).all() and (moved[1:] > 0).all()
    assert (run.path / "log.txt").read_text().count("validation") == 4
    assert [p.name for p in (run.path / "checkpoint" / "12").glob("*.safetensors")] == [
        "weights.safetensors"
    ]
    kept = deepstack.load_config(run.path / "config.yaml")
    assert kept.task.options()["mask_rate"] == 0.15  # fully resolved, the task's options as well
    written = {p: p.stat().st_mtime_ns for p in run.path.rglob("*") if p.is_file() and p.suffix}
    for same in (kept, small(task__mask_rate=0.15), small(runtime__threads=1)):
        assert deepstack.train(same, study="runs", out=tmp_path).path == run.path
    assert written == {p: p.stat().st_mtime_ns for p in written}


def test_model_update_is_the_mean_token_distance_from_initialisation(tmp_path: Path) -> None:
    """steps.csv against F computed once more from the weights that the run kept."""
    config = small(train__steps=5)
    run = deepstack.train(config, out=tmp_path)
    tokens = torch.from_numpy(task_of(config).probe_batch(2).inputs)
    built = deepstack.build_model(config, vocab_size=257)
    with torch.no_grad():
        first = built.model.hidden(tokens)
        built.banks.load(load_file(run.path / "checkpoint" / "5" / "weights.safetensors"))
        last = built.model.hidden(tokens)
    moved = (last - first).double()
    expected = {
        "model_update": moved.norm(dim=-1).mean().item(),
        "model_update_fro": moved.norm().item(),
        "model_update_rel": moved.norm().item() / first.double().norm().item(),
    }
    assert dict(run.steps.iloc[-1][list(expected)]) == pytest.approx(expected, rel=1e-5)
    assert run.columns["f0_norm"] == pytest.approx(first.norm(dim=-1).mean().item(), rel=1e-5)
    assert run.steps["model_update"][0] == run.steps["model_update_step"][0]


UNSEEN: list[dict[str, Any]] = [
    {"log.layers_every": 0},
    {"log.layers_every": 1},
    {"log.probe_sequences": 5},
    {"log.skipped_layers": 3, "log.jacobian": True, "log.stream_update": True},
    every_instrument(5),
    {"train.eval_every": 0},
    {"runtime.checkpoint_seconds": 0.0},
    {"runtime.banks": False},
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[float, pd.DataFrame]:
    """Dropout -> the steps of a run with the usual logging."""
    out = tmp_path_factory.mktemp("plain")
    runs = {p: deepstack.train(small(model__dropout=p), out=out) for p in (0.0, 0.1)}
    return {p: run.steps for p, run in runs.items()}


@pytest.mark.parametrize(("change", "dropout"), some(product(UNSEEN, [0.0, 0.1]), 7))
def test_looking_does_not_disturb(
    change: dict[str, Any], dropout: float, plain: dict[float, pd.DataFrame], tmp_path: Path
) -> None:
    config = with_overrides(small(model__dropout=dropout), change)
    other = deepstack.train(config, out=tmp_path).steps
    assert plain[dropout][["loss", "grad_norm"]].equals(other[["loss", "grad_norm"]])


def test_training_without_any_logging_has_the_same_losses(
    plain: dict[float, pd.DataFrame],
) -> None:
    config, logged = small(), plain[0.0]["loss"]
    built = deepstack.build_model(config, vocab_size=257)
    step = step_of(built, config)
    task, cpu = task_of(config), torch.device("cpu")
    for t in range(1, 13):
        loss = step(*to_device(task.train_batch(t, 4), cpu), learning_rate(config.train, t)).loss
        assert np.float32(loss.item()) == np.float32(logged[t - 1])


# Several good rows, and then a loss above the bound.
BLOW_UP = {
    "train.lr": 3.0, "train.optimizer": "sgd", "train.clip": None, "train.steps": 30,
    "train.max_loss": 20.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("lag", "checkpoint_seconds", "stop"), some(product([1, 4, 10], [0.0, 120.0], [None, 4, 9]), 11)
)
def test_divergence_is_a_result_however_late_it_is_seen(
    lag: int,
    checkpoint_seconds: float,
    stop: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bad row is the last one, also where rows are read late."""
    config = with_overrides(small(), BLOW_UP)
    first = deepstack.train(config, out=tmp_path / "a")
    losses = first.steps["loss"]
    assert 3 < len(losses) < 30
    assert (losses <= 20).tolist() == [True] * (len(losses) - 1) + [False]
    end = [first.status[key] for key in ("state", "quantity", "step")]
    assert end == ["diverged", "loss", len(losses)] and not first.folder.checkpoints()

    monkeypatch.setattr(Recorder, "lag", property(lambda self: lag, lambda self, lag: None), False)
    late = with_overrides(config, {"runtime.checkpoint_seconds": checkpoint_seconds})
    try:
        deepstack.train(late, out=tmp_path / "b", stop=stop_at(stop or 10**6))
    except Interrupted:
        deepstack.train(late, out=tmp_path / "b")
    run = only_run(tmp_path / "b" / "runs")
    assert run.status | {"checksums": first.status["checksums"]} == first.status  # but for times
    assert data_of(run) == data_of(first)


@pytest.mark.parametrize("factor", [1e6, math.nan])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_no_parameter_moves_from_the_step_on_that_diverged(optimizer: str, factor: float) -> None:
    """The host reads losses late, so the steps after it have to change nothing."""
    config = small(train__optimizer=optimizer, train__max_loss=100.0)
    built = build_model(config, vocab_size=17)
    factors = iter([1.0, factor, 1.0, 1.0])

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return next(factors) * mean_loss(built.model(x), y)

    step = make_step(loss, built, make_optimizer(config.train, built), config.train)
    tokens, after = torch.arange(32).view(2, 16) % 17, [weights(built)]
    for _ in range(4):
        step(tokens, tokens, 0.01)
        after.append(weights(built))
    assert not torch.equal(after[0], after[1])
    assert all(torch.equal(after[1], later) for later in after[2:])


def test_no_parameter_moves_after_an_f_that_is_not_finite() -> None:
    """The probe measures F after the second update, so that only later ones are left out."""
    config = small()
    built = build_model(config, vocab_size=17)
    updates = iter([0.1, math.inf, 0.1, 0.1])
    optimizer = make_optimizer(config.train, built)
    step = make_step(
        lambda x, y: mean_loss(built.model(x), y), built, optimizer, config.train,
        probe=lambda: {"model_update": torch.tensor(next(updates))},
    )  # fmt: skip
    tokens, after = torch.arange(32).view(2, 16) % 17, [weights(built)]
    for _ in range(4):
        step(tokens, tokens, 0.01)
        after.append(weights(built))
    moved = [not torch.equal(a, b) for a, b in pairwise(after)]
    assert moved == [True, True, False, False]


def weights(built: Built) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in built.model.parameters()])


def test_a_diverged_run_keeps_its_checkpoint_until_its_end_is_written(tmp_path: Path) -> None:
    config = with_overrides(small(runtime__checkpoint_seconds=0.0), BLOW_UP)
    with (
        patch("deepstack.training.outcome.write_end", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        deepstack.train(config, out=tmp_path)
    assert only_run(tmp_path / "runs").folder.checkpoints()
    run = deepstack.train(config, out=tmp_path)
    assert run.state == "diverged" and not run.folder.checkpoints()


def test_lack_of_memory_is_a_separate_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = Mock(side_effect=lambda *_, **__: torch.empty(2**60))
    monkeypatch.setattr("deepstack.training.run.make_optimizer", greedy)
    message = r"out of memory in building the model after step 0 \(estimate"
    with pytest.raises(ResourceError, match=message) as caught:
        deepstack.train(small(), out=tmp_path)
    status = only_run(tmp_path / "runs").status
    assert (caught.value.exit_code, status["state"]) == (5, "out_of_memory")
    assert (status["phase"], status["step"]) == ("building the model", 0)
    assert 100 < status["estimate_mb"] < status["limit_mb"]


def test_too_small_a_disk_is_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = disk_estimate(small())[1]
    parameters = sum(deepstack.build_model(small(), vocab_size=257).banks.count().values())
    assert 3 * 3 * 4 * parameters < needed < 3e6
    free = SimpleNamespace(free=needed - 2000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(ResourceError, match=r"needs about .* MB on the disk") as caught:
        deepstack.train(small(), out=tmp_path)
    assert caught.value.exit_code == 5 and not list(tmp_path.glob("*/*/config.yaml"))
    free.free = needed
    assert deepstack.train(small(), out=tmp_path).state == "done"


def test_a_run_takes_no_more_disk_than_its_estimate(tmp_path: Path) -> None:
    config = small(runtime__checkpoint_seconds=0.0, train__steps=15)
    kept, most = disk_estimate(config)
    seen = []

    def look() -> None:
        files = [p for p in tmp_path.rglob("*") if p.is_file()]
        seen.append(sum(p.stat().st_size for p in files))

    deepstack.train(config, out=tmp_path, stop=look)
    look()
    # The draft of a third checkpoint is gone by the time of each look.
    assert 0.5 * kept < seen[-1] < kept
    assert max(seen) < most < 3 * max(seen)


def test_an_error_of_our_own_is_kept_with_its_traceback(tmp_path: Path) -> None:
    error, ends = RuntimeError("a bug"), Mock()
    with (
        patch("deepstack.training.run.TrainingRun.evaluate", side_effect=error),
        pytest.raises(RuntimeError, match="a bug"),
    ):
        deepstack.train(small(), out=tmp_path, observer=ends)
    run = only_run(tmp_path / "runs")
    assert run.state == "failed" and "Traceback" in run.folder.log_path.read_text()
    ends.finished.assert_called_once_with("failed", run.status["step"])


# --- what grows with the length of a run grows in proportion, counted in bytes and rows -----------


class Counting(RunFolder):
    """A run folder that counts the records it is given to write."""

    records = synced = 0

    def write_layers(self, values: Any, steps: Any, *, sync: bool = True) -> None:
        self.records += len(steps)
        self.synced += sync
        super().write_layers(values, steps, sync=sync)


def seen(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor([step, step + 0.5]), "b": torch.tensor([-step, 1.0])}


def test_records_of_layers_are_not_written_anew_at_every_look(tmp_path: Path) -> None:
    folder = Counting(tmp_path)
    records = LayerRecords(folder)
    written = {}
    for step in range(1000):
        records.add(step, seen(step))
        steps, values = folder.read_layers("a")
        assert step + 1 - len(steps) <= len(steps) / 32 and values[-1, 0] == steps[-1]
        written[step + 1] = folder.records
    assert written[1000] < 40 * 1000 and written[1000] < 2.5 * written[500]
    assert folder.synced == 0, "each record waited for the disk"
    records.write()
    before = folder.records
    records.write()
    assert folder.records == before and folder.synced == 1
    for name in ("a", "b"):
        steps, values = folder.read_layers(name)
        assert steps.tolist() == list(range(1000))
        assert np.array_equal(values, np.stack([seen(s)[name] for s in steps]))


DEEP = """
import threading
from helpers.snapshots import ToyModel
toy = ToyModel(**{"model.depth": 300, "model.d_model": 2, "model.n_heads": 1})
threading.stack_size(2**17)
thread = threading.Thread(target=lambda: print(len(toy.snapshots())))
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_snapshots_of_deep_models_fit_on_the_stack() -> None:
    process = python(DEEP)
    assert (process.communicate()[0].strip(), process.returncode) == ("1", 0)


def test_the_memory_limit_is_the_least_of_machine_data_and_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {"RLIMIT_DATA": 2 * 10**9, "RLIMIT_AS": 10**9}
    limits = {getattr(resource, name): limit for name, limit in kinds.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], -1))
    assert memory_limit(torch.device("cpu")) == 10**9
    limits.update(dict.fromkeys(limits, resource.RLIM_INFINITY))
    assert memory_limit(torch.device("cpu")) == machine_memory()
