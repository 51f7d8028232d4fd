"""Reads what a run's files hold: rows, numbers, arrays, JSON and YAML; other content is damage."""

from __future__ import annotations

import contextlib
import io
import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack.base import yaml_reader
from deepstack.base.errors import ResourceError
from deepstack.records import files, shapes

if TYPE_CHECKING:
    import numpy as np

LARGEST_FLOAT32 = 3.4028235e38 * (1 + 1e-6)


def last_rows(path: Path, size: int = 1024) -> tuple[list[str], list[list[str]]]:
    """Return the column names of a CSV file and the cells of the whole rows in its last bytes.

    Both are empty if there is no file, or if its first line is longer than `size` bytes.
    """
    names = b""
    with files.trouble(path), contextlib.suppress(FileNotFoundError), files.open_file(path) as file:
        names = file.readline(size)
        start = max(len(names), os.fstat(file.fileno()).st_size - size)
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]  # without a torn last line
    if not names.endswith(b"\n"):
        return [], []
    if start > len(names) and len(lines) > 1:
        del lines[0]  # its start may be missing
    rows = [line.decode("ascii", "replace").split(",") for line in lines]
    return names.decode("ascii", "replace").rstrip("\n").split(","), rows


def damage_error(path: Path, why: str) -> ResourceError:
    """Return the error for a file that is not as a run wrote it."""
    levels = 2 if path.parent.parent.name == "analysis" else int(path.suffix == ".npy")
    folder = path.parents[levels]
    return ResourceError(f"{path}: {why}; `deepstack verify {shlex.quote(str(folder))}` says more")


def read_npy(path: Path) -> np.ndarray:
    """Return the array in a .npy file.

    Raises ResourceError if it cannot be read, KeyError if there is no file.
    """
    import numpy as np

    data = files.read(path)
    if data is None:
        raise KeyError(path.stem)
    try:
        array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # numpy evaluates the header, which may raise anything
        # Hide numpy's message: it advises to allow pickles, which run code.
        raise damage_error(path, "is not an array of numbers") from error
    return array


def logged_number(path: Path, cell: str | None) -> float:
    """Return the number in a cell of a log, NaN for an empty one.

    Raises ResourceError for one that no run writes there.
    """
    try:
        number = float(cell or "nan")
    except ValueError as error:
        raise damage_error(path, f"is not a table of numbers ({error})") from error
    if cell and not is_logged(path, number):
        raise damage_error(path, f"found {cell:.20}, which no run writes there")
    return number


def is_logged(path: Path, number: float) -> bool:
    """Return whether a run writes such a number: times are finite, other values of float32."""
    if path.stem == "timing":
        return 0 <= number < shapes.LARGEST
    return not math.isfinite(number) or abs(number) <= LARGEST_FLOAT32


def npy_bytes(array: np.ndarray) -> bytes:
    """Return the content of the .npy file of an array."""
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def load_json(path: Path, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a file, {} without one.  Raises ResourceError for another shape."""
    data = files.read(path, files.LARGEST_TEXT)
    if data is None:
        return {}
    try:
        value = files.parse_object(data)
    except ValueError as error:
        raise damage_error(path, str(error) if data else "is empty") from error
    if problem := shapes.mismatch(value, shape):
        raise damage_error(path, problem)
    return value


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.  Raises ResourceError for a file without one."""
    root, problems = yaml_reader.read(files.read(path, files.LARGEST_TEXT) or b"", path.name)
    if problems:
        raise damage_error(path, f"is no YAML ({problems[0]})")
    value = root.plain()
    if not value or not isinstance(value, dict):
        raise damage_error(path, "is not a mapping" if value else "is empty or missing")
    return value
