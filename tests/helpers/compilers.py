"""Programs in place of C++ compilers, and a cache of kernels of a test's own."""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepstack.fast.native import Kernels, cache, find_kernels
from deepstack.fast.native.cache import DIGEST, cache_folder, key_of

NOBODY = 65534
"""The number of another user."""


@dataclass(frozen=True)
class Programs:
    """A folder of programs that is the whole of PATH; `calls` has a line for each call.

    library: a file with the bytes of real kernels.
    """

    folder: Path
    library: Path

    @property
    def calls(self) -> list[str]:
        """The names of the programs that were called, in order."""
        log = self.folder / "calls"
        return log.read_text().split() if log.exists() else []

    def add(self, name: str, text: str) -> Path:
        """Write a program of the shell; its last argument but none is the library's name."""
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho {name} >> "{self.folder}/calls"\n{text}\n')
        path.chmod(0o755)
        return path

    def add_good(self, name: str) -> Path:
        """Add a compiler that gives the real kernels."""
        return self.add(name, f'/bin/cp "{self.library}" kernels.so')

    def add_failing(self, name: str, message: str = "error: it is broken", code: int = 1) -> Path:
        """Add a compiler that fails with a message."""
        lines = "".join(f"echo {line!r} >&2\n" for line in message.splitlines())
        return self.add(name, f"{lines}exit {code}")

    def remove(self, name: str) -> None:
        """Remove a program."""
        (self.folder / name).unlink()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """No compilers yet, and an empty cache in tmp_path / 'cache'."""
    kernels = find_kernels(print)
    if isinstance(kernels, str):
        pytest.skip(kernels)
    folder, library = tmp_path / "programs", tmp_path / "real.so"
    folder.mkdir()
    library.write_bytes(library_in(cache_folder()).read_bytes()[:-DIGEST])
    monkeypatch.setattr(cache, "_by_folder", {})
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Programs(folder, library)


def library_in(folder: Path) -> Path:
    """Return the path of the present kernels in a cache folder."""
    return folder / f"kernels-{key_of()}.so"


def fresh(notices: list[str] | None = None) -> Kernels | str:
    """Find the kernels as another process would; its lines are added to `notices`."""
    cache._by_folder.clear()
    return find_kernels([].append if notices is None else notices.append)


def is_private(path: Path) -> bool:
    """Return whether only this user may read or change a file or folder."""
    state = path.stat()
    return state.st_uid == os.geteuid() and not stat.S_IMODE(state.st_mode) & 0o077


def signed(content: bytes) -> bytes:
    """Return a library as the cache holds it."""
    return content + hashlib.sha256(content).hexdigest().encode()
