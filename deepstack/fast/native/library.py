"""Loads the compiled kernels from their bytes, so that checked bytes are the ones that run."""

import ctypes
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deepstack.fast.native.compiler import ForbiddenError, UnavailableError, cure_of
from deepstack.fast.native.record import RECORD

# More kinds than there are: a library that names more is broken.
MOST_KINDS = 1000


class Kernels(NamedTuple):
    """The loaded kernels.

    run: (address of a table, number of records, threads, address of the plan or 0) -> None.
    plan: (address of a table, number of records, threads, address of 1 + threads 32-bit integers
        for each record, which it writes) -> None.
    run_part: (address of a record, thread, threads, address of its plan) -> None; for tests.
    kinds: number of each kind by name.
    description: instruction width and hash of the library's bytes.
    """

    run: Callable[[int, int, int, int], None]
    plan: Callable[[int, int, int, int], None]
    run_part: Callable[[int, int, int, int], None]
    kinds: dict[str, int]
    description: str


def load(content: bytes) -> Kernels:
    """Load a library and read its kinds of operations; raises UnavailableError."""
    loaded = link(content)
    address, integer = ctypes.c_void_p, ctypes.c_int
    try:
        loaded.deepstack_kind.restype = ctypes.c_char_p
        for function in (loaded.deepstack_run, loaded.deepstack_plan):
            function.argtypes, function.restype = [address, ctypes.c_long, integer, address], None
        loaded.deepstack_run_part.argtypes = [address, integer, integer, address]
        loaded.deepstack_run_part.restype = None
        size, width = loaded.deepstack_record_size(), 32 * loaded.deepstack_vector_width()
        functions = loaded.deepstack_run, loaded.deepstack_plan, loaded.deepstack_run_part
    except AttributeError as error:
        raise UnavailableError(f"the library of the kernels is broken: {error}") from None
    if size != RECORD.size:
        raise UnavailableError("the compiler lays records out in an unknown way")
    kinds: dict[str, int] = {}
    while len(kinds) < MOST_KINDS and (name := loaded.deepstack_kind(len(kinds))):
        kinds[name.decode("ascii", "replace")] = len(kinds)
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Kernels(*functions, kinds, f"{width} bits, {digest}")


def link(content: bytes) -> ctypes.CDLL:
    """Return the linked library.

    It is linked from memory, or where the system forbids that, from a new file in the temporary
    folder.  Raises UnavailableError for a library that cannot be linked, ForbiddenError if none
    can.
    """
    try:
        return link_in_memory(content)
    except AttributeError:  # a system without files in memory
        pass
    except OSError as error:
        if is_at_fault(error):
            raise UnavailableError(unloadable(error)) from None
    try:
        return link_in_temporary_folder(content)
    except OSError as error:
        kind = UnavailableError if is_at_fault(error) else ForbiddenError
        raise kind(unloadable(error)) from None


def is_at_fault(error: OSError) -> bool:
    """Return whether the linker refuses the library itself; the system's refusals have numbers."""
    return error.errno is None and "failed to map" not in str(error)


def unloadable(error: OSError) -> str:
    """Return the reason for which a library cannot be loaded, and its cure."""
    return f"the kernels cannot be loaded: {error}{cure_of(str(error))}"


def link_in_memory(content: bytes) -> ctypes.CDLL:
    """Link a library from a file in memory, which no other process can reach by a name."""
    descriptor = os.memfd_create("deepstack-kernels")
    try:
        with open(os.dup(descriptor), "wb") as file:
            file.write(content)
        # The descriptor stays open: the linker would take a later one of its number for this one.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except BaseException:
        os.close(descriptor)
        raise


def link_in_temporary_folder(content: bytes) -> ctypes.CDLL:
    """Link a library from a new file, unless another user could put another file in its place."""
    parent = Path(tempfile.gettempdir()).resolve()
    for folder in (parent, *parent.parents):
        state = folder.stat()
        is_shared = state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX
        if is_shared or state.st_uid not in (0, os.geteuid()):
            raise ForbiddenError(
                f"the kernels cannot be loaded: another user could exchange folders in {folder}, "
                "which is above the temporary folder; set TMPDIR to another one"
            )
    with tempfile.TemporaryDirectory(prefix="deepstack-", dir=parent) as private:
        path = Path(private) / "kernels.so"
        path.write_bytes(content)
        return ctypes.CDLL(str(path))
