"""The kernels that are loaded are the bytes that were checked, whoever moves folders meanwhile."""

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from helpers.compilers import NOBODY, Programs, fresh, library_in, signed
from helpers.compilers import programs as programs
from helpers.sampling import some

from deepstack.fast.native import Kernels, cache, library
from deepstack.fast.native.compiler import UnavailableError

IS_ROOT = os.geteuid() == 0


class Exchange:
    """The user's folder and another one with a foreign library, which take each other's place."""

    def __init__(self, programs: Programs, parent: Path) -> None:
        self.folder, self.other = cache.cache_folder(), parent / "other"
        self.renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
        if self.renameat2 is None:
            pytest.skip("this system cannot exchange two folders at once")
        programs.add_good("g++")
        result = fresh()
        assert isinstance(result, Kernels)
        self.right = result.description
        self.other.mkdir(mode=0o777)
        content = programs.library.read_bytes() + bytes(1)  # the same code by another name
        library_in(self.other).write_bytes(signed(content))
        library_in(self.other).chmod(0o600)
        if IS_ROOT:
            os.chown(library_in(self.other), NOBODY, NOBODY)
            os.chown(self.other, NOBODY, NOBODY)
        else:
            self.other.chmod(0o777)

    def swap(self) -> None:
        """Exchange the folders at once."""
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        folder, other = bytes(self.folder), bytes(self.other)
        assert self.renameat2(here, folder, here, other, exchange) == 0

    def is_foreign(self, result: Kernels | str) -> bool:
        """Return whether the foreign library was loaded."""
        return isinstance(result, Kernels) and result.description != self.right


def calling_at(number: int, action: Callable[[], None], function: Callable[[], Any]) -> int:
    """Call a function, and `action` before its call number `number` of a function in C.

    Returns how many such calls it makes.
    """
    count = 0

    def profile(_: object, event: str, __: object) -> None:
        nonlocal count
        if event == "c_call":
            count += 1
            if count == number:
                sys.setprofile(None)
                action()
                sys.setprofile(profile)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("compiles", some([True, False], 2))
def test_no_exchange_of_folders_loads_a_foreign_library(
    compiles: bool, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders change places before every call of the system, one after the other."""
    exchange = Exchange(programs, tmp_path)
    results: list[Kernels | str] = []

    def find() -> None:
        results.append(fresh())

    calls = calling_at(-1, lambda: None, find)
    assert calls > 30
    loaded = refused = 0
    for number in range(1, calls, 7 if compiles else 1):
        if compiles:
            library_in(exchange.folder).unlink(missing_ok=True)
        calling_at(number, exchange.swap, find)
        assert not exchange.is_foreign(results[-1])
        loaded += isinstance(results[-1], Kernels)
        refused += isinstance(results[-1], str)
        exchange.swap()
        assert len(list(exchange.other.iterdir())) == 1, "something was written there"
    assert loaded and refused


def exchange_for_ever(exchange: Exchange) -> None:
    """Exchange the folders again and again."""
    while True:
        exchange.swap()


@pytest.mark.slow
def test_a_loop_of_exchanges_beside_many_loads_loads_no_foreign_library(
    programs: Programs, tmp_path: Path
) -> None:
    exchange = Exchange(programs, tmp_path)
    attacker = get_context("fork").Process(target=exchange_for_ever, args=[exchange], daemon=True)
    attacker.start()
    try:
        results = [fresh() for _ in range(1000)]
    finally:
        attacker.kill()
        attacker.join()
    assert not any(map(exchange.is_foreign, results))
    assert any(isinstance(one, Kernels) for one in results)


def test_two_libraries_of_one_process_are_two(programs: Programs) -> None:
    content = programs.library.read_bytes()
    one, two = library.load(content), library.load(content + bytes(1))
    assert one.description != two.description
    assert one.kinds == two.kinds


@pytest.fixture
def without_memory_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The temporary folder of a system that has no files in memory."""

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_system_without_files_in_memory_links_a_temporary_file(
    programs: Programs, without_memory_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = programs.library.read_bytes()
    before = sorted(without_memory_files.iterdir())
    assert library.load(content).kinds
    monkeypatch.delattr(os, "memfd_create")
    assert library.load(content).kinds
    assert sorted(without_memory_files.iterdir()) == before


def test_a_temporary_folder_in_which_others_exchange_folders_is_not_used(
    programs: Programs, without_memory_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, shared = programs.library.read_bytes(), without_memory_files / "shared"
    (shared / "own").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(shared / "own"))
    shared.chmod(0o777)
    with pytest.raises(UnavailableError, match=rf"exchange folders in {shared}.*TMPDIR"):
        library.load(content)
    shared.chmod(0o1777)
    assert library.load(content).kinds


def test_after_a_library_of_another_system_the_next_compiler_is_tried(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /proc/self/fd/9)"

    def refuse(path: str) -> None:
        raise OSError(message)

    monkeypatch.setattr("ctypes.CDLL", refuse)
    programs.add_good("g++")
    programs.add_good("clang++")
    reason = str(fresh())
    assert reason.count(message) == 2 and "name an older compiler by CXX" in reason
    assert programs.calls == ["g++", "clang++"]


def test_a_file_system_that_runs_no_program_names_the_cure_once(
    programs: Programs, without_memory_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    programs.add_good("g++")
    programs.add_good("clang++")
    assert isinstance(fresh(), Kernels)
    monkeypatch.setattr("ctypes.CDLL", refuse)
    for calls in (1, 2):  # the kept library, and a compiled one
        reason = str(fresh())
        assert reason.count("failed to map") == 1 and "noexec): set TMPDIR" in reason
        assert len(programs.calls) == calls
        library_in(cache.cache_folder()).unlink(missing_ok=True)
    assert not list(cache.cache_folder().glob("failed-*"))
