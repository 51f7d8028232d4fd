"""Mistakes in commands and calls: each message names the text to type instead."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import QUICK
from helpers.command_line import PLUGIN, TINY, typed
from helpers.extensions import needs, needs_command
from helpers.plot_runs import make_run
from helpers.record_runs import contents
from helpers.registries import restored_names

import deepstack
from deepstack.base import plugins
from deepstack.base.errors import ConfigError
from deepstack.cli import sweep_command
from deepstack.cli.options import listed_seeds
from deepstack.config import parse_config
from deepstack.records import Run

CONFIG = parse_config("", overrides=["model.depth=2", "model.d_model=8", "train.steps=2"])

LOADED = r"for a configuration; allowed what deepstack.load_config\(PATH\) returns"
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (deepstack.load_config, (QUICK, "model.depth=3"), "found str; allowed a list of texts, such"),
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
    before = contents(run, ".lock")
    again = typed("train", run / "config.yaml", "--out", tmp_path)  # filed under its study
    assert again.stdout.strip() == str(run)
    assert again.stderr.startswith(
        "done already, left as it is; to train it anew, first: "
        f"deepstack rm {run} --out {tmp_path}\n"
    )
    assert contents(run, ".lock") == before
    assert typed("train", QUICK, *TINY, "--out", tmp_path, "--quiet").stderr == ""
    copied = tmp_path / "config.yaml"
    copied.write_bytes(before["config.yaml"])
    other = typed("train", copied, "--out", tmp_path, "-q")
    assert Path(other.stdout.strip()).parent.name == "config"


def test_a_folder_that_cannot_be_written_asks_for_another(run: Path, tmp_path: Path) -> None:
    (run.parent / "figures").write_text("a file where the figures should go")
    for words, end in (
        (["plot", "loss_vs_step", run.parent], "give another folder with --to"),
        (["train", QUICK, *TINY, "--out", run / "config.yaml"], "give another folder with --out"),
        (["sweep", QUICK, "--out", run / "config.yaml"], "give another folder with --out"),
    ):
        result = typed(*words)
        assert result.exit_code == 5 and result.stderr.rstrip().endswith(end)


def test_a_plugin_that_is_not_given_and_one_that_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "forgotten.py"
    out = tmp_path / "my results"

    def train(*words: object) -> Any:
        with restored_names():  # as in a new process
            return typed("train", *words, "-q", "--out", out)

    def refusal(*words: object) -> str:
        refused = train(*words)
        assert refused.exit_code == 2
        return str(refused.stderr).rstrip()

    words = [QUICK, *TINY, "model.scheme=own"]
    assert refusal(*words).endswith("a scheme of your own comes with --plugin FILE")
    assert "--plugin" not in refusal(QUICK, "model.scheme=postln")
    file.write_text(PLUGIN)
    folder = train(*words, "--plugin", file).stdout.strip()
    (recorded,) = Run(folder).meta["plugins"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    again = refusal(f"{folder}/config.yaml", "--study", "quick")
    assert "forgotten.py" in again and recorded["sha256"] in again
    file.write_text(PLUGIN + "# changed\n")
    changed = refusal(*words, "--plugin", file)
    hint = changed.partition("or, to train with the file that is there: deepstack ")[2]
    assert shlex.split(hint) == ["rm", folder, "--out", str(out)]
    assert typed(*shlex.split(hint), "--yes").exit_code == 0 and not Path(folder).exists()


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


# --- words, folders and settings ------------------------------------------------------------------


STUDY = "results/study"
RUN = f"{STUDY}/deepnorm-d6-s0-0.001"


@pytest.mark.parametrize(
    "words",
    [
        *("ls", "plot", "compare", "plot loss_vs_step results"),
        pytest.param("report", marks=needs("report")),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_before_any_run_the_first_one_is_named(words: str, exists: bool, here: Path) -> None:
    if exists:
        (here / "results").mkdir()
    result = typed(*words.split())
    assert result.exit_code == 7
    assert result.stderr.endswith("to train a first run: deepstack train quick\n")


WRONG_WORDS: list[tuple[list[str], str]] = [
    (["run", "quick"], "No such command 'run'; did you mean 'train' (one run), 'sweep'"),
    (["resume", "results"], "'resume'; an interrupted run continues when its train or sweep"),
    (["delete", "results"], "No such command 'delete'; did you mean 'rm'?"),
    (["tag", RUN, "good"], "No such command 'tag'; did you mean 'note RUN --tag WORD'?"),
    (["watch"], "No such command 'watch'; did you mean 'ls --watch'?"),
    (["serve", STUDY], "No such command 'serve'; did you mean 'report --serve'?"),
    (["diff", RUN, RUN], "No such command 'diff'; did you mean 'compare RUN RUN --diff'?"),
    (["report", STUDY, "--port", "80"], "--port: found without --serve, which it needs"),
    (["report", STUDY, "--serve", "--latex"], "--serve: found --to or --latex, which write"),
    (["trian", QUICK], "No such command 'trian'. Did you mean 'train'?"),
    (["train", QUICK, "--resume"], "--resume; an interrupted run continues when its train"),
    (["report", "--serve", "--host", "::"], "--host; the page is for this machine alone; from"),
    (["train", QUICK, "--epochs", "3"], "--epochs; training is measured in steps: train.steps"),
    (["train", QUICK, "train.epochs=3"], "did you mean 'train.steps'?"),
    (["train", QUICK, "model.layers=5"], "did you mean 'model.depth'?"),
    (["compare", STUDY, "--best", "learning_rate"], "did you mean 'train.lr'?"),
    (["plot", "loss", STUDY], "did you mean final_loss_vs_depth, loss_vs_compute, loss_vs_lr"),
    (["plot", "loss_vs_step", STUDY, "--panels", "foo"], "panels: unknown key 'foo'; allowed"),
    (["export", STUDY, "--where", "depth=2", "--to", "x"], "--where: found without --logs"),
    (["signal", QUICK, "--seeds", "-1"], "--seeds: found '-1'; allowed seeds from 0 on, as in"),
    (["list", "shemes"], "unknown kind 'shemes'; did you mean 'schemes'? allowed: "),
    (["train", QUICK, "model.activation=swiglu"], "; swiglu is model.activation=silu with mod"),
    (["train", QUICK, "model.activation=GEGLU"], "GEGLU is model.activation=gelu with model."),
    (["ls", STUDY, "depth=6"], "extra argument(s) (depth=6); to select runs: --where depth=6"),
    (["note", RUN, "it", "is"], 'put the text in quotes: note RUN "TEXT"'),
    (["ls", STUDY, "b"], "allowed one folder, and the folder above several has the runs"),
    (["report", STUDY, "--out", "x"], "No such option: --out; did you mean --to?"),
    (["ls", "--tag", "good"], "No such option: --tag; did you mean --where tag=WORD?"),
    (["plot", "metric", STUDY, "--x", "dpth", "--y", "loss"], "did you mean 'model.depth'?"),
    (["fit", "--law", "dept"], "for '--law': 'dept' is not one of 'depth', 'width', 'compute'"),
    (["train", "model.depth=12"], "the configuration, as in: FILE.yaml model.depth=12"),
    (["train", QUICK, "task.path=/no/such/text"], "/no/such/text"),
    (["train", QUICK, "model.scheme_options.p=1"], "model.scheme_options.p"),
    (["train", QUICK, "--plugin", "nothing.py"], "--plugin nothing.py"),
    (["train", QUICK, "--depth", "3"], "did you mean model.depth=VALUE?"),
    (["check", QUICK, "--train.lr", "1"], "did you mean train.lr=VALUE?"),
    (["sweep", "--depths", "6,x"], "model.depth"),
    (["sweep", "--schemes", "post_ln,deepnrm"], "did you mean 'deepnorm'?"),
    (["sweep", QUICK, "--depth", "12"], "did you mean --depths?"),
    (["sweep", QUICK, "--seeds", "0-2"], "with commas between them (0,1,2)"),
    (["sweep", QUICK, "model.norm=rms,layer"], "allowed a key in it: kind, gain, bias"),
    (["train", QUICK, "train.steps=1e3"], "to 1000000000; did you mean 1000?"),
    (["train", QUICK, "model.depth='12'"], "did you mean 12?"),
    (["train", "quick.yaml"], "quick.yaml: no such file; did you mean 'quick'?"),
    (["train", RUN], f"list configs; did you mean '{RUN}/config.yaml'?"),
    (["rerun", STUDY], "is not a run: expected a folder with a config.yaml"),
    (["export", STUDY, "--to", "x"], "is not a run: expected a folder with a config.yaml"),
    (["init", "mine.yaml", "--from", "quik"], "did you mean 'quick'"),
    # After a suggestion no long list follows.
    (["train", QUICK, "model.scheme=deepnrm"], "'deepnrm'; did you mean 'deepnorm'?\n"),
    (["plot", "loss_vs_tsep", STUDY], "chart 'loss_vs_tsep'; did you mean 'loss_vs_step'?\n"),
    (["plot", "zzz", STUDY], "more (deepstack list charts); a chart of your own"),
    (["compare", STUDY, "--latex", "--markdown"], "--latex: found with --markdown"),
    (["list", "schemes", "--json", "--markdown"], "--markdown: found with --json; allowed one"),
    (["plot", STUDY, "--x", "depth"], "--x belongs to the charts metric, map and scatter"),
    (["plot", STUDY, "--diagnostic", "gradnorm"], "'gradnorm'; did you mean 'grad_norm'?"),
    (
        ["report", STUDY, "--diagnostic", "zzz"],
        "diagnostic of these runs 'zzz'; allowed: grad_norm",
    ),
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            words,
            message,
            marks=needs_command(words[:1])
            + ([needs("laws")] if "loss_vs_compute" in message else []),
        )
        for words, message in WRONG_WORDS
    ],
)
def test_a_wrong_word_names_the_right_one(words: list[str], message: str, here: Path) -> None:
    make_run(here / STUDY)
    before = sorted(here.rglob("*"))
    result = typed(*words)
    shown = " ".join(result.stderr.split()) + "\n"
    assert result.exit_code == 2 and message in shown and "Traceback" not in shown, shown
    assert sorted(here.rglob("*")) == before


def test_a_missing_folder_is_named_and_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for command in ("ls", "plot"):
        result = typed(command, tmp_path / "resutls")
        assert result.exit_code == 7 and f"did you mean '{tmp_path / 'results'}'?" in result.stderr
        result = typed(command, "no/such/folder")
        assert result.exit_code == 7 and "no/such/folder" in result.stderr


def test_a_sweep_that_the_disk_cannot_hold_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_command.conf, "disk_estimate", lambda config: (10**16, 0))
    result = typed("sweep", QUICK, *TINY, "--out", tmp_path / "new" / "out", "-q")
    assert result.exit_code == 5 and "are free; give another folder with --out" in result.stderr
    assert not any(tmp_path.iterdir())


@needs("export")
def test_an_export_prints_its_files_on_lines(trained: Path, tmp_path: Path) -> None:
    exported = typed("export", trained, "--to", tmp_path / "model")
    assert exported.exit_code == 0 and "[" not in exported.stdout
    names = {"weights.safetensors", "weights.yaml", "weights.json"}
    assert names <= {Path(line.rstrip()).name for line in exported.stdout.splitlines()}


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=needs_command([one])) for one in ("sweep", "signal", "calibrate")],
)
def test_a_number_alone_is_one_seed_in_every_command(command: str, tmp_path: Path) -> None:
    """Each ends at a depth that is not allowed."""
    done = typed(command, QUICK, "--seeds", "3", "--depths", "0,1", "--out", tmp_path)
    note = "--seeds 3 trains seed 3 only; for several seeds: --seeds 0,1,2"
    assert done.exit_code == 2 and note in done.stderr
    assert listed_seeds("3", quiet=True) == [3]
