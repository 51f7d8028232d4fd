"""Published values beside a study, which charts draw over its own."""

import io
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from deepstack.base.errors import ConfigError
from deepstack.records import Run
from deepstack.records.folder import absolute

REFERENCE_COLUMNS = ("chart", "x", "y", "label")


def read_reference(
    directories: Sequence[str | os.PathLike[str]], runs: Sequence[Run]
) -> pd.DataFrame | None:
    """Published values found beside the studies of these runs, or None.

    reference.csv has the columns chart, x, y, label and, if a chart has several panels, panel.
    """
    folders_given = [absolute(Path(directory)) for directory in directories]
    folders = [*folders_given, *(absolute(run.path).parent for run in runs)]
    tables = []
    for folder in {folder.resolve(): folder for folder in folders}.values():
        path = folder / "reference.csv"
        if not path.is_file():
            continue
        try:
            table = read_texts(path)
            missing = [name for name in REFERENCE_COLUMNS if name not in table]
            if missing:
                raise ValueError(f"no column {', '.join(missing)}")
            table[["x", "y"]] = table[["x", "y"]].astype(float)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path}: {error}; expected chart,x,y,label") from error
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else None


def read_texts(path: Path) -> pd.DataFrame:
    """Return a table in which each cell is a text as written: `None`, `NA`, `007`, `a # b`.

    A line that begins with # is a comment; an empty `panel` is missing.
    """
    lines = [line for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    content = "\n".join(line for line in lines if not line.startswith("#"))
    table = pd.read_csv(io.StringIO(content), dtype=str, keep_default_na=False)
    return table.assign(panel=table["panel"].replace("", None)) if "panel" in table else table
