"""Threads divide the operations of a replayed step: any number of them gives the same bytes."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import config_with
from helpers.kernels import kernels as kernels
from helpers.sampling import some
from helpers.small_runs import data_of
from helpers.turns import by_turns
from torch import Tensor

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.fast.native import Kernels
from deepstack.fast.recording import Recording
from deepstack.fast.replay import Bound, bind_recording
from deepstack.schemes import SCHEMES
from deepstack.training.timing import temporary_run

config = partial(config_with, {
    "model.depth": 4, "model.d_model": 32, "model.n_heads": 2, "task.name": "markov",
    "task.seq_len": 12, "train.batch_size": 4, "train.steps": 6, "train.eval_every": 3,
    "train.eval_batches": 2, "train.clip": 0.1, "log.layers_every": 3, "log.probe_sequences": 2,
    "runtime.device": "cpu", "runtime.replay": "native",
})  # fmt: skip


def numbers_of(given: Config, threads: int) -> list[Tensor]:
    """Return losses, measurements and weights after two steps, and an evaluation's losses."""
    with temporary_run(with_overrides(given, {"runtime.threads": threads})) as run:
        run.begin()
        results = []
        for step in (1, 2):
            measured = run.step(*run.batch(step), 1e-3)
            results += [measured.loss, measured.grad_norm, *measured.probe.values()]
            results = [result.clone() for result in results]
        evaluation = run.evaluation.measure(run.state.built.model, run.forward)
        weights = [p.detach().clone() for bank in run.state.built.banks for p in bank.parameters]
        return [*results, torch.tensor(evaluation["loss"], dtype=torch.float64), *weights]


def assert_equal_in_any_order(
    given: Config, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare one thread with two and three, whose parts run in random orders."""
    expected = numbers_of(given, 1)
    for threads in (2, 3):
        scheduled = by_turns(kernels, seed=threads)
        monkeypatch.setattr("deepstack.fast.accelerate.find_kernels", lambda _, k=scheduled: k)
        torch.testing.assert_close(numbers_of(given, threads), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", some(SCHEMES.names(), 24, SCHEMES.names().index("deepnorm") % 24))
def test_every_scheme_has_the_same_bytes_in_any_order_of_the_threads(
    name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal_in_any_order(config(model__scheme=name), kernels, monkeypatch)


KINDS: list[dict[str, Any]] = [
    {"model__dropout": 0.1},
    {"train__shards": 2, "model__dropout": 0.1},
    {"model__norm__kind": "batch"},
    {"model__norm__kind": "rms", "model__positions": "rotary", "model__qk_norm": True},
    {"model__gated": True, "model__activation": "silu", "runtime__fused": False},
    {"runtime__banks": False, "train__optimizer": "muon"},
    {"runtime__recompute_every": 2, "train__clip": None},
    {"model__family": "encoder_decoder", "task__name": "copy"},
    {"model__d_model": 72, "model__n_heads": 3, "model__d_ff": 264, "train__batch_size": 16},
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_every_kind_of_step_has_the_same_bytes_in_any_order_of_the_threads(
    kind: dict[str, Any], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal_in_any_order(config(**kind), kernels, monkeypatch)


@pytest.mark.parametrize(
    "kind",
    some([{}, {"model__dropout": 0.1}, {"train__shards": 2}, {"model__d_model": 96}], 4),
    ids=str,
)
def test_runs_by_several_threads_have_the_same_files(
    kind: dict[str, Any], tmp_path: Path, kernels: Kernels
) -> None:
    runs = [
        deepstack.train(config(**kind, runtime__threads=threads), out=tmp_path / str(threads))
        for threads in (1, 2, 3)
    ]
    assert data_of(runs[0]) == data_of(runs[1]) == data_of(runs[2])
    assert {run.meta["environment"]["threads"] for run in runs} == {1}


def bind(function: Any, inputs: list[Tensor], kernels: Kernels, threads: int) -> Bound:
    """Record a function of tensors, and bind it for several threads."""
    with torch.no_grad(), Recording() as recording:
        result = function(*inputs)
    recording.finish([result])
    return bind_recording(recording, kernels=kernels, threads=threads)


def mix(x: Tensor, w: Tensor) -> Tensor:
    """Return numbers of which each depends on all rows of the input, again and again."""
    for _ in range(30):
        x = torch.tanh((x.t() @ x) @ w / 64 + x.sum(0) / 8)
    return x


def inputs_of_mix() -> list[Tensor]:
    """Return a square matrix and a factor."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 64, generator=generator) for _ in range(2)]


def test_threads_that_do_not_wait_give_other_numbers(kernels: Kernels) -> None:
    inputs = inputs_of_mix()
    alone = bind(mix, inputs, kernels, 1)
    alone.run()
    for waits in (True, False):
        bound = bind(mix, inputs, by_turns(kernels, 0, waits=waits), 2)
        bound.run()
        assert torch.equal(bound.results[0], alone.results[0]) == waits


def test_tables_that_run_at_the_same_time_do_not_disturb_each_other(kernels: Kernels) -> None:
    inputs = inputs_of_mix()
    bounds = [bind(mix, inputs, kernels, threads) for threads in (1, 2, 3, 2)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            list(pool.map(Bound.run, bounds))
    for bound in bounds:
        torch.testing.assert_close(bound.results, bounds[0].results, rtol=0, atol=0)


SCRIPT = """
import os, sys
sys.path.insert(0, "tests/fast")
from deepstack.fast.native import find_kernels
from test_threads import bind, inputs_of_mix, mix
kernels = find_kernels(print)
one, two = (bind(mix, inputs_of_mix(), kernels, threads) for threads in (1, 2))
one.run()
expected = one.results[0].clone()
def check():
    for _ in range(100):
        two.run()
        assert two.results[0].equal(expected)
check()
"""
FORK = """
child = os.fork()
check()
sys.exit(os.waitpid(child, 0)[1] if child else 0)
"""


def run_script(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in another process."""
    folder, environment = Path(__file__).parents[2], os.environ | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder / "tests")])
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
def test_a_forked_process_has_threads_of_its_own_and_ends(kernels: Kernels) -> None:
    answer = run_script(SCRIPT + FORK)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the checks of threads")
def test_no_two_threads_touch_memory_without_order(tmp_path: Path, kernels: Kernels) -> None:
    """Run a table with the compiler's checks of threads."""
    path = deepstack.fast.native.compiler.find_compilers()[0].words[0]
    library = subprocess.check_output([path, "-print-file-name=libtsan.so"], text=True).strip()
    if not os.path.isabs(library):
        pytest.skip("the compiler has no checks of threads")
    flags = (
        "from deepstack.fast.native import compiler\n"
        "compiler.FLAGS += ('-g', '-fsanitize=thread')\n"
    )
    checks = {"LD_PRELOAD": library, "TSAN_OPTIONS": "halt_on_error=1 report_bugs=1"}
    answer = run_script(flags + SCRIPT, XDG_CACHE_HOME=str(tmp_path), **checks)
    if "unexpected memory mapping" in answer.stderr:
        pytest.skip("this system's layout of memory has no checks of threads")
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "data race" not in answer.stderr


def test_a_run_by_itself_uses_all_cores_that_it_may(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepstack.config.cores", lambda: 8)
    given = config(train__batch_size=16)  # 192 tokens
    for limit, replay, threads in (("", "native", 3), ("2", "native", 2), ("", "python", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        with temporary_run(with_overrides(given, {"runtime.replay": replay})) as run:
            assert run.prepared.threads == threads
            assert run.prepared.environment["threads"] == torch.get_num_threads() == 1
