"""Trains a study in batches until its question is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepstack.base import ConfigError
from deepstack.config import Study
from deepstack.records import ENDED, Run, followed
from deepstack.runs import DEPTH, LR, SEED, Result, Runs
from deepstack.tools.answer.between import with_depth
from deepstack.tools.answer.grow import Growth, Point, grow
from deepstack.tools.answer.looks import SEEDS, Looks, write_looks
from deepstack.tools.answer.sentence import named

if TYPE_CHECKING:
    from deepstack.cli import Training
    from deepstack.sweeps import CellProgress


class GrowingStudy:
    """A study whose runs are trained in batches, each of which the earlier ones determine.

    entries: how each run ended, by the name of its folder.
    values: swept values of one run of each setting and depth.

    Raises ConfigError for seeds that other settings follow.
    """

    def __init__(self, study: Study, training: Training, looks: Looks) -> None:
        for group in study.zips:
            if SEED in group:
                raise ConfigError("--until: found seed in sweep.zip; allowed in sweep.grid")
        if any(SEED in override.where for override in study.overrides):
            raise ConfigError(
                "--until: found seed in sweep.overrides, which say nothing of added seeds; allowed "
                "overrides of other settings"
            )
        self.study, self.training, self.looks = study, training, looks
        self.entries: dict[str, CellProgress] = {}
        self.values: dict[tuple[str, int], dict[str, Any]] = {}

    @property
    def cells(self) -> int:
        """The number of combinations apart from seeds."""
        return self.study.size // len(self.study.grid.get(SEED, [None]))

    @property
    def most_runs(self) -> int:
        """The number of runs with the seeds of the last look, without further rates."""
        return self.cells * max(SEEDS[-1], len(self.study.grid.get(SEED, ())))

    def grow(self, most: int | None) -> Growth:
        """Train batches until the study is decided.  most: the largest number of runs."""
        grown = grow(self.measure, self.looks, most, refusal=self.refusal)
        return replace(grown, found=named(grown.found, self.looks))

    def refusal(self, point: Point) -> str:
        """Return why the depth of a run has no settings, or ''."""
        return with_depth(self.study, self.values_of(point)).refusal

    def measure(self, points: Sequence[Point]) -> list[Result]:
        """Train further runs, at first those of the study, and return the results of all.

        If a run is not done, it ends the sweep as `Training.finish` does.
        """
        batch = self.batch(points) if points else self.study
        progress = self.training.train(batch, part=True)
        self.entries |= {entry.cell.folder.name: entry for entry in progress}
        if any(entry.state not in ENDED for entry in self.entries.values()):
            self.training.finish(list(self.entries.values()))
        order = self.training.order
        write_looks(followed(order.out / order.name), self.looks)
        runs = Runs(Run(entry.cell.folder.path) for entry in self.entries.values())
        readable = runs.keep(lambda run: run.damage() is None, "none of these runs can be read")
        for run, result in readable.results.items():
            values = self.entries[run.path.name].cell.values
            self.values.setdefault((result.setting, result.depth), values)
        return list(readable.results.values())

    def batch(self, points: Sequence[Point]) -> Study:
        """Return the study of some further runs, with the rules of the whole one."""
        rows, study = [], self.study
        for point in points:
            row = self.values_of(point) | {SEED: point.seed}
            rows.append(row | ({LR: point.rate} if LR in row else {}))
            between = with_depth(self.study, rows[-1])
            new = [one for one in between.study.overrides if one not in study.overrides]
            study = replace(study, overrides=(*study.overrides, *new))
            for key, value in between.settings.items():
                self.looks = self.looks.with_interpolated(point.depth, key, value)
        group = {key: [row[key] for row in rows] for key in rows[0]}
        return replace(study, grid={}, zips=(group,))

    def values_of(self, point: Point) -> dict[str, Any]:
        """Return the swept values of a run; those of its setting's other depths if it is new."""
        known = self.values.get((point.setting, point.depth))
        if known is None:
            known = next(row for (label, _), row in self.values.items() if label == point.setting)
        return known | ({DEPTH: point.depth} if DEPTH in known else {})
