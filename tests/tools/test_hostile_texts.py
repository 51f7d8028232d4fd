"""Texts of a hostile folder stay texts: in LaTeX, BibTeX, CSV, Markdown, HTML and on a terminal."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import succeed
from helpers.extensions import needs
from helpers.plot_runs import make_run

import deepstack
from deepstack.base import csv_text, latex, markdown
from deepstack.plots.files import csv_bytes
from deepstack.records import RunFolder
from deepstack.tools.answer import bibtex
from deepstack.tools.answer.answer import Answer

BREAKOUT = r"\end{ver\end{verbatim}batim}\end{verbatim}\input{evil}"
FORMULAS = ["=HYPERLINK(1)", "+cmd|x", "-cmd|x", "@SUM(1)", "\t=1", "\r=1"]
LABEL = f'=HYPERLINK(1)}},\n}} @preamble{{"x"}} {BREAKOUT} <script>x</script> | `x` \x1b[31m\x07'


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose names, labels, command, plugins and versions are hostile."""
    study = tmp_path_factory.mktemp("results") / BREAKOUT.replace("/", "")
    for scheme in ("deepnorm", "post_ln"):
        for seed in range(3):
            ends: Any = {"seed": seed, "masked": 2.5 + 0.1 * seed * (scheme == "post_ln")}
            config = {"task.path": re.sub(r"[\x00-\x1f]", "", LABEL), "train.optimizer": "adamw"}
            run = RunFolder(make_run(study, scheme=scheme, config=config, **ends))
            columns = run.read_columns()
            columns["scheme"] |= {
                "label": f"{LABEL} {scheme}",
                "paper": f"{LABEL} arXiv:2601.99999",
            }
            columns["columns"]["=1+1"] = {"symbol": LABEL, "unit": LABEL}
            run.write_columns(columns)
            environment = {"deepstack": LABEL, "torch": LABEL, "device": "cpu", "cpu_model": LABEL}
            meta = {"command": LABEL, "plugins": [{"file": LABEL}], "environment": environment}
            run.write_meta(meta | {"git": {"commit": LABEL[:12]}})
    return study


@pytest.fixture(scope="module")
def answer(hostile: Path) -> Answer:
    return deepstack.answer(hostile)


def no_control(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), repr(text[:200])


def commands_in(text: str) -> set[str]:
    """The commands of LaTeX outside of verbatim, which ends where LaTeX ends it."""
    outside = re.sub(r"(?s)\\begin\{verbatim\}.*?\\end\{verbatim\}", "", text)
    return set(re.findall(r"(?<!\\)(?:\\\\)*\\([A-Za-z]+)", outside))


KNOWN = set(
    "documentclass usepackage begin end section subsection textbf texttt caption includegraphics "
    "linewidth textheight centering footnotesize scriptsize setlength tabcolsep smallskip toprule "
    "midrule bottomrule textbackslash textasciitilde textasciicircum textless textgreater textbar "
    "symbol ldots cite bibliographystyle bibliography pm ge le times Delta".split()
)


@needs("report")
def test_latex_has_no_command_of_a_folder(hostile: Path, answer: Answer, tmp_path: Path) -> None:
    tables = succeed("compare", hostile, "--latex")
    report = tmp_path / "report.tex"
    succeed("report", hostile, "--latex", "--to", report)
    page = answer.page("latex")
    for text in (tables, report.read_text(), page):
        no_control(text)
        assert commands_in(text) <= KNOWN, commands_in(text) - KNOWN
    assert page.count(r"\begin{verbatim}") == page.count(r"\end{verbatim}") >= 2


def test_bibtex_has_only_its_own_entries(answer: Answer) -> None:
    entries = answer.bibtex
    no_control(entries)
    depth, kinds = 0, []
    for number, letter in enumerate(entries):
        if letter == "@" and depth == 0:
            kinds.append(entries[number:].partition("{")[0])
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0 and set(kinds) == {"@misc", "@software"}


def test_no_cell_of_csv_is_a_formula(hostile: Path, answer: Answer, tmp_path: Path) -> None:
    succeed("plot", "loss_vs_step", hostile, "--to", tmp_path, "--format", "csv")
    assert answer.chart is not None
    files = [file.read_bytes() for file in tmp_path.glob("*.csv")]
    cells = []
    for content in (*files, csv_bytes(answer.chart)):
        text = content.decode()
        no_control(text)
        cells += [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    for cell in cells:
        if cell.startswith(("=", "+", "-", "@", "\t", "\r")):
            float(cell)
    assert files and any(cell.startswith("'=HYPERLINK") for cell in cells)


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_gets_an_apostrophe_and_numbers_stay(text: str) -> None:
    assert csv_text.cell_text(text).startswith("'")
    for number in (-1.5, 3, "-1.5", "+2e3", None, True):
        assert csv_text.cell_text(number) == number


def test_markdown_html_and_terminal_have_no_markup_of_a_folder(
    hostile: Path, answer: Answer
) -> None:
    pages = {name: answer.page(name) for name in ("markdown", "html", "terminal")}
    pages["table"] = succeed("compare", hostile, "--markdown")
    for text in pages.values():
        no_control(text)
    pages["markdown"] = re.sub(r"(?ms)^(`{3,})[^\n]*\n.*?^\1$", "", pages["markdown"])
    assert not any("<script" in pages[name] for name in ("markdown", "html", "table"))
    for name in ("markdown", "table"):
        rows = [line for line in pages[name].splitlines() if line.startswith("|")]
        columns = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        assert rows and len(set(columns)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a--b", "a-{}-b"), ("<|>", r"\textless{}\textbar{}\textgreater{}"), ("''", "'{}'"),
        ('"', r"\symbol{34}"), ("a\n\nb", "a  b"), ("–", "--"), ("\x1b", r"\textbackslash{}u001b"),
        # the ten characters that LaTeX reserves
        ("~/a~b", r"\textasciitilde{}/a\textasciitilde{}b"), ("a^b", r"a\textasciicircum{}b"),
        ("#$%&_{}", r"\#\$\%\&\_\{\}"), ("\\x", r"\textbackslash{}x"), ("3\u00a0s", "3~s"),
    ],
)  # fmt: skip
def test_signs_that_latex_joins_or_replaces_stay(text: str, expected: str) -> None:
    assert latex.tex(text) == expected


def test_a_row_of_latex_begins_with_no_option() -> None:
    lines = latex.tabular([{"name": "x"}, {"name": "[2pt] y"}, {"name": "* z"}]).splitlines()
    assert not any(line.startswith(("[", "*")) for line in lines)


def test_values_of_bibtex_end_no_field() -> None:
    entry = bibtex.entry("misc", "a b", {"note": "x}, y = {z} 50% \\input{e}\n@x"}, whole=["note"])
    assert entry == "@misc{a_b,\n  note = {{x , y = z 50\\% input e @x}},\n}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- x", r"\- x"), ("1. x", r"1\. x"), ("# x", r"\# x"), ("[a](b)", r"\[a\](b)"),
        ("a_i v_i, x_{l+1}", "a_i v_i, x_{l+1}"), ("_x_", r"\_x_"), ("<k, x>", "&lt;k, x>"),
        ("x <- w * y", "x <- w * y"), ("@key", r"\@key"), ("`a|b`", r"`a\|b`"),
    ],
)  # fmt: skip
def test_signs_of_markdown_are_letters(text: str, expected: str) -> None:
    assert markdown.paragraph(text) == expected
