"""Texts and tables as LaTeX; a table needs the package booktabs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

LATIN = 0x17F  # the last letter that T1 fonts of LaTeX have
# Signs of the texts that LaTeX's default fonts lack or that it reads as commands.
SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$",
    "#": r"\#", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "−": "$-$", "±": r"$\pm$", "‖": r"$\|$", "Δ": r"$\Delta$", "√": r"$\sqrt{\ }$",
    "≥": r"$\ge$", "≤": r"$\le$", "×": r"$\times$", "·": r"$\cdot$", "θ": r"$\theta$",
    "–": "--", "…": r"\ldots{}", "α": r"$\alpha$", "β": r"$\beta$", "∂": r"$\partial$",
    "₀": "$_0$", "\u00a0": "~",
}  # fmt: skip
WIDE = 8  # columns of a table that one column of a page does not hold at footnotesize
HEAD = "% needs \\usepackage{booktabs}"
Rows = Sequence[Mapping[str, str]]


def tex(text: str) -> str:
    """Return a text as LaTeX; a letter that its usual fonts lack is a code."""
    return "".join(
        rf"\texttt{{U+{ord(letter):04X}}}"
        if ord(letter) > LATIN and letter not in SIGNS
        else SIGNS.get(letter, letter)
        for letter in text
    )


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
        lines.append(" & ".join(cells.values()) + r" \\")
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
