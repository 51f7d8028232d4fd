"""Summarises a measurement as rows, ratios and exponents, and draws the rows."""

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import Measured
from benchmarks.peers.rows import LOGGED, PRODUCTS_LABEL, UNLOGGED, RowProcess
from deepstack import config as conf
from deepstack.base import ConfigError
from deepstack.records import followed, replace
from deepstack.runs import power_law


def report(config: conf.Config, measured: Measured, command: str, source: str) -> dict[str, Any]:
    """Return the measurement as one JSON object.

    rows: one dict a row, see `row_of`.
    ratios: 'a / b' -> the time of a's step over that of b's, paired by round.
    exponents: of deepstack's step time and memory in depth, if other depths were measured.
    """
    result: dict[str, Any] = {
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
        "rows": rows_of(measured, config.train.batch_size * config.task.seq_len),
        "ratios": ratios_of(measured.rows),
    }
    if measured.depths:
        result["exponents"] = exponents_of(measured.depths)
    return result


def rows_of(measured: Measured, tokens: int) -> list[dict[str, Any]]:
    """Return all rows, the last for the matrix products alone, in deepstack's process."""
    rows = [row_of(process, tokens) for process in measured.rows]
    first = measured.rows[0]
    last = _row(PRODUCTS_LABEL, first.products, tokens)
    return [*rows, last | {"matmul_fraction": 1.0, "gflop": first.flops / 1e9}]


def row_of(process: RowProcess, tokens: int) -> dict[str, Any]:
    """Return one row.

    step_ms, step_ms_low, step_ms_high: median, lowest and highest of the rounds.
    peak_memory_mb: of its process, or allocated on the GPU.  start_memory_mb: before the model is
    built.  matmul_fraction: median over the rounds of the time of the matrix products alone, in
    the same process, over that of the step.
    start_s: from the start of the process to the end of its first step.
    """
    row = _row(process.row.label, process.steps, tokens)
    shares = [p / s for p, s in zip(process.products, process.steps, strict=True)]
    return row | {
        "peak_memory_mb": round(process.peak_memory, 1),
        "start_memory_mb": round(process.start_memory, 1),
        "matmul_fraction": rounded(statistics.median(shares)),
        "start_s": round(process.start, 2),
        "parameters": process.parameters,
    }


def _row(name: str, seconds: Sequence[float], tokens: int) -> dict[str, Any]:
    summary = summarise([1000 * s for s in seconds])
    median = summary["median"]
    return {
        "name": name,
        "step_ms": median,
        "step_ms_low": summary["low"],
        "step_ms_high": summary["high"],
        "steps_per_s": rounded(1000 / median),
        "tokens_per_s": rounded(1000 * tokens / median),
        "peak_memory_mb": None,
        "matmul_fraction": None,
        "start_s": None,
    }


def ratios_of(processes: Sequence[RowProcess]) -> dict[str, dict[str, float]]:
    """Return step times of deepstack's rows over each other row, and of its rows over each other.

    Each of deepstack's rows is compared with that in which ‖ΔF‖ is logged, and this one with that
    in which nothing is.
    """
    by_row = {process.row: process.steps for process in processes}
    own_rows = [row for row in by_row if row.is_own]
    pairs = [(LOGGED, UNLOGGED)]
    pairs += [(row, LOGGED) for row in own_rows if row.variants]
    pairs += [(ours, other) for other in by_row if not other.is_own for ours in own_rows]
    return {
        f"{a.label} / {b.label}": summarise(
            [x / y for x, y in zip(by_row[a], by_row[b], strict=True)]
        )
        for a, b in pairs
    }


def exponents_of(processes: Sequence[RowProcess]) -> dict[str, Any]:
    """Return the powers of depth with which step time and memory above the start grow.

    Least squares in logarithms over the medians; standard_error is None for fewer than three.
    """
    depths = [process.config.model.depth for process in processes]
    values = {
        "step_ms": [rounded(1000 * statistics.median(p.steps)) for p in processes],
        "memory_mb": [rounded(p.peak_memory - p.start_memory) for p in processes],
    }
    result: dict[str, Any] = {"depth": depths}
    for name, value in values.items():
        fit = power_law(depths, value) if min(value) > 0 else None
        error = None if fit is None or fit.n < 3 else rounded(fit.standard_error)
        result[name] = {
            "exponent": None if fit is None else rounded(fit.exponent),
            "standard_error": error,
            "values": value,
        }
    return result


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest."""
    return {
        "median": rounded(statistics.median(values)),
        "low": rounded(min(values)),
        "high": rounded(max(values)),
    }


def rounded(value: float) -> float:
    """Round to four significant digits, enough for a time."""
    return float(f"{value:.4g}")


SUFFIXES = (".png", ".svg", ".pdf")


def refuse_chart(path: Path) -> None:
    """Raise ConfigError for a file that could not be written; called before the measurement."""
    if path.suffix.lower() not in SUFFIXES:
        allowed = ", ".join(SUFFIXES)
        raise ConfigError(f"--chart {path}: found {path.suffix or 'no'} suffix; allowed {allowed}")
    if not path.parent.is_dir():
        raise ConfigError(f"--chart {path}: there is no folder {path.parent}")


def draw_rows(result: Mapping[str, Any], path: Path) -> None:
    """Draw the median time of a step with its range, and the matrix products alone as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from deepstack.plots import COLOURS, GREY, PAGE_WIDTH, deepstack_style

    rows = result["rows"]
    unit, scale = ("s", 1e-3) if max(row["step_ms"] for row in rows) >= 1000 else ("ms", 1.0)
    with deepstack_style():
        figure = Figure(figsize=(PAGE_WIDTH, 0.75 + 0.26 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.grid(False, axis="y")
        most = max(row["step_ms_high"] for row in rows) * scale
        for position, row in enumerate(rows):
            low, middle, high = (
                scale * row[name] for name in ("step_ms_low", "step_ms", "step_ms_high")
            )
            is_ours = row["name"].startswith("deepstack")
            is_last = position == len(rows) - 1
            colour = COLOURS[0] if is_ours else GREY if is_last else COLOURS[1]
            axes.barh(position, middle, height=0.62, color=colour, alpha=1.0 if is_ours else 0.75)
            axes.errorbar(
                middle, position, xerr=[[middle - low], [high - middle]],
                color="black", linewidth=0.8, capsize=2, fmt="none",
            )  # fmt: skip
            memory = row["peak_memory_mb"]
            suffix = "" if memory is None else f", {memory / 1000:.2f} GB"
            axes.text(high + 0.012 * most, position, f"{middle:.3g} {unit}{suffix}", va="center")
        axes.axvline(scale * rows[-1]["step_ms"], color=GREY, linewidth=0.8, linestyle=(0, (3, 2)))
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, most * 1.22)
        axes.set_xlabel(f"time of a training step ({unit}; median, lowest to highest)")
        axes.set_title(title_of(result))
        kind = path.suffix.lower().removeprefix(".") or "png"
        picture = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(picture, format=kind, metadata=metadata)
    replace(followed(path.parent) / path.name, picture.getvalue())


def title_of(result: Mapping[str, Any]) -> str:
    """Return the title: shape, machine, version and date."""
    shape, machine = result["shape"], result["machine"]
    return (
        f"{shape['depth']} layers of d_model {shape['d_model']}, "
        f"batch {shape['batch_size']} x {shape['seq_len']}, {shape['precision']}; "
        f"{where(machine)}, torch {machine['torch']}, {machine['date']}"
    )


def where(machine: Mapping[str, Any]) -> str:
    """Return the GPU's name, or the CPU's with the number of threads."""
    if "gpu" in machine:
        return str(machine["gpu"])
    threads = machine["threads"]
    return f"{machine['cpu']}, {threads} thread{'s' if threads > 1 else ''}"
