"""Help texts are whole and show an example; the shell completes what can be typed."""

import re
import shlex
from pathlib import Path

import pytest
from helpers.command_line import TINY, succeed, typed
from typer.main import get_command
from typer.testing import CliRunner

from deepstack.cli import app
from deepstack.cli.app import COMMANDS
from deepstack.config.load import example_paths


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_is_whole_and_shows_an_example(command: str) -> None:
    summaries = typed("--help").stdout
    assert command in summaries and "..." not in summaries.replace("[ARGS]...", "")
    text = typed(command, "--help").stdout
    words = shlex.split(" ".join(text.partition("Example: ")[2].split()))
    assert words[:2] == ["deepstack", command]
    assert all(word in text.partition("Example: ")[0] for word in words if word[:2] == "--")


@pytest.mark.parametrize(
    ("command", "headings"),
    [
        ("sweep", ["Grid", "Resources", "Clusters", "Best value of a setting"]),
        ("plot", ["Selection of runs", "Files", "The charts metric and map", "Appearance"]),
        ("ls", ["Selection of runs"]),
        ("train", []),
    ],
)
def test_options_stand_below_the_heading_of_their_group(command: str, headings: list[str]) -> None:
    text = typed(command, "--help").stdout
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == ["Arguments", *headings, "Options"]
    options = get_command(app).commands[command].params  # type: ignore[attr-defined]
    names = [one.opts[0] for one in options if one.param_type_name == "option"]
    listed = re.findall(r"^  (?:-q, )?(--[\w-]+)", text, re.MULTILINE)
    assert sorted(listed) == sorted([*names, "--help"])


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("deepstack ", set(COMMANDS)),
        ("deepstack train --fail", {"--fail-on-divergence"}),
        ("deepstack train qu", {"quick"}),
        ("deepstack train quick model.d", {"model.depth=", "model.d_model="}),
        ("deepstack train quick model.scheme=pre", {"pre_ln", "pre_ln_scaled"}),
        ("deepstack train quick train.optimizer=", {"adamw", "sgd"}),
        ("deepstack sweep quick runtime.fused=true,f", {"true,false"}),
        ("deepstack plot loss_vs_", {"loss_vs_step", "loss_vs_lr"}),
        ("deepstack list sch", {"schemes"}),
        ("deepstack run ", set(COMMANDS)),
        ("deepstack ls --where dept", {"depth="}),
        ("deepstack plot --where outcome=", {"trained", "learnt", "damaged"}),
        ("deepstack report --where scheme=deepnorm,post_l", {"deepnorm,post_ln"}),
        ("deepstack ls --where tags=", set()),
        ("deepstack plot results --schemes=", {"pre_ln", "deepnorm"}),
        ("deepstack plot results --schemes=post_ln,pre", {"post_ln,pre_ln"}),
        ("deepstack ls --where=scheme=pre", {"pre_ln"}),
        ("deepstack ls --sort=lr --where=dept", {"depth="}),
        ("deepstack ls --sort model.dep", {"model.depth"}),
    ],
)
def test_completion(line: str, some: set[str], here: Path) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "quick.yaml").touch()
    words = line.replace("=", " = ")  # as bash splits it
    last = len(words.split()) - (not line.endswith(" "))
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(last)}
    environment["_DEEPSTACK_COMPLETE"] = "complete_bash"
    shown = CliRunner().invoke(app, [], prog_name="deepstack", env=environment).stdout
    offered = set(shown.split())
    assert some <= offered and bool(some) == bool(offered)
    start = line.split(" ")[-1].rpartition("=")[2]
    assert all(word.startswith(start) for word in offered)


def test_examples_are_used_by_name(here: Path) -> None:
    listed = typed("list", "configs").stdout
    assert all(name in listed for name in example_paths())
    assert succeed("train", "quick", *TINY, "-q").startswith("results/quick/deepnorm-")
    assert "deepnorm" in typed("check", "quick").stdout
    assert typed("sweep", "quick", *TINY, "seed=0,1", "--dry-run").exit_code == 0
    # A config starts from an example.
    assert typed("init", "--from", "quick").stdout.strip() == "quick.yaml"
    assert (here / "quick.yaml").read_text().endswith(example_paths()["quick"].read_text())
