"""The command line, as its user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.command_line import TINY
from helpers.command_line import typed as deepstack
from helpers.terminals import run_on_terminal

from deepstack.config import Config
from deepstack.config.model_schema import NORM_KINDS
from deepstack.records import Run, find_runs


def test_train_prints_the_folder_and_a_second_time_the_same(tmp_path: Path) -> None:
    first = deepstack("train", QUICK, *TINY, "--out", tmp_path)
    assert first.exit_code == 0
    folder = Path(first.stdout.strip())
    assert Run(folder).state == "done" and folder.parent.name == "quick"
    assert "validation loss" in first.stderr and "unigram" in first.stderr
    again = deepstack("train", folder / "config.yaml", "--out", tmp_path, "--study", "quick")
    assert again.exit_code == 0 and again.stdout == first.stdout
    assert deepstack("train", QUICK, *TINY, "seed=1", "--out", tmp_path, "-q").stderr == ""


def test_check_counts_parameters_and_flops_exactly(trained: Path) -> None:
    described = json.loads(deepstack("check", QUICK, *TINY, "--json").stdout)[0]
    meta = Run(trained).meta
    assert described["run"] == trained.name
    assert described["parameters"] == meta["parameters"]["total"]
    assert described["FLOPs a step"] == meta["flops"]["step"]
    plan = json.loads(deepstack("sweep", QUICK, *TINY, "--dry-run", "--json").stdout)
    assert plan[0]["flops"] == pytest.approx(described["FLOPs of the training"], rel=1e-3)


def test_init_writes_a_config_that_trains(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert deepstack("init", file).stdout.strip() == str(file)
    assert deepstack("init", file).exit_code == 2
    assert deepstack("check", file).exit_code == 0
    schema = json.loads((tmp_path / "deepstack.schema.json").read_text())
    assert "depth" in json.dumps(schema)
    assert json.loads(deepstack("init", "--schema").stdout) == schema
    assert deepstack("train", file, *TINY, "--out", tmp_path).exit_code == 0


def test_every_commented_default_of_init_is_the_default(tmp_path: Path) -> None:
    """Uncommented line by line, the file is the configuration of all defaults."""
    from deepstack.config import Config, annotated_defaults, parse_config, with_overrides

    lines = annotated_defaults("x.json").splitlines()[2:]
    text = "\n".join(line.replace("# ", "", 1) if "# " in line[:10] else line for line in lines)
    wanted = with_overrides(Config(), {"model.depth": 48})
    assert parse_config(text).model_dump() == wanted.model_dump()


@pytest.mark.parametrize("kind", ["settings", "schemes", "tasks", "diagnostics", "charts"])
def test_list(kind: str) -> None:
    rows = json.loads(deepstack("list", kind, "--json").stdout)
    assert rows and all(row["name"] for row in rows)
    for row in rows:
        text = row.get("description") or row.get("equation")
        assert text and text[0].isprintable(), row


def test_settings_are_listed_with_what_each_may_be() -> None:
    rows = json.loads(deepstack("list", "settings", "--json").stdout)
    found = {row["name"]: row for row in rows}
    assert found["model.norm.kind"]["allowed"] == ", ".join(NORM_KINDS)
    assert {"gelu", "relu"} <= set(found["model.activation"]["allowed"].split(", "))
    assert {"adam", "sgd"} <= set(found["train.optimizer"]["allowed"].split(", "))
    assert found["train.lr"]["default"] == Config().train.lr
    assert "allowed: configs, settings, " in deepstack("list", "norms").stderr


def test_coefficients_are_listed_at_a_depth_and_gains_of_the_first_and_last_layer() -> None:
    rows = json.loads(deepstack("list", "schemes", "--depth", "1000", "--json").stdout)
    listed = {row["name"]: row for row in rows}
    deepnorm = listed["deepnorm"]
    assert deepnorm["alpha"] == pytest.approx(6.6874, rel=1e-4)
    assert deepnorm["gains"]["v"] == pytest.approx(0.10574, rel=1e-4)
    assert deepnorm["gains"]["q"] == 1.0 and deepnorm["gains"] == deepnorm["gains_last"]
    for name, first, last in (("post_ln_init", 1e-3, 1.0), ("ds_init", 1.0, 1000**-0.5)):
        for row in (listed[name], listed[name]["coefficients"]["encoder_decoder"]["decoder"]):
            assert row["gains"]["w1"] == pytest.approx(first)
            assert row["gains_last"]["w1"] == pytest.approx(last)


def test_sweep_runs_skips_and_ends_with_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sweep", QUICK, *TINY, "--depths", "1,2", "--schemes", "post_ln,deepnorm"]
    words += ["--out", str(tmp_path), "--workers", "2"]
    plan = deepstack(*words, "--dry-run", "--json")
    rows = json.loads(plan.stdout)
    assert len(rows) == 4 and {row["state"] for row in rows} == {"new"}
    assert not list(tmp_path.iterdir())
    result = deepstack(*words)
    assert result.exit_code == 0, result.stderr
    assert "post_ln" in result.stdout and "deepnorm" in result.stdout
    runs = find_runs(tmp_path)
    assert len(runs) == 4 and {run.state for run in runs} == {"done"}
    times = {run.name: (run.path / "steps.csv").stat().st_mtime_ns for run in runs}
    runs[0].folder.write_status("failed", 1)
    monkeypatch.setattr(sys.modules["deepstack.sweeps.local"], "cores", lambda: 1)
    again = deepstack(*words, "--json")
    assert again.exit_code == 3 and len(json.loads(again.stdout)) == 4
    assert "2 workers have more threads than the cores; use --workers 1" in again.stderr
    assert f"(reasons: deepstack ls {tmp_path / 'quick'})" in again.stderr
    assert again.stderr.rstrip().endswith("to run them again: --retry failed")
    assert times == {r.name: (r.path / "steps.csv").stat().st_mtime_ns for r in find_runs(tmp_path)}


def test_the_live_display_on_a_terminal(tmp_path: Path) -> None:
    words = ["train", QUICK, *TINY, "train.steps=60", "--out", str(tmp_path)]
    printed, shown = run_on_terminal(*words)
    for part in ("loading PyTorch", "DeepNorm", "‖ΔF‖", "unigram_loss", "60/60", "done", "━"):
        assert part in shown, part
    assert Run(Path(printed.strip())).state == "done"
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is there again


@pytest.mark.parametrize("width", [20, 80, 300])
def test_the_display_can_be_drawn_at_every_moment(width: int) -> None:
    from rich.console import Console

    from deepstack.cli.display import Display
    from deepstack.records import RunFolder
    from deepstack.training import Started

    console = Console(force_terminal=True, width=width, record=True, file=open(os.devnull, "w"))
    display = Display(console)
    with display.progress:
        folder = RunFolder("results/x/y")
        display.started(Started(folder, "DeepNorm", [3], 30, 4, 90_000, "cpu", {}))
        for step in range(4, 90):
            row = {"loss": 3.1234, "model_update": None, "grad_norm": 1.2345, "step_ms": 234.5}
            row["model_update"] = 1.2345 if step > 4 else None
            display.stepped(step, row)
            display.progress.refresh()
            assert width < 80 or f"{step}/90000 " in console.export_text()
        display.evaluated(4, {"loss": float("nan"), "loss_masked": 3.1, "unigram_loss": 3.2})
        display.finished("done", 90)
    console.file.close()
    assert "validation loss nan" in console.export_text()


def test_a_missing_reader_of_stdout_is_no_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "deepstack", "list", "schemes"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait() == 0
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


NEEDING_MORE = {
    "frontier", "loss_vs_lr", "best_lr_vs_depth", "solved_vs_depth", "iso_flop", "lens_by_layer",
    "effects", "layer_similarity", "effective_depth_vs_depth", "law_fit",
}  # fmt: skip


@pytest.mark.slow
def test_plot_draws_each_study_of_a_results_folder_by_itself(tmp_path: Path) -> None:
    for study in ("one", "two"):
        for depth in (1, 2):
            words = ["train", QUICK, *TINY, f"model.depth={depth}", "--study", study]
            words += ["log.attribution_every=1", "log.sharpness_every=1"]
            assert deepstack(*words, "--out", tmp_path, "-q").exit_code == 0
    result = deepstack("plot", tmp_path)
    assert result.exit_code == 0, result.stderr
    written = [Path(line) for line in result.stdout.splitlines()]
    assert {path.suffix for path in written} == {".pdf", ".png", ".svg", ".csv"}
    assert {path.parent for path in written} == {tmp_path / s / "figures" for s in ("one", "two")}
    tables = [path.read_text().splitlines() for path in written if path.suffix == ".csv"]
    assert all(len(lines) > 1 for lines in tables)
    assert all(path.stat().st_size > 5000 for path in written if path.suffix != ".csv")
    names = {path.stem for path in written}
    charts = {row["name"] for row in json.loads(deepstack("list", "charts", "--json").stdout)}
    assert names == charts - NEEDING_MORE
    assert "frontier is not drawn: needs finished runs of two learning rates" in result.stderr
    chosen = deepstack("plot", "update_vs_depth", tmp_path / "one", "--to", tmp_path / "x")
    assert len(chosen.stdout.splitlines()) == 4
    assert deepstack("plot", "update_vs_dept", tmp_path).exit_code == 2
