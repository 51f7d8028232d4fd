"""Measured entries as rows, as JSON, as a page and as charts."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepstack.records import followed, replace
from deepstack_lab.ledger.claim import Claim, Curves, Finding, Part, Rule, Source
from deepstack_lab.ledger.measured import Measured
from deepstack_lab.ledger.reach import Extent

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

ROUNDING = 1e-9  # a standard error below this share of the value comes from rounding
SIGNS = {"=": "", "<=": "≤ ", ">=": "≥ "}


def predicted(part: Part | Rule) -> str:
    """Return the prediction as text, such as `≤ 1 (within 5%)`."""
    share = f"{100 * part.tolerance:.3g}%" if part.predicted else f"{part.tolerance:.3g}"
    allowed = f" (within {share})" if part.tolerance >= 1e-3 else ""
    return f"{SIGNS[part.relation]}{part.predicted:.4g}{allowed}"


def measured(part: Part) -> str:
    """Return the measured number ± its standard error, rounded to two digits of the latter."""
    value, error = part.measured, part.uncertainty
    if error <= ROUNDING * abs(value) or not math.isfinite(error) or not math.isfinite(value):
        return f"{value:.4g}"
    if error < 1e-4 * abs(value):
        return f"{value:.4g} ± {error:.0e}"
    digits = 1 - math.floor(math.log10(error))
    if abs(value) < 1e-3 or digits <= 0:
        return f"{value:.3g} ± {error:.2g}"
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def null_result(part: Part | Rule) -> str:
    """Return value and meaning of a null result, such as `1: no decay`."""
    return f"{part.null.value:.4g}: {part.null.meaning}"


def needed(part: Part) -> str:
    """Return the draws that would decide an undecided part, to two digits; empty if unknown."""
    count = part.draws_needed
    if not count:
        return ""
    return f"about {float(f'{count:.1e}'):,.0f}" if count < 10_000 else "over 10,000"


def decision_text(part: Part) -> str:
    """Return a part's decision, with the draws it needs if undecided; 'beside' if not stated."""
    word: str = part.decision
    if part.draws_needed:
        word += f" (needs {needed(part)} draws, has {part.draws})"
    return word if part.stated else f"beside: {word}"


def interval(part: Part) -> str:
    """Return both ends of a part's interval as text; a dash without one."""
    low, high = part.interval
    return f"{low:.4g} to {high:.4g}" if math.isfinite(low) else "-"


def rows(results: Sequence[Measured]) -> list[dict[str, str]]:
    """Return a row for each entry with its verdict, followed by one for each of its parts."""
    columns = ("predicted", "measured", "99.73 % interval", "seeds")
    names = ("id", "formula", *columns, "cost", "verdict")
    table: list[tuple[str, ...]] = []
    for one in results:
        verdict = f"{one.verdict} ({one.reason})" if one.reason else one.verdict
        cost = f"{one.seconds:.1f} s" if one.finding else ""
        table.append((one.entry.id, one.entry.formula, "", "", "", "", cost, verdict))
        for rule in [] if one.finding else one.entry.rules:
            table.append(("", f"  {rule.what}", predicted(rule), "", "", "", "", ""))
        for part in one.finding.parts if one.finding else ():
            numbers = predicted(part), measured(part), interval(part), str(part.draws or "")
            table.append(("", f"  {part.what}", *numbers, "", decision_text(part)))
    return [dict(zip(names, cells, strict=True)) for cells in table]


def as_json(one: Measured) -> dict[str, Any]:
    """Return an entry and its result as lists and dicts that JSON can hold."""
    entry, finding = one.entry, one.finding or Finding((), "")
    shown = ("tier", "place", "published", "read", "study", "opposes", "identity")
    ranges = {"source_range": entry.source_range, "measured_range": one.measured_range}
    judged = ("agrees", "decision", "draws_needed", "interval")
    return (
        {"id": entry.id, "formula": entry.formula, "source": entry.source._asdict()}
        | {name: getattr(entry, name) for name in shown}
        | {"rules": [asdict(rule) | {"null": rule.null._asdict()} for rule in entry.rules]}
        | {name: asdict(range_) if range_ else None for name, range_ in ranges.items()}
        | {"verdict": one.verdict, "outside": list(one.outside), "reason": one.reason}
        | {"seeds": one.seeds, "seconds": round(one.seconds, 2)}
        | asdict(finding)
        | {
            "parts": [
                asdict(p) | {"null": p.null._asdict()} | {name: getattr(p, name) for name in judged}
                for p in finding.parts
            ]
        }
    )


def environment() -> Environment:
    """Return the environment of the page's template."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("deepstack_lab.ledger", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts = (predicted, null_result, measured, interval, decision_text, cited, escaped, listed)
    for text in (*texts, needed, reach, reach_sentence):
        environment.filters[text.__name__] = text
    return environment


def page(results: Sequence[Measured], command: str, charts: str | None) -> str:
    """Return the results as a page of Markdown; charts: the path of their folder from the page."""
    import torch

    total = Counter(one.verdict for one in results)
    counted = ", ".join(f"{verdict}: {count}" for verdict, count in sorted(total.items()))
    by_id = {one.entry.id: one for one in results}
    pairs = [
        (one, by_id[other]) for one in results for other in one.entry.opposes if other in by_id
    ]
    parts = [(one.entry, part) for one in results if one.finding for part in one.finding.parts]
    page = (
        environment()
        .get_template("page.md")
        .render(
            results=results,
            command=command,
            charts=charts,
            torch=torch.__version__,
            counted=counted.capitalize(),
            pairs=pairs,
            contradicted=[one for one in results if one.verdict == "disagrees"],
            unseen=[one for one in results if one.verdict == "not seen at this size"],
            undecided=[(entry, part) for entry, part in parts if part.decision == "undecided"],
        )
    )
    return page.removesuffix("\n")


def reach(one: Measured) -> str:
    """Return in a word how far the verdict of an entry reaches."""
    if one.entry.identity:
        return "identity"
    if one.entry.source_range is None:
        return "exact"
    if one.measured_range is None:
        return "no stack"
    return f"outside in {', '.join(one.outside)}" if one.outside else "inside"


def reach_sentence(one: Measured) -> str:
    """Return the ranges of the source and of the measurement, and where they differ."""
    if one.entry.identity:
        return "an identity, which holds for every number: it tests the program alone."
    if one.entry.source_range is None:
        return "exact: an equation, a bound or a start, stated of every size."
    sizes = str(one.entry.source_range)
    verb = "states" if sizes == str(Extent()) else "speaks of"
    source = f"the source {verb} {sizes}"
    if one.measured_range is None:
        return f"{source}; no stack is measured."
    beyond = f"Not shown to lie inside: {', '.join(one.outside)}."
    inside = beyond if one.outside else "It lies inside."
    return f"{source}; measured: {one.measured_range}.  {inside}"


def listed(draws: Sequence[float]) -> str:
    """Return draws as text, to twelve digits."""
    return " ".join(f"{value:.12g}" for value in draws)


def cited(source: Source) -> str:
    """Return authors, title, address and papers of a document, with links."""
    link = r"[arXiv:\1](https://arxiv.org/abs/\1)"
    papers = re.sub(r"arXiv:(\S+?)(?=[,.;]?(?:\s|$))", link, source.papers)
    address = f", {source.address}" if source.address else ""
    return f"{source.name}{address}" + (f" (on {papers})." if papers else ".")


def escaped(value: str | int) -> str:
    """Escape a cell of a Markdown table; code spans and links keep their meaning."""
    cell = str(value).replace("|", "\\|")
    return cell if cell.startswith(("`", "[")) else re.sub(r"([*_<>])", r"\\\1", cell)


def draw(claim: Claim, finding: Finding, folder: Path) -> None:
    """Draw the claim's chart, if it has one, as <folder>/<id>.png.

    Measured points have a bar of ± one standard error, lines a band.  The same finding gives the
    same bytes.
    """
    if finding.curves is None:
        return
    from matplotlib.ticker import MaxNLocator

    from deepstack.plots import Page, axis_limits, deepstack_style, log_axis

    curves = finding.curves
    xs = [float(x) for line in curves.lines for x in line.x]
    ys = [float(y) for line in curves.lines for y in line.y]
    with deepstack_style():
        page = Page(1, 1, height=1.7)
        axes = page.axes[0]
        handles = lines(axes, curves)
        if curves.log_x:
            log_axis(axes, "x", *axis_limits(xs))
        elif all(x.is_integer() for x in xs):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if curves.log_y:
            log_axis(axes, "y", *axis_limits(ys))
        elif min(ys) >= 0:
            axes.set_ylim(bottom=0)
        axes.set(xlabel=lowered(curves.x), ylabel=lowered(curves.y))
        verdict = Measured(claim, finding).verdict
        figure = page.finish(f"{claim.id}: {verdict}", claim.formula, (), handles)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=150, metadata={"Software": None})
    replace(followed(folder) / f"{claim.id}.png", picture.getvalue())


def lowered(label: str) -> str:
    """Return a label with the indices of symbols as subscripts: θ_l, β_LN, d_head."""
    from deepstack.plots import typeset_index

    return re.sub(r"_(?:\{([^}]*)\}|([A-Za-z]+|\d+))", lambda m: typeset_index(m[1] or m[2]), label)


def lines(axes: Axes, curves: Curves) -> list[Line2D]:
    """Draw the lines and return the legend's entries.

    Lines whose labels are equal up to the last comma share a colour.
    """
    from matplotlib.lines import Line2D

    from deepstack.plots import COLOURS, DASHES, MARKERS

    names = [line.label.rpartition(", ")[0] or line.label for line in curves.lines]
    colours = dict(zip(dict.fromkeys(names), cycle(COLOURS), strict=False))
    handles = []
    for line, name, marker, dash in zip(
        curves.lines, names, cycle(MARKERS), cycle(DASHES), strict=False
    ):
        style: dict[str, Any] = {"color": colours[name]}
        if line.measured:
            style |= {"marker": marker, "linestyle": "none"}
            axes.errorbar(line.x, line.y, yerr=line.error, capsize=1.5, elinewidth=0.8, **style)
        else:
            style |= {"linestyle": dash}
            axes.plot(line.x, line.y, **style)
            if line.error:
                band = np.subtract(line.y, line.error), np.add(line.y, line.error)
                axes.fill_between(line.x, *band, color=colours[name], alpha=0.2, linewidth=0)
        handles.append(Line2D([], [], label=lowered(line.label), **style))
    return handles
