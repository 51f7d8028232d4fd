"""Runs the GPU tests and measures every GPU row of the tables.

python benchmarks/gpu.py [--out FOLDER] [SECTION ...]
python benchmarks/gpu.py studies [--minutes 10] [--plan]     (benchmarks/studies.py)

The sections `peers` and `depths` run only if they are named.  Each section runs in its own process
with a time limit, prints a table and writes its numbers to <out>/<section>.json. The script prints
a failure or a timeout and starts the next section.  Nothing is downloaded; `correctness` runs
pytest (pip install -e '.[test]').
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import studies, waits
from benchmarks.peers import bench, report
from deepstack.cli import emit
from deepstack.config import Config, load_config, memory_estimate, with_overrides
from deepstack.records import Run
from deepstack.schemes import scheme_memory
from deepstack.training import memory_limit, temporary_run, train

ROOT = Path(__file__).resolve().parents[1]
NARROW, WIDE = ROOT / "configs" / "bench_narrow.yaml", ROOT / "configs" / "bench_wide.yaml"
MIDDLE = ROOT / "configs" / "deepnorm_1000_gpu.yaml"
MODERN, DEEP = ROOT / "configs" / "decoder_96.yaml", ROOT / "configs" / "deepnorm_1000.yaml"
STUDY = ROOT / "experiments" / "model_update_vs_depth" / "study_gpu.yaml"

SHARED = {"runtime.cuda_graph": True, "runtime.compile": False, "runtime.fused": False}
FAST_PATHS = {
    "plain": SHARED,
    "fused": SHARED | {"runtime.fused": True},
    "compiled": SHARED | {"runtime.compile": True},
}
"""Settings of the fast paths to compare, all of them captured."""


def trained(config: Config, out: Path) -> Run:
    """Train a configuration and return its run, which must be done."""
    run = train(config, out=out)
    assert run.state == "done", run.state
    return run


def correctness() -> dict[str, Any]:
    """Run the tests marked gpu: schemes eager, fused, captured, compiled; kernels; resuming."""
    tests = ["-m", "gpu", "-q", "-n", "8", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT)
    assert done.returncode == 0, f"pytest ended with {done.returncode}"
    return {"pytest " + " ".join(tests): "passed"}


@contextmanager
def stepping(config: Config) -> Iterator[Callable[[], None]]:
    """Yield a function that makes one training step of a run and leaves its row on the device."""
    with temporary_run(config) as run:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1
            run.step(*run.batch(1), run.learning_rate(1))

        yield step


def user() -> dict[str, Any]:
    """Time what a user waits for: a run of 1000 layers, and the runs of a short sweep."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        whole = waits.command_seconds("train", DEEP, "--quiet", "--out", out / "whole")
        rows = waits.phases(load_config(DEEP), out / "phases")
        sweep = ["sweep", STUDY, "model.depth=6", "--seeds", ",".join(map(str, range(12)))]
        sweep += ["--schemes", "post_ln", "--quiet", "--out", out / "sweep"]
        seconds = waits.command_seconds(*sweep)
        runs = waits.sweep_rows(out / "sweep")
    beside = [run["beside, s"] for run in runs if run["beside, s"] is not None]
    return {
        "rows": rows,
        "deepstack train configs/deepnorm_1000.yaml, s": whole,
        "sweep of 12 runs, s": seconds,
        "workers": len({run["worker"] for run in runs}),
        "s a run beside its steps, median": statistics.median(beside) if beside else None,
        "runs": runs,
    }


def narrow() -> dict[str, Any]:
    """Time the narrow size beside torch and JAX, with every fast path, and its kernels."""
    config = with_overrides(load_config(NARROW), {"runtime.device": "cuda"})
    measured = bench(config, steps=3, peers=["torch", "jax"], say=say)
    result = report(config, measured, " ".join(sys.argv), str(NARROW))
    paths = {name: kernel_times(with_overrides(config, keys)) for name, keys in FAST_PATHS.items()}
    return {"rows": result["rows"], "ratios": result["ratios"], **paths}


def seconds_a_step(step: Callable[[], None], times: int = 5) -> float:
    """Return the seconds of a step once everything is warm, compiled and captured."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def kernel_times(config: Config) -> dict[str, float]:
    """Return milliseconds of a captured step: by the clock, and in kernels alone.

    torch's profiler measures the kernels. Without the permission, as in some containers, it
    measures none, and the result has no kernel times.
    """
    with stepping(config) as step:
        clock = seconds_a_step(step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        kernels = sum(event.self_device_time_total for event in seen.key_averages()) / 1e6
    result = {"step_ms": 1000 * clock, "kernels_ms": 1000 * kernels}
    return result | {"ratio": clock / kernels} if kernels else result


def wide() -> dict[str, Any]:
    """Time the wide size as a share of this GPU's bf16 matrix rate, with and without ‖ΔF‖."""
    config, rate = fitting(load_config(WIDE)), matrix_rate()
    measured = bench(config, steps=5, peers=[], say=say)
    rows = report(config, measured, " ".join(sys.argv), str(WIDE))["rows"]
    return {"rows": shares(rows, rate), "bf16 TFLOP/s": rate, "batch": config.train.batch_size}


def peers() -> dict[str, Any]:
    """Time the wide size beside all peers at a quarter of the depth, which fits into memory."""
    config = fitting(load_config(WIDE, ["model.depth=250"]))
    measured = bench(config, steps=5, say=say)
    result = report(config, measured, " ".join(sys.argv), str(WIDE))
    return {"rows": shares(result["rows"], matrix_rate()), "ratios": result["ratios"]}


def middle() -> dict[str, Any]:
    """Time 1000 layers of width 256 beside JAX."""
    measured = bench(load_config(MIDDLE), steps=5, peers=["jax"], say=say)
    result = report(load_config(MIDDLE), measured, " ".join(sys.argv), str(MIDDLE))
    return {"rows": result["rows"], "ratios": result["ratios"]}


def modern() -> dict[str, Any]:
    """Time four micro-batches of the modern decoder, in fused sublayers and compiled."""
    config = load_config(MODERN, ["train.batch_size=64", "train.micro_batches=4"])
    rows = []
    for name in ("fused", "compiled"):
        torch.cuda.reset_peak_memory_stats()
        times = kernel_times(with_overrides(config, FAST_PATHS[name]))
        peak = torch.cuda.max_memory_allocated() / 1e9
        rows.append({"fast path": name} | times | {"peak GB": peak})
    return {"rows": rows}


def shares(rows: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """Add to each row its share of a rate in TFLOP/s."""
    work = next(row["gflop"] for row in rows if row.get("gflop")) / 1e3
    for row in rows:
        row["share of the rate"] = work / (row["step_ms"] / 1e3) / rate
    return rows


def estimate_memory(config: Config) -> int:
    """Return the estimated peak of a run's memory, in bytes."""
    return memory_estimate(config, scheme_memory=scheme_memory(config))


def fitting(config: Config) -> Config:
    """Halve the batch of a configuration until the run fits into this GPU."""
    memory = 0.95 * memory_limit(torch.device("cuda"))
    while estimate_memory(config) > memory and config.train.batch_size > 1:
        config = with_overrides(config, {"train.batch_size": config.train.batch_size // 2})
        say(f"a batch of {config.train.batch_size}: more does not fit into this GPU")
    return config


def matrix_rate(size: int = 8192, times: int = 20) -> float:
    """Measure TFLOP/s of bf16 products (size, size) (size, size) on this GPU."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b, out = torch.randn_like(a), torch.empty_like(a)
    for _ in range(5):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    return 2 * size**3 * times / (time.perf_counter() - began) / 1e12


def depths() -> dict[str, Any]:
    """Fit the exponents of time and memory in depth, from 6 to 1000 layers."""
    config = with_overrides(load_config(NARROW), {"runtime.device": "cuda"})
    measured = bench(config, steps=5, peers=[], depths=[6, 48, 200, 1000], say=say)
    result = report(config, measured, " ".join(sys.argv), "depths")
    return {"rows": result["rows"], "exponents": result["exponents"]}


def deep() -> dict[str, Any]:
    """Train 10,000 layers of d_model 64 for five steps; compare memory with the estimate."""
    config = with_overrides(
        load_config(NARROW),
        {"runtime.device": "cuda", "model.depth": 10_000, "train.steps": 5, "train.eval_every": 0,
         "train.eval_batches": 1, "log.layers_every": 0},
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        losses = trained(config, Path(folder)).steps["loss"].tolist()
    seconds = time.perf_counter() - began
    peak, estimate = torch.cuda.max_memory_allocated(), estimate_memory(config)
    row = {"depth": 10_000, "steps": len(losses), "s in all": seconds, "loss": losses[-1]}
    return {"rows": [row | {"peak GB": peak / 1e9, "estimate/peak": estimate / peak}]}


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


# section -> time limit in seconds
SECTIONS: dict[Callable[[], dict[str, Any]], int] = {
    correctness: 150,
    user: 170,
    narrow: 110,
    wide: 100,
    middle: 120,
    peers: 150,
    modern: 150,
    depths: 100,
    deep: 200,
}


UNTIMED = ("correctness", "deep")
BY_NAME = ("peers", "depths")
"""Sections that run only if they are named: the others take less than eight minutes together."""


def show(result: dict[str, Any]) -> None:
    """Print the rows as a table, and the other numbers unformatted."""
    print(f"\n## {result.pop('section')}")
    if rows := result.pop("rows", []):
        emit(rows, as_json=False)
    for name, value in result.items():
        print(f"{name}: {value}")


def main() -> None:
    """Run the requested sections, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = {section.__name__: section for section in SECTIONS}
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--here", action="store_true", help="run the section in this process")
    arguments = parser.parse_args()
    arguments.sections = arguments.sections or [name for name in names if name not in BY_NAME]
    if unknown := set(arguments.sections) - set(names):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(names)}")
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        for name in arguments.sections:
            result = names[name]()
            (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1, default=str))
            show({"section": name} | result)
        return
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, Python {platform.python_version()}", flush=True)
    for group in groups(arguments.sections):
        began, running = time.monotonic(), {}
        for name in group:
            command = [sys.executable, __file__, name, "--here", "--out", str(arguments.out)]
            running[name] = subprocess.Popen(command, start_new_session=True)  # with its children
        for name, section in running.items():
            limit = SECTIONS[names[name]]
            try:
                code = section.wait(max(1, began + limit - time.monotonic()))
                how = f"exit {code} after {time.monotonic() - began:.0f} s"
            except subprocess.TimeoutExpired:
                os.killpg(section.pid, signal.SIGKILL)
                section.wait()
                how = f"not done after {limit} s"
            print(f"{name}: {how}\n", flush=True)


def groups(sections: list[str]) -> list[list[str]]:
    """Group sections by time: all that time no step run at once, then the others one by one."""
    untimed = [name for name in sections if name in UNTIMED]
    timed = [[name] for name in sections if name not in UNTIMED]
    return [untimed, *timed] if untimed else timed


if __name__ == "__main__":
    if sys.argv[1:2] == ["studies"]:
        sys.exit(studies.main(sys.argv[2:]))
    main()
