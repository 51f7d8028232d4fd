"""The results of runs: final loss, loss without context, and the outcome that follows.

Files hold the four outcomes; readers see the words of OUTCOME_WORDS.

| outcome | a finished run whose L - L_0, the final loss less the loss without context         |
|---------|------------------------------------------------------------------------------------|
| trained | has an interval below -CLEAR, and whose loss ends more than CLEAR below its start  |
| above   | has an interval above FAR                                                          |
| stalled | has another interval                                                               |

The interval is the 95 % interval over the blocks of the validation set (Student's t).  It says how
well the validation set represents the text, and nothing of other seeds.

**Why CLEAR is 0.02 nats.**  Eighteen runs of `deepstack sweep --depths 6,48 --seeds 0,1,2` have
2,560 validation positions in 128 blocks.  Post-LN with 48 layers reads no context: its L - L_0 is
0.026, 0.035 and 0.036, with standard errors of 0.007.  So a run without context stays within 0.02
of its mean, and the best constant guess, chosen in hindsight for all held-out bytes, is only 0.003
below L_0.  Fourteen of the other fifteen runs end 0.12 to 0.20 below L_0, with standard errors of
0.028 to 0.037, so that all of their intervals lie below -0.02.  The fifteenth, Post-LN with 6
layers, ends 0.061 below with an error of 0.027 and does not count.  With 0.1 as the rule six of the
fourteen would count.  Above L_0 the rule is FAR, 0.1: a run that has not yet learnt all frequencies
is at chance.

A stack whose head is tied to its embedding repeats the token that it reads, so that before any
training it may end below L_0 on a task whose answers are shown.  The start therefore counts too,
except in a run that starts with the weights of another one.

Runs of earlier versions have no standard error, and a validation text unlike their training text:
for them CLEAR is FAR, and the interval is L - L_0 alone.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from deepstack.records import Run
from deepstack.runs.intervals import LEAST_SEEDS, student
from deepstack.runs.loss_text import context_free_loss, known, latest
from deepstack.runs.settings import LR, SEED, depth_of, scheme_label

FAMILY = "model.family"
PLACES = ("task.path", "task.held_out_path", "task.source")
Task = tuple[tuple[str, str], ...]
# The values in files, and the words that charts and printed tables show for them.
OUTCOME_WORDS = {
    "trained": "learnt", "stalled": "at chance", "above": "worse", "diverged": "diverged"
}  # fmt: skip
OUTCOMES = tuple(OUTCOME_WORDS)
# Nats between the interval of a loss and the loss without context, on the same positions.
CLEAR, FAR = 0.02, 0.1
LEARNT = (
    "the 95 % interval of its final validation loss over validation blocks ends more than "
    f"{CLEAR:g} nats below the best predictor without context on the same positions, and its loss "
    "as far below its own start"
)


def outcome_words(outcomes: str) -> str:
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
    error: standard error of L - L_0 over validation blocks, or None.
    half_width: of the 95 % interval of L - L_0, or None.
    start: loss in nats at step 0 on the same positions; None for a run that starts with trained
        weights.
    optimum: least possible loss in nats on the same positions, or None.
    run: the run itself, None for results without files.
    task: settings on which the level of the loss depends: `task_of` the run.
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
    error: float | None = None
    half_width: float | None = None
    start: float | None = None
    optimum: float | None = None
    run: Run | None = None
    task: Task = ()

    @property
    def margin(self) -> float | None:
        """L - L_0 in nats; None without an evaluation or anything to compare with."""
        return None if self.loss is None or self.floor is None else self.loss - self.floor

    @property
    def clear(self) -> float:
        """The nats below chance that count: CLEAR, or FAR without an interval."""
        return FAR if self.half_width is None else CLEAR

    @property
    def outcome(self) -> str | None:
        """One of OUTCOMES for a finished run with a known floor, or None."""
        if self.state == "diverged":
            return "diverged"
        difference = self.margin if self.state == "done" else None
        if difference is None or self.loss is None:
            return None
        half = self.half_width or 0.0
        has_fallen = self.start is None or self.loss < self.start - self.clear
        if difference + half < -self.clear and has_fallen:
            return "trained"
        return "above" if difference - half > FAR else "stalled"

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
    rows = run.evaluations
    row = rows[-1] if rows else {}
    column = "loss" if known(row.get("loss_masked")) is None else "loss_masked"
    floor = context_free_loss(run, column) if rows else None
    rate = run.get(LR)
    error = known(row.get("loss_se" if column == "loss" else "margin_se"))
    blocks = run.meta.get("validation", {}).get("blocks", 0)
    has_interval = error is not None and blocks >= LEAST_SEEDS
    is_new = not run.meta.get("start")
    return Result(
        setting,
        scheme_label(run),
        depth_of(run),
        math.nan if rate is None else float(rate),
        int(run.get(SEED) or 0),
        run.state,
        known(row.get(column)),
        floor,
        str(run.get("train.optimizer") or ""),
        error,
        student(blocks) * error if has_interval and error is not None else None,
        latest([one for one in rows if one["step"] == 0], column) if is_new else None,
        known(row.get("optimal_loss")),
        run,
        task_of(run),
    )


def task_of(run: Run) -> Task:
    """Return the family and all settings of the task of a run, and the sha256 of its data.

    A text of a known sha256 is the same one in whatever file it lies.
    """
    settings = {k: v for k, v in run.flat_config.items() if k == FAMILY or k.startswith("task.")}
    if digest := run.meta.get("data", {}).get("sha256"):
        settings = {k: v for k, v in settings.items() if k not in PLACES} | {"data": digest}
    return tuple((key, repr(value)) for key, value in sorted(settings.items()))


def task_differences(tasks: Iterable[Task]) -> list[str]:
    """Return the settings that all tasks have and that differ; their losses are not compared."""
    first, *others = [dict(task) for task in tasks] or [{}]
    shared = sorted(set(first).intersection(*others))
    return [key for key in shared if any(one[key] != first[key] for one in others)]


def task_sentence(tasks: Iterable[Task]) -> list[str]:
    """Return a sentence on what differs between tasks, so that losses are not compared; or none."""
    keys = task_differences(tasks)
    verb = "differs" if len(keys) == 1 else "differ"
    return [f"Losses are not compared: {', '.join(keys)} {verb}."] if keys else []


def margin(run: Run) -> float | None:
    """Return L - L_0, the final validation loss minus the loss without context, in nats."""
    return result_of(run).margin


def outcome(run: Run) -> str | None:
    """Return one of OUTCOMES for a finished run with a known floor, or None."""
    return result_of(run).outcome
