"""The trained model of a run, loaded from its newest whole checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from deepstack import config as conf
from deepstack.errors import NothingMatchedError
from deepstack.model import without_defaults
from deepstack.model.build import Built, build_model
from deepstack.plugins import require_plugins
from deepstack.records import RunFolder
from deepstack.records.published import is_published
from deepstack.tasks import Task, task_of
from deepstack.training import checkpoint as ckpt
from deepstack.training.preflight import refuse_probed


@dataclass(frozen=True)
class Trained:
    """A run's model at the weights of a checkpoint, with its settings and its task."""

    folder: RunFolder
    config: conf.Config
    built: Built
    step: int
    task: Task


def load_trained(folder: RunFolder, say: Callable[[str], None] = lambda _: None) -> Trained:
    """Load config, task and model of the newest whole checkpoint of a run.

    say: receives a line for each checkpoint that is not used.  Raises ConfigError for a run
    of an external model, NothingMatchedError without a checkpoint.
    """
    refuse_probed(folder)
    require_plugins(folder.read_meta().get("plugins", []), str(folder.path))
    config = conf.load_config(folder.config_path, [])
    task = task_of(config)
    built = build_model(config, vocab_size=task.vocab_size, draw=False)
    damaged: list[str] = []
    owner = ckpt.Owner(conf.digest(without_defaults(config)), built.state(), sys.maxsize)
    newest = next(ckpt.whole_checkpoints(folder, damaged, owner), None)
    for problem in damaged:
        say(f"not used: {problem}")
    if newest is None and is_published(folder.path):
        raise NothingMatchedError(
            f"{folder.path} is published without weights; to train it again: "
            f"deepstack train {folder.config_path} --study NAME"
        )
    if newest is None:
        state = folder.read_status().get("state", "interrupted")
        raise NothingMatchedError(
            f"{folder.path} has no whole checkpoint to load (its run is {state}); "
            "a run that is done keeps its weights, a diverged one has none"
        )
    built.load(newest.parts["weights"])
    built.at_step(newest.step)
    return Trained(folder, config, built, newest.step, task)
