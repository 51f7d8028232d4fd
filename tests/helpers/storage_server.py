"""Imports torch and deepstack once, then forks a watched process for every job it is given.

A line of JSON on stdin is a list of jobs that run at once; the answer is a list of [exit code,
seconds].  A job:

    trainer, arguments      a function of storage_trainers and what it gets behind the folder
    planted                 names of storage_faults, applied first
    out, errors, report     folder; stderr goes to one file, what the trainer tells to the other
    mode, number, error, trace      as of storage_calls.watch; with None as mode nobody watches
    signals                 [[seconds, number], ...]
    hold                    SIGTERM when no other job is left
    environment             variables
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from helpers import storage_calls


def main(library: str, config: str) -> None:
    """Warm up, then serve until stdin ends."""
    import torch

    torch.set_num_threads(1)
    from helpers import (
        storage_faults,  # noqa: F401, imported once for all children
        storage_trainers,
    )

    storage_calls.load(Path(library))
    os.environ["STORAGE_CONFIG"] = config
    storage_trainers.write_config(Path(config))
    storage_trainers.prepare_training()
    stdout = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with tempfile.TemporaryDirectory() as folder:  # what only a first run imports
        assert storage_trainers.command(Path(folder)) == 0
        assert storage_trainers.dummy(Path(folder)) == 0
    gc.collect()
    gc.freeze()
    os.write(stdout, b"ready\n")
    with contextlib.suppress(BrokenPipeError):  # whoever asked has gone
        for line in sys.stdin:
            os.write(stdout, json.dumps(run_at_once(json.loads(line))).encode() + b"\n")


def run_at_once(jobs: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Run jobs beside each other; the exit code of each, negative for a signal, and its seconds."""
    began = time.monotonic()
    running = {fork(job): number for number, job in enumerate(jobs)}
    ended: dict[int, tuple[int, float]] = {}
    due = [
        (began + seconds, pid, what)
        for pid, number in running.items()
        for seconds, what in jobs[number].get("signals", [])
    ]
    due.sort()
    while running:
        while due and time.monotonic() >= due[0][0]:
            _, pid, what = due.pop(0)
            if pid in running:  # not waited for yet: the id is still its own
                os.kill(pid, what)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.0005)
            continue
        seconds = time.monotonic() - began
        ended[running.pop(pid)] = os.waitstatus_to_exitcode(status), seconds
        if len(running) == 1 and jobs[next(iter(running.values()))].get("hold"):
            os.kill(next(iter(running)), signal.SIGTERM)
    return [ended[number] for number in range(len(jobs))]


def fork(job: dict[str, Any]) -> int:
    """The process id of a new job."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        errors = os.open(job["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(job)
    except SystemExit as stop:  # of a signal once the trainer has returned: Python ends with it
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(job: dict[str, Any]) -> int:
    """The job itself, in the process that was made for it."""
    from helpers import storage_faults, storage_trainers

    os.environ["STORAGE_REPORT"] = job["report"]
    os.environ.update(job.get("environment", {}))
    for name in job.get("planted", ()):
        storage_faults.PLANTED[name]()
    out = Path(job["out"])
    if job["mode"] is not None:
        storage_calls.watch(out, job["mode"], job["number"], job["error"], job["trace"])
    trainer = getattr(storage_trainers, job["trainer"])
    return int(trainer(out, *job.get("arguments", ())))


if __name__ == "__main__":
    main(*sys.argv[1:])
