"""Same config, seed and environment: the same bytes, whatever else is different."""

import io
import subprocess
import sys
import time
from contextlib import closing, redirect_stderr
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.sampling import some
from helpers.small_runs import data_of, small

import deepstack
from deepstack.config import to_yaml, with_overrides
from deepstack.records import find_runs
from deepstack.sweeps.fork_server import ForkServer

BASE = small(model__depth=3, train__steps=8, train__eval_batches=1)
CONFIGS = {
    "plain": BASE,
    "dropout": with_overrides(BASE, {"seed": 7, "model.dropout": 0.1, "task.name": "markov"}),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of each configuration in this process, without other work."""
    out = tmp_path_factory.mktemp("references")
    return {
        name: data_of(deepstack.train(config, study=name, out=out))
        for name, config in CONFIGS.items()
    }


ENVIRONMENTS: dict[str, dict[str, str]] = {
    "another process": {},
    "hash seed, time zone, terminal": {
        "PYTHONHASHSEED": "4294967295", "TZ": "Asia/Kathmandu", "COLUMNS": "20", "NO_COLOR": "1"},
    "locale POSIX without UTF-8": {
        "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "threads": {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", some(ENVIRONMENTS, 4, 0))
def test_environment_variables_change_no_byte(
    name: str,
    references: dict[str, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in ENVIRONMENTS[name].items():
        monkeypatch.setenv(key, value)
    with closing(ForkServer()) as server:
        for study, config in CONFIGS.items():
            process = server.start(to_yaml(config), ["--out", str(tmp_path), "--study", study])
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert process.poll() == 0, process.stderr_text()
    assert {run.study: data_of(run) for run in find_runs(tmp_path)} == references


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_and_any_order(workers: int, tmp_path: Path) -> None:
    """Six runs: as each of them alone in this process."""
    order = [0, 1, 2] if workers < 4 else [2, 1, 0]
    grid = {"seed": order, "model.scheme": ["pre_ln", "deepnorm"]}
    runs = deepstack.sweep(BASE, grid, study="swept", out=tmp_path, workers=workers)
    assert len(runs) == 6
    for run in runs:
        cell = {"model.scheme": run.get("model.scheme"), "seed": run.get("seed")}
        alone = deepstack.train(with_overrides(BASE, cell), study="alone", out=tmp_path)
        assert data_of(run) == data_of(alone)


# stdout and stderr -> the exit code: an answer may be lost, never a training
STREAMS = {
    ">&- 2>/dev/full": 0,
    ">/dev/full 2>&-": 5,
    ">&-": 0,
    ">/dev/full": 5,
    "2>&-": 0,
    "2>/dev/full": 0,
    "<&- >&- 2>&-": 0,
    ">/dev/full 2>/dev/full": 5,
    "| true": 0,
    "2>&1 >/dev/null | true": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("streams", STREAMS)
def test_closed_and_full_streams_stop_and_change_nothing(
    streams: str, references: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(to_yaml(CONFIGS["plain"]))
    shell = ["bash", "-o", "pipefail", "-c", f'"$@" {streams}', "bash"]
    command = [*shell, sys.executable, "-m", "deepstack", "train", file, "--out", tmp_path / "out"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == STREAMS[streams], ended.stderr
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    (run,) = find_runs(tmp_path / "out")
    assert run.state == "done" and data_of(run) == references["plain"]
    if "2>" in streams and "1" not in streams and ">/dev/full 2" not in streams:
        assert ended.stdout in ("", f"{run.path}\n")  # without the text for stderr
    if streams == ">/dev/full":
        last = ended.stderr.splitlines()[-1]
        assert last == "deepstack: the output cannot be written: No space left on device"


def test_a_terminal_that_goes_away_does_not_stop_the_run(
    references: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepstack.cli.display import observe
    from deepstack.cli.views import TerminalView
    from deepstack.training import PlainLines

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    gone = Mock(wraps=io.StringIO(), encoding="utf-8")  # a terminal whose window was closed
    gone.isatty.return_value = True
    gone.write.side_effect = gone.flush.side_effect = OSError(5, "Input/output error")
    with redirect_stderr(gone), observe(quiet=False) as observer:
        assert isinstance(observer, PlainLines) and isinstance(observer.view, TerminalView)
        run = deepstack.train(CONFIGS["plain"], out=tmp_path, observer=observer)
    assert data_of(run) == references["plain"]
