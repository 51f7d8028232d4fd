"""Draws the rows of a benchmark as horizontal bars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepstack.errors import ConfigError

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

    from deepstack.plots.style import COLOURS, GREY, PAGE, deepstack_style

    rows = result["rows"]
    unit, scale = ("s", 1e-3) if max(row["step_ms"] for row in rows) >= 1000 else ("ms", 1.0)
    with deepstack_style():
        figure = Figure(figsize=(PAGE, 0.75 + 0.26 * len(rows)), layout="constrained")
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
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


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
