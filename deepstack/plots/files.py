"""Files of charts: the figure as PDF, PNG and SVG, and its values as CSV."""

import io
from collections.abc import Sequence
from pathlib import Path

from deepstack.base.csv_text import csv_text
from deepstack.base.text import printable
from deepstack.plots.chart import Chart, Options
from deepstack.plots.style import deepstack_style
from deepstack.records.files import replace

FORMATS = ("pdf", "png", "svg", "csv")
DEFAULT_OPTIONS = Options()
# Forms of a figure -> what matplotlib would write into it that another day or version changes.
CHANGING_METADATA = {
    "pdf": ("CreationDate", "Creator", "Producer"),
    "png": ("Software",),
    "svg": ("Date", "Creator"),
}


def save(
    chart: Chart,
    folder: Path,
    name: str,
    formats: Sequence[str] = FORMATS,
    options: Options = DEFAULT_OPTIONS,
) -> list[Path]:
    """Write <name>.pdf, .png, .svg and .csv; the same chart gives the same bytes.

    formats: which of these.  A figure has its caption, with every setting of its runs, in
        <name>.txt beside it.
    """
    paths = []
    for kind in formats:
        paths.append(folder / f"{name}.{kind}")
        replace(paths[-1], csv_bytes(chart) if kind == "csv" else render(chart, kind, options))
    if chart.caption and any(kind != "csv" for kind in formats):
        paths.append(folder / f"{name}.txt")
        replace(paths[-1], printable(chart.caption).encode("utf-8"))
    return paths


def render(chart: Chart, kind: str, options: Options = DEFAULT_OPTIONS) -> bytes:
    """Return the figure as a pdf, png or svg; in the style `paper` texts of an SVG are text."""
    buffer = io.BytesIO()
    with deepstack_style(options.font, svg_text=options.style == "paper"):
        chart.figure.savefig(buffer, format=kind, metadata=dict.fromkeys(CHANGING_METADATA[kind]))
    return buffer.getvalue()


def csv_bytes(chart: Chart) -> bytes:
    """Return the values of a chart as CSV."""
    return csv_text(chart.data).encode("utf-8", "backslashreplace")
