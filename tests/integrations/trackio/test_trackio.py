"""trackio stores the values of a run (slow)."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.extensions import needs
from helpers.live_runs import STEPS, Steps, assert_every_row, killed_and_resumed
from helpers.tracked_runs import assert_logged, pictured

from deepstack.records import Run


@needs("export")
@pytest.mark.slow
def test_trackio_reads_the_export(runs: dict[str, Run], tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    # trackio keeps the folder of its first import: use another process
    words = ["export", runs["done"].path.parent, "--logs", "trackio", "--to", tmp_path / "t"]
    command = [sys.executable, "-m", "deepstack", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["runs"] == 2  # and nothing else on stdout
    with sqlite3.connect(tmp_path / "t" / "study.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    for run in runs.values():
        read: dict[int, dict[str, Any]] = {}
        for name, step, metrics in rows:
            if name == run.name:
                read.setdefault(step, {}).update(json.loads(metrics))
        assert_logged(read, run)
        pictures = {key for key, value in read[max(read)].items() if isinstance(value, dict)}
        assert pictures == pictured(run)


@pytest.mark.slow
def test_trackio_follows_a_run_through_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("trackio")

    def read(path: Path) -> Steps:
        if not (file := path / "trackio" / "s.db").exists():
            return {}
        with sqlite3.connect(file) as database:
            rows = database.execute("select run_id, step, metrics from metrics").fetchall()
        assert len({number for number, _, _ in rows}) <= 1  # one run, also after the kill
        steps: Steps = {}
        for _, step, metrics in rows:
            for key in json.loads(metrics):
                steps.setdefault(key, []).append(step)
        return {key: sorted(found) for key, found in steps.items()}

    run, before, shown = killed_and_resumed("trackio", tmp_path, read)
    assert 0 < len(before["steps/loss"]) < STEPS
    assert_every_row(shown, is_once=False)
    assert pictured(run) <= set(shown)
