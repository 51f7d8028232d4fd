"""Runs one command and records it: the process between a sweep and the command of a run.

It holds the lock of the run folder.  The command, and all processes below it, end with it: when the
sweep asks, when the sweep dies, and when the command itself is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from deepstack.base import SIGNALS, DeepstackError, die_with
from deepstack.records import ENDED, RunFolder
from deepstack.records import files as on_disk
from deepstack.tools.own_trainer.live import LiveValues
from deepstack.tools.own_trainer.processes import (
    adopt_orphans,
    below,
    kill_below,
    signal_all,
)
from deepstack.tools.own_trainer.record import FILES, OUTPUT, begin, end, environment_of

POLL_SECONDS = 0.05
# From SIGTERM to SIGKILL for the command; a sweep waits 30 seconds for this process.
GRACE_SECONDS = 20.0


class Supervisor:
    """A command that runs, and the signal that has asked it to end.

    order: as `orders` of launcher.py writes it.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.folder = order, RunFolder(order["folder"])
        self.environment = dict(os.environ)  # the command's: trackers add to that of this process
        self.signal: int | None = None
        for number in SIGNALS:
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def run(self) -> int:
        """Run the command under the lock of its folder; return the exit code of this process."""
        with self.folder.lock():
            if self.folder.exists() and self.folder.present_state() in ENDED:
                return 0  # another sweep has just done it
            if self.signal is not None:  # the sweep has ended while this process began
                return 128 + self.signal
            order = self.order
            begin(self.folder, order["config"], order["meta"], order["columns"], keep=order["keep"])
            live = None
            if order["log_to"]:
                places = (self.folder.path / OUTPUT, self.folder.path / FILES)
                more = order["log_to"], order["label"]
                live = LiveValues(self.folder, *places, *more, keep=order["keep"])
            code = self.execute(live)
            if self.signal is not None:
                self.folder.write_status("interrupted", 0)
                why = ""
            else:
                why = end(self.folder, code)
            if live is not None:
                live.finish()
            if self.signal is not None:
                return 128 + self.signal
            if why:
                print(f"deepstack: {why}", file=sys.stderr)
                return 1
            return 0

    def execute(self, live: LiveValues | None) -> int:
        """Run the command and return its exit code, negative for the signal that ended it.

        live: passes the values on to trackers while the command runs.
        """
        this = os.getpid()
        trackers = below(this)  # their own processes
        try:
            with on_disk.open_log(self.folder.path / OUTPUT) as output:
                command = subprocess.Popen(
                    self.order["arguments"],
                    cwd=self.order["place"],
                    env=self.environment | self.order["environment"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: die_with(this, signal.SIGKILL),
                )
        except OSError as error:
            text = f"{self.order['arguments'][0]}: {error.strerror or error}\n"
            on_disk.rewrite_end(self.folder.path / OUTPUT, 0, text.encode())
            return 127
        kill_at: float | None = None
        while (code := command.poll()) is None:
            if self.signal is not None and kill_at is None:
                kill_at = time.monotonic() + GRACE_SECONDS
                signal_all([one for one in below(this) if one not in trackers], signal.SIGTERM)
            if kill_at is not None and time.monotonic() > kill_at:
                kill_below(this, trackers)
            if live is not None:
                live.read()
            time.sleep(POLL_SECONDS)
        if code or self.signal is not None:  # what a done command leaves behind may go on
            kill_below(this, trackers)
        return code


def main() -> None:
    """Run the command of the order on stdin, a JSON object."""
    order = json.loads(sys.stdin.buffer.read())
    os.environ.update(order["environment"])
    if order["sweep"]:
        os.setsid()  # a Ctrl-C on the terminal reaches only the sweep, which passes it on
    else:  # a job, on another machine
        order["meta"]["environment"] = environment_of(order["arguments"], os.environ)
    adopt_orphans()
    supervisor = Supervisor(order)
    if order["sweep"]:
        die_with(order["sweep"], signal.SIGTERM)
    try:
        code = supervisor.run()
    except DeepstackError as error:
        print(f"deepstack: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.exit(code)
