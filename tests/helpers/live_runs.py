"""A run that sends its rows to a tracker, is killed without warning, and resumes."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deepstack.config import to_yaml
from deepstack.records import Run, find_runs
from helpers.cluster_results import until
from helpers.tracked_runs import settings

Steps = dict[str, list[int]]
"""The steps that a tracker shows for each key, in order, each as often as it was written."""

STEPS = 400
SLOW = """
import sys, time, deepstack
config = deepstack.load_config(sys.argv[1])
deepstack.train(config, study="s", out=sys.argv[2], stop=lambda: time.sleep(float(sys.argv[3])))
"""


def last_noted(folder: Path) -> int:
    """Return the last step that a run has noted as sent, -1 for none."""
    path = folder / "run.json"
    return int(json.loads(path.read_text())["steps"]) if path.exists() else -1


def killed_and_resumed(
    tracker: str, folder: Path, read: Callable[[Path], Steps]
) -> tuple[Run, Steps, Steps]:
    """Train a run, kill it when its tracker shows rows, and resume it.

    read: the folder of a run -> what the tracker shows.

    Returns the run, and what the tracker showed before the kill and at the end.
    """
    more = [f"train.steps={STEPS}", "train.eval_every=100", "log.layers_every=100"]
    config = settings(*more, "runtime.checkpoint_seconds=1", f"log.to=[{tracker}]")
    path = folder / "live.yaml"
    path.write_text(to_yaml(config))
    # Another process each: W&B leaves pipes open, and trackio has one folder for each process.
    command = [sys.executable, "-c", SLOW, str(path), str(folder)]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen([*command, "0.1"], stdout=output, stderr=output)
    try:
        before: Steps = {}

        def shows_rows() -> bool:
            assert process.poll() is None, (folder / "output").read_text()
            for run in folder.glob("s/*/config.yaml"):
                before.update(read(run.parent) if (run.parent / "checkpoint").exists() else {})
                # A kill before the tracker's rows are noted may repeat them.
                if last_noted(run.parent / tracker) < 1:
                    return False
            return "steps/loss" in before

        until(shows_rows, what="rows in the tracker", seconds=120)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    time.sleep(2)  # a tracker's own process ends after it
    again = subprocess.run([*command, "0"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    (run,) = find_runs(folder)
    assert run.state == "done" and len(run.meta["resumed"]) == 1
    return run, before, read(run.path)


def assert_every_row(shown: Steps, *, is_once: bool = True) -> None:
    """The tracker has each row of the run, in rising order, and has each once if `is_once`."""
    wanted = {key: list(range(1, STEPS + 1)) for key in ("steps/loss", "timing/step_ms")}
    for key in ("evals/loss", "layers/grad_norm/mean"):
        wanted[key] = [step for step in range(0, STEPS + 1, 100)]
    for key, steps in wanted.items():
        assert (shown[key] if is_once else sorted({*shown[key]})) == steps, key
