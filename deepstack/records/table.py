"""Tables with one row a run: the settings that vary, and the last logged values."""

import csv
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepstack.base.errors import ResourceError
from deepstack.base.text import scalar
from deepstack.config.identity import differing_keys
from deepstack.config.schema import flatten
from deepstack.records.file_values import damage_error, last_rows, logged_number
from deepstack.records.files import open_file, trouble
from deepstack.records.folder import EVALS_COLUMNS, STEPS_COLUMNS, RunFolder, absolute
from deepstack.records.labels import Labels, read_labels

# Keys that identify a run in any study.
ALWAYS = ("model.scheme", "model.depth", "seed")
LOGGED = (
    "step", "loss", "grad_norm", "model_update", "val_loss", "val_loss_masked", "step_ms"
)  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """The values that a table shows of one run.

    path: the folder, absolute; links keep their names.
    config: by dotted key.
    logged: a value for each of LOGGED.
    labels: tags and note.
    created: the time, '' if unknown.
    damage: why the run cannot be read, or None.
    """

    path: Path
    state: str
    config: dict[str, Any]
    logged: dict[str, Any]
    labels: Labels
    created: str = ""
    damage: str | None = None

    @property
    def order(self) -> tuple[str, int, str]:
        """Return a value by which runs sort in the order of their creation, without ties.

        Runs of earlier versions have times to the second.  Among equal times, the time of
        config.yaml decides, then the path.
        """
        try:
            began = (self.path / "config.yaml").stat().st_mtime_ns
        except OSError:
            began = 0
        return self.created.removesuffix("Z"), began, str(self.path)


def rows_of(
    summaries: Sequence[Summary], settings: Callable[[Summary], dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of `deepstack.records.run_rows` for summaries of runs.

    settings: the settings of each row and their order, instead of those that vary; tags and note
        are then always columns.
    """
    keys = varying_in_studies([one for one in summaries if one.damage is None])
    labels = [
        name
        for name in Labels._fields
        if settings or any(getattr(one.labels, name) for one in summaries)
    ]
    return [
        {"study": one.path.parent.name, "run": one.path.name, "state": one.state}
        | {name: _label(getattr(one.labels, name)) for name in labels}
        | (settings(one) if settings else {key: scalar(one.config.get(key)) for key in keys})
        | one.logged
        for one in summaries
    ]


def _label(value: str | tuple[str, ...]) -> str:
    """Return a note, or tags as `good, keep`."""
    return value if isinstance(value, str) else ", ".join(value)


def summarize(folder: RunFolder) -> Summary:
    """Return the values that a table shows of a run.

    Reads only the ends of steps.csv and evals.csv.  `Run.damage` finds damage far from the end of a
    log.
    """
    path, labels = absolute(folder.path), read_labels(folder)
    try:
        config = {sys.intern(key): value for key, value in flatten(folder.read_config())}
        state = folder.present_state()
        meta = folder.read_meta()
        folder.read_columns()
        step = _last_row(folder.steps_path, STEPS_COLUMNS)
        evaluation = _last_row(folder.evals_path, EVALS_COLUMNS)
        logged = {
            "step": int(step.get("step", 0)),
            **{name: step.get(name) for name in ("loss", "grad_norm", "model_update")},
            "val_loss": evaluation.get("loss"),
            "val_loss_masked": evaluation.get("loss_masked"),
            "step_ms": _median_ms(folder.timing_path),
        }
    except ResourceError as error:
        empty = dict.fromkeys(LOGGED)
        return Summary(path, "damaged", {}, empty, labels, damage=str(error))
    return Summary(path, state, config, logged, labels, str(meta.get("created", "")))


def varying_in_studies(summaries: Sequence[Summary]) -> list[str]:
    """Return the keys that vary inside a study, in the config's order.

    Scheme, depth and seed count also if they vary between studies.  Schemes differ in every option,
    so an option counts only if it varies among a study's runs of one scheme.
    """
    keys = {key for key in differing_keys([one.config for one in summaries]) if key in ALWAYS}
    groups: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for one in summaries:
        study, scheme = one.path.parent, str(one.config.get("model.scheme"))
        for group in ((study,), (study, scheme)):
            groups.setdefault(group, []).append(one.config)
    for names, configs in groups.items():
        of_scheme = len(names) == 2
        for key in differing_keys(configs):
            if key.startswith("model.scheme_options.") == of_scheme:
                keys.add(key)
    order = dict.fromkeys(key for one in summaries for key in one.config)
    return [key for key in order if key in keys]


def _last_row(path: Path, columns: Iterable[str]) -> dict[str, float]:
    """Return the values of the last row of a log, empty without rows.

    Raises ResourceError if a row among those read at the end of the file holds no numbers.
    """
    names, rows = last_rows(path)
    if names and (missing := [name for name in list(columns)[:2] if name not in names]):
        raise damage_error(path, f"has no column {missing[0]}")
    values: list[float] = []
    for row in rows:
        if len(row) != len(names) or not row[0].isdecimal():
            raise damage_error(path, f"is not a table of numbers (in the row of step {row[0]:.20})")
        values = [logged_number(path, cell) for cell in row]
    return dict(zip(names, values, strict=False))


def _median_ms(path: Path) -> float | None:
    """Return the median of the latest time of each step; None without a step."""
    latest: dict[str, float] = {}
    with trouble(path), suppress(FileNotFoundError), open_file(path) as file:
        lines = (line.decode("ascii", "replace") for line in file if line.endswith(b"\n"))
        for row in csv.DictReader(lines):
            latest[row.get("step", "")] = logged_number(path, row.get("step_ms"))
    times = [time for time in latest.values() if not math.isnan(time)]
    return statistics.median(times) if times else None
