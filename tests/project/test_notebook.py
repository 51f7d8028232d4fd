"""deepstack as a library, as a notebook's cells use it and show it."""

import inspect
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import QUICK, ROOT
from helpers.command_line import TINY
from helpers.extensions import needs
from helpers.record_runs import make_run

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.records import Run, find_runs
from deepstack.sweeps import CellProgress
from deepstack.training import Observer, PlainLines

CONFIG = deepstack.load_config(QUICK, TINY)


def test_on_windows_one_sentence_refuses() -> None:
    code = "import sys; sys.platform = 'win32'; import deepstack"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == (
        "ImportError: deepstack runs on Linux and macOS; on Windows, use it inside WSL 2\n"
    )


@needs("answer", "calibrate", "depth_use")
def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in deepstack.__all__:
        assert len(inspect.getdoc(getattr(deepstack, name)) or "") > 40, name
    with pytest.raises(
        AttributeError, match=r"no attribute 'trian'; it has analyze, .*calibrate, "
    ):
        _ = deepstack.trian


def test_the_columns_of_its_frames_are_named_where_help_shows_them(tmp_path: Path) -> None:
    run = deepstack.train(CONFIG, out=tmp_path)
    rows = inspect.getdoc(deepstack.load_runs) or ""
    for column in deepstack.load_runs(tmp_path).columns:
        assert column in rows or column in ("model.scheme", "seed"), column
    for frame in ("steps", "evals", "timing"):
        said = inspect.getdoc(getattr(type(run), frame)) or ""
        assert all(column in said for column in getattr(run, frame).columns), frame


@pytest.fixture
def ctrl_c() -> None:
    """Set Python's own handler of Ctrl-C, also where the tests run in a shell's background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_progress_is_printed_where_it_is_asked_for(tmp_path: Path, capsys: Any) -> None:
    deepstack.train(CONFIG, out=tmp_path / "silent")
    assert capsys.readouterr().out == ""  # nor a bar, which a notebook shows
    run = deepstack.train(CONFIG, out=tmp_path, observer=PlainLines())
    printed = capsys.readouterr().out
    assert "steps 1 to 2" in printed and printed.endswith("done at step 2\n")
    again = deepstack.train(CONFIG, out=tmp_path, observer=PlainLines())
    assert again.path == run.path and "done already" in capsys.readouterr().out


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_cell_saves_and_a_second_one_ends_at_once(tmp_path: Path, times: int) -> None:
    class Impatient(Observer):
        def stepped(self, step: int, row: Any) -> None:
            for _ in range(times if step == 1 else 0):
                signal.raise_signal(signal.SIGINT)

    config = deepstack.load_config(QUICK, [*TINY, "train.steps=3"])
    with pytest.raises(KeyboardInterrupt, match="step 1, saved" if times == 1 else "^$"):
        deepstack.train(config, out=tmp_path, observer=Impatient())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (run,) = find_runs(tmp_path)
    assert run.folder.checkpoints() == ([1] if times == 1 else [])
    assert run.state == "interrupted"
    assert deepstack.train(config, out=tmp_path).state == "done"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_the_last_step_ends_what_comes_after_it(tmp_path: Path) -> None:
    class Late(Observer):
        def finished(self, state: str, step: int) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        deepstack.train(CONFIG, out=tmp_path, observer=Late())
    assert [*deepstack.load_runs(tmp_path).state] == ["done"]


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_sweep_has_its_runs_save(tmp_path: Path) -> None:
    sent: list[int] = []

    def show(progress: Sequence[CellProgress]) -> None:
        if progress[0].step and not sent:
            sent.append(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    config = deepstack.load_config(QUICK, [*TINY, "train.steps=100000"])
    with pytest.raises(KeyboardInterrupt):
        deepstack.sweep(config, {"seed": [0, 1]}, out=tmp_path, workers=1, show=show)
    (run,) = find_runs(tmp_path)
    assert run.state == "interrupted" and run.folder.checkpoints()


# --- progress bars, and short forms of runs, configs and schemes ----------------------------------


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that a notebook has displayed, in order."""
    shown: list[str] = []

    def display(value: Any, display_id: bool = True) -> SimpleNamespace:
        assert display_id and "<progress" in value._repr_html_()
        shown.append(repr(value))
        return SimpleNamespace(update=display)

    fake = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=object()),
        display=SimpleNamespace(display=display),
    )
    monkeypatch.setitem(sys.modules, "IPython", fake)  # type: ignore[arg-type]
    return shown


@pytest.mark.slow(turn=22)
def test_a_notebook_shows_a_bar_for_a_run_and_for_a_sweep(cells: list[str], tmp_path: Path) -> None:
    deepstack.train(CONFIG, out=tmp_path / "quiet", observer=Observer())
    assert cells == []
    deepstack.train(CONFIG, out=tmp_path)
    assert cells[0].startswith("[------------------------] 0/2  DeepNorm, 2 layers")
    assert cells[-1].startswith("[########################] 2/2  done: step 2  validation loss")
    deepstack.sweep(CONFIG, {"seed": [0, 1]}, out=tmp_path, workers=1)
    assert cells[-1] == "[########################] 2/2  runs ended: 2 done"


def test_a_config_shows_what_differs_from_the_defaults() -> None:
    assert repr(Config()) == "Config()"
    config = with_overrides(Config(), {"model.depth": 12, "model.scheme": "post_ln", "name": "a"})
    assert repr(config) == "Config(name='a', model.scheme='post_ln', model.depth=12)"
    page = config._repr_html_()
    assert "<th style='text-align:left'>model.depth</th>" in page and ">12<" in page
    assert "all settings have their defaults" in Config()._repr_html_()


def test_a_run_shows_its_state_and_last_values(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "<b>study" / "run", "model: {depth: 6, scheme: post_ln}\n")
    run = Run(folder.path)
    assert repr(run) == f"Run({str(folder.path)!r}, done)"
    page = run._repr_html_()
    assert "<b>study" not in page and "&lt;b&gt;study/run" in page
    assert ">post_ln<" in page and ">done<" in page and "model_update" in page
    folder.config_path.write_text("- <script>")
    assert "damaged" in Run(folder.path)._repr_html_()


def test_schemes_and_their_registry_are_short() -> None:
    scheme = deepstack.build_model(CONFIG, vocab_size=5).model.schemes[0]
    assert repr(scheme) == f"DeepNorm: {scheme.equation}"
    assert scheme.equation.replace("<", "&lt;").split("(")[0] in scheme._repr_html_()
    assert repr(deepstack.schemes.SCHEMES).startswith("Registry of ")


@pytest.mark.slow
def test_mypy_reports_a_name_that_deepstack_lacks(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text("import deepstack\ndeepstack.trian\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "typo.py"]
    environment = {"MYPYPATH": str(ROOT), "PATH": "/usr/bin"}
    checked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert checked.returncode == 1, checked.stderr
    assert 'typo.py:2: error: Module has no attribute "trian"' in checked.stdout
