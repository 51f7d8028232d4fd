"""One row a setting and depth: its seeds' mean and spread, and the distance from a baseline."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from deepstack.config.write import yaml_of
from deepstack.errors import ConfigError, ResourceError
from deepstack.plots.draw import studies_in
from deepstack.plots.loss import final_value, masked
from deepstack.plots.outcomes import outcome
from deepstack.plots.series import (
    DEPTH,
    SCHEME,
    SEED,
    Series,
    depth_words,
    determines,
    differing,
    owner_of,
    setting,
    split,
)
from deepstack.plots.update import measure_of, value_at
from deepstack.plots.values import last_row, spread_of
from deepstack.records import Run
from deepstack.registry import unknown

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = (
    "val_loss", "val_sd", "unigram", "difference", "se", "update_first", "update_last", "step_ms"
)  # fmt: skip


def compare(
    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    against: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> pd.DataFrame:
    """Settings and depths below a folder, or several, compared: a pandas DataFrame.

    | column           | unit |                                                                    |
    |------------------|------|--------------------------------------------------------------------|
    | study            |      | the folder's name, where there are several                         |
    | setting          |      | what tells the runs apart besides depth and seed                   |
    | depth            |      | N; `20 + 5` in an encoder-decoder                                  |
    | seeds            |      | how many                                                           |
    | outcome          |      | trained, stalled, above, diverged (chart `outcomes`), or the state |
    | val_loss, val_sd | nats | final validation loss, where [MASK] is shown if anywhere: mean and |
    |                  |      | standard deviation over the seeds that are done                    |
    | unigram          | nats | the unigram's loss on the same positions                           |
    | difference, se   | nats | with `against`: val_loss minus the baseline's, of runs alike in    |
    |                  |      | all else, seed by seed: mean and standard error over the `pairs`   |
    | update_first     |      | ‖ΔF‖ after the first step, relative where some F leaves no norm    |
    | update_last      |      | the same after the last step; both of the seeds that are done      |
    | step_ms          | ms   | median wall-clock time of a step                                   |

    against: KEY=VALUE, such as train.optimizer=adamw, or a scheme's name.  `say` gets a sentence
    for each run that cannot be read and is left out.  Raises NothingMatchedError without runs,
    ResourceError where none can be read, ConfigError for a baseline that is not there.
    """
    import pandas as pd

    folders = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    studies, skipped = studies_in(folders)
    whole = {study: runs for study, runs in studies.items() if runs}
    if not whole:
        raise ResourceError("\n".join(skipped))
    for line in skipped:
        say(line)
    rows = []
    for study, runs in whole.items():
        named = {"study": study.name} if len(whole) > 1 else {}
        rows += [named | row for row in comparison(runs, against)]
    table = pd.DataFrame(rows)
    return table.astype({name: float for name in NUMBERS if name in table})


def comparison(runs: Sequence[Run], against: str | None = None) -> list[dict[str, Any]]:
    """The rows of `compare` for the runs of one study."""
    series, _ = split(runs)
    base = None if against is None else Baseline(runs, against)
    measure = measure_of(runs)
    rows = []
    for s in series:
        on_mask = masked(s.runs)
        column = "loss_masked" if on_mask else "loss"
        for depth in s.depths:
            there = s.at(depth)
            done = [run for run in there if run.state == "done"]
            loss = spread_of([v for r in done if (v := final_value(r, column)) is not None])
            row: dict[str, Any] = {
                "setting": label_of(s),
                "depth": " and ".join(depth_words(there)),
                "seeds": len(there),
                "outcome": outcomes_of(there),
                "val_loss": finite(loss.mean),
                "val_sd": finite(loss.mean - loss.low),
                "unigram": mean_of([unigram(run) for run in there]),
            }
            if base is not None:
                row |= base.difference(there, column)
            first, last = (updates_of(done, measure, at) for at in (0, -1))
            row |= {"update_first": mean_of(first), "update_last": mean_of(last)}
            times = [float(run.timing["step_ms"].median()) for run in there if len(run.timing)]
            rows.append(row | {"step_ms": median(times) if times else None})
    return rows


class Baseline:
    """The runs of `key=value` among others, or of a scheme: what each of the others is paired with.

    A pair has the same seed and depth, and is alike in whatever else varies, but for what follows
    from these, such as a learning rate that was chosen for each scheme.  Raises ConfigError where
    no run is one.
    """

    def __init__(self, runs: Sequence[Run], against: str) -> None:
        key, _, value = against.rpartition("=")
        self.key = key or SCHEME
        varying = differing(runs)
        if self.key not in varying:
            raise ConfigError(f"against: {unknown('key', self.key, varying)}, which vary")
        words = {written(setting(run, self.key)): run for run in runs}
        if value not in words:
            raise ConfigError(f"against: {unknown(self.key, value, words)}")
        kept = [k for k in varying if k != self.key and owner_of(k) != self.key]
        for k in reversed(kept.copy()):
            if determines([self.key, DEPTH, *(other for other in kept if other != k)], k, runs):
                kept.remove(k)
        self.keys = [DEPTH, SEED, *kept]
        self.runs = {
            self.place(run): run
            for run in runs
            if written(setting(run, self.key)) == value and run.state == "done"
        }

    def place(self, run: Run) -> tuple[str, ...]:
        """What a run and its partner have in common."""
        return tuple(repr(setting(run, key)) for key in self.keys)

    def difference(self, runs: Sequence[Run], column: str) -> dict[str, Any]:
        """Mean and standard error of the final validation loss minus the partner's."""
        found = []
        for run in runs:
            other = self.runs.get(self.place(run))
            if run.state != "done" or other is None or other is run:
                continue
            own, base = final_value(run, column), final_value(other, column)
            found += [own - base] if own is not None and base is not None else []
        spread = spread_of(found)
        error = (spread.mean - spread.low) / math.sqrt(spread.n) if found else math.nan
        return {"difference": finite(spread.mean), "se": finite(error), "pairs": spread.n}


def written(value: object) -> str:
    """A setting as a command line has it: false, 0.001, null."""
    return yaml_of({"": value}).split(": ", 1)[1].strip().strip('"')


def label_of(series: Series) -> str:
    """A series in words that can be typed."""
    return series.label.replace("\u00a0", " ")


def outcomes_of(runs: Sequence[Run]) -> str:
    """`3 trained`, `2 trained, 1 diverged`, `1 stalled, 2 running`."""
    found = Counter(outcome(run) or run.state for run in runs)
    return ", ".join(f"{number} {name}" for name, number in found.most_common())


def unigram(run: Run) -> float | None:
    """What a predictor without context pays on the positions of the final loss."""
    measured = last_row(run.evals, ["unigram_loss"])
    stated = run.columns.get("references", {}).get("unigram_entropy")
    return measured if measured is not None or stated is None else float(stated)


def updates_of(runs: Sequence[Run], column: str, at: int) -> list[float | None]:
    """‖ΔF‖ at the first or the last step of each run."""
    return [value_at(r, column, int(r.steps["step"].iloc[at])) for r in runs if len(r.steps)]


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of the finite ones, None without any."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(found) if found else None


def finite(value: float) -> float | None:
    """A number, or None for one that is none."""
    return value if math.isfinite(value) else None
