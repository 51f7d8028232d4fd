"""Adds `deepstack sweep --until decided`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from deepstack.base import ConfigError, counted, unknown
from deepstack.cli import SweepOption, SweepOrder, Training, log, option
from deepstack.config import DEPTH

if TYPE_CHECKING:
    from deepstack.tools.answer.grow import Growth

growth = partial(option, panel="Study that grows")


class UntilOption(SweepOption):
    """A study that trains further seeds and rates until `deepstack answer` has decided it."""

    place = 101

    until: str | None = growth(
        "With the word decided: add seeds, rates at the edge and depths between two until the "
        "question of the study is decided; see deepstack answer.",
        metavar="decided",
    )
    error: float = growth(
        "With --until: the probability of a wrong answer, over all looks at the study.",
        default=0.05,
    )
    max_runs: int | None = growth("With --until: the largest number of runs.", min=1)

    def run(self, order: SweepOrder, training: Training) -> None:
        from deepstack.tools.answer.looks import growing
        from deepstack.tools.answer.until import GrowingStudy

        if self.until != "decided":
            raise ConfigError(unknown("--until", str(self.until), ["decided"]))
        if not 0 < self.error <= 0.5:
            raise ConfigError(f"--error: found {self.error:g}; allowed above 0, at most 0.5")
        if self.max_runs is not None and self.max_runs < order.study.size:
            raise ConfigError(
                f"--max-runs: found {self.max_runs}; allowed {order.study.size} or more, the runs "
                "of the grid"
            )
        # A depth that another setting follows, such as a rate, has no value of it in between.
        looks = growing(self.error, depths=DEPTH in order.study.grid)
        study = GrowingStudy(order.study, training, looks)
        if order.dry_run:
            training.train(order.study)
            limit = f"{study.most_runs} runs, rates beyond an edge and depths between two"
            most = limit if self.max_runs is None else counted("{} runs", self.max_runs)
            log(f"this is the first batch; further ones follow until decided, at most {most}")
            return
        grown = study.grow(self.max_runs)
        training.finish(list(study.entries.values()))
        if not order.quiet:
            for line in lines_of(grown, self.max_runs, study.most_runs):
                log(line)


def lines_of(grown: Growth, max_runs: int | None, most: int) -> list[str]:
    """Return the sentences on a study that has stopped growing."""
    found, number = grown.found, counted("{} runs", grown.runs)
    word = "decided" if found.decided else "undecided"
    sentence = found.sentence.removeprefix("Undecided: ")
    lines = [f"{word} after {number}: {sentence}", *found.details]
    limit = most if max_runs is None else max_runs
    if (saved := limit - grown.runs) > 0 and not grown.next:
        lines.append(f"saved {counted('{} runs', saved)} of at most {limit}")
    if found.more is not None and not found.decided:
        lines.append(f"{counted('{} more runs', found.more.runs)} {found.more.reason}")
    if grown.next:
        further = len(grown.next)
        lines.append(
            f"the next look takes {counted('{} more runs', further)}: repeat the command with "
            f"--max-runs {grown.runs + further} or more"
        )
    return lines
