"""Findings as rows, as JSON, as a page and as charts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack.theory.claim import Claim, Curves, Finding, Part, Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

Findings = Sequence[tuple[Claim, Finding]]

ROUNDING = 1e-9  # a standard error below this share of the value is that of arithmetic
SIGNS = {"=": "", "<=": "≤ ", ">=": "≥ "}
RULE = (
    "Every measured number stands with its standard error.  Its interval is the 99.73 % interval: "
    "three standard errors on each side, and more for few draws, by Student's t (4.53 for eight).  "
    "A part *disagrees* if its whole interval violates the claim, with the tolerance that the "
    "claim allows.  It is *undecided* if the estimate violates the claim but its interval reaches "
    "it, or, for an equality, if the interval is wider than the tolerance, or than 10 % of the "
    "prediction where the claim gives none.  Otherwise it *agrees*.  An equality without tolerance "
    "agrees if its interval contains the prediction.  Where the prediction is 0, tolerances are "
    "absolute.  A claim is undecided if a stated part is; it holds if all its parts agree, as a "
    "bound if none of them is an equality, and in part if some do.  Parts marked *beside* are not "
    "claimed: they show a true statement instead, or how tight the claim is."
)


def predicted(part: Part) -> str:
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


def decision_text(part: Part) -> str:
    """Return a part's decision, with the draws it needs if undecided; 'beside' if not stated."""
    word: str = part.decision
    if part.draws_needed:
        word += f" (needs {part.draws_needed} draws, has {part.draws})"
    return word if part.stated else f"beside: {word}"


def rows(findings: Findings) -> list[dict[str, str]]:
    """Return a row for each claim with its verdict, followed by one for each of its parts."""
    table = []
    for claim, finding in findings:
        names = ("id", "formula", "predicted", "measured", "verdict")
        table.append(
            dict(zip(names, (claim.id, claim.formula, "", "", finding.verdict), strict=True))
        )
        for part in finding.parts:
            cells = ("", f"  {part.what}", predicted(part), measured(part), decision_text(part))
            table.append(dict(zip(names, cells, strict=True)))
    return table


def as_json(findings: Findings) -> list[dict[str, Any]]:
    """Return the findings as lists and dicts that JSON can hold."""
    return [
        {
            "id": claim.id,
            "formula": claim.formula,
            "source": claim.source._asdict(),
            "verdict": finding.verdict,
            "parts": [
                asdict(part)
                | {
                    "agrees": part.agrees,
                    "decision": part.decision,
                    "draws_needed": part.draws_needed,
                }
                for part in finding.parts
            ],
            "note": finding.note,
            "curves": curves_as_json(finding.curves) if finding.curves else None,
        }
        for claim, finding in findings
    ]


def curves_as_json(curves: Curves) -> dict[str, Any]:
    """Return curves as lists of numbers."""
    options = {key: value for key, value in vars(curves).items() if key != "lines"}
    lines = [
        {key: list(v) if key in ("x", "y", "error") and v else v for key, v in line.items()}
        for line in (line._asdict() for line in curves.lines)
    ]
    return options | {"lines": lines}


def page(findings: Findings, command: str, charts: str | None) -> str:
    """Return the findings as a page of Markdown; charts: the path of their folder from the page."""
    import torch

    total: dict[str, int] = {}
    for _, finding in findings:
        total[finding.verdict] = total.get(finding.verdict, 0) + 1
    counted = ", ".join(f"{verdict}: {total[verdict]}" for verdict in sorted(total))
    lines = [
        "# What the source documents claim, measured",
        "",
        f"This page was made by `{command}` (torch {torch.__version__}, CPU).  Do not edit it.",
        "",
        f"{len(findings)} claims.  {counted.capitalize()}.",
        "",
        RULE,
        "",
        *undecided_parts(findings),
        "",
        *table(
            ("claim", "what is claimed", "verdict"),
            [
                (f"[{claim.id}](#{claim.id.lower()})", code(claim.formula), finding.verdict)
                for claim, finding in findings
            ],
        ),
    ]
    for claim, finding in findings:
        lines += ["", *section(claim, finding, charts)]
    return "\n".join(lines)


def undecided_parts(findings: Findings) -> list[str]:
    """Return the undecided parts with the draws they need, as lines of Markdown."""
    cells = [
        (claim.id, f"{'' if part.stated else 'beside: '}{part.what}", str(part.draws),
         str(part.draws_needed or "unknown"))
        for claim, finding in findings
        for part in finding.parts
        if part.decision == "undecided"
    ]  # fmt: skip
    if not cells:
        return ["No part is undecided."]
    head = "Undecided parts, and the draws that decide them if estimate and spread stay:"
    return [head, "", *table(("claim", "part", "draws", "draws needed"), cells)]


def section(claim: Claim, finding: Finding, charts: str | None) -> list[str]:
    """Return the section of one claim, as lines of Markdown."""
    lines = [f"## {claim.id}", "", f"{code(claim.formula)}: **{finding.verdict}**.", ""]
    cells = [
        (part.what, predicted(part), measured(part), decision_text(part)) for part in finding.parts
    ]
    lines += table(("what", "claimed", "measured", ""), cells)
    lines += ["", finding.note, ""]
    if charts and finding.curves:
        lines += [f"![{finding.curves.y} against {finding.curves.x}]({charts}/{claim.id}.png)", ""]
    return [*lines, f"Source: {cited(claim.source)}"]


def cited(source: Source) -> str:
    """Return title, address and papers of a document, with links."""
    papers = re.sub(r"arXiv:(\S+?)(?=[,.;]?(?:\s|$))", link, source.papers)
    address = f", {source.address}" if source.address else ""
    return f"{source.title}{address}" + (f" (on {papers})." if papers else ".")


def link(match: re.Match[str]) -> str:
    """Return an arXiv id as a link."""
    return f"[arXiv:{match[1]}](https://arxiv.org/abs/{match[1]})"


def code(text: str) -> str:
    """Return text as a code span of Markdown."""
    return f"`{text}`"


def table(names: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, as lines."""
    lines = [names, ["---"] * len(names), *cells]
    safe = ([escaped(cell) for cell in line] for line in lines)
    return [f"| {' | '.join(line)} |" for line in safe]


def escaped(cell: str) -> str:
    """Escape a cell of a Markdown table; code spans and links keep their meaning."""
    cell = cell.replace("|", "\\|")
    return cell if cell.startswith(("`", "[")) else re.sub(r"([*_<>])", r"\\\1", cell)


def draw(claim: Claim, finding: Finding, folder: Path) -> Path | None:
    """Draw the claim's chart as <folder>/<id>.png and return its path; None if it has no chart.

    Measured points have a bar of ± one standard error, lines a band.  The same finding gives the
    same bytes.
    """
    if finding.curves is None:
        return None
    from matplotlib.ticker import MaxNLocator

    from deepstack.plots.page import Page
    from deepstack.plots.style import extent, log_axis, paper

    curves = finding.curves
    with paper():
        page = Page(1, 1, height=1.7)
        handles = lines(page.axes[0], curves)
        axes = page.axes[0]
        for which, log in (("x", curves.log_x), ("y", curves.log_y)):
            if log:
                values = [float(v) for line in curves.lines for v in getattr(line, which)]
                log_axis(axes, which, *extent(values))
        if not curves.log_x and all(float(x).is_integer() for li in curves.lines for x in li.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if not curves.log_y and min(min(line.y) for line in curves.lines) >= 0:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(lowered(curves.x))
        axes.set_ylabel(lowered(curves.y))
        figure = page.finish(f"{claim.id}: {finding.verdict}", claim.formula, (), handles)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{claim.id}.png"
        figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def lowered(label: str) -> str:
    """Return a label with the indices of symbols as subscripts: θ_l, β_LN, d_head."""
    return re.sub(r"_(?:\{([^}]*)\}|([A-Za-z]+|\d+))", lambda m: f"$_{{{m[1] or m[2]}}}$", label)


def lines(axes: Axes, curves: Curves) -> list[Line2D]:
    """Draw the lines and return the legend's entries.

    Measured points and the claimed line share a colour if their labels are equal up to the last
    comma.
    """
    from matplotlib.lines import Line2D

    from deepstack.plots.style import COLOURS, MARKERS

    fronts = [line.label.rpartition(", ")[0] for line in curves.lines]
    kinds = [
        {line.measured for line, other in zip(curves.lines, fronts, strict=True) if other == front}
        for front in fronts
    ]
    names = [
        front if front and len(kind) == 2 else line.label
        for line, front, kind in zip(curves.lines, fronts, kinds, strict=True)
    ]
    families = list(dict.fromkeys(names))
    handles = []
    for name, line in zip(names, curves.lines, strict=True):
        index = families.index(name)
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)]}
        if line.measured:
            style |= {"marker": MARKERS[index % len(MARKERS)], "linestyle": "none"}
            axes.errorbar(line.x, line.y, yerr=line.error, capsize=1.5, elinewidth=0.8, **style)
        else:
            axes.plot(line.x, line.y, **style)
            if line.error:
                low = [y - e for y, e in zip(line.y, line.error, strict=True)]
                high = [y + e for y, e in zip(line.y, line.error, strict=True)]
                axes.fill_between(line.x, low, high, color=style["color"], alpha=0.2, linewidth=0)
        handles.append(Line2D([], [], label=lowered(line.label), **style))
    return handles
