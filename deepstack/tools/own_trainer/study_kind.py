"""Lets `deepstack sweep` take a study of commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from deepstack.base import ConfigError
from deepstack.cli import StudyKind
from deepstack.config import SCHEME

if TYPE_CHECKING:
    from deepstack.cli import SweepOption, SweepTraining
    from deepstack.config import Study

TASKS = ("until",)  # tasks of `deepstack sweep` that work with commands
FLAGS = ("--ray", "--slurm")  # and options


class CommandStudy(StudyKind):
    """A study whose file has `command:`, or `baseline:` and `candidate:`."""

    words = "a study of commands"
    signs = ("command", "baseline", "candidate")

    def load(self) -> Study:
        from deepstack.tools.own_trainer.study_file import load_commands

        self.commands = load_commands(self.path, self.settings)
        return self.commands.study

    def refuse(self, tasks: Sequence[SweepOption], given: Sequence[str]) -> None:
        others = [f"--{one.name}" for one in tasks if one.name not in TASKS]
        for flag in [flag for flag in (*given, *others) if flag not in FLAGS]:
            raise ConfigError(
                f"{flag}: found a study of commands, for which it does nothing; allowed without it"
            )
        sides = self.commands.study.grid.get(SCHEME, [])
        if tasks and self.commands.is_comparison and len(sides) < 2:
            raise ConfigError(f"--until: found {sides[0]} alone; allowed baseline and candidate")
        seeds = self.commands.seedless
        if tasks and seeds:
            raise ConfigError(
                f"--until: found {seeds} without {{seed}}; allowed a command that takes the seed, "
                "as in --seed {seed}, since further runs have further seeds"
            )

    def training(self, given: SweepTraining) -> SweepTraining:
        from deepstack.sweeps import RUN_AGAIN
        from deepstack.tools.own_trainer.training import CommandTraining

        options = vars(given) | {"retried": given.retried or RUN_AGAIN}
        return CommandTraining(**options, file=self.commands)

    def end(self, training: SweepTraining, tasks: Sequence[SweepOption]) -> None:
        from deepstack.tools.own_trainer.training import CommandTraining

        assert isinstance(training, CommandTraining)
        if not (tasks and self.commands.is_comparison and training.ended):
            return
        from deepstack.cli import log
        from deepstack.tools.own_trainer.verdict import decide

        study = training.order.out / training.order.name
        verdict = decide(study, [entry.cell.folder for entry in training.ended.values()])
        log(verdict.sentence)
        if verdict.exit_code:
            raise typer.Exit(verdict.exit_code)
