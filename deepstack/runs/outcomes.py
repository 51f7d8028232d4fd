"""The results of runs: final loss, loss without context, and the outcome that follows.

Files hold these four values; readers see the words of OUTCOME_WORDS.
"""

import math
from typing import NamedTuple

from deepstack.records import Run
from deepstack.runs.settings import LR, SEED, depth_of, scheme_label
from deepstack.runs.statistics import context_free_loss, last_row

# The values in files, and the words that charts and printed tables show for them.
OUTCOME_WORDS = {
    "trained": "learnt", "stalled": "at chance", "above": "worse", "diverged": "diverged"
}  # fmt: skip
OUTCOMES = tuple(OUTCOME_WORDS)
# Nats between a loss and the one without context, on the same positions, that count.
CLEAR = 0.1


def in_words(outcomes: str) -> str:
    """Return outcomes as readers see them: '2 trained, 1 stalled' as '2 learnt, 1 at chance'."""
    for value, word in OUTCOME_WORDS.items():
        outcomes = outcomes.replace(value, word)
    return outcomes


class Result(NamedTuple):
    """The end of one run: a row of the results of a study.

    setting: label of the settings that vary, apart from depth, seed and learning rate.
    scheme: label of the residual scheme.
    rate: the learning rate.
    loss: final validation loss in nats, where [MASK] is shown if anywhere, or None.
    floor: loss in nats of the best predictor without context on the same positions, or None.
    optimizer: name of the optimizer, '' if unknown.
    start: loss in nats of the untrained stack on the same positions, or None.
    optimum: least possible loss in nats on the same positions, or None.
    """

    setting: str
    scheme: str
    depth: int
    rate: float
    seed: int
    state: str
    loss: float | None
    floor: float | None
    optimizer: str = ""
    start: float | None = None
    optimum: float | None = None

    @property
    def margin(self) -> float | None:
        """L - L_0 in nats; None without an evaluation or anything to compare with."""
        return None if self.loss is None or self.floor is None else self.loss - self.floor

    @property
    def outcome(self) -> str | None:
        """One of OUTCOMES for a finished run with a known floor, or None.

        A run has learnt if its loss is below the floor and below its untrained stack's, both by
        more than CLEAR: a tied head may begin below the floor, since its stack passes tokens on.
        """
        if self.state == "diverged":
            return "diverged"
        difference = self.margin if self.state == "done" else None
        if difference is None or self.gain is None:
            return None
        if self.gain > CLEAR:
            return "trained"
        return "stalled" if difference <= CLEAR else "above"

    @property
    def gain(self) -> float | None:
        """The distance in nats of the loss below the floor, or below a lower start; None without.

        A loss above the floor has a negative gain.
        """
        if self.loss is None or self.floor is None:
            return None
        known = [self.floor] if self.start is None else [self.floor, self.start]
        return (min(known) if self.loss < self.floor else self.floor) - self.loss

    @property
    def share(self) -> float | None:
        """The part that was learnt of the distance from floor to optimum; None if unknown."""
        if self.loss is None or self.floor is None or self.optimum is None:
            return None
        learnable = self.floor - self.optimum
        return (self.floor - self.loss) / learnable if learnable > 0 else None

    @property
    def final_loss(self) -> float:
        """The final validation loss in nats; infinite for a diverged run, NaN without one."""
        if self.state == "diverged":
            return math.inf
        return math.nan if self.loss is None else self.loss


def result_of(run: Run, setting: str = "") -> Result:
    """Return the end of a run.  setting: its label among the runs of a study.

    L is taken where [MASK] is shown, if anywhere; L_0 is `context_free_loss` on the same positions.
    """
    row = run.evals.iloc[-1:]
    column = "loss" if last_row(row, "loss_masked") is None else "loss_masked"
    floor = context_free_loss(run, column) if len(row) else None
    rate = run.get(LR)
    is_untrained = run.get("model.start") is None  # its first evaluation is one of fresh weights
    start = last_row(run.evals[run.evals["step"] == 0], column) if is_untrained else None
    return Result(
        setting,
        scheme_label(run),
        depth_of(run),
        math.nan if rate is None else float(rate),
        int(run.get(SEED) or 0),
        run.state,
        last_row(row, column),
        floor,
        str(run.get("train.optimizer") or ""),
        start,
        last_row(row, "optimal_loss"),
    )


def margin(run: Run) -> float | None:
    """Return L - L_0, the final validation loss minus the loss without context, in nats."""
    return result_of(run).margin


def outcome(run: Run) -> str | None:
    """Return one of OUTCOMES for a finished run with a known floor, or None."""
    return result_of(run).outcome
