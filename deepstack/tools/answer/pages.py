"""An answer as text: for the terminal, as HTML, Markdown or LaTeX."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from deepstack.base import latex as latex_writer
from deepstack.base import markdown as markdown_writer
from deepstack.base import printable, short_text, wrap
from deepstack.cli import lay_out
from deepstack.plots import render
from deepstack.runs import INTERVAL_COLUMN, LOSS_COLUMN, interval_cell, nats_cell
from deepstack.tools.answer.content import PAPER, Content

WIDTH = 80  # of the text on a terminal; tables may be wider in a pipe
BELOW = "below chance"
FIGURE = "_figure"  # ending of the name of the figure that the page of LaTeX includes
CITED = re.compile(r" ?\[@(\w+)\]")


def table_rows(answer: Content) -> list[dict[str, str]]:
    """Return the rows of the table as texts; a row for each setting and depth.

    Runs of commands may have no depth, and no chance that their losses are compared with: then
    these columns are left out.
    """
    rows = []
    has_depth = any(row["N"] for row in answer.rows)
    has_chance = any(row["below"] is not None for row in answer.rows)
    for row in answer.rows:
        cells = {"setting": str(row["setting"])}
        if has_depth:
            cells["N"] = str(row["N"])
        if "best lr" in row:
            edge = f" ({row['edge']} tried)" if row["edge"] else ""
            cells["best lr"] = f"{short_text(row['best lr'])}{edge}"
        cells |= {"outcome": row["outcome"], LOSS_COLUMN: nats_cell(row["val_loss"])}
        if row["sd"] is not None:
            cells[LOSS_COLUMN] += f" ± {row['sd']:.3f}"
        cells[INTERVAL_COLUMN] = interval_cell(row["low"], row["high"])
        if has_chance:
            cells[BELOW] = nats_cell(row["below"])
        rows.append(cells)
    return rows


def rate_cells(answer: Content) -> list[dict[str, str]]:
    """Return the table of settings by learning rates as texts."""
    return [
        {name: "; ".join(value) if isinstance(value, list) else short_text(value)
         for name, value in row.items()}
        for row in answer.rate_rows
    ]  # fmt: skip


def plain_citations(text: str, sources: Mapping[str, str]) -> str:
    """Return a text whose citations are sources in brackets: 'DeepNorm (arXiv:2203.00555)'."""
    return CITED.sub(lambda one: f" ({s})" if (s := sources.get(one[1])) else "", text)


def terminal(answer: Content, figure: str, width: int | None = WIDTH) -> str:
    """Return the page for a terminal, without the settings' YAML.

    figure: path without ending.  width: of the tables, None for any.
    """
    lines = [*wrapped(answer.question), ""] if answer.question else []
    lines += wrapped(answer.sentence)
    for text in (*answer.found.details, *answer.found.sure):
        lines += ["", *wrapped(text)]
    text, commands = answer.next_runs
    if text:
        lines += ["", *wrapped(text), *(f"    {command}" for command in commands)]
    rows, by_rate = table_rows(answer), rate_cells(answer)
    lines += lay_out(rows, width, ["N", LOSS_COLUMN, BELOW], ["outcome", "best lr"]).lines
    lines += lay_out(by_rate, width).lines if by_rate else []
    if answer.chart:
        lines += [f"Figure: {figure}.pdf", *wrapped(answer.caption), ""]
    lines += ["To repeat it:", *(f"    {command}" for command in answer.repeat), ""]
    if answer.methods:
        methods = plain_citations(answer.methods, answer.sources)
        lines += ["Methods:", *wrapped(methods), ""]
    lines += [answer.bibtex, ""]
    return printable("\n".join(lines))


def wrapped(text: str) -> list[str]:
    """Return a paragraph in lines."""
    return wrap(text, WIDTH)


def markdown(answer: Content, figure: str) -> str:
    """Return the page as Markdown, with pandoc's citations.  figure: path without ending."""
    text, commands = answer.next_runs
    parts = [f"# {cited(answer.question or answer.title)}", f"**{cited(answer.sentence)}**"]
    parts += map(cited, (*answer.found.details, *answer.found.sure))
    if text:
        parts += [cited(text), markdown_writer.code(commands)]
    if answer.chart:
        parts.append(f"![{cited(answer.caption)}]({figure}.png)")
    for rows in (table_rows(answer), rate_cells(answer)):
        parts += [markdown_writer.table(rows)] if rows else []
    settings = [answer.settings.rstrip()]
    parts += ["## Settings of all runs", markdown_writer.code(settings, "yaml")]
    parts += ["## Commands", markdown_writer.code(answer.repeat)]
    parts += ["## Methods", cited(answer.methods)] if answer.methods else []
    parts += ["## References", markdown_writer.code([answer.bibtex], "bibtex")]
    return "\n\n".join(parts) + "\n"


def cited(text: str) -> str:
    """Return a text as Markdown, with its citations as pandoc reads them."""
    parts = CITED.split(text)
    cites = [f" [@{key}]" for key in parts[1::2]]
    words = [markdown_writer.paragraph(parts[0]), *map(markdown_writer.escaped, parts[2::2])]
    return "".join(part + cite for part, cite in zip(words, [*cites, ""], strict=True))


def tex(text: str) -> str:
    """Return a text as LaTeX, with `\\cite` for its citations."""
    parts = CITED.split(text)
    cites = [latex_writer.cite(key) for key in parts[1::2]]
    words = map(latex_writer.tex, parts[::2])
    return "".join(part + cite for part, cite in zip(words, [*cites, ""], strict=True))


def latex(answer: Content, figure: str) -> str:
    """Return the page as a LaTeX document; answer.bib beside it has the references."""
    text, commands = answer.next_runs
    parts = [latex_writer.heading(tex(answer.question or answer.title))]
    parts += [latex_writer.strong(tex(answer.sentence))]
    parts += map(tex, (*answer.found.details, *answer.found.sure))
    if text:
        parts += [tex(text), latex_writer.verbatim(commands)]
    if answer.chart:
        parts.append(latex_writer.figure(f"{figure}{FIGURE}", tex(answer.caption)))
    for rows in (table_rows(answer), rate_cells(answer)):
        parts += [latex_writer.centred(latex_writer.tabular(rows))] if rows else []
    if answer.methods:
        parts += [latex_writer.heading("Methods", 2), tex(answer.methods)]
    settings = answer.settings.splitlines()
    parts += [latex_writer.heading("Settings of all runs", 2), latex_writer.verbatim(settings)]
    parts += [latex_writer.heading("Commands", 2), latex_writer.verbatim(answer.repeat)]
    return latex_writer.document(parts, figure)


def html(answer: Content, *, whole: bool) -> str:
    """Return the page as HTML with the figure in it.  whole: whether it is a file of its own."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("deepstack.tools.answer", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text, commands = answer.next_runs
    values: dict[str, Any] = {
        "heading": answer.question or answer.title,
        "sentence": answer.sentence,
        "details": answer.found.details,
        "sure": answer.found.sure,
        "next_text": text,
        "next_commands": commands,
        "picture": picture(answer),
        "caption": answer.caption,
        "tables": [rows for rows in (table_rows(answer), rate_cells(answer)) if rows],
        "settings": answer.settings,
        "commands": answer.repeat,
        "methods": plain_citations(answer.methods, answer.sources),
        "bibtex": answer.bibtex,
    }
    name = "page.html" if whole else "body.html"
    return printable(environment.get_template(name).render(**values))


def picture(answer: Content) -> str:
    """Return the figure as the address of an image: SVG in base64, or ''."""
    if answer.chart is None:
        return ""
    svg = render(answer.chart, "svg", PAPER)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
