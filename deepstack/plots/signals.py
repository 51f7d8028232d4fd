"""Gradient ratios of each sublayer: through its norm, and over its residual sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.analysis.captions import caption_of, diverged_note, title_of
from deepstack.analysis.series import Series, choose_series, left_out_note, split_series
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import band_handle
from deepstack.plots.layers import sides_note
from deepstack.plots.page import Handle, Page, typeset
from deepstack.plots.style import COLOURS, DASHES, GREY, layer_axis, log_axis
from deepstack.plots.values import draw_band, draw_reference, log_extent, write_no_value
from deepstack.records import Run

MOST_ROWS = 4
KINDS = {
    "attention": "attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
}
# Reported for Post-LN by Zhang et al. 2019, arXiv:1908.11365, section 3.
PUBLISHED = {"β_LN": (0.82, 0.86), "β_RC": (1.10, 1.22)}
WORDS = {"β_LN": "through the norm", "β_RC": "over the sum", "β_LN·β_RC": "both"}


@dataclass(frozen=True)
class Rows:
    """One quantity of one kind of sublayer: (seeds, records, layers)."""

    steps: np.ndarray
    values: np.ndarray

    def at(self, record: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation over the seeds, by layer; NaN for the one of one seed."""
        found = self.values[:, record]
        several = len(found) > 1
        nothing = np.full(found.shape[1], math.nan)
        return found.mean(axis=0), found.std(axis=0, ddof=1) if several else nothing


def read(members: Sequence[Run], name: str) -> Rows | None:
    """A diagnostic of all seeds, at the records that they share; None where one lacks it."""
    if not all(name in run.layer_names() for run in members):
        return None
    diagnostics = [run.layers(name) for run in members]
    shared = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in diagnostics)))
    picked = [v[[steps.tolist().index(s) for s in shared]] for steps, v in diagnostics]
    values = np.array(picked, dtype=float)
    rows = Rows(np.array(shared), np.where(np.isfinite(values), values, math.nan))
    return rows if len(shared) and (rows.values > 0).any() else None


@chart("gradient_ratios")
def gradient_ratios(runs: list[Run], *, options: Options) -> Chart:
    """Ratios β_LN, β_RC and their product by layer and sublayer, at the first and last record."""
    usable = [run for run in runs if "beta_ln_feed_forward" in run.layer_names()]
    if not usable:
        raise NothingMatchedError("no run has the per-layer diagnostics beta_ln and beta_rc")
    series, depth_settings = split_series(usable)
    values = {s.label: quantities(s) for s in series}
    if not any(values.values()):
        raise NothingMatchedError("β_LN and β_RC: no value is finite")
    # A setting with something to show in every panel comes first, one without any has none.
    complete = [s for s in series if len({symbol for _, symbol in values[s.label]}) == len(WORDS)]
    partly = [s for s in series if values[s.label] and s not in complete]
    choice, _ = choose_series(complete, MOST_ROWS)
    choice += choose_series(partly, MOST_ROWS - len(choice))[0]
    shown = [s for s in series if s in choice]
    page = Page(len(shown), 3, height=1.25)
    table = Table()
    end_steps: tuple[set[int], set[int]] = (set(), set())
    kinds: set[str] = set()
    several = len(shown) > 1 or len({depth for one in series for depth in one.depths}) > 1
    vanished: list[str] = []
    published: list[Handle] = []
    for row, one in enumerate(shown):
        axes = page.axes[3 * row : 3 * row + 3]
        label = f"{one.label}, N\u00a0=\u00a0{one.depths[-1]}"
        for panel, symbol in zip(axes, WORDS, strict=True):
            subscript = in_braces(symbol)
            panel.set_title(f"{label}: {subscript}" if several else subscript)
            draw_published(panel, symbol, table, f"{label}: {symbol}")
        draw_setting(axes, one, values[one.label], label, table)
        for rows in values[one.label].values():
            for steps, end in zip(end_steps, (0, -1), strict=True):
                steps.add(int(rows.steps[end]))
        kinds |= {kind for kind, _ in values[one.label]}
        vanished += gaps(label, values[one.label])
        for panel, symbol in zip(axes, WORDS, strict=True):
            if not any(known == symbol for _, known in values[one.label]):
                write_no_value(panel)
        for panel, symbol in zip(axes, WORDS, strict=True):
            name = f"{label}: {symbol}"
            published = draw_reference(panel, options, "gradient_ratios", table, name) or published
    for column, symbol in enumerate(WORDS):
        low, high = log_extent([r for r in table.rows if r["panel"].endswith(f": {symbol}")])
        for panel in page.axes[column::3]:
            log_axis(panel, "y", low, high)
            panel.set_ylabel(f"{in_braces(symbol)}, {WORDS[symbol]}")
    for panel in page.axes[: -3 or None]:
        panel.set_xlabel("")
    notes = sides_note(usable) + caption_of(usable, depth_settings)
    if any(len(one.depths) > 1 for one in shown):
        notes.insert(0, "each at its greatest depth")
    notes = left_out_note([s.label for s in series if s not in shown]) + notes
    if vanished:
        notes.append(f"no ratio where the gradient is 0: {'; '.join(vanished)}")
    title = "Gradient ratios by layer"
    notes += diverged_note(
        (f"{s.label}, N\u00a0=\u00a0{s.depths[-1]}", s.at(s.depths[-1])) for s in shown
    )
    entries = handles(kinds, sorted(end_steps[0]), sorted(end_steps[1]), table)
    figure = page.finish(title, title_of(usable, series), notes, entries + published)
    return Chart(figure, table.frame(), title)


def in_braces(symbol: str) -> str:
    """The symbol with both of its letters as subscripts."""
    return typeset(symbol.replace("_LN", "_{LN}").replace("_RC", "_{RC}"))


def quantities(one: Series) -> dict[tuple[str, str], Rows]:
    """Return the values of a series at its greatest depth, by kind of sublayer and symbol."""
    members = one.at(one.depths[-1])
    symbols = {}
    for kind in KINDS:
        ln, rc = (read(members, f"{name}_{kind}") for name in ("beta_ln", "beta_rc"))
        product = Rows(ln.steps, ln.values * rc.values) if ln and rc else None
        for symbol, rows in zip(WORDS, (ln, rc, product), strict=True):
            if rows is not None:
                symbols[kind, symbol] = rows
    return symbols


def gaps(label: str, found: dict[tuple[str, str], Rows]) -> list[str]:
    """Where the last record has no ratio of layers that the first one has: in one of the seeds."""
    layers = set()
    for rows in found.values():
        first, last = (rows.at(record)[0] > 0 for record in (0, -1))
        layers |= set((np.flatnonzero(first & ~last) + 1).tolist())
    if not layers:
        return []
    step = int(next(iter(found.values())).steps[-1])
    low, high = min(layers), max(layers)
    several = "" if len(layers) == high - low + 1 else f"{len(layers)} of "
    return [f"{label}, step {step}, {several}layers {low} to {high}"]


def draw_setting(
    axes: Sequence[Axes],
    one: Series,
    found: dict[tuple[str, str], Rows],
    label: str,
    table: Table,
) -> None:
    """The three panels of a setting."""
    members = one.at(one.depths[-1])
    depth = 1
    first = members[0].columns.get("stacks", {}).get("encoder", 0)  # where a decoder begins
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        expected = read(members, f"beta_ln_predicted_{kind}")
        for panel, symbol in zip(axes, WORDS, strict=True):
            rows = found.get((kind, symbol))
            if rows is None:
                continue
            depth = rows.values.shape[2]
            records = sorted({0, len(rows.steps) - 1})
            for style, record in zip(("-", DASHES[1]), records, strict=False):
                name = f"{KINDS[kind]}, step {int(rows.steps[record])}"
                draw_line(
                    panel, rows, record, {"color": colour, "ls": style}, first,
                    table, f"{label}: {symbol}", name, "line",
                )  # fmt: skip
            if symbol == "β_LN" and expected is not None:
                draw_line(
                    panel, expected, 0, {"color": colour, "ls": DASHES[2], "lw": 0.7}, first,
                    table, f"{label}: {symbol}", f"{KINDS[kind]}, predicted", "predicted",
                )  # fmt: skip
    for panel in axes:
        layer_axis(panel, depth, ticks=4)


def draw_line(
    axes: Axes,
    rows: Rows,
    record: int,
    style: dict[str, Any],
    first: int,
    table: Table,
    panel: str,
    name: str,
    kind: str,
) -> None:
    """One line over the layers with its band; broken after layer `first`, where a stack ends."""
    mean, deviation = rows.at(record)
    if kind != "line":
        deviation = np.full_like(mean, math.nan)  # it has no band
    low, high = mean - deviation, mean + deviation
    layers = np.arange(1, len(mean) + 1)
    good = np.isfinite(mean) & (mean > 0)
    marker = "o" if int(good.sum()) <= 24 else None
    for part in (layers <= first, layers > first):
        chosen = good & part
        axes.plot(layers[chosen], mean[chosen], marker=marker, ms=1.8, **style)
        known = np.where(good, low, math.nan)
        draw_band(axes, layers[part], known[part], high[part], style["color"])
    for layer in layers[good]:
        i = layer - 1
        table.add(
            panel=panel, series=name, kind=kind, x=int(layer), y=mean[i],
            low=low[i], high=high[i], n=len(rows.values),
        )  # fmt: skip


def draw_published(axes: Axes, symbol: str, table: Table, panel: str) -> None:
    """The published range as a band, and the line at 1 that says growing or vanishing."""
    axes.axhline(1.0, color=GREY, lw=0.6, zorder=1)
    table.add(panel=panel, series="neither grows nor vanishes", kind="level", y=1.0)
    if symbol in PUBLISHED:
        low, high = PUBLISHED[symbol]
        axes.axhspan(low, high, color=GREY, alpha=0.18, lw=0)
        for edge in (low, high):
            table.add(panel=panel, series="published", kind="reference", y=edge)


def handles(
    kinds: set[str], first: Sequence[int], last: Sequence[int], table: Table
) -> list[Handle]:
    """Legend entries: colours are kinds of sublayer, dashes the settings' first and last steps."""
    entries: list[Handle] = [
        Line2D([], [], color=colour, label=KINDS[kind])
        for kind, colour in zip(KINDS, COLOURS, strict=False)
        if kind in kinds
    ]
    entries.append(Line2D([], [], color=GREY, ls="-", label=step_words(first, "first")))
    if first != last:
        entries.append(Line2D([], [], color=GREY, ls=DASHES[1], label=step_words(last, "last")))
    if any(row["kind"] == "predicted" for row in table.rows):
        words = f"1/sqrt(α² + Var G), {step_words(first, 'first')}"
        entries.append(Line2D([], [], color=GREY, ls=DASHES[2], lw=0.7, label=words))
    entries.append(Patch(color=GREY, alpha=0.18, lw=0, label="published for Post-LN"))
    return entries + band_handle(table)


def step_words(steps: Sequence[int], which: str) -> str:
    """`step 20`, or where settings differ in it `each one's last snapshot, step 2 to 20`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"each one's {which} snapshot, step {steps[0]} to {steps[-1]}"
