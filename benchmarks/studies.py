"""Runs the GPU studies of experiments/ within a time budget: `python benchmarks/gpu.py studies`.

Every study is an ordinary sweep of a file study_gpu.yaml.  They run in the order of STUDIES, each
by `deepstack sweep FILE --max-hours …` with the time that is left.  When the time is over, running
runs save and end, and the exit code is 3; the same command continues.

The estimates come from the measurements on one H200 in benchmarks/log.md, section "On a GPU"; no
study has been timed.  A study's minutes are the sum over its runs as if they ran one after the
other; a sweep runs several at once.
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from deepstack.base import ResourceError
from deepstack.cli import emit
from deepstack.config import (
    Config,
    layer_counts,
    load_study,
    predicted_positions,
    validation_sequences,
)
from deepstack.model import flops_of
from deepstack.sweeps import Cell, plan
from deepstack.tasks import task_of

ROOT = Path(__file__).resolve().parents[1]
STUDIES = (
    "model_update_vs_depth",
    "lr_transfer_across_depth",
    "who_diverges",
    "lr_depth_frontier",
    "where_the_update_comes_from",
    "bound_against_measured",
    "gradient_ratios",
    "warm_up",
)
"""Folders of experiments/ with a study_gpu.yaml, the most valuable first."""

UNFINISHED, NO_GPU = 3, ResourceError.exit_code

LAYER_STEP = 3.0e-4
"""Seconds of a layer in a captured step: 30.1 ms of 100 compiled layers, d_model 256, 32 x 128
tokens, bf16.  Fused layers of this size take two thirds of it."""
RATES = {"bf16": 1.07e14, "fp32": 1.66e13}
"""FLOPs a second of a step.  bf16: the 1000 layers of configs/deepnorm_1000_gpu.yaml take 195 ms.
fp32: cuBLAS takes 115 us for 3.2 GFLOP, and a wide step 1.69 of its products' time."""
LAYER_START = 0.036
"""Seconds of start, first uncaptured steps and end for each layer: of 98 s for 300 of these steps
58.5 are steps and 3.9 imports, which a sweep does once."""
START = 1.0
"""Seconds of a run beside its layers and imports: CUDA, first validations, files."""
EAGER_STEP = 2.4e-3
"""Seconds of a layer in a step kernel by kernel: 2355 ms of 1000 layers.  A snapshot counts as one,
and an attribution's forward passes, one for each of about 16 roles, as a third of one each."""


def estimate_seconds(config: Config) -> float:
    """Return the estimated seconds of a run on one H100, without imports."""
    counts, train = layer_counts(config), config.train
    layers = counts.depth + counts.decoder
    flops = flops_of(config, task_of(config)).total
    step = max(layers * LAYER_STEP, flops / RATES[train.precision])
    evaluations = 2 + (train.steps // train.eval_every if train.eval_every else 0)
    passes = records(config.log.layers_every, train.steps)
    passes += 16 / 3 * records(getattr(config.log, "attribution_every", 0), train.steps)
    sequences = validation_sequences(config, config.task.seq_len, predicted_positions(config))
    steps = step * (train.steps + evaluations * sequences / train.batch_size / 3)
    return START + layers * (LAYER_START + EAGER_STEP * passes) + steps


def records(every: int | str, steps: int) -> float:
    """Return how many records an interval of a run makes; of 'log' about as many."""
    if every == "log":
        return 2 + math.log(steps + 1, 1.6)
    return steps // int(every) if every else 0


@dataclass(frozen=True)
class PlannedStudy:
    """A study's file and the cells of its sweep, with their present states."""

    file: Path
    name: str
    cells: Sequence[Cell]

    @property
    def left(self) -> list[Cell]:
        """The cells without a result."""
        return [cell for cell in self.cells if cell.state not in ("done", "diverged")]

    def row(self) -> dict[str, object]:
        """Return the study's row of the plan."""
        whole, rest = (
            sum(estimate_seconds(cell.config) for cell in cells) / 60
            for cells in (self.cells, self.left)
        )
        return {
            "study": self.name,
            "runs": len(self.cells),
            "left": len(self.left),
            "estimated minutes": round(whole, 1),
            "minutes left": round(rest, 1),
        }


def plan_study(file: Path, words: Sequence[str], out: Path) -> PlannedStudy:
    """Return the plan of a study's file, with settings added, under the folder `out`."""
    study = load_study(file, list(words))
    name = study.base.name or file.stem
    return PlannedStudy(file, name, plan(study, study=name, out=out))


def run_studies(
    files: Sequence[Path],
    words: Sequence[str],
    out: Path,
    minutes: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the sweeps in order within a time budget and return the exit code.

    clock: returns seconds.

    The exit code is 0 if every run has a result and 3 if runs are left or failed.  A sweep with
    another exit code, refused or interrupted, ends this command with it.
    """
    deadline, code = clock() + 60 * minutes, 0
    for file in files:
        study = plan_study(file, words, out)
        seconds = deadline - clock()
        if not study.left or seconds <= 0:
            continue
        print(f"\n## {study.name}: {study.row()['minutes left']} minutes estimated", flush=True)
        command = ["sweep", str(file), *words, "--out", str(out)]
        ended = sweep_process([*command, "--max-hours", str(seconds / 3600)])
        if ended not in (0, UNFINISHED):
            code = ended
            break
    left = [one for one in map(partial(plan_study, words=words, out=out), files) if one.left]
    for study in left:
        print(f"{study.name}: {len(study.left)} of {len(study.cells)} runs are left")
    if left and not code:
        print("repeat the command to continue")
        return UNFINISHED
    return code


def sweep_process(command: Sequence[str]) -> int:
    """Run `deepstack` with these words and return its exit code; after Ctrl-C it saves first."""
    process = subprocess.Popen([sys.executable, "-m", "deepstack", *command])
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal sends it to the sweep too
        return process.wait()


def main(words: Sequence[str]) -> int:
    """Run or plan the studies that the words of the command line name; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="gpu.py studies", description="Run the GPU studies of experiments/ in a time budget."
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="studies (default: all eight)"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="then runs save and end (exit code 3)"
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--plan", action="store_true", help="print runs and estimated minutes only")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args(words)
    files = chosen.files or [ROOT / "experiments" / one / "study_gpu.yaml" for one in STUDIES]
    settings = [f"runtime.device={chosen.device}"]
    if chosen.plan:
        emit([plan_study(file, settings, chosen.out).row() for file in files], as_json=False)
        return 0
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here; --plan prints runs and estimated minutes", file=sys.stderr)
        return NO_GPU
    return run_studies(files, settings, chosen.out, chosen.minutes)
