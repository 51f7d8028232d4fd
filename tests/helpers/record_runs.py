"""Runs and processes that write them: for the tests of records."""

import os
import subprocess
import sys
from pathlib import Path

from deepstack.records import STEPS_COLUMNS, RunFolder, write_end
from helpers import ROOT

# A process that locks a folder; with the word "fork" it leaves a child behind.
HOLDER = """
import os, sys, time
from deepstack.records import RunFolder
with RunFolder(sys.argv[1]).lock():
    child = os.fork() if sys.argv[2:] == ["fork"] else None
    if child == 0:
        print(os.getpid(), flush=True)
    elif child is None:
        print("locked", flush=True)
    time.sleep(60)
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def make_run(
    path: Path, config: str = "model: {depth: 6}\n", state: str = "done", rows: int = 3
) -> RunFolder:
    folder = RunFolder(path)
    folder.write_config(config)
    with folder.log("steps", STEPS_COLUMNS) as log:
        for step in range(1, rows + 1):
            log.write({"step": step, "loss": 4.0 - step, "model_update": 0.1 * step})
    folder.write_status(state, rows)
    return folder


def contents(folder: Path, without: str = "") -> dict[str, bytes]:
    """Return the bytes of every file below a folder, except those named `without`."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != without)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def end(folder: RunFolder, step: int = 3) -> RunFolder:
    """Write the end of a run that is done."""
    write_end(folder, "done", step)
    return folder
