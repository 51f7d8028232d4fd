"""`deepstack.conform`: a PyTorch block beside deepstack's reference of a scheme."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deepstack.base import DifferenceError
from deepstack.schemes import SCHEMES
from deepstack.tools.conform.block import Patterns, load_block
from deepstack.tools.conform.comparison import Comparison
from deepstack.tools.conform.reference import Reference
from deepstack.tools.conform.report import Report
from deepstack.tools.conform.sets import CHECKS, TOLERANCE, set_of


def conform(
    block: str | Path | ModuleType | Any,
    scheme: str,
    *,
    parameters: Mapping[str, Patterns] | None = None,
    settings: Mapping[str, Any] | None = None,
    checks: Sequence[str] = CHECKS,
    tolerance: float = TOLERANCE,
    set_name: str | None = None,
) -> Report:
    """Compare a PyTorch block with deepstack's reference of a scheme; raise if they differ.

    block: a file, a module, or a function: `build(depth, d_model, n_heads, d_ff)`, which returns a
        torch.nn.Module x_0 -> F, or `residual(x, G, …)`, which returns the new stream.
    parameters: name in the reference -> name in the module (docs/conform.md).
    settings: of the reference, as in {"model.norm.kind": "rms"}.
    checks: some of forward, gradients, start, update.
    tolerance: the largest relative difference of numbers in double precision.
    set_name: a dated set of checks and tolerances in place of both, as in "2026-12".

    Returns a report with the differences.  Raises DifferenceError, whose text names the first
    disagreement with its size, cause, equation and effect; ConfigError if the block cannot be run.
    """
    report = examine(
        block,
        scheme,
        parameters=parameters,
        settings=settings,
        checks=checks,
        tolerance=tolerance,
        set_name=set_name,
    )
    if report.difference is not None:
        raise DifferenceError(report.text)
    return report


def examine(
    block: Any,
    scheme: str,
    *,
    parameters: Mapping[str, Patterns] | None = None,
    settings: Mapping[str, Any] | None = None,
    checks: Sequence[str] = CHECKS,
    tolerance: float = TOLERANCE,
    set_name: str | None = None,
) -> Report:
    """Return the report of `conform`, also of a block that differs."""
    began = time.perf_counter()
    scheme = SCHEMES[scheme].name  # refuses an unknown one
    numbers = set_of(set_name, scheme, checks, tolerance)
    loaded = load_block(block, parameters)
    given = dict(loaded.settings) | dict(settings or {})
    loaded = loaded.expanded(Reference(scheme, 2, given))
    chosen = loaded.reference_settings() | given
    report = Report(loaded.name, scheme, numbers)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for small matrices
    try:
        with torch.random.fork_rng(devices=[]):
            Comparison(loaded, scheme, chosen, numbers, report).run()
    finally:
        torch.set_num_threads(threads)
    report.seconds = time.perf_counter() - began
    return report
