"""Watches, stops or refuses the calls by which a process changes files below one folder.

    watch(folder, FAIL_ONCE, number=17, error=errno.ENOSPC, trace=path)     in the process itself
    read_trace(path)                                                        afterwards, anywhere

`storage_calls.c` does it on x86-64 Linux with a C compiler; else MISSING names the missing one.
"""

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WATCH, KILL_BEFORE, KILL_AMID, FAIL_ONCE, FAIL_ON, SHORT = range(6)
KINDS = (
    "", "create", "empty", "write", "resize", "rename", "unlink", "rmdir", "mkdir", "sync", "mark",
    "unknown",
)  # fmt: skip
HEAD = struct.Struct("=iiqqIIII")

MISSING = ""
if sys.platform != "linux" or platform.machine() != "x86_64":
    MISSING = "system calls are watched on x86-64 Linux only"
elif not shutil.which("cc"):
    MISSING = "no C compiler (cc) to build the watcher of system calls"

_library: ctypes.CDLL | None = None


@dataclass(frozen=True)
class Call:
    """One call that changed a file, or would have: failed is then the errno.

    number: its place among all that were counted.  place: where the bytes of a write went, the size
    of a resize, the value of a mark.
    """

    kind: str
    failed: int
    number: int
    place: int
    path: Path
    target: Path
    data: bytes


def build(folder: Path) -> Path:
    """Compile the library into a folder; its path."""
    source, made = Path(__file__).with_suffix(".c"), folder / "storage_calls.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


def load(library: Path) -> None:
    """Load the library into this process; nothing is watched yet."""
    global _library
    _library = ctypes.CDLL(str(library))
    _library.storage_start.argtypes = [
        ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_char_p,
    ]  # fmt: skip
    _library.storage_mark.argtypes = [ctypes.c_long]


def watch(folder: Path, mode: int, number: int = 0, error: int = 0, trace: str = "") -> None:
    """Watch this process, for the rest of its life."""
    assert _library is not None
    wanted = os.fsencode(trace) if trace else None
    failed = _library.storage_start(os.fsencode(folder), mode, number, error, wanted)
    if failed:
        raise OSError(failed, os.strerror(failed), "watching system calls")


def mark(value: int) -> None:
    """A remark in the trace; nothing where nobody watches."""
    if _library is not None:
        _library.storage_mark(value)


def read_trace(path: Path) -> list[Call]:
    """Return the calls that `watch` recorded, in order."""
    data, calls, start = path.read_bytes(), [], 0
    while start + HEAD.size <= len(data):  # a kill may have torn the last one
        kind, failed, number, place, first, second, size, _ = HEAD.unpack_from(data, start)
        start += HEAD.size
        middle, last = start + first, start + first + second
        path, target = (Path(os.fsdecode(name)) for name in (data[start:middle], data[middle:last]))
        start = last + size
        calls.append(Call(KINDS[kind], failed, number, place, path, target, data[last:start]))
    return calls
