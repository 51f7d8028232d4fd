"""Compilers of the kernels: their order, remembered failures, the reason of a failure, Ctrl-C."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.compilers import Programs, fresh
from helpers.compilers import programs as programs
from helpers.small_runs import data_of, logs_of, small

import deepstack
from deepstack.base.errors import ConfigError, Interrupted
from deepstack.cli.check_command import facts_of
from deepstack.fast.native import Kernels, cache, compiler, find_kernels


def test_the_compiler_of_the_variable_comes_first(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("c++", "g++", "clang++"):
        programs.add_good(name)
    given = programs.add("mine", f'[ "$1" = -x ] && /bin/cp "{programs.library}" kernels.so')
    monkeypatch.setenv("CXX", f"{given} -x")
    assert isinstance(fresh(), Kernels)
    assert programs.calls == ["mine"]


def test_the_next_compiler_is_tried_when_one_fails(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "mine")
    for name in ("mine", "c++", "g++"):
        programs.add_failing(name, f"error: {name} is broken")
    programs.add_good("clang++")
    notices: list[str] = []
    assert isinstance(fresh(notices), Kernels)
    assert programs.calls == ["mine", "c++", "g++", "clang++"]
    assert len(notices) == 2 and "first run on this machine" in notices[0]
    assert notices[1].startswith(f"{programs.folder}/mine: does not compile the kernels: error: m")
    assert notices[1].endswith(f"g++ is broken; {programs.folder}/clang++ compiles them")


def test_a_variable_without_a_program_counts_for_nothing(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "x86_64-conda-linux-gnu-c++")
    assert "(x86_64-conda-linux-gnu-c++, c++, g++, clang++); install g++" in str(fresh())
    programs.add_good("clang++")
    assert isinstance(fresh(), Kernels)
    monkeypatch.setenv("CXX", "'")
    cache.cache_folder().rename(programs.folder / "aside")
    assert "CXX=' is not a command" in str(fresh())


def test_two_names_of_one_compiler_are_tried_once(programs: Programs) -> None:
    programs.add_failing("g++")
    (programs.folder / "c++").symlink_to("g++")
    assert str(fresh()).count("it is broken") == 1
    assert len(programs.calls) == 1


def test_a_failure_is_remembered_for_an_hour(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_failing("g++")
    first, notices = str(fresh()), list[str]()
    assert first == f"{programs.folder}/g++: does not compile the kernels: error: it is broken"
    again = str(fresh(notices))
    assert again.startswith(first) and not notices and len(programs.calls) == 1
    [kept] = cache.cache_folder().glob("failed-*.txt")
    assert again.endswith(f"(remembered for an hour in {kept})")
    for age in (3700, -3700):  # a clock that was put back is no hour
        os.utime(kept, (time.time() - age, time.time() - age))
        fresh()
    assert len(programs.calls) == 3
    kept.unlink()
    fresh()
    assert len(programs.calls) == 4


def test_a_failure_is_forgotten_with_the_compiler_or_the_flags(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_failing("g++")
    fresh()
    programs.add_failing("g++", "error: another version of it is broken")
    assert "another version" in str(fresh())
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
    fresh()
    assert len(programs.calls) == 3
    programs.add_good("g++")
    assert isinstance(fresh(), Kernels)


@pytest.mark.parametrize(
    "text",
    [
        "kill -9 $$",
        "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        "echo 'virtual memory exhausted: Cannot allocate memory' >&2; exit 1",
        "echo 'fatal error: error writing to /tmp/x.s: No space left on device' >&2; exit 1",
    ],
)
def test_a_lack_that_may_pass_is_not_remembered(text: str, programs: Programs) -> None:
    programs.add("g++", text)
    assert "does not compile the kernels" in str(fresh())
    programs.add_good("g++")
    assert isinstance(fresh(), Kernels)


REASONS = {
    "In file included from a.h:3,\na.h:9: warning: odd\na.h:7:5: error: no type\nb.h: error: x": (
        "a.h:7:5: error: no type",
        "",
    ),
    "/tmp/x.s: Assembler messages:\n/tmp/x.s:8: Error: no such instruction: vpdpbusd": (
        "/tmp/x.s:8: Error: no such instruction: vpdpbusd",
        "the assembler is older than the compiler",
    ),
    "/usr/bin/ld: cannot find -lstdc++: No such file\nclang: error: linker command failed": (
        "/usr/bin/ld: cannot find -lstdc++: No such file",
        "install g++",
    ),
    "table.h:3:10: fatal error: cmath: No such file or directory\ncompilation terminated.": (
        "fatal error: cmath: No such file or directory",
        "install g++",
    ),
    "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.": (
        "Killed signal terminated program cc1plus",
        "about 400 MB of memory",
    ),
    "virtual memory exhausted: Cannot allocate memory": (
        "virtual memory exhausted",
        "about 400 MB of memory",
    ),
    "/tmp/x.s: No space left on device\nas: BFD error": ("No space left", "set TMPDIR"),
    "g++: error: unrecognized command line option '-std=c++17'": ("-std=c++17", "GCC 9"),
    "strange \x1b[31mwords": ("strange  [31mwords", ""),
    "": ("exit code 1 without a message", ""),
}


@pytest.mark.parametrize("message", REASONS)
def test_the_reason_is_the_line_that_matters_and_has_its_cure(message: str) -> None:
    line, cure = REASONS[message]
    reason = compiler.reason_of(1, message)
    assert line in reason and "\n" not in reason
    assert cure in compiler.cure_of(reason) and bool(cure) == bool(compiler.cure_of(reason))


def test_other_ends_of_a_compiler_have_words() -> None:
    assert compiler.reason_of(-9, "") == "it was stopped by SIGKILL"
    assert "400 MB" in compiler.cure_of("it was stopped by SIGKILL")
    assert compiler.reason_of(0, "") == "it wrote no library"
    assert len(compiler.reason_of(1, "error: " + 10**4 * "x")) == 300


def test_a_compiler_speaks_english(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    programs.add("g++", 'echo "error: $LC_ALL" >&2; exit 1')
    assert str(fresh()).endswith("error: C")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("while :; do echo endless words; done", "prints more than"),
        ("/bin/sleep 60", "takes longer than 1 seconds"),
        ("exit 0", "wrote no library"),
    ],
)
def test_a_compiler_that_never_ends_gives_one_line(
    text: str, reason: str, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in text:
        monkeypatch.setattr(compiler, "PATIENCE", 1)
    monkeypatch.setattr(compiler, "LONGEST_OUTPUT", 2**17)
    programs.add("g++", text)
    began = time.monotonic()
    line = str(fresh())
    assert reason in line and "\n" not in line
    assert time.monotonic() - began < 20


def test_a_program_that_cannot_be_run_gives_one_line(programs: Programs) -> None:
    programs.add_good("g++").write_text("not a program")
    assert "g++: does not compile the kernels: error: [Errno 8] Exec format error" in str(fresh())


def has_ended(pid: int) -> bool:
    """Return whether no process has this number; a dead one may wait for its parent."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_python", [False, True])
def test_a_signal_ends_the_compiler_and_all_its_processes(
    is_python: bool, programs: Programs
) -> None:
    """Either the command's request to stop, or Python's KeyboardInterrupt."""
    log = programs.folder / "child"
    programs.add("g++", f'/bin/sleep 60 & echo $! > "{log}.new"; /bin/mv "{log}.new" "{log}"; wait')

    def stop() -> int | None:
        if not log.exists():
            return None
        if is_python:
            raise KeyboardInterrupt
        return signal.SIGTERM

    cache._by_folder.clear()
    with pytest.raises(KeyboardInterrupt if is_python else Interrupted) as raised:
        find_kernels([].append, stop)
    assert is_python or getattr(raised.value, "exit_code", None) == 143
    child, deadline = int(log.read_text()), time.monotonic() + 10
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended(child)
    assert sorted(path.name for path in cache.cache_folder().iterdir()) == ["kernels.lock"]
    programs.add_good("g++")  # nothing is remembered
    assert isinstance(fresh(), Kernels)


def test_without_a_compiler_torch_replays_the_steps(programs: Programs, tmp_path: Path) -> None:
    given = small(train__steps=3, runtime__replay=True)
    reason = "found no C++ compiler (c++, g++, clang++); install g++ or clang, or name one by CXX"
    assert facts_of(given)["replay"] == f"steps are replayed by torch's kernels: {reason}"
    run = deepstack.train(given, out=tmp_path)
    assert run.meta["environment"]["replayed"] and "executor" not in run.meta["environment"]
    assert reason in (run.path / "log.txt").read_text()
    with pytest.raises(ConfigError, match=r"runtime.replay: found native, but found no C\+\+"):
        deepstack.train(small(runtime__replay="native"), out=tmp_path / "native")


def stop_after(steps: int) -> Iterator[int | None]:
    """Yield what `stop` returns after each step."""
    yield from [None] * (steps - 1)
    while True:
        yield signal.SIGINT


def interrupted(out: Path, steps: int, **changes: object) -> None:
    """Train until so many steps are made."""
    stops = stop_after(steps)
    with pytest.raises(Interrupted):
        deepstack.train(small(**changes), out=out, stop=lambda: next(stops))


@pytest.mark.slow(turn=47)
def test_a_run_that_began_with_torchs_kernels_continues_by_them(
    programs: Programs, tmp_path: Path
) -> None:
    changes = {"runtime__replay": True}
    whole = deepstack.train(small(**changes), out=tmp_path / "whole")
    programs.add("g++", "kill -9 $$")  # for lack of memory, say
    cache._by_folder.clear()
    interrupted(tmp_path / "parts", 5, **changes)
    programs.add_good("g++")
    assert isinstance(fresh(), Kernels)
    run = deepstack.train(small(**changes), out=tmp_path / "parts")
    assert run.meta["resumed"] and "executor" not in run.meta["environment"]
    assert data_of(run) == data_of(whole) and logs_of(run) == logs_of(whole)
    log = (run.path / "log.txt").read_text()
    assert "it was stopped by SIGKILL; the compiler needs about 400 MB" in log
    assert "replayed by torch's kernels: this run began with them" in log
    other = deepstack.train(small(seed=1, **changes), out=tmp_path / "other")
    assert other.meta["environment"]["executor"].startswith("C++, ")


def test_a_run_of_kernels_that_are_gone_says_why_they_are(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_good("g++")
    interrupted(tmp_path, 5, runtime__replay=True)
    programs.remove("g++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another cache"))
    with pytest.raises(ConfigError) as raised:
        deepstack.train(small(runtime__replay=True), out=tmp_path)
    first, second, third = str(raised.value).splitlines()
    assert "executor was 'C++, " in first and "is None" in first
    assert second.startswith("steps are replayed by torch's kernels: found no C++ compiler")
    assert "--allow-env-change" in third


@pytest.mark.slow
def test_ctrl_c_during_a_compilation_ends_the_command_with_130(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal reaches the whole group, as from a terminal; the same command goes on then."""
    marker = tmp_path / "compiling"
    programs.add("c++", f'> "{marker}"; /bin/sleep 60')
    settings = shlex.split("runtime.replay=native runtime.device=cpu train.steps=3")
    words = [sys.executable, "-m", "deepstack", "train", "quick", *settings, "--out", "results"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, process_group=0
    )
    while not marker.exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 130, printed
    assert "interrupted while the kernels are compiled" in printed and "Traceback" not in printed
    programs.add_good("c++")
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)
