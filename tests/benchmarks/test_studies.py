"""python benchmarks/gpu.py studies: order, budget and resumption, with tiny studies on a CPU."""

from pathlib import Path

import pytest
from helpers import ROOT

import deepstack
from benchmarks import studies
from deepstack.config import load_study
from deepstack.sweeps import expand

CPU = ["runtime.device=cpu"]
TINY = """
name: {name}
model: {{depth: 2, d_model: 8, n_heads: 1}}
task: {{name: copy, seq_len: 4}}
train: {{steps: 2, batch_size: 2, eval_every: 0, eval_batches: 1, warmup_steps: 0}}
log: {{probe_sequences: 1, layers_every: 0}}
sweep: {{grid: {{seed: {seeds}}}}}
"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for name, seeds in (("second_by_name", [0, 1]), ("first_by_name", [0])):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(TINY.format(name=name, seeds=seeds))
    return paths


def times(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in out.rglob("status.json")}


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert studies.main(["--minutes", "10"]) == studies.NO_GPU
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "torch sees no GPU here" in err


def test_without_time_nothing_runs_and_all_that_is_left_is_named(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    words = ["--minutes", "0", "--device", "cpu", "--out", str(out)]
    assert studies.main([*map(str, files), *words]) == studies.UNFINISHED
    assert capsys.readouterr().out.splitlines() == [
        "second_by_name: 2 of 2 runs are left",
        "first_by_name: 1 of 1 runs are left",
        "repeat the command to continue",
    ]
    assert not out.exists()


def test_the_plan_counts_runs_and_minutes(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    assert studies.main([str(files[0]), "--plan", "--device", "cpu", "--out", str(out)]) == 0
    name, runs, left, whole, rest = capsys.readouterr().out.splitlines()[3].split()
    assert (name, runs, left) == ("second_by_name", "2", "2") and whole == rest


def test_studies_run_in_order_within_the_time_and_resume(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seconds, started = tmp_path / "results", iter(range(0, 1000, 10)), list[str]()

    def sweep_in_this_process(command: list[str]) -> int:
        started.append(f"{Path(command[1]).stem} {float(command[-1]) * 3600:.0f}")
        for config in expand(load_study(Path(command[1]), CPU)):
            deepstack.train(config, out=out)
        return 0

    monkeypatch.setattr(studies, "sweep_process", sweep_in_this_process)
    # Each look at the clock takes ten seconds: 15 are over before the second study.
    code = studies.run_studies(files, CPU, out, 0.25, clock=lambda: next(seconds))
    assert code == studies.UNFINISHED and started == ["second_by_name 5"]
    done = times(out)
    assert len(done) == 2
    assert studies.run_studies(files, CPU, out, 1, clock=lambda: next(seconds)) == 0
    assert started[1:] == ["first_by_name 40"]
    assert len(times(out)) == 3 and done.items() <= times(out).items()


@pytest.mark.slow
def test_a_sweep_out_of_time_ends_by_itself(
    files: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # By this clock there is time for the sweep to start, and by its own it is over at once.
    code = studies.run_studies(files[:1], CPU, tmp_path, 1e-9, clock=lambda: 0.0)
    seen = capfd.readouterr()
    assert code == studies.UNFINISHED and "--max-hours are over" in seen.err
    assert "2 of 2 runs are left" in seen.out


@pytest.mark.slow
def test_every_gpu_study_is_estimated_below_ten_minutes() -> None:
    found = {path.parent.name for path in ROOT.glob("experiments/*/study_gpu.yaml")}
    assert set(studies.STUDIES) == found
    for name in studies.STUDIES:
        configs = expand(load_study(ROOT / "experiments" / name / "study_gpu.yaml"))
        seeds = len({config.seed for config in configs})
        first = [config for config in configs if not config.seed]
        assert 60 < seeds * sum(map(studies.estimate_seconds, first)) < 600, name
