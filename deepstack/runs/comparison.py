"""Comparison tables: mean and spread over seeds per setting and depth, and a baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from deepstack.base.errors import ConfigError, ResourceError
from deepstack.base.registry import unknown
from deepstack.base.text import printable_row
from deepstack.config.key import Key
from deepstack.config.write import one_line
from deepstack.records import Run
from deepstack.runs.best import Best
from deepstack.runs.captions import depth_words, hidden_note, versions_notes
from deepstack.runs.conditions import Where, is_equal, sort_rows
from deepstack.runs.outcomes import result_of, task_differences, task_of, task_sentence
from deepstack.runs.runs import Runs, best_keys
from deepstack.runs.series import undetermined
from deepstack.runs.settings import (
    DEPTH,
    SCHEME,
    SEED,
    setting_value,
    values_of,
)
from deepstack.runs.statistics import (
    difference_of,
    final_value,
    loss_column,
    loss_of,
    mask_note,
    mean_of,
    training_flops,
    update_column,
    value_at,
)
from deepstack.runs.studies import Folders, find_studies, list_folders
from deepstack.runs.validation import validation_notes
from deepstack.runs.words import lead_sentence

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = (
    "val_loss", "val_sd", "val_low", "val_high", "unigram", "difference", "se", "diff_low",
    "diff_high", "update_first", "update_last", "step_ms", "flops"
)  # fmt: skip

OTHER_SETTING = "; another setting: --against KEY=VALUE"


def compare(
    directory: Folders,
    against: str | None = None,
    best: str | Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
) -> pd.DataFrame:
    """Compare settings and depths below one or several folders; return a pandas DataFrame.

    | column           | unit |                                                                    |
    |------------------|------|--------------------------------------------------------------------|
    | study            |      | the folder's name, where there are several                         |
    | setting          |      | the values that differ, besides depth and seed                     |
    | depth            |      | N; all are texts where one is `20 + 5`, of an encoder-decoder      |
    | seeds            |      | how many                                                           |
    | outcome          |      | trained, stalled, above, diverged (chart `outcomes`), or the state |
    | val_loss, val_sd | nats | final validation loss, where [MASK] is shown if anywhere: mean and |
    |                  |      | standard deviation over the `n` seeds that are done                |
    | val_low,         | nats | 95 % interval of that mean: Student's t with n - 1 degrees of      |
    | val_high         |      | freedom; empty below three seeds                                   |
    | unigram          | nats | loss of a predictor without context on the same positions          |
    | difference, se   | nats | with `against`: val_loss minus the baseline's, of runs alike in    |
    |                  |      | all else, seed by seed: mean and standard error over the `pairs`   |
    | diff_low,        | nats | 95 % interval of the difference: Student's t with pairs - 1        |
    | diff_high        |      | degrees of freedom; empty below three pairs                        |
    | train.lr, …      |      | with `best`: its value here, and `edge`: whether it is the least   |
    |                  |      | or the greatest that was tried, so that a better one may lie there |
    | update_first     |      | ‖ΔF‖ after the first step, relative where some F leaves no norm    |
    | update_last      |      | the same after the last step; both of the seeds that are done      |
    | update_measure   |      | of these two columns: ‖ΔF‖ or ‖ΔF‖/‖F_0‖                           |
    | step_ms          | ms   | median wall-clock time of a step                                   |
    | flops            |      | FLOPs of all training steps, forward and backward; mean over seeds |

    against: KEY=VALUE, such as train.optimizer=adamw, or a scheme's name.
    best: keys that are chosen and not compared, such as train.lr: of each setting and depth the
        best value by the rule of `deepstack.runs.best`.  Choice and comparison use the same losses,
        which biases a mean; other seeds, trained at the chosen values, avoid it.  Of several
        studies, one in which no such key varies is not chosen from.

    where, last: as in `deepstack.load_runs`.
    sort: a column of this table, descending with `-`.
    say: gets a sentence for each run that cannot be read and is left out, and for each study one on
        runs that another run hides and one on the best setting of its greatest depth.

    Raises NothingMatchedError without runs, ResourceError where none can be read, ConfigError for a
    baseline or a key that no study has.
    """
    import pandas as pd

    studies, skipped = find_studies(list_folders(directory), where=where, last=last)
    readable = {study: runs for study, runs in studies.items() if runs}
    if not readable:
        raise ResourceError("\n".join(skipped))
    for line in skipped:
        say(line)
    rows, keys = [], best_keys(readable, best)
    for study, study_rows in comparisons(readable, against, keys).items():
        rows += [{"study": study.name} | row if len(readable) > 1 else row for row in study_rows]
        runs = readable[study]
        for line in comparison_notes(runs):
            say(f"{study.name}: {line}" if study.name else line)
        lead = lead_sentence(runs.bests(keys[study]))
        for line in [lead] if lead else task_sentence(map(task_of, runs)):
            say(f"{study.name}: {line}" if len(readable) > 1 else line)
    # Of several studies one may lack columns, and it may be the first.
    order = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    if sort is not None:
        rows = sort_rows(rows, sort, list(order), number_of)
    table = pd.DataFrame(map(printable_row, rows), columns=list(order))
    table.attrs["several_tasks"] = [
        study.name if len(readable) > 1 else ""
        for study, runs in readable.items()
        if not has_one_task(runs)
    ]
    return with_types(table)


def with_types(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with numbers as numbers and its attrs, also where a column is empty."""
    if "pairs" in table:
        table["pairs"] = table["pairs"].fillna(0).astype(int)
    if len(table) and table["depth"].str.isdecimal().all():
        table["depth"] = table["depth"].astype(int)
    return table.astype({name: float for name in NUMBERS if name in table})


def has_one_task(runs: Iterable[Run]) -> bool:
    """Return whether all runs have the same task, so that their losses can be compared."""
    return not task_differences(map(task_of, runs))


def comparison_notes(runs: Runs) -> list[str]:
    """Return sentences on hidden runs, and on columns whose names may suggest something else."""
    lines = []
    if note := hidden_note(runs):
        lines.append(f"{note}; of your own loop: probe(…, seed=…) or probe(…, name=…)")
    lines += versions_notes(runs) + validation_notes(runs)
    if mask_note(runs):
        lines.append("val_loss is over hidden tokens alone: the column val_loss_masked of ls")
    if any(run.get("model.start") for run in runs):
        lines.append("flops leave out the runs with whose weights others begin (model.start)")
    return lines


def number_of(row: Mapping[str, Any], key: str) -> Any:
    """Return a cell of this table; a depth of one stack, '48', as a number."""
    value = row.get(key)
    return int(value) if key == "depth" and value and value.isdecimal() else value


def comparisons(
    studies: Mapping[Path, Runs],
    against: str | None,
    best: Mapping[Path, Sequence[Key]],
) -> dict[Path, list[dict[str, Any]]]:
    """Return the rows of each study; a study without the baseline has no differences.

    best: settings that are chosen and not compared, of each study (see `best_keys`).

    Raises ConfigError if every study lacks the baseline.
    """
    tables, missing = {}, []
    for study, runs in studies.items():
        try:
            tables[study] = comparison(runs, against, best[study])
        except ConfigError as error:
            missing.append(error)
            tables[study] = comparison(runs, None, best[study])
    if len(missing) == len(studies):
        raise missing[0]
    return tables


def comparison(
    runs: Runs, against: str | None = None, best: Sequence[Key] = ()
) -> list[dict[str, Any]]:
    """Return the rows of `compare` for the runs of one study; values that are unknown are None."""
    chosen = runs.bests(best)
    partner = None if against is None else pair_runs(chosen, against, best)
    measure = update_column(runs)
    rows = []
    for one in chosen:
        there, column = one.runs, loss_column(one.runs)
        done = [run for run in there if run.state == "done"]
        ends = list(map(result_of, there))
        outcomes = Counter(end.outcome or end.state for end in ends).most_common()
        loss = loss_of([final_value(run, column) for run in done])
        row: dict[str, Any] = {
            "setting": one.label,
            "depth": " and ".join(depth_words(there)),
            "seeds": len({run.get(SEED) for run in there}),
            "outcome": ", ".join(f"{number} {name}" for name, number in outcomes),
            "val_loss": loss.value,
            "val_sd": loss.sd,
            "val_low": loss.low,
            "val_high": loss.high,
            "n": loss.n,
            "unigram": mean_of([end.floor for end in ends]).value,
        }
        if partner is not None:
            row |= difference_cells(done, partner, column)
        if best:
            row |= one.values | {"edge": one.edge}
        row |= update_cells(done, measure) | cost_cells(there)
        rows.append({key: None if value != value else value for key, value in row.items()})
    return rows


def difference_cells(
    done: Sequence[Run], partner: Callable[[Run], Run | None], column: str
) -> dict[str, Any]:
    """Return the difference to the baseline over pairs of runs of one task.

    partner: from `pair_runs`.
    """
    found = [(run, other) for run in done if (other := partner(run)) not in (None, run)]
    pairs = [pair for pair in found if has_one_task(pair)]
    gap = difference_of([(final_value(a, column), final_value(b, column)) for a, b in pairs])
    row = {"difference": gap.value, "se": gap.se}
    return row | {"diff_low": gap.low, "diff_high": gap.high, "pairs": gap.n}


def update_cells(done: Sequence[Run], measure: str) -> dict[str, Any]:
    """Return ‖ΔF‖ after the first and the last step; measure: its column in steps.csv."""
    row: dict[str, Any] = {}
    for name, at in (("update_first", 0), ("update_last", -1)):
        steps = {run: int(run.steps["step"].iloc[at]) for run in done if len(run.steps)}
        row[name] = mean_of([value_at(run, measure, step) for run, step in steps.items()]).value
    return row | {"update_measure": "‖ΔF‖" if measure == "model_update" else "‖ΔF‖/‖F_0‖"}


def cost_cells(runs: Sequence[Run]) -> dict[str, float]:
    """Return the time of a step, and the FLOPs of all steps."""
    times = [float(run.timing["step_ms"].median()) for run in runs if len(run.timing)]
    flops = mean_of([training_flops(run) for run in runs]).value
    return {"step_ms": median(times) if times else math.nan, "flops": flops}


def means(value: Any, word: str, text: str) -> bool:
    """Return whether a word means a setting's value, whose text is given."""
    return word == text or (not isinstance(value, str) and is_equal(value, word))


def value_meant(value: str, key: Key, values: Mapping[Run, str], other: str) -> str:
    """Return the text of a setting's value that a user has typed, 2e-3 being 0.002.

    values: text of each run's value.
    other: the end of the ConfigError for a value that no run has.
    """
    texts = list(dict.fromkeys(values.values()))
    alike = [text for run, text in values.items() if means(setting_value(run, key), value, text)]
    if alike:
        return alike[0]
    raise ConfigError(f"against: {unknown(key, value, texts)}{other}")


def pair_runs(
    bests: Sequence[Best], against: str, chosen: Sequence[Key] = ()
) -> Callable[[Run], Run | None]:
    """Return a function that gives a run its baseline run, of `key=value` or of a scheme.

    A pair has equal seed, depth and other varying settings, except for settings that these
    determine, such as a learning rate chosen for each scheme.  Raises ConfigError if no run is a
    baseline, or if a run has baselines that differ in other settings.
    """
    runs = Runs(run for one in bests for run in one.runs)
    name, _, value = against.rpartition("=")
    varying = [other for other in runs.varying if other not in chosen]
    key = runs.key(name or SCHEME, "against", varying)
    values = {run: one_line(setting_value(run, key)) for run in runs}
    value = value_meant(value, key, values, other="" if name else OTHER_SETTING)
    others = [k for k in varying if k != key and k.owner != key]
    shared = [DEPTH, SEED, *undetermined(others, [key, DEPTH], runs)]
    partners: dict[Any, Run] = {}
    for one in bests:
        for run in one.runs:
            if values[run] == value and run.state == "done":
                first = partners.setdefault(values_of(run, shared), run)
                if differing := [k for k in varying if run.get(k) != first.get(k)]:
                    raise ConfigError(
                        f"against: {value} has several values of {differing[0]}; take the best of "
                        f"them with --best {differing[0].short}"
                    )
    return lambda run: partners.get(values_of(run, shared))
