"""Logs for trackers: exports that are refused or fail."""

import errno
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import pytest
from helpers.command_line import refusal
from helpers.extensions import has, needs

from deepstack.base.errors import ConfigError
from deepstack.records import Run
from deepstack.runs.tracked import scalars
from deepstack.runs.trackers import Tracker, known_trackers, register_tracker
from deepstack.tools.export.logs import export_logs


def test_scalars_equal_the_runs(runs: dict[str, Run]) -> None:
    run = runs["done"]
    values = dict(scalars(run))
    assert list(values) == list(range(13))
    for row in run.steps.to_dict("records"):
        logged = values[int(row.pop("step"))]
        assert {key: logged[f"steps/{key}"] for key in row} == row
    assert values[12]["evals/loss"] == run.evals.loss.iloc[-1]
    if has("attribution"):
        assert values[12]["attribution/q"] == run.attribution.q.iloc[-1]
    steps, norms = run.layers("grad_norm")
    for step, norm in zip(steps, norms, strict=True):
        assert values[step]["layers/grad_norm/mean"] == pytest.approx(norm.mean())
        assert values[step]["layers/grad_norm/max"] == norm.max()
    # no key for each layer: as many keys for any depth
    keys = {key for each in values.values() for key in each if key.startswith("layers/")}
    assert len(keys) <= 3 * len(run.layer_names())


@needs("tensorboard", "wandb")
def test_wrong_exports_are_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    for more, expected in [
        (["--logs", "tensorbord", "--to", tmp_path / "x"], "did you mean 'tensorboard'?"),
        (["--logs", "wandb", "--to", tmp_path], "exists already; give another folder"),
        ([], "--to is missing"),
    ]:
        assert expected in refusal(2, "export", runs["done"].path.parent, *more)
    assert list(tmp_path.iterdir()) == []
    assert "holds no runs" in refusal(7, "export", tmp_path, "--logs", "wandb")


def test_a_failed_export_leaves_one_line_and_no_folder(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    def fail(runs: Sequence[Run], to: Path) -> None:
        to.mkdir()
        raise RuntimeError("table exists\nwith a query of ten lines")

    register_tracker("failing", Tracker(fail, str))
    words = "export", runs["done"].path.parent, "--logs", "failing", "--to", tmp_path / "m"
    line = "deepstack: --logs: failing could not write the runs: RuntimeError: table exists\n"
    assert refusal(1, *words) == line
    assert not (tmp_path / "m").exists()


def test_an_error_in_a_thread_of_a_tracker_is_the_error_of_the_export(
    runs: dict[str, Run], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def export(runs: Sequence[Run], to: Path) -> None:
        to.mkdir()
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()

    register_tracker("failing", Tracker(export, str))
    words = "export", runs["done"].path.parent, "--logs", "failing", "--to", tmp_path / "m"
    line = "--logs: failing could not write the runs: OSError: [Errno 28] No space left on device"
    assert refusal(5, *words) == f"deepstack: {line}\n"
    assert not (tmp_path / "m").exists() and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("tracker", known_trackers())
def test_the_command_that_shows_an_export_quotes_its_folder(tracker: str) -> None:
    words = shlex.split(known_trackers()[tracker].show(Path("my logs/it's 5%")))
    assert any("my logs/it's 5%" in unquote(word) for word in words)


@pytest.mark.parametrize("tracker", known_trackers())
def test_an_export_without_its_package_names_the_extra(
    tracker: str, runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (tracker, "mlflow.entities", "tensorboard.compat.proto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"of the extra \[{tracker}\]: pip install"):
        export_logs(list(runs.values()), tracker, tmp_path / "x")
    assert not (tmp_path / "x").exists()
