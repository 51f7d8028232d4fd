"""What was measured, as rows, ratios and exponents: medians with their lowest and highest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from deepstack import config as conf
from deepstack.bench.measure import Measured
from deepstack.bench.process import Worker
from deepstack.bench.rows import LOGGED, OWN, PRODUCTS_LABEL, UNLOGGED, label_of
from deepstack.plots.fit import power_law


def report(config: conf.Config, measured: Measured, command: str, source: str) -> dict[str, Any]:
    """All of it as one JSON object.

    rows: one dict a row, see `row_of`.  ratios: 'a / b' -> the time of a's step over that of b's,
    pair by pair.  exponents: of deepstack's own step time and memory in depth; only where other
    depths were asked for.
    """
    found: dict[str, Any] = {
        "config": source,
        "shape": {
            "depth": config.model.depth,
            "d_model": config.model.d_model,
            "n_heads": config.model.n_heads,
            "d_ff": config.model.d_ff,
            "batch_size": config.train.batch_size,
            "seq_len": config.task.seq_len,
            "precision": config.train.precision,
        },
        "settings": conf.non_defaults(config),
        "machine": measured.facts,
        "command": command,
        "interleaved": measured.interleaved,
        "rows": rows_of(measured),
        "ratios": ratios_of(measured.rows),
    }
    if measured.depths:
        found["exponents"] = exponents_of(measured.depths)
    return found


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """Every row, and last the matrix products alone, in deepstack's own process."""
    rows = [row_of(worker, measured.tokens) for worker in measured.rows]
    own = measured.rows[0]
    spread = spread_of([1000 * seconds for seconds in own.products])
    rows.append(_row(PRODUCTS_LABEL, spread, measured.tokens) | {"matmul_fraction": 1.0})
    rows[-1]["gflop"] = own.flops / 1e9
    return rows


def row_of(worker: Worker, tokens: int) -> dict[str, Any]:
    """One row.

    step_ms, step_ms_low, step_ms_high: median, lowest and highest of the rounds.
    peak_memory_mb: of its process, or of what it allocated on the GPU; start_memory_mb of that
    was held before anything was built.  matmul_fraction: median over the rounds of the time of the
    matrix products alone, in the same process, over that of the step.
    start_s: from the start of the process to the end of its first step.
    """
    row = _row(label_of(worker.row), spread_of([1000 * s for s in worker.steps]), tokens)
    shares = [p / s for p, s in zip(worker.products, worker.steps, strict=True)]
    return row | {
        "peak_memory_mb": round(worker.peak_memory, 1),
        "start_memory_mb": round(worker.start_memory, 1),
        "matmul_fraction": rounded(statistics.median(shares)),
        "start_s": round(worker.start, 2),
        "parameters": worker.parameters,
    }


def _row(name: str, spread: dict[str, float], tokens: int) -> dict[str, Any]:
    median = spread["median"]
    return {
        "name": name,
        "step_ms": median,
        "step_ms_low": spread["low"],
        "step_ms_high": spread["high"],
        "steps_per_s": rounded(1000 / median),
        "tokens_per_s": rounded(1000 * tokens / median),
        "peak_memory_mb": None,
        "matmul_fraction": None,
        "start_s": None,
    }


def ratios_of(workers: Sequence[Worker]) -> dict[str, dict[str, float]]:
    """The step of deepstack's rows over that of each other row, and what logging costs."""
    by_row = {worker.row: worker.steps for worker in workers}
    pairs = [(LOGGED, UNLOGGED)]
    pairs += [(own, other) for other in by_row if other not in OWN for own in OWN]
    return {
        f"{label_of(a)} / {label_of(b)}": spread_of(
            [x / y for x, y in zip(by_row[a], by_row[b], strict=True)]
        )
        for a, b in pairs
    }


def exponents_of(workers: Sequence[Worker]) -> dict[str, Any]:
    """The power of depth by which step time and memory above the process's start grow.

    Least squares in logarithms over the medians; standard_error is None for fewer than three.
    """
    depths = [worker.config.model.depth for worker in workers]
    values = {
        "step_ms": [rounded(1000 * statistics.median(w.steps)) for w in workers],
        "memory_mb": [rounded(w.peak_memory - w.start_memory) for w in workers],
    }
    found: dict[str, Any] = {"depth": depths}
    for name, value in values.items():
        fit = power_law(depths, value) if min(value) > 0 else None
        error = None if fit is None or fit.n < 3 else rounded(fit.standard_error)
        found[name] = {
            "exponent": None if fit is None else rounded(fit.exponent),
            "standard_error": error,
            "values": value,
        }
    return found


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {
        "median": rounded(statistics.median(values)),
        "low": rounded(min(values)),
        "high": rounded(max(values)),
    }


def rounded(value: float) -> float:
    """Four significant digits: more says nothing of a time."""
    return float(f"{value:.4g}")
