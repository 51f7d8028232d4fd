"""Kills of a sweep, a supervisor and a command at random moments: nothing is lost or half done.

`python tests/tools/own_trainer/test_kills.py 20` prints a line for each of 20 trials.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.sampling import rotating

from deepstack.records import find_runs, problems
from deepstack.tools.own_trainer.processes import parents

TRAINER = Path(__file__).with_name("trainer.py").resolve()
SEEDS = (0, 1, 2)
STUDY = f"""\
command: [{sys.executable}, -S, {TRAINER}, slow0.4, 1e-3, '{{seed}}', '{{run}}']
metric: 'step (?P<step>\\d+): .*val loss ([0-9.]+)'
sweep: {{grid: {{seed: {list(SEEDS)}}}}}
"""
VICTIMS = ("sweep", "supervisor", "command")
PATIENCE = 120.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deepstack", "sweep", "study.yaml", "--workers", "2", "-q"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def of_folder(folder: Path) -> list[int]:
    """The supervisors and commands that run for a study in this folder."""
    return [pid for pid, _ in parents() if f"{folder}/results" in command_line(pid)]


def victims_of(kind: str, folder: Path, sweep: int) -> list[int]:
    """The processes of a kind that can be killed now."""
    if kind == "sweep":
        return [sweep]
    is_command = {pid: str(TRAINER) in command_line(pid) for pid in of_folder(folder)}
    return [pid for pid, one in is_command.items() if one == (kind == "command")]


def states_of(folder: Path) -> list[str]:
    return sorted(run.state for run in find_runs(folder / "results"))


def finished(folder: Path) -> dict[str, bytes]:
    """The files of the runs that are called done, each of which is whole."""
    found = {}
    for run in find_runs(folder / "results"):
        if run.state != "done":
            continue
        assert problems(run.folder) == [], run
        seed = run.get("seed")
        assert run.evals["loss"].tolist() == [3.1 + seed / 100 - step / 20 for step in (0, 10, 20)]
        record = json.loads((run.path / "files/metrics.json").read_text())
        assert record["arguments"][2] == str(seed)
        found |= {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    return found


def trial(number: int, folder: Path, kind: str) -> str:
    """Kill one process of a sweep at a random moment, repeat the command, and compare."""
    rng = random.Random(number)
    folder.mkdir()
    (folder / "study.yaml").write_text(STUDY)
    sweep = start(folder)
    wait_until(lambda: list(folder.glob("results/*/*/status.json")))
    time.sleep(rng.uniform(0, 1.5))
    victims: list[int] = []
    wait_until(lambda: victims.extend(victims_of(kind, folder, sweep.pid)) or victims)
    os.kill(victims[0], signal.SIGKILL)
    code = sweep.wait(PATIENCE)
    wait_until(lambda: not of_folder(folder))
    before, states = finished(folder), states_of(folder)
    assert "running" not in states
    again = start(folder)
    assert again.wait(PATIENCE) == 0
    after = finished(folder)
    assert states_of(folder) == ["done"] * len(SEEDS)
    assert before.items() <= after.items()  # a finished run is not touched
    assert not of_folder(folder)
    # a process that is killed after its last write has lost nothing
    assert kind == "sweep" or "failed" in states or states == ["done"] * len(SEEDS), states
    return f"{kind} killed, exit code {code}, then {', '.join(states)}; repeated: all done"


@pytest.mark.parametrize("kind", rotating(VICTIMS, 2))
def test_a_kill_loses_nothing_and_leaves_nothing_half_done(kind: str, tmp_path: Path) -> None:
    trial(len(kind), tmp_path / kind, kind)


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    for at in range(int(sys.argv[1])):
        print(at, trial(at, place / str(at), ["sweep", "sweep", "command", "supervisor"][at % 4]))
        sys.stdout.flush()
    shutil.rmtree(place)
