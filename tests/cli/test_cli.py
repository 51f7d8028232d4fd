"""The command line, as its user meets it: commands, help, lists and completion."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import QUICK, ROOT, extensions
from helpers.command_line import TINY, succeed, typed
from helpers.extensions import has, needs
from helpers.terminals import terminal
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from deepstack.cli import app
from deepstack.cli.commands import find_commands
from deepstack.cli.finding import next_command, run_finding, sweep_finding
from deepstack.cli.listing import definition_kinds, listings, names_of
from deepstack.cli.output import emit_json
from deepstack.cli.views import run_view
from deepstack.config import Config, json_schema, load_config, parse_config, with_overrides
from deepstack.config.load import example_paths, recipe_paths
from deepstack.plots import CHARTS
from deepstack.records import Run, RunFolder, find_runs
from deepstack.schemes import NORMS
from deepstack.training import PlainLines, Started


def test_init_writes_every_default_and_a_schema(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert typed("init", file).stdout.strip() == str(file)
    assert typed("init", file).exit_code == 2
    schema = json.loads((tmp_path / "deepstack.schema.json").read_text())
    names = {key: names_of(kind) for key, kind in definition_kinds().items()}
    assert json.loads(typed("init", "--schema").stdout) == schema == json_schema(names)
    proposed = schema["$defs"]["Train"]["properties"]["optimizer"]["examples"]
    assert proposed == ["adam", "adamw", "muon", "sgd"]
    # As it is and uncommented line by line, the file is the configuration of all defaults.
    lines = file.read_text().splitlines()[2:]
    text = "\n".join(line.replace("# ", "", 1) if "# " in line[:10] else line for line in lines)
    assert load_config(file) == parse_config(text) == with_overrides(Config(), {"model.depth": 48})


def test_json_has_null_for_nan_and_text_for_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"rows": [{"a": math.nan, "b": [np.float32(2), -math.inf]}]})
    assert json.loads(capsys.readouterr().out) == {"rows": [{"a": None, "b": [2.0, "-inf"]}]}


def test_settings_are_listed_with_what_each_may_be() -> None:
    rows = json.loads(typed("list", "settings", "--json").stdout)
    assert all(row["description"] for row in rows)
    found = {row["name"]: row for row in rows}
    assert found["model.norm.kind"]["allowed"] == ", ".join(NORMS)
    assert found["train.optimizer"]["allowed"] == "adam, adamw, muon, sgd"
    assert found["train.lr"]["default"] == Config().train.lr
    assert "allowed: configs, settings, " in typed("list", "flavours").stderr


def test_coefficients_are_listed_at_a_depth_and_gains_of_the_first_and_last_layer() -> None:
    rows = json.loads(typed("list", "schemes", "--depth", "1000", "--json").stdout)
    listed = {row["name"]: row for row in rows}
    deepnorm = listed["deepnorm"]
    assert deepnorm["alpha"] == pytest.approx(6.6874, rel=1e-4)
    assert deepnorm["gains"]["v"] == pytest.approx(0.10574, rel=1e-4)
    assert deepnorm["gains"]["q"] == 1.0 and deepnorm["gains"] == deepnorm["gains_last"]
    for name, first, last in (("post_ln_init", 1e-3, 1.0), ("ds_init", 1.0, 1000**-0.5)):
        for row in (listed[name], listed[name]["coefficients"]["encoder_decoder"]["decoder"]):
            assert row["gains"]["w1"] == pytest.approx(first)
            assert row["gains_last"]["w1"] == pytest.approx(last)


@pytest.mark.usefixtures("warm_server")
def test_sweep_runs_skips_and_ends_with_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times() -> list[int]:
        return [(run.path / "steps.csv").stat().st_mtime_ns for run in find_runs(tmp_path)]

    words = ["sweep", QUICK, *TINY, "--depths", "1,2", "--schemes", "post_ln,deepnorm"]
    words += ["--out", str(tmp_path), "--workers", "2"]
    plan = json.loads(typed(*words, "--dry-run", "--json").stdout)
    assert [row["state"] for row in plan] == ["new"] * 4
    assert not list(tmp_path.iterdir())
    table = succeed(*words)
    assert "Post-LN" in table and "DeepNorm" in table and "N = 2" in table
    runs = find_runs(tmp_path)
    assert [run.state for run in runs] == ["done"] * 4
    before = times()
    runs[0].folder.write_status("failed", 1)
    monkeypatch.setattr("deepstack.config.cores", lambda: 1)
    again = typed(*words, "--json")
    assert again.exit_code == 3 and len(json.loads(again.stdout)) == 4
    assert "2 workers have more threads than the cores; use --workers 1" in again.stderr
    assert f"(reasons: deepstack ls {tmp_path / 'quick'})" in again.stderr
    assert again.stderr.rstrip().endswith("to run them again: --retry failed")
    assert times() == before


@pytest.mark.slow(turn=0)
def test_the_live_display_on_a_terminal(tmp_path: Path) -> None:
    at_once = (
        "import deepstack.cli.output as p; p.DELAY_SECONDS = 0.0; from deepstack.cli import main"
    )
    command = [sys.executable, "-c", f"{at_once}; main()", "train", QUICK, *TINY, "train.steps=60"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    options: Any = {"cwd": tmp_path, "env": environment, "text": True}
    with (
        terminal() as (stderr, read),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, **options) as process,
    ):
        shown = ""
        while process.poll() is None:
            shown += read()
        shown += "".join(iter(read, ""))
        assert process.stdout is not None
        folder = tmp_path / process.stdout.read().strip()
    for part in ("loading PyTorch", "DeepNorm", "‖ΔF‖", "(unigram ", "60/60", "done", "━"):
        assert part in shown, part
    assert Run(folder).state == "done"
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is there again


@pytest.mark.parametrize("width", [20, 80, 300])
def test_the_display_can_be_drawn_at_every_moment(width: int) -> None:
    console = Console(force_terminal=True, width=width, record=True, file=StringIO())
    view = run_view(console)
    display = PlainLines(0.0, view)
    with view.live:
        folder = RunFolder("results/x/y")
        display.started(Started(folder, "DeepNorm", [3], 30, 4, 90_000, "cpu", {}))
        for step in range(4, 90):
            update = 1.2345 if step > 4 else None
            row = {"loss": 3.1, "model_update": update, "grad_norm": 1.2, "step_ms": 234.5}
            display.stepped(step, row)
            view.live.refresh()
            assert width < 80 or f"{step}/90000 " in console.export_text()
        display.evaluated(4, {"loss": float("nan"), "unigram_loss": 3.2})
        display.finished("done", 90)
    assert "validation loss nan" in " ".join(console.export_text().split())


def test_a_missing_reader_of_stdout_is_not_an_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "deepstack", "list", "schemes"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 0


NEEDING_MORE = {
    "frontier", "loss_vs_lr", "best_lr_vs_depth", "solved_vs_depth", "iso_flop", "lens_by_layer",
    "effects", "layer_similarity", "effective_depth_vs_depth", "effective_depth_vs_step", "law_fit",
}  # fmt: skip


@pytest.mark.slow
def test_plot_draws_each_study_of_a_results_folder_by_itself(tmp_path: Path) -> None:
    everything = ["log.attribution_every=1", "log.sharpness_every=1"]
    for study, words in (("one", everything), ("two", ["log.layers_every=0"])):
        for depth in (1, 2):
            given = [*TINY, f"model.depth={depth}", *words]
            succeed("train", QUICK, *given, "--study", study, "--out", tmp_path, "-q")
    result = typed("plot", tmp_path, "--all")
    assert result.exit_code == 0, result.stderr
    written = [Path(line) for line in result.stdout.splitlines()]
    assert {path.suffix for path in written} == {".pdf", ".png", ".svg", ".csv", ".txt"}
    assert {path.parent for path in written} == {tmp_path / s / "figures" for s in ("one", "two")}
    for path in written:
        if path.suffix == ".csv":
            assert len(path.read_text().splitlines()) > 1, path
        elif path.suffix != ".txt":
            assert path.stat().st_size > 5000, path
    drawn = {path.stem for path in written if path.parts[-3] == "one"}
    assert drawn == {*CHARTS} - NEEDING_MORE
    (line,) = (one for one in result.stderr.splitlines() if "these runs do not allow" in one)
    assert "one: frontier, " in line and "--why has the reasons" in line
    alone = typed("plot", "frontier", tmp_path / "one")
    assert "frontier is not drawn: needs finished runs of two learning rates" in alone.stderr
    chosen = typed("plot", "update_vs_depth", tmp_path / "one", "--to", tmp_path / "x")
    assert len(chosen.stdout.splitlines()) == 5


# --- train and sweep end with a finding in words and the next command -----------------------------


PUBLISHED = ROOT / "results/published/schemes_and_depth"


def test_a_run_is_described_and_a_sweep_by_depth() -> None:
    for name, sentence in (
        ("deepnorm", "DeepNorm with 48 layers has learned from context: 0.14 ± 0.03 nats below"),
        ("post_ln", "Post-LN with 48 layers has learned nothing from context: it ends"),
    ):
        (path,) = PUBLISHED.glob(f"{name}-d48-s0-*")
        text = run_finding(Run(path)) or ""
        assert text.startswith(sentence) and "the unigram" in text
    assert sweep_finding(find_runs(PUBLISHED))[1:] == [
        "6 layers: Pre-LN 3 of 3 (0.19), DeepNorm 3 of 3 (0.16), Post-LN 3 of 3 (0.14)",
        "48 layers: Pre-LN 3 of 3 (0.16), DeepNorm 3 of 3 (0.14), Post-LN 0 of 3",
        "200 layers: Pre-LN 3 of 3 (0.14), DeepNorm 3 of 3 (0.11), Post-LN 0 of 3",
        "1000 layers: Pre-LN 3 of 3 (0.11), DeepNorm 3 of 3 (0.09), Post-LN 0 of 3",
        "At N = 1000 it is undecided which of Pre-LN and DeepNorm is better: Pre-LN ends 0.024 "
        "nats lower (95 % interval −0.025 to 0.074, 3 pairs of seeds).",
    ]


def test_train_names_another_scheme_and_then_the_charts(run: Path, tmp_path: Path) -> None:
    words, one = ["train", "quick", "model.scheme=deepnorm"], Run(run)
    assert next_command(one, words) == "deepstack train quick model.scheme=post_ln"
    extended = ["train", str(run), "--extend", "20"]  # no other setting may change
    assert next_command(one, extended) == f"deepstack plot {run.parent}"
    other = ["train", QUICK, *TINY, "model.scheme=post_ln", "--out", tmp_path]
    shown = typed(*other)
    assert "validation loss" in shown.stderr and "unigram" in shown.stderr
    assert f"next: deepstack plot {tmp_path / 'quick'}" in shown.stderr
    assert typed(*other, "-q").stderr == ""
    assert next_command(one, words) == f"deepstack plot {tmp_path / 'quick'}"


def test_diverged_and_damaged_runs_do_not_stop_a_command(tmp_path: Path) -> None:
    words = ["train", QUICK, *TINY, "train.max_loss=0.1", "--out", tmp_path]
    shown = typed(*words)
    assert shown.exit_code == 0 and "DeepNorm with 2 layers diverged at step 1." in shown.stderr
    assert typed(*words, "--fail-on-divergence").exit_code == 4
    (run,) = find_runs(tmp_path)
    (run.path / "evals.csv").write_text("step\n")
    assert sweep_finding(find_runs(tmp_path)) == []


# --- help texts are whole and show an example; the shell completes words --------------------------


@pytest.mark.parametrize("command", find_commands())
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
        pytest.param(
            "sweep",
            ["Grid", "Resources", "Clusters", "Best value of a setting", "Study that grows"],
            marks=needs("ray", "slurm", "refine", "answer"),
        ),
        (
            "plot",
            ["Selection of runs", "Files", "The charts metric, map and scatter", "Appearance"],
        ),
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
        ("deepstack ", set(find_commands())),
        ("deepstack train --fail", {"--fail-on-divergence"}),
        ("deepstack train qu", {"quick"}),
        ("deepstack train quick model.d", {"model.depth=", "model.d_model="}),
        ("deepstack train quick model.scheme=pre", {"pre_ln", "pre_ln_scaled"}),
        ("deepstack train quick train.optimizer=", {"adamw", "sgd"}),
        ("deepstack sweep quick runtime.fused=true,f", {"true,false"}),
        ("deepstack plot loss_vs_", {"loss_vs_step", "loss_vs_lr"}),
        ("deepstack list sch", {"schemes"}),
        ("deepstack run ", set(find_commands())),
        ("deepstack ls --where dept", {"depth="}),
        ("deepstack plot --where outcome=", {"trained", "learnt", "damaged"}),
        pytest.param(
            "deepstack report --where scheme=deepnorm,post_l",
            {"deepnorm,post_ln"},
            marks=needs("report"),
        ),
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
    assert all((name in listed) == (name not in recipe_paths()) for name in example_paths())
    assert succeed("train", "quick", *TINY, "-q").startswith("results/quick/deepnorm-")
    assert "deepnorm" in typed("check", "quick").stdout
    assert typed("sweep", "quick", *TINY, "seed=0,1", "--dry-run").exit_code == 0
    # A config starts from an example.
    assert typed("init", "--from", "quick").stdout.strip() == "quick.yaml"
    assert (here / "quick.yaml").read_text().endswith(example_paths()["quick"].read_text())


# --- `deepstack list` reads the index -------------------------------------------------------------


PROGRAM = """
import sys
from deepstack.cli import app

def run(words, heavy):
    try:
        app(words)
    except SystemExit:
        pass
    assert not set(heavy.split()) & set(sys.modules), words

run(["--help"], "pydantic yaml rich deepstack.config deepstack.records")
assert not [name for name in sys.modules if name.endswith("_command")]
for words in (["--help"], ["train", "--help"], ["check", "nothing.yaml"]):
    run(words, "torch pandas matplotlib numpy scipy")
for kind in sys.argv[1:]:
    run(["list", kind], "torch matplotlib")
"""


def test_help_errors_and_lists_import_no_torch() -> None:
    command = [sys.executable, "-c", PROGRAM, *listings()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "nothing.yaml: no such file" in result.stderr
    words = "deepnorm", "grad_norm", "loss_vs_step", *(["C36"] if has("ledger") else [])
    assert all(word in result.stdout for word in words)


def test_the_tests_know_the_addition_of_each_command() -> None:
    homes = {name: one.module.split(".")[-2] for name, one in find_commands().items()}
    assert {name: home for name, home in homes.items() if home != "cli"} == {
        name: home for name, home in extensions.COMMANDS.items() if has(home)
    }


@pytest.mark.parametrize(
    "kind",
    [
        *("schemes", "diagnostics", "charts"),
        pytest.param("analyses", marks=needs("depth_use")),
        pytest.param("claims", marks=needs("ledger")),
    ],
)
def test_the_short_tables_have_the_values_of_the_full_ones(kind: str) -> None:
    short, rows = listings()[kind].table(), listings()[kind].table(100)
    assert len(short) > 5 and len(short) == len(rows)
    full = {row["name"]: row for row in rows}
    for row in short:
        assert row == {key: full[row["name"]][key] for key in row}
        assert row.get("description") or row.get("equation") or row.get("source"), row
