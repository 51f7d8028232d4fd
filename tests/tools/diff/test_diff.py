"""`deepstack compare --diff`: the settings, results and rows in which two runs differ."""

import json
from pathlib import Path

from helpers.command_line import refusal, typed
from helpers.plot_runs import make_run

from deepstack.records import Run
from deepstack.tools.diff.diff import differences


def test_settings_results_and_the_first_other_row_are_named(tmp_path: Path) -> None:
    one = make_run(tmp_path, seed=0, losses=[3.0, 2.9, 2.8, 2.7, 2.6], masked=2.5)
    two = make_run(tmp_path, seed=1, losses=[3.0, 2.9, 2.85, 2.7, 2.6], masked=2.4, lr=0.002)
    shown = typed("compare", one, two, "--diff", "--json")
    rows = {
        (row["kind"], row["name"]): (row["first"], row["second"])
        for row in json.loads(shown.stdout)
    }
    assert rows["setting", "seed"] == (0, 1)
    assert rows["setting", "train.lr"] == (0.001, 0.002)
    assert ("setting", "model.depth") not in rows
    assert rows["result", "val_loss"] == (2.5, 2.4)
    (log,) = (row for row in rows if row[0] == "steps.csv")
    assert log[1].endswith(("at step 1", "at step 3"))
    text = " ".join(typed("compare", one, two, "--diff").stdout.split())
    assert "train.lr" in text and "model.depth" not in text


def test_equal_parts_are_named_with_their_rows(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a")
    two = make_run(tmp_path / "b")
    rows, equal = differences(Run(one), Run(two))
    assert [row for row in rows if row["kind"] != "environment"] == []
    assert "equal: settings" in equal and "equal: steps.csv, 5 rows" in equal
    assert not any("timing" in line for line in equal)


def test_a_shorter_log_differs_by_its_last_step(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", steps=5)
    two = make_run(tmp_path / "b", steps=5)
    lines = (two / "steps.csv").read_text().splitlines(keepends=True)
    (two / "steps.csv").write_text("".join(lines[:-2]))
    rows, _ = differences(Run(one), Run(two))
    (row,) = (row for row in rows if row["kind"] == "steps.csv")
    assert (row["name"], row["first"], row["second"]) == ("last step", 5, 3)


def test_an_empty_cell_equals_an_empty_cell(tmp_path: Path) -> None:
    for name, value in (("a", ""), ("b", ""), ("c", "1.5")):
        make_run(tmp_path / name)
        (run,) = (tmp_path / name).iterdir()
        (run / "evals.csv").write_text(f"step,loss,loss_masked\n0,{value},2.0\n")
    a, b, c = (Run(next((tmp_path / name).iterdir())) for name in "abc")
    assert "equal: evals.csv, 1 row" in differences(a, b)[1]
    (row,) = (row for row in differences(a, c)[0] if row["kind"] == "evals.csv")
    assert row["name"] == "loss at step 0" and row["second"] == 1.5


def test_other_versions_and_commits_are_named(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        run = Run(make_run(tmp_path / name))
        meta = {"environment": {"torch": "2.9", "host": name}, "git": {"commit": f"{name}1"}}
        run.folder.write_meta(run.folder.read_meta() | meta)
        runs.append(Run(run.path))
    rows = [row for row in differences(*runs)[0] if row["kind"] == "environment"]
    found = {row["name"]: (row["first"], row["second"]) for row in rows}
    assert found == {"host": ("a", "b"), "commit": ("a1", "b1")}


def test_other_folders_are_refused(tmp_path: Path) -> None:
    assert "is not a run" in refusal(2, "compare", tmp_path, tmp_path, "--diff")
    run = make_run(tmp_path)
    for words in ([run], [run, run, run], [run, run, "--last", 1], [run, run, "--where", "seed=0"]):
        assert "allowed two runs alone" in refusal(2, "compare", *words, "--diff")
