"""`ls` reads the ends of the logs."""

import json
import statistics
from pathlib import Path

import pytest
from helpers.command_line import typed
from helpers.record_runs import make_run, python

from deepstack.records import TIMING_COLUMNS, Run, RunFolder, find_runs, run_rows

ROW = "{},1.5,1e-04,5.3733234,0.0056823366,0.0056823366,0.01620405,0.0020255118\n"


def long_run(path: Path, steps: int) -> RunFolder:
    folder = make_run(path, f"seed: {steps}\nmodel: {{depth: 6}}\n", rows=0)
    with open(folder.steps_path, "a") as file:
        file.writelines(map(ROW.format, range(1, steps + 1)))
    folder.write_status("done", steps)
    return folder


def bytes_read() -> int:
    """Bytes that this process has read so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def test_fifty_megabytes_of_steps_are_not_read(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "s" / "long", 700_000)
    assert folder.steps_path.stat().st_size > 50_000_000
    typed("ls", tmp_path, "--json")  # the imports
    before = bytes_read()
    found = typed("ls", tmp_path, "--json")
    assert bytes_read() - before < 200_000
    (row,) = json.loads(found.stdout)
    assert (row["step"], row["loss"], row["state"]) == (700_000, 1.5, "done")


def test_ls_needs_neither_pandas_nor_numpy(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / "run")
    code = """
import sys; from deepstack.cli import app
try: app(['ls', sys.argv[1]])
except SystemExit: print({'pandas', 'numpy', 'torch'} & set(sys.modules))
"""
    process = python(code, tmp_path)
    assert process.communicate(timeout=60)[0].splitlines()[-1] == "set()"


def test_the_time_of_a_step_is_the_median_of_the_latest(tmp_path: Path) -> None:
    """A resumed run times steps again."""
    steps = 500
    folder = long_run(tmp_path / "s" / "run", steps)
    rows = [(step, 10.0 + step % 7) for step in range(1, steps + 1)]
    again = [(step, 90.0) for step in range(steps // 2, steps + 1)]
    text = "".join(f"{step},{ms},100.0\n" for step, ms in rows + again)
    folder.timing_path.write_text(",".join(TIMING_COLUMNS) + "\n" + text + "7,1")
    (row,) = run_rows(find_runs(tmp_path))
    assert row["step_ms"] == statistics.median(dict(rows + again).values())
    assert row["step_ms"] == Run(folder.path).timing["step_ms"].median()


@pytest.mark.parametrize(
    "end", ["4,x,1,1,1,1,1,1\n", "4,1,1\n", "four,1,1,1,1,1,1,1\n", "4" + ",1" * 2_000 + "\n"]
)
def test_a_bad_last_row_is_damage(end: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "s" / "run", state="interrupted")
    folder.steps_path.write_text(folder.steps_path.read_text() + end)
    (row,) = run_rows([Run(folder.path)])
    assert row["state"] == "damaged" and row["loss"] is None
    assert "is no table of numbers" in typed("ls", tmp_path).stderr


def test_the_last_values_are_those_of_the_whole_logs(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "s" / "run", 400)
    with open(folder.steps_path, "a") as file:
        file.write("401,2.5,,,inf,nan,1,1\n402,9.")  # an empty cell; a torn row
    folder.write_status("interrupted", 401)
    (row,) = run_rows([Run(folder.path)])
    last = Run(folder.path).steps.iloc[-1]
    assert (row["step"], row["loss"]) == (401, 2.5) == (last["step"], last["loss"])
    assert row["grad_norm"] != row["grad_norm"] and row["model_update"] == float("inf")
