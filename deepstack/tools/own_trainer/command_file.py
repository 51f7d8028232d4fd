"""A study of commands: what its file says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.config import SCHEME, SEED, Key
from deepstack.tools.own_trainer.command import Command
from deepstack.tools.own_trainer.metric import Metric, Pattern, as_json

ONE, BASELINE, CANDIDATE = "command", "baseline", "candidate"


@dataclass(frozen=True)
class CommandFile:
    """A study of commands.

    path: of the file.
    commands: each by the name of its setting: one, or baseline and candidate.
    metric: of the validation loss; less is better.
    loss: pattern of the training loss with its step, or None.
    environment: variables that are added for the commands.
    resume: whether {run} keeps its files for the next start of a run that has not ended.
    keys: name in braces -> the setting in config.yaml.
    study: the grid, by settings.
    trackers: those that get the values while a command runs.
    """

    path: Path
    commands: Mapping[str, Command]
    metric: Metric
    study: conf.Study
    keys: Mapping[str, Key]
    loss: Pattern | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    trackers: Sequence[str] = ()

    @property
    def is_comparison(self) -> bool:
        """Whether it compares a candidate with a baseline."""
        return CANDIDATE in self.commands

    @property
    def grid_keys(self) -> list[str]:
        """The settings that its lists give, also on the command line."""
        return [*self.study.grid, *(key for group in self.study.zips for key in group)]

    @property
    def seedless(self) -> str:
        """The name of a command that does not take the seed, or ''."""
        seeds = [name for name, key in self.keys.items() if key == SEED]
        without = (name for name, one in self.commands.items() if not set(seeds) & set(one.names))
        return next(without, "")

    def command_of(self, values: Mapping[str, Any]) -> tuple[str, Command]:
        """Return name and command of the cell with these values."""
        if self.is_comparison:
            name = str(values[SCHEME])
            return name, self.commands[name]
        ((name, command),) = self.commands.items()
        return str(values.get(SCHEME, name)), command

    def digest(self, values: Mapping[str, Any]) -> str:
        """Return six hex digits of all that makes the run with these values."""
        _, command = self.command_of(values)
        known: dict[str, Any] = {"command": command.words, "values": dict(values)}
        known |= {"environment": dict(self.environment)} if self.environment else {}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:6]

    def metrics(self) -> dict[str, Any]:
        """Return metric and loss as meta.json has them."""
        return {"metric": as_json(self.metric), "loss": as_json(self.loss)}
