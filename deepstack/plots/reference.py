"""Published values beside a study, which charts draw over its own."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from deepstack.base.errors import ConfigError
from deepstack.plots.chart import CHARTS
from deepstack.records import Run
from deepstack.records.folder import absolute

REFERENCE_COLUMNS = ("chart", "x", "y", "label")


def read_reference(
    directories: Sequence[str | os.PathLike[str]], runs: Sequence[Run]
) -> pd.DataFrame | None:
    """Published values found beside the studies of these runs, or None.

    reference.csv has the columns chart, x, y, label and, if a chart has several panels, panel.  Its
    first line separates them by commas, semicolons or tabs.  Without commas between columns, x and
    y may have decimal commas.

    Raises ConfigError with the line of a value that is no number, of a chart that does not exist,
    or of a row with more values than columns.
    """
    folders_given = [absolute(Path(directory)) for directory in directories]
    folders = [*folders_given, *(absolute(run.path).parent for run in runs)]
    tables = []
    for folder in {folder.resolve(): folder for folder in folders}.values():
        path = folder / "reference.csv"
        if not path.is_file():
            continue
        try:
            tables.append(read_texts(path))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path}{error}; expected chart,x,y,label") from error
    return pd.concat(tables, ignore_index=True) if tables else None


def read_texts(path: Path) -> pd.DataFrame:
    """Return a table of which x and y are numbers, and all else is a text as written: `NA`, `007`.

    A line that begins with # is a comment; an empty `panel` is missing.  Raises ValueError, whose
    text begins with the line's number.
    """
    lines = path.read_text("utf-8-sig").splitlines()
    kept = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    head = kept[0][1] if kept else ""
    separator = next((sign for sign in ";\t" if sign in head and "," not in head), ",")
    names = [name.strip() for name in head.split(separator)]
    if missing := [name for name in REFERENCE_COLUMNS if name not in names]:
        raise ValueError(f": no column {', '.join(missing)}")
    rows = []
    reader = csv.reader((f"{line}\n" for _, line in kept[1:]), delimiter=separator)
    for cells in reader:
        number = kept[reader.line_num][0]  # of the last line of a text with several
        if len(cells) != len(names):
            extra = '; quote a label that has one: "a, b"' * (len(cells) > len(names))
            text = f"found {len(cells)} values{extra}"
            raise ValueError(f":{number}: {text}; allowed {len(names)}, {separator.join(names)}")
        row: dict[str, Any] = dict(zip(names, cells, strict=True))
        for name in ("x", "y"):
            row[name] = number_of(row[name], separator, f":{number}: {name}")
        try:
            CHARTS[row["chart"]]
        except ConfigError as error:
            raise ValueError(f":{number}: {error}") from None
        rows.append(row)
    table = pd.DataFrame(rows, columns=names)
    return table.assign(panel=table["panel"].replace("", None)) if "panel" in table else table


def number_of(text: str, separator: str, where: str) -> float:
    """Return a number, with a decimal comma if commas separate no columns."""
    try:
        return float(text if separator == "," else text.replace(",", "."))
    except ValueError:
        raise ValueError(f"{where}: found {text!r}; allowed a number such as 0.5") from None
