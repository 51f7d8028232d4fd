"""A CSV file that only ever grows, whose bytes can be recomputed and compared."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from deepstack.errors import ChangedLogError, DeepstackError, DifferenceError
from deepstack.records.files import make_folder, open_file, sync_folder, trouble

# Bytes of the longest line that is read as a row.
LONGEST_LINE = 2**20

Value = float | int | None


def number_text(value: Any) -> str:
    """Return the shortest text that reads back as the same float32; integers stay integers.

    None gives the empty cell, NaN `nan`, infinities `inf` and `-inf`. The text depends on the value
    alone, not on the locale or the machine.
    """
    if value is None:
        return ""
    import numpy as np

    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return str(int(value))
    number = float(value)
    if math.isnan(number):
        return "nan"
    with np.errstate(over="ignore"):
        return str(np.float32(number))


class Extent(NamedTuple):
    """The header and the first rows of a log: size in bytes, sha256, and the last row's step."""

    size: int
    sha256: str
    last_step: int | None


class AppendLog:
    """Rows of a CSV file whose first column is the step, added one at a time and never changed.

    `write` hands each row to the operating system at once. A killed process therefore leaves its
    first rows, at worst with a torn last line. `open(replay_from)` expects the rows after that step
    to be written again: each is compared byte for byte, and a torn last line is completed.

    `path`: the file. `columns`: names, the first one is `step`.
    `compared=False` is for values that differ between executions (timing): rows are appended after
    all rows on disk, and only a torn last line is removed.
    `tolerance`: relative difference up to which a replayed row counts as equal (for runs without
    determinism); the row on disk stays, and `tolerated` counts such rows.

    The log keeps a running sha256 of its rows; `check` compares the file with it.

    Raises DifferenceError when a row is not the one on disk, ResourceError when the disk refuses.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str],
        *,
        compared: bool = True,
        tolerance: float = 0.0,
    ) -> None:
        self.path = Path(path)
        self.columns = tuple(columns)
        self.compared = compared
        self.tolerance = tolerance
        self.tolerated = 0
        self.last_step: int | None = None
        self._expected = b""
        self._at = 0  # how much of it has been written again
        self._file: int | None = None
        self._sha256 = hashlib.sha256()  # of the rows written, or found equal on disk
        self._lines = array("I")  # crc32 of each of these lines, to find the one that changed

    def open(self, replay_from: int = -1) -> Self:
        """Open the file for writing; rows after step `replay_from` will be compared.

        The default compares every row, that of step 0 included, and starts a missing file.
        """
        header = (",".join(self.columns) + "\n").encode()
        # Some file systems, after a power cut, show zeros where bytes had not reached the disk.
        with self._reading() as file:
            data = file.read().rstrip(b"\0")
        self._cut(len(data))
        # A torn header is completed like any torn line; a complete one must have these columns.
        start = data[: len(header)]
        if start != header[: len(start)]:
            raise self._difference(data[: data.find(b"\n") + 1] or data, header)
        with trouble(self.path):
            make_folder(self.path.parent)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if len(data) < len(header):
            self._append(header[len(data) :])
            data = header
            with trouble(self.path):
                sync_folder(self.path.parent)
        if self.compared:
            done = max(sum(map(len, _rows_upto(io.BytesIO(data), replay_from))), len(header))
            self._expected, self._at = data[done:], 0
        else:
            done = data.rfind(b"\n") + 1
            self._cut(done)
        self._count(data[:done])
        last_line = data[data.rfind(b"\n", 0, done - 1) + 1 : done]
        self.last_step = _step_of(last_line) if self.compared else None
        return self

    def write(self, row: Mapping[str, Any] | Sequence[Any]) -> None:
        """Add one row: a mapping from column to value (missing ones stay empty) or a sequence."""
        if self._file is None:
            raise ValueError(f"{self.path.name} is not open")
        if isinstance(row, Mapping):
            unknown = sorted(set(row) - set(self.columns))
            if unknown:
                raise ValueError(f"{self.path.name} has no column {', '.join(unknown)}")
            values: list[Any] = [row.get(column) for column in self.columns]
        else:
            values = list(row)
            if len(values) != len(self.columns):
                raise ValueError(f"{self.path.name} has {len(self.columns)} columns")
        step = int(values[0])
        if self.compared and self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path.name}: step {step} after step {self.last_step}")
        line = (",".join(map(number_text, values)) + "\n").encode()
        self._count(self._place(line))
        self.last_step = step

    def _count(self, lines: bytes) -> None:
        """Add whole lines to the running checksums."""
        self._sha256.update(lines)
        self._lines.extend(map(zlib.crc32, io.BytesIO(lines)))

    def _place(self, line: bytes) -> bytes:
        """Append the missing part of a line; return the line that is on disk afterwards.

        Required by the planted faults torn_line_kept, rows_written_twice and
        log_truncated_on_resume.
        """
        # Many rows may have to be written again, so the remaining ones are not copied for each.
        there = self._expected[self._at : self._at + len(line)]
        if there == line[: len(there)]:  # also if nothing is there
            self._at += len(there)
            self._append(line[len(there) :])
        elif self.tolerance and (old := self._tolerable(line)) is not None:
            self.tolerated += 1
            self._at += len(old)
            return old
        elif self.tolerance and self._expected.find(b"\n", self._at) < 0:
            # Without determinism a torn line cannot be completed, so it is written anew.
            self._cut(self.path.stat().st_size - len(self.remaining))
            self._at = len(self._expected)
            self._append(line)
        else:
            raise self._difference(self._next_line(), line)
        return line

    def _tolerable(self, line: bytes) -> bytes | None:
        """Return the complete line expected here if it equals `line` within the tolerance."""
        old = self._next_line()
        before, now = old.rstrip(b"\n").split(b","), line.rstrip(b"\n").split(b",")
        if not old.endswith(b"\n") or len(before) != len(now) or before[0] != now[0]:
            return None
        try:
            is_close = all(
                a == b or math.isclose(float(a), float(b), rel_tol=self.tolerance)
                for a, b in zip(before, now, strict=True)
            )
        except ValueError:
            return None
        return old if is_close else None

    @property
    def remaining(self) -> bytes:
        """The bytes on disk after the last row written; empty once all rows are written again."""
        return self._expected[self._at :]

    def _next_line(self) -> bytes:
        """Return the line on disk that the next row must equal."""
        end = self._expected.find(b"\n", self._at) + 1
        return self._expected[self._at : end or None]

    def flush(self) -> None:
        """Wait until the rows are on the disk; a checkpoint that relies on them comes after."""
        if self._file is not None:
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
        if self._file is None:
            return
        with trouble(self.path):
            try:
                same = os.path.samestat(os.lstat(self.path), os.fstat(self._file))
            except FileNotFoundError:
                raise self._changed("was removed") from None
            if not same:
                raise self._changed("was replaced by another file")
        rest = b"" if ended else self.remaining
        wanted = self._sha256.copy()
        wanted.update(rest)
        with self._reading() as file:
            if hashlib.file_digest(file, "sha256").digest() != wanted.digest():  # type: ignore[arg-type]
                raise self._changed(self._first_change(file, rest))

    def _first_change(self, file: BinaryIO, rest: bytes) -> str:
        """Describe where the file differs from the rows written.

        Required by test_a_changed_log_is_not_sealed_and_the_run_starts_again.
        """
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        number = at = 0
        for crc in (*self._lines, *map(zlib.crc32, io.BytesIO(rest))):
            line, number = file.readline(LONGEST_LINE), number + 1
            if zlib.crc32(line) != crc:
                if at + len(line) == size and not line.endswith(b"\n"):
                    return f"was cut off in line {number} (at byte {size})"
                return f"changed in line {number} (from byte {at}), which now is {line[:200]!r}"
            at += len(line)
        return f"has {size - at} bytes too many after line {number} (from byte {at})"

    def _changed(self, how: str) -> ChangedLogError:
        return ChangedLogError(f"{self.path}: {how} while its run worked")

    def close(self) -> None:
        """Flush and close; closing twice is harmless."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> Self:
        return self if self._file is not None else self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def upto(self, step: int) -> Extent:
        """Return the extent of the rows up to a step; reads one line at a time."""
        digest, size, last = hashlib.sha256(), 0, None
        with self._reading() as file:
            for line in _rows_upto(file, step):
                digest.update(line)
                size, last = size + len(line), _step_of(line)
        return Extent(size, digest.hexdigest(), last)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[BinaryIO]:
        """Open the file to read it in blocks; the log of a long run is larger than its model."""
        with trouble(self.path):
            try:
                file: BinaryIO = open_file(self.path)
            except FileNotFoundError:
                file = io.BytesIO()
            with file:
                yield file

    def _cut(self, size: int) -> None:
        """Cut the file off after `size` bytes."""
        if self.path.exists() and self.path.stat().st_size > size:
            with trouble(self.path):
                os.truncate(self.path, size)

    def _append(self, data: bytes) -> None:
        """Write all bytes.

        Required by the planted faults short_write_not_noticed and full_disk_not_said.
        """
        assert self._file is not None
        with trouble(self.path):
            while data:
                data = data[os.write(self._file, data) :]

    def _difference(self, old: bytes, new: bytes) -> DeepstackError:
        was, now = (line.rstrip(b"\n").decode("ascii", "replace") for line in (old, new))
        return DifferenceError(
            f"{self.path}: a row written again differs from the one on disk\n"
            f"  on disk: {was}\n"
            f"  now:     {now}"
        )


def _step_of(line: bytes) -> int | None:
    cell = line.split(b",", 1)[0]
    return int(cell) if cell.isdigit() else None


def _rows_upto(file: BinaryIO, step: int) -> Iterator[bytes]:
    """Yield the header and the complete rows up to a step."""
    line = file.readline(LONGEST_LINE)
    while line.endswith(b"\n"):
        yield line
        line = file.readline(LONGEST_LINE)
        row_step = _step_of(line)
        if row_step is None or row_step > step:
            return
