"""LaTeX: the only place that writes it.  Texts are escaped; a table needs the package booktabs."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest

from deepstack.base.text import printable

LATIN = 0x17F  # the last letter that T1 fonts of LaTeX have
# Signs that LaTeX's default fonts lack, that it reads as commands, or that it turns into others.
SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$",
    "#": r"\#", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\symbol{34}",
    "−": "$-$", "±": r"$\pm$", "‖": r"$\|$", "Δ": r"$\Delta$", "√": r"$\sqrt{\ }$",
    "≥": r"$\ge$", "≤": r"$\le$", "×": r"$\times$", "·": r"$\cdot$", "θ": r"$\theta$",
    "–": "--", "…": r"\ldots{}", "α": r"$\alpha$", "β": r"$\beta$", "∂": r"$\partial$",
    "₀": "$_0$", "\u00a0": "~",
}  # fmt: skip
# Two letters that fonts draw as another sign: dashes, quotes and upside-down marks.
LIGATURES = ("--", "''", "``", ",,", "?`", "!`")
OPTIONS = ("[", "*")  # which LaTeX reads as options of the end of the row before
WIDE = 8  # columns of a table that one column of a page does not hold at footnotesize
LINE = 84  # letters of a line of `verbatim` at footnotesize
HEAD = "% needs \\usepackage{booktabs}"
Rows = Sequence[Mapping[str, str]]


def tex(text: str) -> str:
    """Return a text as LaTeX in one line; a letter that its usual fonts lack is a code."""
    line = printable(text.replace("\n", " "))
    return "".join(
        sign_of(letter) + "{}" * (letter + after in LIGATURES)
        for letter, after in zip_longest(line, line[1:], fillvalue="")
    )


def sign_of(letter: str) -> str:
    """Return a letter as LaTeX."""
    if letter in SIGNS or ord(letter) <= LATIN:
        return SIGNS.get(letter, letter)
    return rf"\texttt{{U+{ord(letter):04X}}}"


def tabular(rows: Rows, bold: Collection[tuple[int, str]] = (), right: Collection[str] = ()) -> str:
    """Return rows as a tabular of booktabs.

    bold: the cells in bold, by number of the row and name of the column.
    right: the columns aligned on the right.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        rf"\begin{{tabular}}{{@{{}}{''.join('r' if n in right else 'l' for n in names)}@{{}}}}"
    ]
    lines += [r"\toprule", " & ".join(map(tex, names)) + r" \\", r"\midrule"]
    for number, row in enumerate(rows):
        cells = {name: tex(row.get(name, "")) for name in names}
        cells |= {name: rf"\textbf{{{cells[name]}}}" for at, name in bold if at == number}
        line = " & ".join(cells.values()) + r" \\"
        lines.append("{}" * line.startswith(OPTIONS) + line)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def table(
    rows: Rows,
    caption: str,
    bold: Collection[tuple[int, str]] = (),
    right: Collection[str] = (),
) -> str:
    """Return rows as a float with a caption, both plain text; see `tabular`."""
    size, gap = (r"\scriptsize", 2) if max(map(len, rows)) > WIDE else (r"\footnotesize", 3)
    return "\n".join(
        [
            r"\begin{table}[t]",
            rf"\centering{size}\setlength{{\tabcolsep}}{{{gap}pt}}",
            rf"\caption{{{tex(caption)}}}\smallskip",
            tabular(rows, bold, right),
            r"\end{table}",
        ]
    )


def comment(text: str) -> str:
    """Return a text as a comment, in one line."""
    return f"% {tex(text)}"


def strong(text: str) -> str:
    """Return LaTeX in bold."""
    return rf"\textbf{{{text}}}"


def heading(text: str, level: int = 1) -> str:
    """Return LaTeX as a heading without a number; level 1 is a section."""
    return rf"\{'sub' * (level - 1)}section*{{{text}}}"


def cite(key: str) -> str:
    """Return the citation of an entry of the bibliography, after a space that keeps lines."""
    return rf"~\cite{{{key}}}"


def centred(text: str) -> str:
    """Return LaTeX in the middle of a page, in small letters."""
    return f"\\begin{{center}}\\footnotesize\n{text}\n\\end{{center}}"


def figure(path: str, caption: str) -> str:
    """Return a float with a picture.  path: of the file without its ending.  caption: LaTeX."""
    return (
        "\\begin{figure}[h]\n\\centering\n"
        "\\includegraphics[width=\\linewidth,height=.4\\textheight,keepaspectratio]"
        f"{{{path}}}\n\\caption{{{caption}}}\n\\end{{figure}}"
    )


def verbatim(lines: Sequence[str]) -> str:
    """Return lines as they are, folded where a page ends.

    No text ends the environment: its end gets a space, which LaTeX does not read as the end.
    """
    folded = [
        part
        for line in "\n".join(lines).split("\n")
        for part in textwrap.wrap(
            printable(line), LINE, subsequent_indent="    ", drop_whitespace=False,
            break_on_hyphens=False,
        )
    ]  # fmt: skip
    shown = "\n".join(folded).encode("ascii", "replace").decode()
    shown = shown.replace(r"\end{verbatim}", r"\end {verbatim}")
    return f"{{\\footnotesize\n\\begin{{verbatim}}\n{shown}\n\\end{{verbatim}}\n}}"


def document(parts: Sequence[str], bibliography: str) -> str:
    """Return LaTeX as a document.  bibliography: name of the BibTeX file without its ending."""
    head = (
        "\\documentclass{article}\n\\usepackage[T1]{fontenc}\n\\usepackage[utf8]{inputenc}\n"
        "\\usepackage{textcomp,graphicx,booktabs}\n\\begin{document}\n"
    )
    foot = f"\n\n\\bibliographystyle{{plain}}\n\\bibliography{{{bibliography}}}\n"
    return head + "\n\n".join(parts) + foot + "\\end{document}\n"
