"""A study whose metric reads no value starts no further run, and its error shows the output."""

from pathlib import Path

import pytest
from helpers.command_line import refusal, typed
from helpers.extensions import needs

from deepstack.records import RunFolder, find_runs
from deepstack.tools.own_trainer.metric import MetricFile
from deepstack.tools.own_trainer.no_value import advice, pattern_for

SCRIPT = """\
import json, os, sys
seed = int(sys.argv[1])
print("step 10: train loss 2.0, valid loss", 2.3 + seed / 10)
if seed in {with_value}:
    print("val loss", 1 + seed)
print("saved the weights", flush=True)
if seed in {with_code}:
    sys.exit(3)
"""


def study(
    folder: Path, with_value: list[int], with_code: list[int], metric: str = "'^val loss ([0-9.]+)'"
) -> Path:
    """Write a study of four seeds, of which some print the metric and some end with code 3."""
    script, path = folder / "own.py", folder / "study.yaml"
    script.write_text(SCRIPT.format(with_value=with_value, with_code=with_code))
    path.write_text(
        f"command: python -S {script} {{seed}}\nmetric: {metric}\n"
        "sweep: {grid: {seed: [0, 1, 2, 3]}}\n"
    )
    return path


def states(out: Path) -> dict[int, str]:
    return {run.get("seed"): run.state for run in find_runs(out)}


@pytest.mark.slow(turn=11)
def test_a_metric_that_matches_nothing_ends_the_study_after_its_first_run(tmp_path: Path) -> None:
    out = tmp_path / "results"
    path = study(tmp_path, with_value=[], with_code=[])
    error = refusal(2, "sweep", path, "--out", out)
    assert states(out) == {0: "failed"}
    assert "no line matches '^val loss ([0-9.]+)'" in error and str(path) in error
    assert "    step 10: train loss 2.0, valid loss 2.3\n    saved the weights\n" in error
    assert "such as 'valid +loss *([0-9.]+)'" in error and "3 runs not started" in error
    (run,) = find_runs(out)
    assert "no line of output.txt matches the metric" in run.status["error"]
    path.write_text(path.read_text().replace("^val loss ([0-9.]+)", "valid +loss *([0-9.]+)"))
    again = typed("sweep", path, "--out", out)
    assert again.exit_code == 0, again.output
    assert states(out) == dict.fromkeys(range(4), "done")
    assert again.stderr.count("\nrunning") == 3  # the first output is read again


@needs("answer")
def test_a_file_without_the_metric_ends_the_study_too(tmp_path: Path) -> None:
    path = study(tmp_path, [], [], metric="{file: metrics.json, key: val}")
    error = refusal(2, "sweep", path, "--out", tmp_path / "results", "--until", "decided")
    assert "metrics.json has no value 'val'; found no such file there" in error
    assert states(tmp_path / "results") == {0: "failed"}


def test_a_file_with_other_numbers_names_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"step": 3, "loss": {"val": 1}, "best": 2.5}')
    metric = MetricFile("metrics.json", "val")
    assert metric.names(tmp_path / "metrics.json") == ["step", "best"]
    run = RunFolder(tmp_path / "run")
    (run.path / "files").mkdir(parents=True)
    (tmp_path / "metrics.json").rename(run.path / "files" / "metrics.json")
    assert "with the numbers step, best there; allowed" in advice(metric, run)


@pytest.mark.parametrize(
    ("with_value", "with_code", "workers"),
    [
        pytest.param([0], [], 1, marks=pytest.mark.slow),  # an earlier run has a value
        pytest.param([1], [], 2, marks=pytest.mark.slow),  # one that still ran has a value
        ([], [0, 1, 2, 3], 1),  # no run ended with exit code 0
        pytest.param([0], [0], 1, marks=pytest.mark.slow),  # a failed run has a value
    ],
)
def test_other_runs_without_a_value_leave_the_study_going(
    with_value: list[int], with_code: list[int], workers: int, tmp_path: Path
) -> None:
    path, out = study(tmp_path, with_value, with_code), tmp_path / "results"
    if workers == 2:
        script = tmp_path / "own.py"
        late = "import time; seed == 1 and time.sleep(1)"
        script.write_text(script.read_text().replace("print", f"{late}\nprint", 1))
    done = typed("sweep", path, "--out", out, "--workers", workers)
    assert done.exit_code == 3, done.output
    assert len(states(out)) == 4


@pytest.mark.slow(turn=13)
def test_a_value_of_an_earlier_sweep_counts(tmp_path: Path) -> None:
    out = tmp_path / "results"
    path = study(tmp_path, with_value=[0], with_code=[])
    assert typed("sweep", path, "seed=0", "--out", out).exit_code == 0
    done = typed("sweep", path, "seed=1,2,3", "--out", out)
    assert done.exit_code == 3, done.output
    assert len(states(out)) == 4


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("iter 3: loss 2.1, eval_loss=0.5 lr 1e-3", "eval_loss= *([0-9.]+)"),
        ("iter 3: loss 2.1, lr 1e-3", "loss *([0-9.]+)"),
        ("2.1", "val loss ([0-9.]+)"),
    ],
)
def test_the_pattern_of_the_likeliest_loss_is_named(line: str, pattern: str) -> None:
    assert pattern_for([line]) == pattern
