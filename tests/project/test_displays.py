"""What a notebook shows: progress bars, and short forms of runs, configs and schemes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import QUICK, ROOT
from helpers.command_line import TINY
from helpers.record_runs import make_run

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.records import Run
from deepstack.training import Observer

CONFIG = deepstack.load_config(QUICK, TINY)


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
