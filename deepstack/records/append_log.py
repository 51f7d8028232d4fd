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
from types import TracebackType
from typing import Any, BinaryIO, Self

from deepstack.errors import ChangedLogError, DeepstackError, DifferenceError
from deepstack.records.files import make_folder, reading, sync_folder, trouble

# What is read of a log at once; a row has some hundred bytes.
BLOCK = 2**16
# Bytes above which a line is no row.
LONGEST_LINE = 2**20

Value = float | int | None


def number_text(value: Any) -> str:
    """The shortest text that reads back as the same float32; integers stay integers.

    None is the empty cell, NaN is `nan`, infinities are `inf` and `-inf`. The text depends on
    nothing but the value: neither on the locale nor on the machine.
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


class AppendLog:
    """Rows of a CSV file whose first column is the step, added one at a time and never changed.

    A row goes to the operating system as soon as it is written, so a killed process leaves a
    prefix of what it would have written, at worst with a torn last line. After `open(replay_from)`
    the rows on disk behind that step are expected to be written again: they are compared byte for
    byte, and a torn last line is completed rather than replaced.

    `path`: the file. `columns`: names, the first one is `step`.
    `compared=False` is for values that differ from one execution to the next (timing): rows are
    then appended behind whatever is there, and only a torn last line is removed.
    `tolerance`: relative difference below which a replayed row counts as the same one (for runs
    without determinism); the row on disk stays, and `tolerated` counts such rows.

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
        self._size = 0  # bytes of the same rows
        self._lines = array("I")  # crc32 of each of these lines, to find the one that changed

    def open(self, replay_from: int = -1) -> Self:
        """Open the file for writing; rows after step `replay_from` will be compared.

        The default replays everything, the row of step 0 included; on a new file it simply
        starts it.
        """
        header = (",".join(self.columns) + "\n").encode()
        # Some file systems, after a power cut, show zeros where bytes had not reached the disk.
        data = self._read().rstrip(b"\0")
        self._cut(len(data))
        # A torn header is completed like any torn line; a complete one must be ours.
        kept = data[: len(header)]
        if kept != header[: len(kept)]:
            raise self._difference(_first_line(data), header)
        with trouble(self.path):
            make_folder(self.path.parent)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if len(data) < len(header):
            self._append(header[len(data) :])
            data = header
            with trouble(self.path):
                sync_folder(self.path.parent)
        if self.compared:
            done = max(_end_of(data, replay_from), len(header))
            self._expected, self._at = data[done:], 0
        else:
            done = data.rfind(b"\n") + 1
            self._cut(done)
        self._count(data[:done])
        self.last_step = _last_step(data[len(header) : done]) if self.compared else None
        return self

    def write(self, row: Mapping[str, Any] | Sequence[Any]) -> None:
        """Add one row: a mapping from column to value (absent ones stay empty) or a sequence."""
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
        self._size += len(lines)
        self._lines.extend(map(zlib.crc32, io.BytesIO(lines)))

    def _place(self, line: bytes) -> bytes:
        """Append the missing part of a line; return the line that is on disk afterwards."""
        # A run may have as many rows to write again as it has time between two checkpoints, so
        # what is left of them is not copied for each.
        there = self._expected[self._at : self._at + len(line)]
        if not there:
            self._append(line)
        elif there == line[: len(there)]:
            self._at += len(there)
            if len(there) < len(line):
                self._append(line[len(there) :])
        elif self.tolerance and (old := self._tolerable(line)) is not None:
            self.tolerated += 1
            self._at += len(old)
            return old
        elif self.tolerance and self._expected.find(b"\n", self._at) < 0:
            # Without determinism a torn line cannot be completed, so it is written anew.
            assert self._file is not None
            with trouble(self.path):
                size = os.fstat(self._file).st_size
                os.ftruncate(self._file, size - len(self.remaining))
            self._at = len(self._expected)
            self._append(line)
        else:
            raise self._difference(self._next_line(), line)
        return line

    def _tolerable(self, line: bytes) -> bytes | None:
        """The complete line expected here when it equals `line` within the tolerance."""
        old = self._next_line()
        before, now = old.rstrip(b"\n").split(b","), line.rstrip(b"\n").split(b",")
        if not old.endswith(b"\n") or len(before) != len(now) or before[0] != now[0]:
            return None
        for a, b in zip(before, now, strict=True):
            try:
                if a != b and not math.isclose(float(a), float(b), rel_tol=self.tolerance):
                    return None
            except ValueError:
                return None
        return old

    @property
    def remaining(self) -> bytes:
        """What lies on disk behind the last row written: empty once all is written again."""
        return self._expected[self._at :]

    def _next_line(self) -> bytes:
        """The line on disk in whose place the next row is written."""
        end = self._expected.find(b"\n", self._at) + 1
        return self._expected[self._at : end or None]

    def flush(self) -> None:
        """Wait until the rows are on the disk itself: before a checkpoint that counts on them."""
        if self._file is not None:
            with trouble(self.path):
                os.fsync(self._file)

    @property
    def sha256(self) -> str:
        """sha256 of the rows written since the file began, whatever the file holds now."""
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
            size = file.seek(0, os.SEEK_END)
            if size != self._size + len(rest) or _sha256(file, size) != wanted.hexdigest():
                raise self._changed(self._first_change(file, size, rest))

    def _first_change(self, file: BinaryIO, size: int, rest: bytes) -> str:
        """Where the file differs from the rows written, in words."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def offset_after(self, step: int) -> int:
        """Bytes up to and including the last complete row whose step is at most `step`."""
        with self._reading() as file:
            return _offset_after(file, step)

    def sha256_upto(self, step: int) -> str:
        """sha256 of the file up to `offset_after(step)`: what a checkpoint remembers of the log."""
        with self._reading() as file:
            return _sha256(file, _offset_after(file, step))

    def last_upto(self, step: int) -> int | None:
        """The step of the last row that is not behind `step`; None where there is no such row."""
        with self._reading() as file:
            end = _offset_after(file, step)
            file.seek(max(0, end - BLOCK))
            return _last_step(file.read(min(end, BLOCK)))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[BinaryIO]:
        """The file, to read in blocks: of a long run it is larger than the model."""
        with trouble(self.path):
            try:
                file: BinaryIO = reading(self.path)
            except FileNotFoundError:
                file = io.BytesIO()
            with file:
                yield file

    def _read(self) -> bytes:
        with self._reading() as file:
            return file.read()

    def _cut(self, size: int) -> None:
        """Remove what lies behind so many bytes."""
        if self.path.exists() and self.path.stat().st_size > size:
            with trouble(self.path):
                os.truncate(self.path, size)

    def _append(self, data: bytes) -> None:
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


def _first_line(data: bytes) -> bytes:
    end = data.find(b"\n") + 1
    return data[:end] if end else data


def _step_of(line: bytes) -> int | None:
    cell = line.split(b",", 1)[0]
    return int(cell) if cell.isdigit() else None


def _end_of(data: bytes, step: int) -> int:
    """Offset after the last complete line that is the header or a row up to `step`."""
    end = data.rfind(b"\n") + 1
    while end > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        found = _step_of(data[start:end])
        if start == 0 or (found is not None and found <= step):
            return end
        end = start
    return 0


def _sha256(file: BinaryIO, size: int) -> str:
    """sha256 of the first bytes of a file, which is read in blocks."""
    found = hashlib.sha256()
    file.seek(0)
    while data := file.read(min(size, BLOCK)):
        found.update(data)
        size -= len(data)
    return found.hexdigest()


def _offset_after(file: BinaryIO, step: int) -> int:
    """`_end_of` for a whole file, of which no more than its end is read where that is enough."""
    size, length = file.seek(0, os.SEEK_END), BLOCK
    while True:
        start = max(0, size - length)
        file.seek(start)
        data = file.read(size - start)
        if start == 0:
            return _end_of(data, step)
        # What stands before the first newline may be a part of a row: it is left out.
        first = data.find(b"\n")
        if first >= 0 and (end := _end_of(data[first:], step)) > 1:
            return start + first + end
        length *= 4


def _last_step(rows: bytes) -> int | None:
    return _step_of(rows[rows.rfind(b"\n", 0, -1) + 1 :]) if rows else None
