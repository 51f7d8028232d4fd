"""What people get wrong when they type a command or call the library: each is told what to type."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import QUICK
from helpers.command_line import TINY, typed

import deepstack
from deepstack.config import parse_config
from deepstack.errors import ConfigError
from deepstack.plugins import load_plugins
from deepstack.records import Run, RunFolder

CONFIG = parse_config("", overrides=["model.depth=2", "model.d_model=8", "train.steps=2"])

CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "one override": (
        lambda: deepstack.load_config(QUICK, "model.depth=3"),
        r"overrides: found str; allowed a list of texts, such as \['model.depth=3'\]",
    ),
    "overrides as a dict": (
        lambda: deepstack.load_config(QUICK, {"model.depth": 3}),  # type: ignore[arg-type]
        r"overrides: found dict; allowed .* \['model.depth=3'\]",
    ),
    "a path to train": (
        lambda: deepstack.train("configs/quick.yaml"),  # type: ignore[arg-type]
        r"found a path .* allowed what deepstack.load_config\('configs/quick.yaml'\)",
    ),
    "a dict to build": (
        lambda: deepstack.build_model({"depth": 2}, vocab_size=3),  # type: ignore[arg-type]
        r"found dict for a configuration; allowed what deepstack.load_config\(PATH\) returns",
    ),
    "a path to sweep": (
        lambda: deepstack.sweep("quick.yaml", {"seed": [0]}),  # type: ignore[arg-type]
        r"found a path .* allowed what deepstack.load_config\('quick.yaml'\)",
    ),
    "one value of an axis": (
        lambda: deepstack.sweep(CONFIG, {"model.depth": 3}),  # type: ignore[dict-item]
        r"sweep.grid.model.depth: found 3; allowed a list of values, such as \[3\]",
    ),
    "one name of an axis": (
        lambda: deepstack.sweep(CONFIG, {"model.scheme": "post_ln"}),
        r"sweep.grid.model.scheme: found 'post_ln'; allowed .* \['post_ln'\]",
    ),
    "one plugin": (
        lambda: load_plugins("mine.py"),
        r"load_plugins: found one path; allowed a list, such as \['mine.py'\]",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_the_right_one(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    call, said = CALLS[name]
    with pytest.raises(ConfigError, match=said):
        call()
    assert not any(tmp_path.iterdir())


def test_a_run_that_is_done_says_that_nothing_was_trained(tmp_path: Path) -> None:
    first = typed("train", QUICK, *TINY, "--out", tmp_path)
    assert "already" not in first.stderr
    folder = Path(first.stdout.strip())
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = typed("train", QUICK, *TINY, "--out", tmp_path)
    assert again.stdout == first.stdout
    assert again.stderr.startswith(
        "done already, left as it is; to train it anew, first: "
        f"deepstack rm {folder} --out {tmp_path}\n"
    )
    same = {path: path.read_bytes() for path in files if path.name != ".lock"}
    assert same == {path: files[path] for path in same}
    assert typed("train", QUICK, *TINY, "--out", tmp_path, "--quiet").stderr == ""


def test_the_config_of_a_run_is_filed_under_its_study(tmp_path: Path) -> None:
    run = Path(typed("train", QUICK, *TINY, "--out", tmp_path, "-q").stdout.strip())
    words = "train", run / "config.yaml", "seed=1", "--out", tmp_path, "-q"
    assert Path(typed(*words).stdout.strip()).parent == run.parent
    copied = tmp_path / "config.yaml"
    copied.write_bytes((run / "config.yaml").read_bytes())
    assert Path(typed("train", copied, *words[2:]).stdout.strip()).parent.name == "config"


def test_a_run_for_its_config_and_a_study_for_its_run(tmp_path: Path) -> None:
    run = Path(typed("train", QUICK, *TINY, "--out", tmp_path, "-q").stdout.strip())
    trained = typed("train", run)
    assert trained.exit_code == 2
    assert (
        f"found a folder; allowed a YAML file; did you mean '{run}/config.yaml'?" in trained.stderr
    )
    for words in (["rerun", run.parent], ["export", run.parent, "--to", tmp_path / "x"]):
        found = typed(*words)
        assert found.exit_code == 2
        assert f"is no run: expected one of those in it, such as {run}" in found.stderr


def test_a_folder_that_cannot_be_written_asks_for_another(tmp_path: Path) -> None:
    run = Path(typed("train", QUICK, *TINY, "--out", tmp_path, "-q").stdout.strip())
    (run.parent / "figures").write_text("a file where the figures should go")
    drawn = typed("plot", "loss_vs_step", run.parent)
    assert drawn.exit_code == 5 and drawn.stderr.rstrip().endswith("give another folder with --to")
    trained = typed("train", QUICK, *TINY, "--out", run / "config.yaml")
    assert trained.exit_code == 5
    assert trained.stderr.rstrip().endswith("Not a directory; give another folder with --out")


SCHEME = '''
from deepstack.schemes import Scheme

class Forgotten(Scheme, name="forgotten", label="Forgotten", paper="none"):
    """x <- x + G(x)."""

    def residual(self, x, G, norm):
        return x + G(x)
'''


def test_a_plugin_that_is_not_given_and_one_that_was_changed(tmp_path: Path) -> None:
    """Each in a process of its own, as a plugin is loaded once in each."""
    file = tmp_path / "forgotten.py"
    out = tmp_path / "my results"
    words = [QUICK, *TINY, "model.scheme=forgotten"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deepstack", "train", *words, "-q", "--out", str(out)]
        return subprocess.run(command, capture_output=True, text=True)

    without = run(*words)
    assert without.returncode == 2
    assert without.stderr.rstrip().endswith("a scheme of your own comes with --plugin FILE")
    file.write_text(SCHEME)
    folder = run(*words, "--plugin", str(file)).stdout.strip()
    (recorded,) = Run(folder).meta["plugins"]
    again = run(f"{folder}/config.yaml", "--study", "quick")
    assert again.returncode == 2
    assert "forgotten.py" in again.stderr and recorded["sha256"] in again.stderr
    file.write_text(SCHEME + "# changed\n")
    changed = run(*words, "--plugin", str(file))
    assert changed.returncode == 2
    _, hint = changed.stderr.rstrip().split("or, to train with the file that is there: deepstack ")
    assert shlex.split(hint) == ["rm", folder, "--out", str(out)]
    assert typed(*shlex.split(hint)).exit_code == 0 and not Path(folder).exists()
    mistyped = typed("check", QUICK, "model.scheme=postln")
    assert "did you mean 'post_ln'" in mistyped.stderr and "--plugin" not in mistyped.stderr


def test_a_sweep_says_what_it_left_alone_and_how_to_run_it_again(tmp_path: Path) -> None:
    words = ["sweep", QUICK, *TINY, "seed=0,1", "-q", "--out", tmp_path]
    swept = typed(*words)
    assert swept.exit_code == 0 and "skipped" not in swept.stderr
    (run, _) = sorted((tmp_path / "quick").iterdir())
    RunFolder(run).write_status("failed", 1, error="no reason")
    left = typed(*words)
    assert left.exit_code == 3
    assert f"1 (reasons: deepstack ls {tmp_path / 'quick'})" in left.stderr
    assert left.stderr.rstrip().endswith("to run them again: --retry failed")


def test_the_config_of_a_probe_is_nothing_to_train(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = tmp_path / "mine" / "run"
    with deepstack.probe(model, torch.ones(2, 3), optimizer, out=out, layers=()) as probe:
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        optimizer.step()
        probe.step(loss)
    for command in ("train", "check", "sweep"):
        found = typed(command, out / "config.yaml")
        assert found.exit_code == 2
        assert "says what deepstack.probe has measured" in found.stderr
        assert found.stderr.rstrip().endswith(f"deepstack plot {out}")


BROKEN = '''
from deepstack.plots import chart

@chart("a_bug")
def a_bug(runs, *, options):
    """A bug."""
    return 1 / 0

@chart("nothing")
def nothing(runs, *, options):
    """No chart."""
'''


def test_a_chart_with_a_bug_is_named_and_the_others_are_drawn(tmp_path: Path) -> None:
    run = Path(typed("train", QUICK, *TINY, "--out", tmp_path, "-q").stdout.strip())
    (tmp_path / "broken.py").write_text(BROKEN)
    words = "plot", "a_bug", "nothing", "loss_vs_step", run.parent
    found = typed(*words, "--plugin", tmp_path / "broken.py")
    assert found.exit_code == 1 and isinstance(found.exception, SystemExit)
    assert "broken.py:7, in a_bug: ZeroDivisionError: division by zero" in found.stderr
    assert "broken.py:9: returned NoneType; allowed Chart(figure, data, title)" in found.stderr
    drawn = [Path(line).name for line in found.stdout.splitlines()]
    assert drawn == [f"loss_vs_step.{kind}" for kind in ("pdf", "png", "svg", "csv")]
    assert all((run.parent / "figures" / name).is_file() for name in drawn)


def test_charts_over_the_runs_of_several_folders(tmp_path: Path) -> None:
    for study, scheme in (("one", "post_ln"), ("two", "deepnorm"), ("three", "deepnorm")):
        typed("train", QUICK, *TINY, f"model.scheme={scheme}", "--study", study, "--out", tmp_path)
    folders = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    last = typed("plot", folders[0], "loss_vs_step")
    assert last.exit_code == 2 and "the folder comes last" in last.stderr
    assert f"deepstack plot loss_vs_step {folders[0]}" in last.stderr
    without = typed("plot", "loss_vs_step", *folders)
    assert without.exit_code == 2 and "need a folder of their own: --to FOLDER" in without.stderr
    found = typed("plot", "loss_vs_step", *folders, "--to", tmp_path / "x")
    assert found.exit_code == 0
    assert f"the same configuration as {tmp_path / 'two'}" in found.stderr
    table = pd.read_csv(tmp_path / "x" / "loss_vs_step.csv")
    assert {"Post-LN", "DeepNorm"} <= set(table["series"])
    alone = typed("plot", "loss_vs_step", folders[0], folders[0], "--to", tmp_path / "y")
    assert alone.exit_code == 0 and alone.stderr == ""


def test_a_sweep_into_a_file_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["sweep", QUICK, "--depths", "2", "--out", str(tmp_path / "file")]
    found = typed(*words)
    assert found.exit_code == 5 and "give another one with --out" in found.stderr
