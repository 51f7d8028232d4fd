"""Messages that name the text to type instead: of commands, options, settings and folders."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import QUICK, ROOT
from helpers.command_line import TINY, typed
from helpers.plot_runs import make_run

from deepstack.cli import sweep_command
from deepstack.records.trash import list_trash

STUDY = "results/study"
RUN = f"{STUDY}/deepnorm-d6-s0-0.001"


@pytest.mark.parametrize("words", ["ls", "plot", "compare", "report", "plot loss_vs_step results"])
@pytest.mark.parametrize("exists", [False, True])
def test_before_any_run_the_first_one_is_named(words: str, exists: bool, here: Path) -> None:
    if exists:
        (here / "results").mkdir()
    result = typed(*words.split())
    assert result.exit_code == 7
    assert result.stderr.endswith("to train a first run: deepstack train quick\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "quick"], "No such command 'run'; did you mean 'train' (one run), 'sweep'"),
        (["resume", "results"], "'resume'; an interrupted run continues when its train or sweep"),
        (["delete", "results"], "No such command 'delete'; did you mean 'rm'?"),
        (["trian", QUICK], "No such command 'trian'. Did you mean 'train'?"),
        (["train", QUICK, "--resume"], "--resume; an interrupted run continues when its train"),
        (["serve", "--host", "0.0.0.0"], "--host; the page is for this machine alone; from"),
        (["train", QUICK, "--epochs", "3"], "--epochs; training is measured in steps: train.steps"),
        (["list", "scheme"], "unknown kind 'scheme'; did you mean 'schemes'? allowed: "),
        (["train", QUICK, "model.activation=swiglu"], "; swiglu is model.activation=silu with mod"),
        (["train", QUICK, "model.activation=GEGLU"], "GEGLU is model.activation=gelu with model."),
        (["ls", STUDY, "depth=6"], "extra argument(s) (depth=6); to select runs: --where depth=6"),
        (["note", RUN, "it", "is"], 'put the text in quotes: note RUN "TEXT"'),
        (["watch", STUDY, "b"], "allowed one folder, and the folder above several has the runs"),
        (["report", STUDY, "--out", "x"], "No such option: --out; did you mean --to?"),
        (["ls", "--tag", "good"], "No such option: --tag; did you mean --where tag=WORD?"),
        (["plot", "metric", STUDY, "--x", "dpth", "--y", "loss"], "did you mean 'model.depth'?"),
        (["fit", "--law", "dept"], "for '--law': 'dept' is not one of 'depth', 'width', 'compute'"),
        (["train", "model.depth=12"], "the configuration, as in: FILE.yaml model.depth=12"),
        (["train", QUICK, "task.mask_rat=0.3"], "did you mean 'mask_rate'?"),
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
        (["train", RUN], f"allowed a YAML file; did you mean '{RUN}/config.yaml'?"),
        (["rerun", STUDY], "is no run: expected a folder with a config.yaml"),
        (["export", STUDY, "--to", "x"], "is no run: expected a folder with a config.yaml"),
        (["init", "mine.yaml", "--from", "quik"], "did you mean 'quick'"),
        # After a suggestion no long list follows.
        (["train", QUICK, "model.scheme=deepnrm"], "'deepnrm'; did you mean 'deepnorm'?\n"),
        (["plot", "loss_vs_tsep", STUDY], "chart 'loss_vs_tsep'; did you mean 'loss_vs_step'?\n"),
        (["plot", "zzz", STUDY], "unknown chart 'zzz'; allowed: attribution_vs_depth, "),
        (["plot", STUDY, "--x", "depth"], "--x belongs to the charts metric and map"),
        (["plot", STUDY, "--diagnostic", "gradnorm"], "'gradnorm'; did you mean 'grad_norm'?"),
        (
            ["report", STUDY, "--diagnostic", "zzz"],
            "diagnostic of these runs 'zzz'; allowed: grad_norm",
        ),
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


def test_the_trash_is_listed_before_it_is_emptied(here: Path) -> None:
    make_run(here / STUDY / "run")
    trashed = typed("rm", STUDY).stdout.strip()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "deepstack", "rm", "--empty"]
    for answer, left in ((b"\n", True), (b"y\n", False)):
        controller, terminal = pty.openpty()
        os.write(controller, answer)
        process = subprocess.run(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
        )
        os.close(terminal)
        shown = os.read(controller, 10_000).decode()
        os.close(controller)
        assert process.returncode == 0 and f"{trashed}/run" in shown
        assert "delete 1 run for good? [y/N]" in shown
        assert ("nothing was deleted" in shown) == left == bool(list_trash("results"))


def test_an_export_prints_its_files_on_lines(trained: Path, tmp_path: Path) -> None:
    exported = typed("export", trained, "--to", tmp_path / "model")
    assert exported.exit_code == 0 and "[" not in exported.stdout
    names = {"weights.safetensors", "weights.yaml", "weights.json"}
    assert names <= {Path(line.rstrip()).name for line in exported.stdout.splitlines()}
