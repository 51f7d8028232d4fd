"""A CSV file that only ever grows, whose rows can be computed again and compared."""

import contextlib
import hashlib
import io
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from deepstack.base.errors import ChangedLogError, DifferenceError
from deepstack.base.text import float32_text
from deepstack.records.files import (
    make_folder,
    open_file,
    open_log,
    read,
    sync_folder,
    trouble,
)


class Extent(NamedTuple):
    """The header and the first rows of a log: size in bytes, sha256, and the last row's step."""

    size: int
    sha256: str
    last_step: int | None


def extent(path: Path, step: int) -> Extent:
    """Return the extent of a log's rows up to a step; reads one line at a time."""
    digest, size, last_step = hashlib.sha256(), 0, None
    with trouble(path), contextlib.suppress(FileNotFoundError), open_file(path) as file:
        for line in file:
            cell = line.split(b",", 1)[0]
            row_step = int(cell) if cell.isdigit() else None
            is_beyond = size > 0 and (row_step is None or row_step > step)  # not of the header
            if is_beyond or not line.endswith(b"\n"):
                break
            digest.update(line)
            size += len(line)
            last_step = row_step
    return Extent(size, digest.hexdigest(), last_step)


class AppendLog:
    """Rows of a CSV file whose first column is the step, added one at a time and never changed.

    `write` hands each row to the operating system at once. A killed process therefore leaves its
    first rows, at worst with a torn last line, which the same row written again completes.

    `path`: the file.
    `columns`: names, the first one is `step`.
    `replay_from`: rows on disk after this step have to be written again: each is compared byte for
        byte. The default compares every row, also the row of step 0.

    `compared=False` is for values that differ between executions (timing): rows are appended after
    all rows on disk.

    `tolerance`: relative difference up to which a row written again counts as equal (for runs
        without determinism); the row on disk stays, but a torn one is written anew.  `tolerated`
        counts the rows that stayed and differ.

    The log keeps a running sha256 of its rows; `check` compares the file with it.

    Raises DifferenceError when a row is not the one on disk, ResourceError when the disk refuses.
    """

    def __init__(
        self,
        path: Path,
        columns: Iterable[str],
        replay_from: int = -1,
        *,
        compared: bool = True,
        tolerance: float = 0.0,
    ) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.compared = compared
        self.tolerance, self.tolerated = tolerance, 0
        header = (",".join(self.columns) + "\n").encode()
        # Some file systems, after a power cut, show zeros where bytes had not reached the disk.
        data = (read(path) or b"").rstrip(b"\0")
        if tolerance or not compared:  # a torn last line is not completed but written anew
            data = data[: data.rfind(b"\n") + 1]
        if not header.startswith(data[: len(header)]):
            raise self._difference(data.splitlines()[0], header)
        with trouble(path):
            make_folder(path.parent)
            self._file = open_log(path)
            self._file.truncate(len(data))
            if len(data) < len(header):
                self._append(header[len(data) :])
                data = header
                sync_folder(path.parent)
        rows = extent(path, replay_from)
        self.last_step = rows.last_step if compared else None
        size = rows.size if compared else len(data)
        self._sha256 = hashlib.sha256(data[:size])  # of the rows written, or found equal on disk
        self._old = io.BytesIO(data[size:])  # the rows that have to be written again

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row; columns that it lacks stay empty."""
        if unknown := sorted(row.keys() - set(self.columns)):
            raise ValueError(f"{self.path.name} has no column {', '.join(unknown)}")
        step = int(row["step"])
        if self.compared and self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path.name}: step {step} after step {self.last_step}")
        cells = [float32_text(row.get(column)) for column in self.columns]
        line = (",".join(cells) + "\n").encode()
        old = self._old.readline()
        if line.startswith(old):  # the same row, a torn one, or none
            self._append(line[len(old) :])
        elif self.tolerance and is_close(old, line, self.tolerance):
            line = old
            self.tolerated += 1
        else:
            raise self._difference(old, line)
        self._sha256.update(line)
        self.last_step = step

    def flush(self) -> None:
        """Wait until the rows are on the disk; a checkpoint that relies on them comes after."""
        with trouble(self.path):
            os.fsync(self._file)

    @property
    def sha256(self) -> str:
        """The sha256 of all rows written, whatever the file holds now."""
        return self._sha256.hexdigest()

    def check(self, *, ended: bool = False) -> None:
        """Raise ChangedLogError unless the file is the one opened and holds the rows written.

        Rows that a resume has yet to write again may follow them, until the run has ended.
        """
        wanted = self._sha256.copy()
        if not ended:
            wanted.update(self._old.getvalue()[self._old.tell() :])
        is_same = False
        with trouble(self.path), contextlib.suppress(FileNotFoundError):
            with open_file(self.path) as file:
                is_same = (
                    os.path.sameopenfile(file.fileno(), self._file.fileno())
                    and hashlib.file_digest(file, "sha256").digest() == wanted.digest()
                )
        if not is_same:
            raise ChangedLogError(
                f"{self.path}: was changed, replaced or removed while its run worked"
            )

    def close(self) -> None:
        """Flush and close; closing twice is harmless."""
        if not self._file.closed:
            with self._file:
                self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        """Write all bytes.

        Required by the planted faults short_write_not_noticed and full_disk_not_said.
        """
        with trouble(self.path):
            while data:
                data = data[self._file.write(data) :]

    def _difference(self, old: bytes, new: bytes) -> DifferenceError:
        was, now = (line.rstrip(b"\n").decode("ascii", "replace") for line in (old, new))
        cells = zip(self.columns, was.split(","), now.split(","), strict=False)
        column = next((name for name, one, two in cells if one != two), "step")
        return DifferenceError(
            f"{self.path}: a row written again differs from the one on disk, at step "
            f"{now.split(',')[0]} in column {column}\n"
            f"  on disk: {was}\n"
            f"  now:     {now}"
        )


def is_close(old: bytes, new: bytes, tolerance: float) -> bool:
    """Return whether two rows of one step have numbers equal within a relative tolerance."""
    before, now = old.split(b","), new.split(b",")
    if before[0] != now[0]:
        return False
    try:
        return all(
            a == b or math.isclose(float(a), float(b), rel_tol=tolerance)
            for a, b in zip(before, now, strict=True)
        )
    except ValueError:  # another number of cells, or one without a number
        return False
