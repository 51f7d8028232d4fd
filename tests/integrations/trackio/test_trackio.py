"""trackio stores the values of a run (slow)."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tracked_runs import assert_logged, pictured

from deepstack.records import Run


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
