"""Ends of a process: signals, Ctrl-C in a notebook, lack of memory and errors of the system."""

import ctypes
import errno
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from deepstack.base.errors import ConfigError, Interrupted, ResourceError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1

# A stream or a disk that takes nothing more.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
# The user has to give another path.
WRONG_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
# Bytes of address space below which the imports of torch and OpenBLAS fail.
LEAST_ADDRESSES = 700_000_000
# How libraries report that the system gave them no memory.
NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't allocate memory",
             "can't start new thread", "not enough memory")  # fmt: skip


@contextmanager
def one_line_endings() -> Iterator[None]:
    """End the process with one line where a signal or the system ends the block.

    The exit code is 128 + the signal, 5 for memory and disk, 2 for an impossible path.  Other
    errors keep their traceback.  Signals that were ignored at the start stay ignored.
    """
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if came and number != signal.SIGINT:
            return
        if not came:
            print_line("interrupted")
        came.append(number)
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        refuse_hopeless()
        yield
    except BaseException as error:
        if came:  # whatever a library made of the interrupt
            sys.exit(128 + came[0])
        reason = None if isinstance(error, SystemExit) else reason_of(error)
        if reason is None:
            raise
        print_line(reason[0])
        flush_stdout()
        sys.exit(reason[1])
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def print_line(text: str) -> None:
    """Print a message on stderr, whatever state Python is in; control characters as escapes."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    with suppress(OSError):
        os.write(2, f"deepstack: {shown}\n".encode("utf-8", "backslashreplace"))


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback as Python does, but control characters as escapes.

    They may come from a file that somebody else wrote, and would reach the terminal.
    """
    text = "".join(traceback.format_exception(kind, error, trace))
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    print(shown, end="", file=sys.stderr, flush=True)


def refuse_hopeless() -> None:
    """Raise an error where torch and OpenBLAS would end the process in their own way."""
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < LEAST_ADDRESSES:
        raise MemoryError(f"deepstack needs {LEAST_ADDRESSES / 1e6:.0f} MB")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        advice = "deleted; change to another folder"
        raise OSError(error.errno, advice, "the working directory") from None


def reason_of(error: BaseException) -> tuple[str, int] | None:
    """Text and exit code of an error that comes from the system, or None."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    for one in reversed(chain):
        if isinstance(one, MemoryError) or any(words in str(one).lower() for words in NO_MEMORY):
            line = next(iter(str(one).splitlines()), "an allocation failed")
            megabytes = resource.getrlimit(resource.RLIMIT_AS)[0] / 1e6
            why = f" (the address space is limited to {megabytes:.0f} MB, see ulimit -v)"
            return f"out of memory{why if megabytes > 0 else ''}: {line}", ResourceError.exit_code
    if isinstance(error, RuntimeError) and getattr(chain[-1], "errno", 0) == errno.ELOOP:
        error = chain[-1]  # pathlib's error for a link to itself
    if not isinstance(error, OSError):
        return None
    code = ConfigError.exit_code if error.errno in WRONG_PATH else ResourceError.exit_code
    if error.errno in FULL:
        return f"{error.filename or 'the output'} cannot be written: {error.strerror}", code
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}", code


def flush_stdout() -> None:
    """Write buffered output; discard it if that fails, as Python would try again at its exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def die_with(parent: int, number: int) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


Stop = Callable[[], int | None]


@contextmanager
def stop_requests(stop: Stop | None) -> Iterator[Stop]:
    """Yield the caller's `stop`, or one that remembers the first Ctrl-C.

    After a first Ctrl-C the block ends with KeyboardInterrupt; a second one raises it at once.  A
    different SIGINT handler stays in place, and threads, which get no signals, are unaffected.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if stop or not ours or threading.current_thread() is not threading.main_thread():
        yield stop or (lambda: None)
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: received[0] if received else None
    except Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:  # Ctrl-C after the last step: the run is done, but the caller must stop here
        raise KeyboardInterrupt
