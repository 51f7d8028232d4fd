"""The external probe in whole loops: several processes, checkpoints, own values, the examples."""

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import ROOT
from helpers.command_line import typed
from helpers.probe_models import adamw, batch_of, encoder
from helpers.two_processes import run_two
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.records import Run, problems
from deepstack.tools.probe.probe import Probe

EXAMPLES = ROOT / "examples"

# -- checkpoints and own values --------------------------------------------------------------------


def train(out: Path, steps: int, saved: Any = None, stop: int = 0, **options: Any) -> Any:
    """Train like a loop with checkpoints; return the one of step 4, stop at a step by an error."""
    model = encoder(2)
    optimizer = adamw(model)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
    else:
        torch.manual_seed(7)
    probe = deepstack.probe(model, batch_of(0), optimizer, out=out, **options)
    if saved:
        probe.load_state_dict(saved["probe"])
    kept = None
    with probe:
        for step in range(probe.at + 1, steps + 1):
            x = batch_of(step)
            optimizer.zero_grad()
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            probe.step(loss)
            probe.log(tokens=20 * step)
            if step % 2 == 0:
                probe.evaluate(2 * loss)
                probe.log(accuracy=1 / step, best=torch.tensor(step))
            if step == 4:
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                parts |= {"random": torch.get_rng_state(), "probe": probe.state_dict()}
                path = out.with_suffix(".pt")
                torch.save(parts, path)
                kept = torch.load(path)
            if step == stop:
                return kept
    return kept


def computed(folder: Path) -> dict[str, bytes]:
    """Return the files of a run that do not depend on the time."""
    files = [*folder.glob("*.csv"), *folder.glob("layers/*"), folder / "columns.json"]
    files.append(folder / "config.yaml")
    return {f.name: f.read_bytes() for f in files if f.name != "timing.csv"}


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_loop_has_the_log_of_an_uninterrupted_one(every: int, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole, 9, every=every, layers_every=1)
    saved = train(cut, 9, stop=6, every=every, layers_every=1)
    assert len(Run(cut).evals) == 3
    (cut / "mine.csv").write_text("my,own,table\n1,2,3\n")
    train(cut, 9, saved, every=every, layers_every=1)
    assert (cut / "mine.csv").read_text() == "my,own,table\n1,2,3\n"
    run = Run(cut)
    assert run.state == "done" and not problems(run.folder)
    (cut / "mine.csv").unlink()
    assert computed(cut) == computed(whole)
    assert [one["step"] for one in run.meta["resumed"]] == [4]
    assert run.timing["step"].tolist() == run.steps["step"].tolist()
    assert run.log("logged")["tokens"].tolist() == [20 * step for step in range(1, 10)]
    assert run.log("logged_2")["best"].tolist() == run.evals["step"].tolist() == [2, 4, 6, 8]
    if every == 1:
        assert run.evals["loss"].tolist() == pytest.approx((2 * run.steps["loss"][1::2]).tolist())


@pytest.mark.slow
def test_charts_and_tables_read_own_values(tmp_path: Path) -> None:
    train(tmp_path / "mine" / "run1", 4)
    chart = typed("plot", "metric", tmp_path / "mine", "--y", "accuracy", "--x", "step")
    assert chart.exit_code == 0, chart.output
    (row,) = json.loads(typed("ls", tmp_path / "mine", "--json").stdout)
    assert row["val_loss"] == pytest.approx(2 * row["loss"])


def test_a_run_that_diverged_stays_as_it_is(tmp_path: Path) -> None:
    saved: list[Any] = []
    for steps in (3, 5):
        model = encoder(1)
        optimizer = adamw(model)
        probe = deepstack.probe(model, batch_of(0), optimizer, out=tmp_path / "run")
        if saved:
            probe.load_state_dict(saved[-1])
        with probe:
            for step in range(probe.at + 1, steps + 1):
                model(batch_of(step)).sum().backward()
                probe.step(float("nan") if step == 2 else 1.0)
                probe.log(a=1)
            saved.append(probe.state_dict())
    assert (probe.run.state, probe.run.status["step"], probe.at) == ("diverged", 2, 5)
    assert len(probe.run.steps) == 2 and len(probe.run.log("logged")) == 1


@pytest.mark.parametrize(("last", "state"), [(float("nan"), "diverged"), (2.0, "done")])
def test_a_run_whose_last_evaluation_is_nan_has_diverged(
    last: float, state: str, tmp_path: Path
) -> None:
    """As a run of a command; else its setting would win by the other seeds."""
    model = encoder(1)
    with deepstack.probe(model, batch_of(0), adamw(model), out=tmp_path / "run") as probe:
        for step, loss in ((1, float("nan") if state == "done" else 2.0), (2, last)):
            model(batch_of(step)).square().mean().backward()
            probe.optimizer.step()
            probe.step(1.0)
            probe.evaluate(loss)
        saved = probe.state_dict()
    assert probe.run.state == state
    if state == "diverged":  # a resumed loop that evaluates no more
        new = deepstack.probe(model, batch_of(0), adamw(model), out=tmp_path / "run")
        new.load_state_dict(saved)
        with new:
            pass
        assert new.run.state == state
    assert probe.run.status.get("quantity") == ("val_loss" if state == "diverged" else None)


def test_mistakes_with_states_and_values_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    model = encoder(1)
    new = lambda **options: deepstack.probe(  # noqa: E731
        model, batch_of(0), adamw(model), **{"out": out, **options}
    )
    with new() as probe:
        state = probe.state_dict()
        probe.evaluate(1.0)
        probe.log(a=1, b=2)
        for call, message in (
            (lambda: probe.evaluate(1.0), "has a row of step 0 already"),
            (lambda: probe.log(a=1, b=2), "logged.csv has a row of step 0 already"),
            (lambda: probe.log(a=1), r"a is a column of logged.csv \(step, a, b\)"),
            (lambda: probe.log(loss=1), "loss is a column of steps.csv"),
            (lambda: probe.log(**{"a,b": 1}), "found the name 'a,b'"),
            (lambda: probe.log(c="x"), "probe.log: c: found str; allowed a number"),
            (lambda: probe.step(None), "probe.step: loss: found NoneType; allowed a number"),
            (lambda: probe.step(torch.ones(2)), r"probe.step: found a loss of shape \(2,\) and"),
            (lambda: probe.step(torch.tensor(1j)), "complex64; allowed a number"),
            (lambda: probe.step(10**400), "probe.step: loss: found int; allowed a number"),
            (lambda: probe.load_state_dict(state), "inside of its context"),
        ):
            with pytest.raises(ConfigError, match=message):
                call()
    with pytest.raises(ConfigError, match=r"probe\.log is called outside"):
        probe.log(a=1)
    with pytest.raises(ConfigError, match="after its context"):
        probe.state_dict()
    for options, changes, message in (
        ({"out": tmp_path / "other"}, {}, "holds no run, but the loaded state is of step 0"),
        ({"every": 2}, {}, "log.every: the run has 1, the probe 2"),
        ({}, {"step": 3}, "ends at step 0, but the loaded state is of step 3"),
        ({}, {"initial": state["initial"][:1]}, "found a state with F of shape"),
        ({"attribution_every": 0}, {}, "and attribution_every|attribution_every"),
    ):
        again = new(**options)
        with pytest.raises(ConfigError, match=message):
            again.load_state_dict(state | changes)
            with again:
                pass


# -- two processes ---------------------------------------------------------------------------------


class Nothing:
    """Stands for a probe that is not there."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *error: object) -> None: ...

    def step(self, *numbers: Any, **named: Any) -> None: ...

    log = evaluate = load_state_dict = step

    def state_dict(self) -> dict[str, Any]:
        return {}


def run_example(rank: int, name: str, words: list[str], port: int, kind: str) -> None:
    """Run an example as one of two processes; kind: of the probe."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank))
    os.environ.update(WORLD_SIZE="2", LOCAL_RANK=str(rank))
    step = Probe.step

    def killed(self: Any, loss: Tensor) -> None:
        step(self, loss)
        if self.at == 7:
            os._exit(9)

    if kind == "without":
        deepstack.probe = Nothing  # type: ignore[attr-defined]
    elif kind == "killed":
        Probe.step = killed  # type: ignore[method-assign]
    sys.argv = [name, *words]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def in_two_processes(name: str, folder: Path, kind: str, *words: str) -> None:
    """Run an example by two processes, which write into a folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    folder.mkdir(exist_ok=True)
    out, checkpoint = str(folder / "study" / "run"), str(folder / "checkpoint")
    given = [*words, "--out", out, "--checkpoint", checkpoint]
    if kind == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [*start, "--master-port", str(port), str(EXAMPLES / name), *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return
    run_two(run_example, name, given, port, kind, exitcode=9 if kind == "killed" else 0)


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each)


def saved_weights(name: str, folder: Path, step: int) -> list[Tensor]:
    """Return weights and moments in the checkpoint of an example, without the probe's state."""
    path = folder / "checkpoint"
    if name == "fsdp2_loop.py":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(path / str(step), folder / "whole.pt")
        return list(tensors_of(torch.load(folder / "whole.pt")["training"]))
    saved = torch.load(path)
    assert saved["iter_num"] == step
    return list(tensors_of([saved["model"], saved["optimizer"]]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nanogpt_loop.py", "fsdp2_loop.py"])
def test_two_processes_resume_after_a_kill_and_train_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    start = "torchrun" if name == "fsdp2_loop.py" else "plain"  # which sets the same variables
    ways = {kind: tmp_path / kind for kind in ("without", start, "killed")}
    for kind, folder in ways.items():
        in_two_processes(name, folder, kind, "--steps", "10")
    assert not (ways["without"] / "study").exists()
    assert Run(ways["killed"] / "study" / "run").state == "interrupted"
    in_two_processes(name, ways["killed"], "resumed", "--steps", "10", "--resume")
    weights = [saved_weights(name, folder, 10) for folder in ways.values()]
    assert len(weights[0]) > 100
    for other in weights[1:]:
        assert all(map(torch.equal, weights[0], other)) and len(other) == len(weights[0])
    folders = [ways[kind] / "study" / "run" for kind in (start, "killed")]
    assert computed(folders[0]) == computed(folders[1])
    assert [Run(folder).state for folder in folders] == ["done", "done"]
    if name == "fsdp2_loop.py":
        compare_with_one_process(folders[0], tmp_path / "one")


def compare_with_one_process(folder: Path, out: Path) -> None:
    """Compare the values of a sharded model with a run of the whole model on the joined batch."""
    torch.manual_seed(0)
    names = runpy.run_path(str(EXAMPLES / "fsdp2_loop.py"))
    model: nn.Module = names["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def tokens(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (names["BATCH"], names["LENGTH"])
        return torch.randint(0, names["VOCABULARY"], shape, generator=generator)

    with deepstack.probe(model, tokens(0), optimizer, out=out, hidden="norm") as probe:
        for step in range(1, 11):
            optimizer.zero_grad()
            loss = model(torch.cat([tokens(2 * step), tokens(2 * step + 1)]))
            loss.backward()
            optimizer.step()
            probe.step(loss)
    one, two = probe.run, Run(folder)
    for log in ("steps", "attribution"):
        pd.testing.assert_frame_equal(one.log(log), two.log(log), rtol=2e-3, atol=1e-5)
    for name in one.layer_names():
        np.testing.assert_array_equal(one.layers(name)[0], two.layers(name)[0])
        np.testing.assert_allclose(one.layers(name)[1], two.layers(name)[1], rtol=2e-3)


@pytest.mark.parametrize("name", ["nanogpt_loop.py", "fsdp2_loop.py"])
def test_an_example_has_about_ten_lines_of_the_probe(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert 5 <= sum("# probe" in line for line in text.splitlines()) <= 12
