"""Compiles the C++ kernels on first use and keeps the library in the user's cache folder."""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from deepstack.fast.native.record import RECORD

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# Contraction to fused multiply-adds is part of the kernels' numbers.
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC", "-pthread",
)  # fmt: skip
# Seconds after which a compiler is stopped.
PATIENCE = 300


class Kernels(NamedTuple):
    """The loaded kernels.

    run: (address of a table, number of records, threads, address of the plan or 0) -> None.
    plan: (address of a table, number of records, threads, address of 1 + threads 32-bit integers
        for each record, which it writes) -> None.
    run_part: (address of a record, thread, threads, address of its plan) -> None; for tests.
    kinds: number of each kind by name.
    description: instruction width and hash of source, compiler and processor.
    """

    run: Callable[[int, int, int, int], None]
    plan: Callable[[int, int, int, int], None]
    run_part: Callable[[int, int, int, int], None]
    kinds: dict[str, int]
    description: str


class UnavailableError(Exception):
    """The kernels cannot be compiled or loaded, for a reason that a user can read."""


_found: dict[str, Kernels | str] = {}


def find_kernels(notify: Callable[[str], None]) -> Kernels | str:
    """Return the kernels, compiled if necessary, or the reason why there are none.

    notify: receives one line before a compilation.
    """
    folder = cache_folder()
    if str(folder) not in _found:
        try:
            _found[str(folder)] = load_or_compile(folder, notify)
        except UnavailableError as error:
            _found[str(folder)] = str(error)
        except (OSError, subprocess.SubprocessError) as error:
            _found[str(folder)] = f"the kernels cannot be compiled in {folder}: {error}"
    return _found[str(folder)]


def cache_folder() -> Path:
    """Return the folder of compiled kernels, in $XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~/.cache"))
    return base / "deepstack"


def load_or_compile(folder: Path, notify: Callable[[str], None]) -> Kernels:
    """Load the library of this source, compiler and processor, or compile it first."""
    compiler, version = find_compiler()
    key = key_of(version)
    make_folder(folder)
    library = folder / f"kernels-{key}.so"
    with locked(folder / "kernels.lock"):
        if not is_intact(library):
            notify("compiling the kernels of a replayed step; about ten seconds, once")
            compile_kernels(compiler, library)
    return load(library, key)


@cache
def find_compiler() -> tuple[str, str]:
    """Return the path of a C++ compiler and the version that it prints."""
    for name in COMPILERS:
        if path := shutil.which(name):
            answer = subprocess.run([path, "--version"], capture_output=True, timeout=60)
            if answer.returncode == 0:
                return path, answer.stdout.decode(errors="replace")
    raise UnavailableError(f"found no C++ compiler ({', '.join(COMPILERS)})")


def source_files() -> list[Path]:
    """Return the C++ files in a fixed order."""
    return sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])


def key_of(compiler: str) -> str:
    """Return the hash of sources, flags, processor and the compiler's version."""
    digest = hashlib.sha256(repr((compiler, flags(), processor())).encode())
    for path in source_files():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def flags() -> tuple[str, ...]:
    """Return the compiler's flags; a compiler names the processor by -mcpu on arm64."""
    arm = platform.machine() in ("arm64", "aarch64")
    return (*FLAGS, "-mcpu=native" if arm else "-march=native")


def processor() -> str:
    """Return the processor's model and instruction sets, which select the machine code."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in first if line.startswith(names))


def make_folder(folder: Path) -> None:
    """Make the cache folder, which only this user may read or change."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"the cache folder {folder} cannot be made: {error}") from None
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise UnavailableError(
            f"the cache folder {folder} must be a folder that belongs to this user and has "
            f"mode 0700; run chmod 700 {folder}, or set XDG_CACHE_HOME"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on this file, so that one process compiles."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def checksum_of(library: Path) -> Path:
    """Return the file with the library's sha256."""
    return library.with_suffix(".sha256")


def is_intact(library: Path) -> bool:
    """Return whether the library is this user's file with the recorded checksum."""
    try:
        state = library.lstat()
        is_own = stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()
        if not is_own or state.st_mode & 0o022:
            return False
        return checksum_of(library).read_text("ascii") == sha256(library)
    except (OSError, UnicodeDecodeError):
        return False


def sha256(path: Path) -> str:
    """Return a file's sha256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compile_kernels(compiler: str, library: Path) -> None:
    """Compile the library, and put it and its checksum in their places."""
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *flags(), str(SOURCES / "kernels.cpp"), "-o", str(made)]
        answer = subprocess.run(command, capture_output=True, timeout=PATIENCE, cwd=folder)
        if answer.returncode or not made.is_file():
            lines = answer.stderr.decode(errors="replace").strip().splitlines()
            reason = next((line for line in lines if "error" in line), (lines or ["no message"])[0])
            raise UnavailableError(f"{compiler} does not compile the kernels: {reason}")
        made.chmod(0o700)
        checksum = Path(folder) / checksum_of(library).name
        checksum.write_text(sha256(made), "ascii")
        checksum_of(library).unlink(missing_ok=True)
        os.replace(made, library)
        os.replace(checksum, checksum_of(library))


def load(library: Path, key: str) -> Kernels:
    """Load the library and read its kinds of operations."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise UnavailableError(f"the kernels cannot be loaded: {error}") from None
    loaded.deepstack_kind.restype = ctypes.c_char_p
    address, integer = ctypes.c_void_p, ctypes.c_int
    for function in (loaded.deepstack_run, loaded.deepstack_plan):
        function.argtypes, function.restype = [address, ctypes.c_long, integer, address], None
    loaded.deepstack_run_part.argtypes = [address, integer, integer, address]
    loaded.deepstack_run_part.restype = None
    if loaded.deepstack_record_size() != RECORD.size:
        raise UnavailableError("the compiler lays records out in an unknown way")
    kinds: dict[str, int] = {}
    while name := loaded.deepstack_kind(len(kinds)):
        kinds[name.decode()] = len(kinds)
    width = 32 * loaded.deepstack_vector_width()
    functions = loaded.deepstack_run, loaded.deepstack_plan, loaded.deepstack_run_part
    return Kernels(*functions, kinds, f"{width} bits, {key}")
