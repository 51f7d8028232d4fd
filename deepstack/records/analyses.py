"""Analyses of a run's trained weights: arrays in analysis/<name>/, replaced as a whole folder."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstack.records.file_values import damage_error, npy_bytes, read_npy
from deepstack.records.files import (
    CHECKSUMS,
    mapping,
    remove_hidden_folders,
    replace_all,
    sha256,
    sync_folder,
    trouble,
)
from deepstack.records.folder import RunFolder

if TYPE_CHECKING:
    import numpy as np

COLUMNS = "columns.json"
# The keys of columns.json and the types of their values.
PARTS = {"columns": dict, "scalars": dict, "about": dict, "notes": list}
NAME = re.compile(r"[a-z][a-z0-9_]*")


class Column(NamedTuple):
    """The meaning of an array of an analysis, or, without axes, of a number."""

    symbol: str
    meaning: str
    axes: str = ""
    unit: str = ""


@dataclass
class Analysis:
    """The result of one analysis: arrays and numbers, each with its meaning.

    arrays: name -> values.
    scalars: name -> number, or None if it is not finite.
    columns: name of each -> symbol, meaning, axes (of an array) and unit.
    about: on what it was measured: step, sequences, sha256 of the weights, … notes: sentences on
        values that are left out or are estimates.
    known: the meaning of the names that `add` accepts.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    scalars: dict[str, float | None] = field(default_factory=dict)
    columns: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    known: Mapping[str, Column] = field(default_factory=dict, repr=False)

    def add(self, name: str, values: Any) -> None:
        """Add an array, or a number if its column has no axes."""
        import numpy as np

        column = self.known[name]
        self.columns[name] = column._asdict()
        if column.axes:
            self.arrays[name] = np.asarray(values)
        else:
            number = float(values)
            self.scalars[name] = number if np.isfinite(number) else None


def write_analysis(folder: RunFolder, name: str, analysis: Analysis) -> Path:
    """Write analysis/<name>/ and return its path; an earlier one is replaced as a whole.

    Readers see the old folder, the new one, or for an instant none, never a mixture of both.  The
    caller holds the folder's lock.  Raises ResourceError when the disk refuses.
    """
    parent = folder.analysis_dir
    target, ending = parent / name, secrets.token_hex(4)
    draft, old = (parent / f".{kind}-{name}-{ending}" for kind in ("draft", "gone"))
    arrays = [(f"{key}.npy", npy_bytes(values)) for key, values in analysis.arrays.items()]
    with trouble(target):
        remove_hidden_folders(parent)
        replace_all(draft, arrays, folder.path)
        folder.write_json(draft / COLUMNS, {part: getattr(analysis, part) for part in PARTS})
        sums = {path.name: sha256(path) for path in sorted(draft.iterdir())}
        folder.write_json(draft / CHECKSUMS, sums)
        with contextlib.suppress(FileNotFoundError):
            target.rename(old)
        draft.rename(target)
        sync_folder(parent)
        shutil.rmtree(old, ignore_errors=True)
    return target


def read_analysis(folder: RunFolder, name: str) -> Analysis:
    """Return the analysis of this name.

    Raises KeyError if there is none, ResourceError if it cannot be read.
    """
    path = folder.analysis_dir / name
    if not NAME.fullmatch(name) or not path.is_dir():
        raise KeyError(name)
    try:
        about = mapping(path / COLUMNS)
    except (OSError, ValueError) as error:
        raise damage_error(path / COLUMNS, str(error)) from error
    parts = {part: about.get(part, kind()) for part, kind in PARTS.items()}
    if not all(isinstance(parts[part], kind) for part, kind in PARTS.items()):
        raise damage_error(path / COLUMNS, "is not as an analysis has it")
    arrays = {file.stem: read_npy(file) for file in sorted(path.glob("[a-z]*.npy"))}
    return Analysis(arrays, **parts)


def analysis_names(folder: RunFolder) -> list[str]:
    """Return the names of the analyses of a run, sorted; drafts have other names."""
    paths = folder.analysis_dir.glob("*")
    return sorted(path.name for path in paths if NAME.fullmatch(path.name) and path.is_dir())
