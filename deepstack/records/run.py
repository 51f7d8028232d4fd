"""Run folders read back, for charts, tables and users."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack.base.errors import ConfigError, NothingMatchedError, ResourceError
from deepstack.base.notebook import html_table
from deepstack.base.registry import nearest
from deepstack.base.text import printable, short_text
from deepstack.config.identity import differing_keys
from deepstack.config.instruments import specs
from deepstack.config.schema import flatten
from deepstack.records.analyses import Analysis, read_analysis
from deepstack.records.file_values import damage_error, is_logged, logged_number
from deepstack.records.files import read
from deepstack.records.folder import (
    EVALS_COLUMNS,
    IDENTITY,
    STEPS_COLUMNS,
    TIMING_COLUMNS,
    RunFolder,
    absolute,
)
from deepstack.records.labels import Labels, read_labels
from deepstack.records.logs import OF_EVERY_RUN, instrument_logs
from deepstack.records.published import PUBLISHED
from deepstack.records.table import rows_of, summarize

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

RESULTS = "results"  # the default of --out


class Run:
    """One run folder, as it was when first read: takes no lock, never sees a torn row.

    steps, evals, timing: pandas DataFrames.
    config, meta, status, columns: dicts.
    state: a word.
    path: the folder.  `columns["columns"]` has symbol, unit and meaning of every column.

    Every attribute is read on first use and then kept; make a new Run to read it again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = RunFolder(path)
        self.path = self.folder.path
        self._instrument_tables: dict[str, pd.DataFrame] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state})"

    def _repr_html_(self) -> str:
        """Return state, identity and last values as a table for notebooks."""
        (row,) = run_rows([self])
        shown = {key: self.get(key) for key in IDENTITY} if row["state"] != "damaged" else {}
        facts = {
            key: short_text(value)
            for key, value in (row | shown).items()
            if value not in (None, "")
        }
        return html_table(f"{facts.pop('study')}/{facts.pop('run')}", facts)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def study(self) -> str:
        """The name of the folder in which the run lies, or a link to it."""
        return absolute(self.path).parent.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config, nested as in the YAML."""
        return self.folder.read_config()

    @cached_property
    def meta(self) -> dict[str, Any]:
        return self.folder.read_meta()

    @cached_property
    def status(self) -> dict[str, Any]:
        """status.json as last written; after a kill it still says `running`."""
        return self.folder.read_status()

    @cached_property
    def columns(self) -> dict[str, Any]:
        """columns.json: columns, scheme, f0_norm, references."""
        return self.folder.read_columns()

    @cached_property
    def labels(self) -> Labels:
        """The tags and the note that the user gave this run: `labels.tags`, `labels.note`."""
        return read_labels(self.folder)

    @cached_property
    def state(self) -> str:
        """done, diverged, failed, out_of_memory, interrupted, running or damaged.

        A run that says `running` but is not locked was killed: it is `interrupted`.  A run whose
        status.json cannot be read, or names a step that steps.csv lacks, is `damaged`.
        """
        try:
            return self.folder.present_state()
        except ResourceError:
            return "damaged"

    @cached_property
    def steps(self) -> pd.DataFrame:
        """A row a training step.

        step; loss (nats) and grad_norm of its batch, before the update and clipping; lr;
        model_update ‖ΔF‖, model_update_step, model_update_fro, model_update_rel, after the update.
        """
        return read_csv(self.folder.steps_path, STEPS_COLUMNS)

    @cached_property
    def evals(self) -> pd.DataFrame:
        """A row an evaluation; step 0 is before training.

        step; loss and loss_masked, of all predicted positions and of those whose token is not shown
        (nats); bits_per_token; losses to compare with, such as unigram_loss (nats); loss_se,
        loss_masked_se and margin_se, of loss_masked - unigram_loss, standard errors (nats).
        """
        return read_csv(self.folder.evals_path, EVALS_COLUMNS)

    @cached_property
    def evaluations(self) -> list[dict[str, float]]:
        """The rows of `evals` as mappings, read without pandas."""
        return read_rows(self.folder.evals_path, EVALS_COLUMNS)

    @cached_property
    def timing(self) -> pd.DataFrame:
        """A row a step: the time of its last execution.

        step; step_ms (wall-clock milliseconds, logging included); peak_memory_mb (MB).
        """
        table = read_csv(self.folder.timing_path, TIMING_COLUMNS)
        latest = table.drop_duplicates("step", keep="last")
        return latest.sort_values("step", ignore_index=True)

    def log_names(self) -> list[str]:
        """Return the names of this run's logs: steps, evals, timing and the instruments' logs."""
        return [*OF_EVERY_RUN, *instrument_logs(self.path)]

    def log(self, name: str) -> pd.DataFrame:
        """Return a log: `steps`, `evals`, `timing`, or an instrument's, a row a measurement.

        An instrument's table is empty if the run has not used it.  `run.<name>` is the same.
        """
        if name in OF_EVERY_RUN:
            table: pd.DataFrame = getattr(self, name)
            return table
        if name not in self._instrument_tables:
            self._instrument_tables[name] = read_csv(self.folder.csv_path(name), ("step",))
        return self._instrument_tables[name]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> pd.DataFrame:
            """Return the log of an instrument."""
            is_known = "folder" in vars(self) and name[0] != "_"
            if is_known and (name in specs() or name in instrument_logs(self.path)):
                return self.log(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def damage(self, *, layers: bool = False) -> str | None:
        """Return why this run cannot be read, or None; layers=True reads the files of layers too.

        Readable files but config.yaml may still have changed: `deepstack verify` finds that.
        """
        try:
            _ = self.config
            self.folder.read_state()
            _ = self.meta, self.columns, self.steps, self.evals, self.timing
            if layers:
                _ = (
                    [self.log(name) for name in self.log_names()],
                    [self.layers(name) for name in self.layer_names()],
                )
        except ResourceError as error:
            return str(error)
        return None

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """The config with dotted keys."""
        return dict(flatten(self.config))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the config value at a dotted key, such as `model.depth`."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    @property
    def step_flops(self) -> float:
        """The training FLOPs of a step; NaN if meta.json has none."""
        return float(self.meta.get("flops", {}).get("step", math.nan))

    def layer_names(self) -> list[str]:
        """Return the names of the per-layer diagnostics of this run."""
        return self.folder.layer_names()

    def layers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps (records,), values (records, depth)) of a diagnostic; KeyError if none."""
        return self.folder.read_layers(name)

    def analysis(self, name: str) -> Analysis:
        """Return what `deepstack analyze` measured on the weights, such as `lens`.

        Raises KeyError if it has not been measured.
        """
        return read_analysis(self.folder, name)


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row a run: study, run, state, the settings that vary, the last logged values.

    Tags and notes are columns if any run has them.  A run that cannot be read is `damaged`, and has
    no values.  A setting is a column if it varies inside a study; scheme, depth and seed also if
    they differ between studies.

    `loss` is the training loss of the last row, `val_loss` and `val_loss_masked` the last
    evaluation's, `step_ms` the median over steps.
    """
    return rows_of([summarize(run.folder) for run in runs])


def find_runs(path: str | os.PathLike[str]) -> list[Run]:
    """Return the runs in a run, study or results folder, in natural order (d6 before d48).

    One that has lost its config.yaml is among them, and is damaged.

    Raises NothingMatchedError when there is none.
    """
    root = Path(path)
    folders = [folder for folder in folders_below(root) if RunFolder(folder).was_run()]
    outer = set(folders)  # a command may have written a run below its own
    folders = [folder for folder in folders if not outer & {*folder.parents[:2]}]
    if not folders:
        reason = "holds no runs" if root.is_dir() else "is not a folder"
        missing = root
        hint = "; to train a first run: deepstack train quick" if str(root) == RESULTS else ""
        while not missing.parent.exists():
            missing = missing.parent
        if not missing.exists() and missing.parent.is_dir():
            beside = [one.name for one in missing.parent.iterdir() if one.is_dir()]
            near = nearest(missing.name, beside)
            meant = missing.parent / (near or "") / root.relative_to(missing)
            hint += f"; did you mean {str(meant)!r}?" if near else ""
        hint = hint or "; deepstack ls lists the runs"
        raise NothingMatchedError(
            f"{root} {reason}: expected a run, a study or a results folder{hint}"
        )
    return [Run(folder) for folder in sorted(folders, key=natural)]


def existing_run(path: str | os.PathLike[str]) -> RunFolder:
    """Return the folder of a run.  Raises ConfigError if it is not one."""
    folder = RunFolder(path)
    if not folder.exists():
        inside = (str(one) for one in folders_below(Path(path)) if RunFolder(one).was_run())
        where = f"such as {first}" if (first := min(inside, default="")) else "as in results/"
        raise ConfigError(f"{path} is not a run: expected a folder with a config.yaml, {where}")
    return folder


def varying(runs: Sequence[Run]) -> list[str]:
    """Return the dotted config keys on which the runs differ, in the config's order.

    Leaves out `name` and `runtime`.  A key that an older config lacks counts as equal, except among
    options of schemes and tasks and factors of roles.
    """
    return differing_keys([run.flat_config for run in runs])


def folders_below(root: Path) -> list[Path]:
    """Return a folder, the visible ones one and two levels below it, and published runs."""
    children = visible_folders(root)
    studies = [*children, *visible_folders(root / PUBLISHED)]
    return [root, *children, *(path for folder in studies for path in visible_folders(folder))]


def path_text(run: Run) -> str:
    """Return the path of a run as tables show it, in which bytes that are not UTF-8 are escapes."""
    return printable(os.fspath(run.path))


def visible_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder whose names do not start with a dot; [] if unreadable."""
    try:
        return [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    except OSError:
        return []


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a sorting key that compares digits as numbers: d6 before d48."""
    parts = re.split(r"(\d+)", f"{path.parent.name}/{path.name}")
    return [(int(part) if i % 2 else 0, part) for i, part in enumerate(parts)]


def read_csv(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    """Return the complete rows of a log, with these columns if it has none yet.

    Raises ResourceError if it cannot be read.
    """
    import pandas as pd

    complete, names = complete_part(path, columns)
    if not complete:
        return pd.DataFrame({name: pd.Series(dtype=_dtype(name)) for name in columns})
    try:
        table = pd.read_csv(io.BytesIO(complete), dtype={name: _dtype(name) for name in names})
    except (ValueError, OverflowError) as error:
        why = str(error).splitlines()[0]
        raise damage_error(path, f"is not a table of numbers ({why})") from error
    refuse_odd_numbers(path, table)
    return table


def read_rows(path: Path, columns: Iterable[str]) -> list[dict[str, float]]:
    """Return the complete rows of a log as mappings; an empty cell is NaN.

    Raises ResourceError if it cannot be read.
    """
    complete, names = complete_part(path, columns)
    lines = complete.decode("ascii", "replace").splitlines()[1:]
    values = ([logged_number(path, cell) for cell in line.split(",")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in values]


def complete_part(path: Path, columns: Iterable[str]) -> tuple[bytes, list[str]]:
    """Return the complete lines of a log, and the names of its columns; empty for no line.

    Raises ResourceError for a log without the first two of these columns, or with torn rows.
    """
    data = read(path) or b""
    complete = data[: data.rfind(b"\n") + 1]
    if not complete:
        return b"", []
    names = complete[: complete.find(b"\n")].decode("ascii", "replace").split(",")
    if missing := [name for name in list(columns)[:2] if name not in names]:
        raise damage_error(path, f"has no column {missing[0]}")
    if complete.count(b",") != complete.count(b"\n") * (len(names) - 1):  # pandas fills short rows
        raise damage_error(path, f"is not a table of numbers (a row has not {len(names)} cells)")
    return complete, names


def refuse_odd_numbers(path: Path, table: pd.DataFrame) -> None:
    """Raise ResourceError for a number that no run writes into this log."""
    for name in table:
        values = table[name].dropna()
        if len(values):
            for value in (values.min(), values.max()):
                if not is_logged(path, float(value)):
                    raise damage_error(path, f"found {value} as {name}, which no run writes there")


def _dtype(name: str) -> str:
    return "int64" if name == "step" else "float64"
