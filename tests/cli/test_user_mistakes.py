"""What people get wrong when they type a command or call the library: each is told what to type."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import QUICK
from helpers.command_line import TINY, typed
from helpers.plot_runs import make_run
from helpers.registries import restored_names

import deepstack
from deepstack import plugins
from deepstack.config import parse_config
from deepstack.errors import ConfigError
from deepstack.records import Run

CONFIG = parse_config("", overrides=["model.depth=2", "model.d_model=8", "train.steps=2"])

LOADED = r"for a configuration; allowed what deepstack.load_config\(PATH\) returns"
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (
        deepstack.load_config,
        (QUICK, "model.depth=3"),
        "found str; allowed a list of texts, such as",
    ),
    (deepstack.load_config, (QUICK, {"model.depth": 3}), r"found dict; .* \['model.depth=3'\]"),
    (deepstack.train, ("configs/quick.yaml",), f"found a str {LOADED}"),
    (partial(deepstack.build_model, vocab_size=3), ({"depth": 2},), f"found a dict {LOADED}"),
    (deepstack.sweep, ("quick.yaml", {"seed": [0]}), f"found a str {LOADED}"),
    (deepstack.sweep, (CONFIG, {"model.depth": 3}), r"grid.model.depth: found 3; .* list .* \[3\]"),
    (deepstack.sweep, (CONFIG, {"model.scheme": "post_ln"}), r"found 'post_ln'; .* \['post_ln'\]"),
    (plugins.load_plugins, ("mine.py",), r"found one path; allowed a list, such as \['mine.py'\]"),
]


@pytest.mark.parametrize(("call", "given", "message"), CALLS)
def test_a_wrong_call_says_the_right_one(
    call: Callable[..., Any], given: Any, message: str, here: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        call(*given)
    assert not any(here.iterdir())


def test_a_run_that_is_done_says_that_nothing_was_trained(run: Path, tmp_path: Path) -> None:
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    again = typed("train", run / "config.yaml", "--out", tmp_path)  # filed under its study
    assert again.stdout.strip() == str(run)
    assert again.stderr.startswith(
        "done already, left as it is; to train it anew, first: "
        f"deepstack rm {run} --out {tmp_path}\n"
    )
    assert all(path.read_bytes() == files[path] for path in files if path.name != ".lock")
    assert typed("train", QUICK, *TINY, "--out", tmp_path, "--quiet").stderr == ""
    copied = tmp_path / "config.yaml"
    copied.write_bytes(files[run / "config.yaml"])
    other = typed("train", copied, "--out", tmp_path, "-q")
    assert Path(other.stdout.strip()).parent.name == "config"


def test_a_folder_that_cannot_be_written_asks_for_another(run: Path, tmp_path: Path) -> None:
    (run.parent / "figures").write_text("a file where the figures should go")
    for words, end in (
        (["plot", "loss_vs_step", run.parent], "give another folder with --to"),
        (["train", QUICK, *TINY, "--out", run / "config.yaml"], "give another folder with --out"),
        (["sweep", QUICK, "--out", run / "config.yaml"], "give another one with --out"),
    ):
        result = typed(*words)
        assert result.exit_code == 5 and result.stderr.rstrip().endswith(end)


SCHEME = '''
from deepstack.schemes import Scheme

class Forgotten(Scheme, name="forgotten", label="Forgotten", paper="none"):
    """x <- x + G(x)."""

    def residual(self, x, G, norm):
        return x + G(x)
'''


def test_a_plugin_that_is_not_given_and_one_that_was_changed(tmp_path: Path) -> None:
    file = tmp_path / "forgotten.py"
    out = tmp_path / "my results"

    def train(*words: object) -> Any:
        with restored_names():  # as in a process of its own
            return typed("train", *words, "-q", "--out", out)

    def refusal(*words: object) -> str:
        refused = train(*words)
        assert refused.exit_code == 2
        return str(refused.stderr).rstrip()

    words = [QUICK, *TINY, "model.scheme=forgotten"]
    assert refusal(*words).endswith("a scheme of your own comes with --plugin FILE")
    assert "--plugin" not in refusal(QUICK, "model.scheme=postln")
    file.write_text(SCHEME)
    folder = train(*words, "--plugin", file).stdout.strip()
    (recorded,) = Run(folder).meta["plugins"]
    again = refusal(f"{folder}/config.yaml", "--study", "quick")
    assert "forgotten.py" in again and recorded["sha256"] in again
    file.write_text(SCHEME + "# changed\n")
    changed = refusal(*words, "--plugin", file)
    hint = changed.partition("or, to train with the file that is there: deepstack ")[2]
    assert shlex.split(hint) == ["rm", folder, "--out", str(out)]
    assert typed(*shlex.split(hint)).exit_code == 0 and not Path(folder).exists()


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


def test_a_chart_with_a_bug_is_named_and_the_others_are_drawn(run: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    words = "plot", "a_bug", "nothing", "loss_vs_step", run.parent, "--format", "csv"
    found = typed(*words, "--plugin", tmp_path / "broken.py")
    assert found.exit_code == 1 and isinstance(found.exception, SystemExit)
    assert "broken.py:7, in a_bug: ZeroDivisionError: division by zero" in found.stderr
    assert "broken.py:9: returned NoneType; allowed Chart(figure, data, title)" in found.stderr
    assert found.stdout.strip() == str(run.parent / "figures" / "loss_vs_step.csv")


def test_charts_over_the_runs_of_several_folders(tmp_path: Path) -> None:
    schemes = {"one": "post_ln", "two": "deepnorm", "three": "deepnorm"}
    folders = [make_run(tmp_path / name, scheme=schemes[name]).parent for name in schemes]
    without = typed("plot", "loss_vs_step", *folders)
    assert without.exit_code == 2 and "need a folder of their own: --to FOLDER" in without.stderr
    words = "loss_vs_step", "--format", "csv", "--to", tmp_path / "x"
    found = typed("plot", *folders, *words)
    assert found.exit_code == 0
    assert f"the same configuration as {tmp_path / 'two'}" in found.stderr
    table = pd.read_csv(tmp_path / "x" / "loss_vs_step.csv")
    assert {"Post-LN", "DeepNorm"} <= set(table["series"])
    alone = typed("plot", folders[0], folders[0], *words)
    assert alone.exit_code == 0 and alone.stderr == ""
