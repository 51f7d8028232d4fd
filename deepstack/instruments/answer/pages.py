"""An answer as text: for the terminal, as HTML, Markdown or LaTeX."""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from deepstack.base import latex as latex_writer
from deepstack.base.text import printable, short_text
from deepstack.cli.table import lay_out
from deepstack.instruments.answer.content import PAPER, Content
from deepstack.plots.files import render
from deepstack.runs.paper_table import INTERVAL, LOSS, interval, nats

WIDTH = 80  # of the text on a terminal; tables may be wider in a pipe
BELOW = "below chance"
FIGURE = "_figure"  # ending of the name of the figure that the page of LaTeX includes
CITED = re.compile(r" ?\[@(\w+)\]")


def table_rows(answer: Content) -> list[dict[str, str]]:
    """Return the rows of the table as texts; a row for each setting and depth."""
    rows = []
    for row in answer.rows:
        cells = {"setting": str(row["setting"]), "N": str(row["N"])}
        if "best lr" in row:
            edge = f" ({row['edge']} tried)" if row["edge"] else ""
            cells["best lr"] = f"{short_text(row['best lr'])}{edge}"
        cells |= {"outcome": row["outcome"], LOSS: nats(row["val_loss"])}
        if row["sd"] is not None:
            cells[LOSS] += f" ± {row['sd']:.3f}"
        cells[INTERVAL] = interval(row["low"], row["high"])
        cells[BELOW] = nats(row["below"])
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
    lines += lay_out(rows, width, ["N", LOSS, BELOW], ["outcome", "best lr"]).lines
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
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def markdown(answer: Content, figure: str) -> str:
    """Return the page as Markdown, with pandoc's citations.  figure: path without ending."""
    text, commands = answer.next_runs
    parts = [f"# {markdown_text(answer.question or answer.title)}"]
    parts += [f"**{markdown_text(answer.sentence)}**"]
    parts += map(markdown_text, (*answer.found.details, *answer.found.sure))
    if text:
        parts += [markdown_text(text), code(commands)]
    if answer.chart:
        parts.append(f"![{markdown_text(answer.caption)}]({figure}.png)")
    for rows in (table_rows(answer), rate_cells(answer)):
        parts += [markdown_table(rows)] if rows else []
    parts += ["## Settings of all runs", code([answer.settings.rstrip()], "yaml")]
    parts += ["## Commands", code(answer.repeat)]
    parts += ["## Methods", markdown_text(answer.methods)] if answer.methods else []
    parts += ["## References", code([answer.bibtex], "bibtex")]
    return printable("\n\n".join(parts) + "\n")


def markdown_text(text: str) -> str:
    """Return a text in which no letter of it is Markdown's, apart from citations."""
    return re.sub(r"([\\`*_<|#]|!(?=\[)|\[(?!@\w+\]))", r"\\\1", text)


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a Markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names)]
    lines += [[markdown_text(row.get(name, "")) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(lines: Sequence[str], language: str = "") -> str:
    """Return a block of code; its fence is longer than any in the lines."""
    text = "\n".join(lines)
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"


def tex(text: str) -> str:
    """Return a text as LaTeX, with `\\cite` for its citations."""
    parts = CITED.split(text)
    cites = [f"~\\cite{{{key}}}" for key in parts[1::2]]
    words = map(latex_writer.tex, parts[::2])
    return "".join(part + cite for part, cite in zip(words, [*cites, ""], strict=True))


def latex(answer: Content, figure: str) -> str:
    """Return the page as a LaTeX document; answer.bib beside it has the references."""
    text, commands = answer.next_runs
    parts = [r"\section*{" + tex(answer.question or answer.title) + "}"]
    parts += [r"\textbf{" + tex(answer.sentence) + "}"]
    parts += map(tex, (*answer.found.details, *answer.found.sure))
    if text:
        parts += [tex(text), listing(commands)]
    if answer.chart:
        parts.append(
            "\\begin{figure}[h]\n\\centering\n"
            "\\includegraphics[width=\\linewidth,height=.4\\textheight,keepaspectratio]"
            f"{{{figure}{FIGURE}}}\n"
            f"\\caption{{{tex(answer.caption)}}}\n\\end{{figure}}"
        )
    for rows in (table_rows(answer), rate_cells(answer)):
        parts += [latex_table(rows)] if rows else []
    if answer.methods:
        parts += [r"\subsection*{Methods}", tex(answer.methods)]
    parts += [r"\subsection*{Settings of all runs}", listing(answer.settings.splitlines())]
    parts += [r"\subsection*{Commands}", listing(answer.repeat)]
    head = (
        "\\documentclass{article}\n\\usepackage[T1]{fontenc}\n\\usepackage[utf8]{inputenc}\n"
        "\\usepackage{graphicx,booktabs}\n\\begin{document}\n"
    )
    foot = f"\n\n\\bibliographystyle{{plain}}\n\\bibliography{{{figure}}}\n\\end{{document}}\n"
    return printable(head + "\n\n".join(parts) + foot)


def latex_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a LaTeX table with booktabs."""
    lines = [r"\begin{center}\footnotesize", latex_writer.tabular(rows), r"\end{center}"]
    return "\n".join(lines)


def listing(lines: Sequence[str]) -> str:
    """Return lines as they are, broken where a page of LaTeX ends."""
    folded = [
        part
        for line in lines
        for part in textwrap.wrap(
            line, 84, subsequent_indent="    ", drop_whitespace=False, break_on_hyphens=False
        )
    ]
    ascii_lines = "\n".join(folded).encode("ascii", "replace").decode()
    shown = ascii_lines.replace(r"\end{verbatim}", "")
    return f"{{\\footnotesize\n\\begin{{verbatim}}\n{shown}\n\\end{{verbatim}}\n}}"


def html(answer: Content, *, whole: bool) -> str:
    """Return the page as HTML with the figure in it.  whole: whether it is a file of its own."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("deepstack.instruments.answer", ""),
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
