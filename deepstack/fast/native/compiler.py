"""Finds C++ compilers and compiles the kernels; a failure gets one line with its cure."""

import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from deepstack.base.ending import Stop
from deepstack.base.errors import Interrupted

SOURCES = Path(__file__).parent
NAMES = ("c++", "g++", "clang++")
# Contraction to fused multiply-adds is part of the kernels' numbers.
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC", "-pthread",
)  # fmt: skip
# Seconds after which, and bytes of messages from which on, a compiler is stopped.
PATIENCE, LONGEST_OUTPUT = 300, 2**20
POLL_SECONDS = 0.05
LONGEST_REASON = 300

# A line that gives a reason, and one that only repeats that there was one.
REASON = re.compile(r"\berror: |\bld(\.\w+)?: |exhausted|No space left|Killed", re.IGNORECASE)
REPETITION = re.compile(r"ld returned|linker command failed|compilation terminated|^\d+ error")

# Patterns of reasons, and their cures.
CURES = (
    (
        r"GLIBC(XX)?_\S+'? not found",
        "this Python runs with an older C or C++ library than the compiler's: name an older "
        "compiler by CXX, or update the library (with conda: libstdcxx-ng)",
    ),
    (
        r"failed to map segment",
        "no program may run from that file system (noexec): set TMPDIR to another one",
    ),
    (r"No space left|quota exceeded", "free some space, or set TMPDIR to another file system"),
    (
        r"Killed|SIGKILL|exhausted|out of memory|cannot allocate|bad_alloc",
        "the compiler needs about 400 MB of memory",
    ),
    (
        r"no such instruction|unsupported instruction|Error: .*(operand|suffix|register)",
        "the assembler is older than the compiler: update binutils, or name another compiler by "
        "CXX",
    ),
    (
        r"cannot find -?l?stdc\+\+|(cmath|cstdint|cstring|utility|vector)'?:? (file )?not found"
        r"|(cmath|cstdint|cstring|utility|vector): No such file",
        "the headers and library of C++ are missing: install g++",
    ),
    (
        r"std=c\+\+|unrecognized command|unknown argument",
        "the kernels need GCC 9 or clang 11, or a later version: name one by CXX",
    ),
)
# Reasons that may be gone at the next start.
PASSING = re.compile(r"Killed|stopped by SIG|exhausted|memory|No space left|quota", re.IGNORECASE)


class UnavailableError(Exception):
    """The kernels cannot be compiled or loaded, for a reason that a user can read."""


class ForbiddenError(UnavailableError):
    """This system forbids to load any library, whichever compiler made it."""


class Compiler(NamedTuple):
    """A C++ compiler: the words that call it, of which the first is a path."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The words as a user types them."""
        return shlex.join(self.words)

    def identity(self) -> str:
        """Return a text that changes when the compiler's program is replaced."""
        state = os.stat(self.words[0])
        return repr((self.words, os.path.realpath(self.words[0]), state.st_mtime_ns, state.st_size))


def find_compilers() -> list[Compiler]:
    """Return the compilers in the order in which they are tried: $CXX, c++, g++, clang++.

    Raises UnavailableError if there is none.
    """
    setting = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(setting)
    except ValueError as error:
        raise UnavailableError(f"CXX={setting} is not a command: {error}") from None
    wanted = [chosen] * bool(chosen) + [[name] for name in NAMES]
    compilers: dict[tuple[str, ...], Compiler] = {}
    for program, *arguments in wanted:
        if path := shutil.which(program):
            kind = "clang" if "clang" in Path(program).name else "gcc"  # a cache has one program
            key = (os.path.realpath(path), kind, *arguments)
            compilers.setdefault(key, Compiler((path, *arguments)))
    if not compilers:
        names = ", ".join(words[0] for words in wanted)
        raise UnavailableError(
            f"found no C++ compiler ({names}); install g++ or clang, or name one by CXX"
        )
    return list(compilers.values())


def flags() -> tuple[str, ...]:
    """Return the compiler's flags; a compiler names the processor by -mcpu on arm64."""
    arm = platform.machine() in ("arm64", "aarch64")
    return (*FLAGS, "-mcpu=native" if arm else "-march=native")


def source_files() -> list[Path]:
    """Return the C++ files in a fixed order."""
    return sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])


def compile_kernels(compiler: Compiler, folder: Path, stop: Stop) -> bytes:
    """Return the library's bytes.

    folder: where a new folder is made for the compilation.

    Raises UnavailableError, and Interrupted once `stop` returns a signal.
    """
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=folder) as draft:
        source, library = SOURCES / "kernels.cpp", Path(draft) / "kernels.so"
        words = [*compiler.words, *flags(), str(source), "-o", library.name]
        try:
            code, output = run(words, draft, stop)
            if code == 0 and library.is_file():
                return library.read_bytes()
        except OSError as error:
            code, output = 1, f"error: {error}"
    reason = reason_of(code, output)
    raise UnavailableError(f"does not compile the kernels: {reason}{cure_of(reason)}")


def run(words: list[str], folder: str, stop: Stop) -> tuple[int, str]:
    """Run a compiler and return its exit code, negative for a signal, and its messages.

    It runs in a new process group, so a Ctrl-C at the terminal does not reach it.  This process
    ends the whole group then, and raises Interrupted or KeyboardInterrupt.
    """
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ | {"LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
        bufsize=0,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    output, deadline = b"", time.monotonic() + PATIENCE
    try:
        while process.poll() is None:
            output += process.stdout.read(2**16) or b""
            if number := stop():
                raise Interrupted("interrupted while the kernels are compiled", number)
            if time.monotonic() > deadline:
                return 1, f"error: it takes longer than {PATIENCE} seconds"
            if len(output) > LONGEST_OUTPUT:
                return 1, f"error: it prints more than {LONGEST_OUTPUT:,} bytes"
            time.sleep(POLL_SECONDS)
        output += process.stdout.read(LONGEST_OUTPUT) or b""
        return process.returncode, output.decode(errors="replace")
    finally:
        if process.returncode is None:  # with the processes that it has started
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def reason_of(code: int, output: str) -> str:
    """Return the line of a compiler's messages that says why it failed."""
    if code < 0:
        return f"it was stopped by {signal.Signals(-code).name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = [line for line in lines if REASON.search(line) and not REPETITION.search(line)]
    last = "it wrote no library" if code == 0 else f"exit code {code} without a message"
    line = next(iter([*reasons, *lines]), last)
    return "".join(c if c.isprintable() else " " for c in line)[:LONGEST_REASON]


def cure_of(reason: str) -> str:
    """Return '; ' and the cure of a reason, or ''."""
    return next((f"; {cure}" for pattern, cure in CURES if re.search(pattern, reason)), "")
