"""Two forked processes, which find torch imported: for tests of loops with several ranks."""

import multiprocessing
from collections.abc import Callable
from importlib import import_module
from typing import Any

HEAVY = ("_dynamo", "distributed.fsdp", "distributed.checkpoint.state_dict")


def run_two(target: Callable[..., Any], *given: Any, exitcode: int = 0) -> None:
    """Call target(rank, *given) in a process for each of two ranks, which end with this code."""
    for module in HEAVY:
        import_module(f"torch.{module}")  # once here, and not in each process
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=target, args=(rank, *given)) for rank in (0, 1)]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(120)
            assert process.exitcode == exitcode
    finally:
        for process in started:
            process.kill()
