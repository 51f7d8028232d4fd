"""The user's cache of compiled kernels: found there, or compiled into it once.

| name in the folder    | content                                                                  |
|-----------------------|--------------------------------------------------------------------------|
| kernels-<key>.so      | a library, followed by the sha256 of its bytes                           |
| failed-<key>.txt      | the reason of a compiler's failure: the runs of a sweep do not repeat it |
| kernels.lock          | held by the process that compiles                                        |
| compiling-<random>/   | a compilation                                                            |

The folder is opened once.  Every file is read and written relative to the opened folder, and the
checked bytes themselves are linked (`library`).  So a user who may rename the folders above can
exchange neither the folder nor a library after its check.
"""

import fcntl
import hashlib
import os
import platform
import pwd
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from deepstack.base.ending import Stop
from deepstack.base.errors import Interrupted
from deepstack.fast.native.compiler import (
    PASSING,
    POLL_SECONDS,
    Compiler,
    ForbiddenError,
    UnavailableError,
    compile_kernels,
    find_compilers,
    flags,
    source_files,
)
from deepstack.fast.native.library import Kernels, load
from deepstack.records import opened

Notify = Callable[[str], None]
# Bytes of a library and of a remembered reason.
LARGEST_LIBRARY, LARGEST_REASON = 2**26, 2**12
DIGEST = 64
# How long a failure is remembered: a missing package may be installed meanwhile.
REMEMBERED_SECONDS = 3600

_by_folder: dict[str, Kernels | str] = {}


def find_kernels(notify: Notify, stop: Stop = lambda: None) -> Kernels | str:
    """Return the kernels, compiled if necessary, or the reason why there are none.

    notify: receives one line before a compilation, and before a wait for another one.
    stop: returns the number of a signal that came, which ends compilation and waiting.

    Raises Interrupted.
    """
    try:
        path = cache_folder()
    except UnavailableError as error:
        return str(error)
    if (known := _by_folder.get(str(path))) is None:
        try:
            known = load_or_compile(path, notify, stop)
        except UnavailableError as error:
            known = str(error)
        except OSError as error:
            known = f"the kernels cannot be kept in {path}: {error.strerror or error}"
        _by_folder[str(path)] = known
    return known


def cache_folder() -> Path:
    """Return the folder of compiled kernels, in $XDG_CACHE_HOME or ~/.cache.

    A relative XDG_CACHE_HOME is ignored, as its specification demands.  Raises UnavailableError
    without a home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "deepstack"
    home = os.environ.get("HOME", "")
    with suppress(KeyError):  # a user without an entry
        home = home or pwd.getpwuid(os.getuid()).pw_dir
    if not os.path.isabs(home):
        raise UnavailableError(
            "found no home folder for the compiled kernels; set XDG_CACHE_HOME to the full path "
            "of a folder of your own"
        )
    return Path(home) / ".cache" / "deepstack"


def load_or_compile(path: Path, notify: Notify, stop: Stop = lambda: None) -> Kernels:
    """Load the library of these sources for this processor, or compile it first.

    Any compiler's library will do: a machine without a compiler uses another one's.
    """
    key = key_of()
    with open_cache(path) as folder:
        cached = load_cached(folder, key)
        if isinstance(cached, Kernels):
            return cached
        with locked(folder, notify, stop) as is_locked:
            cached = load_cached(folder, key)  # another process may have compiled it meanwhile
            if isinstance(cached, Kernels):
                return cached
            held = opened.file_in(folder, path / "x").parent
            if is_locked:
                remove_abandoned(held, folder)
            return compile_by_any(path, held, folder, key, cached, notify, stop)


def key_of() -> str:
    """Return the hash of sources, flags and processor."""
    digest = hashlib.sha256(repr((flags(), processor())).encode())
    for path in source_files():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """Return the processor's model and instruction sets, which select the machine code."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in first if line.startswith(names))


@contextmanager
def open_cache(path: Path) -> Iterator[int]:
    """Yield the descriptor of the cache folder, made if missing; the user's own link is followed.

    Raises UnavailableError for a folder that another user may write to.
    """
    advice = "set XDG_CACHE_HOME to a folder of your own"
    with ExitStack() as stack:
        try:
            if not path.is_symlink():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=0o700, exist_ok=True)
            target = opened.followed(path)
            folder = stack.enter_context(opened.open_folder(target))
        except OSError as error:
            to = f" is a link to {os.readlink(path)}, which" if path.is_symlink() else ""
            raise UnavailableError(
                f"the cache folder {path}{to} cannot be used: {error.strerror or error}; {advice}"
            ) from None
        state = os.fstat(folder)
        if state.st_uid != os.geteuid():
            raise UnavailableError(f"the cache folder {target} belongs to another user; {advice}")
        if state.st_mode & 0o022:
            raise UnavailableError(
                f"other users may write to the cache folder {target}; run chmod 700 {target}"
            )
        yield folder


def read_own(name: str, folder: int, largest: int) -> tuple[bytes, float] | None:
    """Return bytes and change time of this user's file in the folder; None without such a file."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            state = os.fstat(file.fileno())
            is_own = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
            if is_own and not state.st_mode & 0o022 and state.st_size <= largest:
                return file.read(largest), state.st_mtime
    except OSError:
        pass
    return None


def write_own(name: str, folder: int, data: bytes) -> None:
    """Write a file of the folder, which readers see whole or not at all; raises OSError."""
    draft = opened.Draft(name, folder)
    try:
        os.fchmod(draft.descriptor, 0o600)
        draft.write(data)
        draft.publish()
    finally:
        draft.close()


def load_cached(folder: int, key: str) -> Kernels | str | None:
    """Return the kernels of the folder, why they cannot be loaded, or None without intact ones.

    Raises ForbiddenError if no library can be loaded.
    """
    data, _ = read_own(f"kernels-{key}.so", folder, LARGEST_LIBRARY) or (b"", 0.0)
    content, digest = data[:-DIGEST], data[-DIGEST:]
    if not content or hashlib.sha256(content).hexdigest().encode() != digest:
        return None
    try:
        return load(content)
    except ForbiddenError:
        raise
    except UnavailableError as error:
        return str(error)


def store(folder: int, key: str, content: bytes) -> None:
    """Keep a library; without space on the disk the next process compiles it again."""
    with suppress(OSError):
        digest = hashlib.sha256(content).hexdigest().encode()
        write_own(f"kernels-{key}.so", folder, content + digest)


@contextmanager
def locked(folder: int, notify: Notify, stop: Stop) -> Iterator[bool]:
    """Hold the lock of the folder, so that one process compiles.

    Yields whether it is held: some file systems have no locks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = opened.open_regular("kernels.lock", folder, flags, 0o600)
    is_held = has_waited = False
    try:
        while not is_held:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            except BlockingIOError:
                if not has_waited:
                    notify("waiting for another process that compiles the kernels")
                    has_waited = True
                if number := stop():
                    raise Interrupted("interrupted while waiting for the kernels", number) from None
                time.sleep(POLL_SECONDS)
            except OSError:
                break
        yield is_held
    finally:
        os.close(descriptor)


def remove_abandoned(held: Path, folder: int) -> None:
    """Remove the files of killed processes.  held: the path of the opened folder."""
    for draft in held.glob("compiling-*"):
        shutil.rmtree(draft, ignore_errors=True)
    opened.remove_drafts(held, folder)


def compile_by_any(
    path: Path, held: Path, folder: int, key: str, reason: str | None, notify: Notify, stop: Stop
) -> Kernels:
    """Return the kernels of the first compiler that makes some; keep them, and all failures.

    path, held: of the folder as the user knows it, and as it stays.
    reason: why an intact library of the folder cannot be loaded, or None.

    Raises UnavailableError with the reason of each compiler.
    """
    reasons = [] if reason is None else [reason]
    has_begun = False
    try:
        compilers = find_compilers()
    except UnavailableError as error:
        raise UnavailableError("; ".join([*reasons, str(error)])) from None
    for compiler in compilers:
        name = f"failed-{failure_key(key, compiler)}.txt"
        if known := remembered(name, folder):
            reasons.append(f"{known} (remembered for an hour in {path / name})")
            continue
        if not has_begun:
            notify("first run on this machine: compiling the kernels, about ten seconds")
            has_begun = True
        try:
            content = compile_kernels(compiler, held, stop)
            kernels = load(content)
        except ForbiddenError:
            raise
        except UnavailableError as error:
            reasons.append(failure := f"{compiler.name}: {error}")
            if not PASSING.search(failure):
                with suppress(OSError):
                    write_own(name, folder, failure.encode()[:LARGEST_REASON])
            continue
        store(folder, key, content)
        if reasons:
            notify(f"{'; '.join(reasons)}; {compiler.name} compiles them")
        return kernels
    raise UnavailableError("; ".join(reasons))


def failure_key(key: str, compiler: Compiler) -> str:
    """Return the hash of a compiler and of the library's key."""
    return hashlib.sha256(f"{key} {compiler.identity()}".encode()).hexdigest()[:16]


def remembered(name: str, folder: int) -> str:
    """Return why a compiler failed within the last hour, or ''."""
    data, changed = read_own(name, folder, LARGEST_REASON) or (b"", 0.0)
    is_recent = 0 <= time.time() - changed < REMEMBERED_SECONDS
    return data.decode(errors="replace") if is_recent else ""
