"""The cache of compiled kernels: where it is, whose it is, and that checked bytes are loaded."""

import _ctypes
import fcntl
import hashlib
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.compilers import NOBODY, Programs, fresh, is_private, library_in, signed
from helpers.compilers import programs as programs

from deepstack.base.errors import Interrupted
from deepstack.fast.native import Kernels, cache, find_kernels

IS_ROOT = os.geteuid() == 0


def test_kernels_are_compiled_once_into_a_private_folder(programs: Programs) -> None:
    programs.add_good("g++")
    first, second = fresh(), fresh()
    assert isinstance(first, Kernels) and isinstance(second, Kernels)
    assert first.description == second.description and len(programs.calls) == 1
    folder = cache.cache_folder()
    assert is_private(folder) and all(map(is_private, folder.iterdir()))
    assert sorted(path.name for path in folder.iterdir()) == [
        library_in(folder).name,
        "kernels.lock",
    ]


def test_a_machine_without_a_compiler_uses_what_another_has_compiled(programs: Programs) -> None:
    programs.add_good("clang++")
    compiled = fresh()
    programs.remove("clang++")
    result = fresh()
    assert isinstance(result, Kernels) and isinstance(compiled, Kernels)
    assert result.description == compiled.description


def test_kernels_are_named_by_their_bytes_whatever_compiled_them(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = set()
    for name in ("g++", "clang++"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        programs.add_good(name)
        result = fresh()
        assert isinstance(result, Kernels)
        names.add(result.description)
        programs.remove(name)
    digest = hashlib.sha256(programs.library.read_bytes()).hexdigest()
    assert [name.rpartition(", ")[2] for name in names] == [digest[:16]]


@pytest.mark.parametrize("damage", ["shorter", "replaced", "writable", "a bit", "no sum", "a link"])
def test_a_damaged_library_is_compiled_again(
    damage: str, programs: Programs, tmp_path: Path
) -> None:
    programs.add_good("g++")
    fresh()
    path = library_in(cache.cache_folder())
    content = bytearray(path.read_bytes())
    if damage == "writable":
        path.chmod(0o666)
    elif damage == "a link":
        path.rename(tmp_path / "elsewhere.so")
        path.symlink_to(tmp_path / "elsewhere.so")
    else:
        content[5000] ^= damage == "a bit"
        lengths = {"shorter": 1000, "no sum": len(content) - cache.DIGEST}
        path.write_bytes(
            b"\x7fELF" + bytes(5000) if damage == "replaced" else content[: lengths.get(damage)]
        )
    assert isinstance(fresh(), Kernels) and len(programs.calls) == 2
    assert isinstance(fresh(), Kernels) and len(programs.calls) == 2


@pytest.mark.parametrize("other", ["a letter of a file", "a file's name", "processor"])
def test_a_library_of_other_sources_or_of_another_processor_is_not_loaded(
    other: str, programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs.add_good("g++")
    fresh()
    if other == "processor":
        monkeypatch.setattr(cache, "processor", lambda: "flags : sse2")
    else:
        for path in (sources := cache.source_files()):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        files = [tmp_path / path.name for path in sources]
        if other == "a file's name":
            files[-1] = files[-1].rename(tmp_path / "renamed.h")
        else:
            files[-1].write_text(files[-1].read_text() + " ")
        monkeypatch.setattr(cache, "source_files", lambda: files)
    assert isinstance(fresh(), Kernels) and len(programs.calls) == 2
    assert isinstance(fresh(), Kernels) and len(programs.calls) == 2


@pytest.mark.skipif(not IS_ROOT, reason="gives a file to another user")
def test_a_library_of_another_user_is_replaced(programs: Programs) -> None:
    programs.add_good("g++")
    fresh()
    path = library_in(cache.cache_folder())
    os.chown(path, NOBODY, NOBODY)
    assert isinstance(fresh(), Kernels) and len(programs.calls) == 2
    assert path.stat().st_uid == 0


def test_a_library_that_the_system_gives_another_owner_is_replaced(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rights of root, which gives a file to another user above."""
    programs.add_good("g++")
    fresh()
    library, state_of = library_in(cache.cache_folder()).stat(), os.fstat

    def with_other_owner(descriptor: int) -> os.stat_result:
        state = state_of(descriptor)
        if state.st_ino != library.st_ino:
            return state
        return os.stat_result((*state[:4], state.st_uid + 1, *state[5:]))

    monkeypatch.setattr(os, "fstat", with_other_owner)
    assert isinstance(fresh(), Kernels) and len(programs.calls) == 2


def test_a_library_that_cannot_be_loaded_is_compiled_again(programs: Programs) -> None:
    """A module of Python has no kernels; bytes that are no library at all may have a right sum."""
    programs.add_good("g++")
    fresh()
    path = library_in(cache.cache_folder())
    for number, content in enumerate((Path(_ctypes.__file__).read_bytes(), b"no library"), 2):
        path.write_bytes(signed(content))
        notices: list[str] = []
        assert isinstance(fresh(notices), Kernels) and len(programs.calls) == number
        assert "kernels" in notices[-1] and notices[-1].endswith("g++ compiles them")
    path.write_bytes(signed(b"no library"))
    programs.remove("g++")
    assert "the kernels cannot be loaded" in str(fresh()) and "no C++ compiler" in str(fresh())


def test_a_broken_compiler_gives_one_line(programs: Programs) -> None:
    programs.add("g++", f'/bin/cp "{_ctypes.__file__}" kernels.so')
    reason = str(fresh())
    assert "g++: the library of the kernels is broken: " in reason and "\n" not in reason
    assert not library_in(cache.cache_folder()).exists()


def test_a_full_disk_keeps_no_library_and_loads_it(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepstack.records.opened.Draft.write", refuse)
    programs.add_good("g++")
    assert isinstance(fresh(), Kernels)
    assert [path.name for path in cache.cache_folder().iterdir()] == ["kernels.lock"]


def test_files_of_killed_compilations_are_removed(programs: Programs) -> None:
    programs.add_good("g++")
    left = cache.cache_folder() / "compiling-abc"
    left.mkdir(parents=True)
    (left / "x.o").write_text("half a file")
    cache.cache_folder().chmod(0o700)
    (cache.cache_folder() / ".kernels-1.so.0123abcd.new").write_text("half a library")
    assert isinstance(fresh(), Kernels)
    assert len(list(cache.cache_folder().iterdir())) == 2


def test_a_process_that_waits_says_so_and_can_be_interrupted(programs: Programs) -> None:
    programs.add_good("g++")
    fresh()
    library_in(cache.cache_folder()).unlink()
    notices, calls = list[str](), list[None]()

    def stop() -> int | None:
        calls.append(None)
        return signal.SIGINT if len(calls) > 3 else None

    with open(cache.cache_folder() / "kernels.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache._by_folder.clear()
        with pytest.raises(Interrupted, match="waiting for the kernels") as raised:
            find_kernels(notices.append, stop)
    assert raised.value.exit_code == 130
    assert notices == ["waiting for another process that compiles the kernels"]
    assert isinstance(fresh(), Kernels)


def test_a_file_system_without_locks_has_kernels(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    programs.add_good("g++")
    assert isinstance(fresh(), Kernels)


@pytest.mark.slow
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    script = "from deepstack.fast.native import find_kernels; print(find_kernels(print))"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    answers = [process.communicate()[0] for process in started]
    assert sum("compiling the kernels" in answer for answer in answers) == 1
    assert all("Kernels(" in answer for answer in answers)


@pytest.mark.parametrize(
    ("home", "given", "expected"),
    [
        ("{}/home", None, "{}/home/.cache/deepstack"),
        ("{}/home", "{}/xdg", "{}/xdg/deepstack"),
        ("{}/home", "", "{}/home/.cache/deepstack"),
        ("{}/home", "relative", "{}/home/.cache/deepstack"),
        ("", "relative", "{}/entry/.cache/deepstack"),
        (None, None, "{}/entry/.cache/deepstack"),
    ],
)
def test_the_folder_is_absolute(
    home: str | None,
    given: str | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = pwd.getpwuid(os.getuid())
    record = pwd.struct_passwd([*entry[:5], f"{tmp_path}/entry", *entry[6:]])
    monkeypatch.setattr(pwd, "getpwuid", lambda _: record)
    for name, value in (("HOME", home), ("XDG_CACHE_HOME", given)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value.format(tmp_path))
    assert str(cache.cache_folder()) == expected.format(tmp_path)


@pytest.mark.parametrize("home", [None, "", "relative", "~"])
def test_without_a_home_folder_no_folder_is_made(
    home: str | None, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_entry(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    programs.add_good("g++")
    assert "found no home folder" in str(fresh()) and "set XDG_CACHE_HOME" in str(fresh())
    assert not list((tmp_path / "work").iterdir()) and not programs.calls


def test_the_users_link_to_another_disk_is_followed(programs: Programs, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o755)
    cache.cache_folder().parent.mkdir()
    cache.cache_folder().symlink_to(scratch)
    programs.add_good("g++")
    assert isinstance(fresh(), Kernels) and library_in(scratch).is_file()
    scratch.chmod(0o775)
    assert str(fresh()) == (
        f"other users may write to the cache folder {scratch}; run chmod 700 {scratch}"
    )
    library_in(scratch).unlink()
    (scratch / "kernels.lock").unlink()
    scratch.rmdir()
    assert f"is a link to {scratch}, which cannot be used" in str(fresh())


@pytest.mark.skipif(not IS_ROOT, reason="makes files of another user")
def test_a_folder_and_a_link_of_another_user_are_refused(
    programs: Programs, tmp_path: Path
) -> None:
    programs.add_good("g++")
    fresh()
    folder, aside = cache.cache_folder(), tmp_path / "aside"
    os.chown(folder, NOBODY, NOBODY)
    assert "belongs to another user; set XDG_CACHE_HOME" in str(fresh())
    os.chown(folder, 0, 0)
    folder.rename(aside)
    folder.symlink_to(aside)
    os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
    assert f"is a link to {aside}, which cannot be used" in str(fresh())


def test_a_folder_that_others_may_write_to_is_refused(programs: Programs) -> None:
    programs.add_good("g++")
    cache.cache_folder().mkdir(parents=True)
    cache.cache_folder().chmod(0o777)
    assert f"run chmod 700 {cache.cache_folder()}" in str(fresh()) and not programs.calls


def test_a_file_in_place_of_the_folder_gives_one_line(programs: Programs) -> None:
    cache.cache_folder().parent.write_text("")
    reason = str(fresh())
    assert "cannot be used: " in reason and "\n" not in reason
