"""LaTeX, BibTeX, CSV and Markdown are each written in one module; JSON is read by one function."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.extensions import is_missing

PACKAGE = ROOT / "deepstack"
LAB = ROOT / "deepstack_lab"
WRITERS = {
    "LaTeX": ("base/latex.py", r"\\(begin|end|text\w+|section|subsection|caption|cite|input)\*?\{"),
    "BibTeX": (
        "tools/answer/bibtex.py",
        r"@(misc|article|software|inproceedings)\{|^@\{\}\{",
    ),
    "Markdown": ("base/markdown.py", r"\| ---|^\| \{?|\| \{?$|^```"),
    "HTML": ("base/notebook.py", r"<(a|b|p|div|span|img|table|tr|td|th|h[1-6]|svg|html)[ >]"),
}
"""Name of a language -> the module that writes it, and the signs that betray it in a string."""
# (file, language) -> why this text comes from no folder
ALLOWED = {
    ("tools/report/server.py", "HTML"): "a constant page",
}
READERS = {
    "cli/index.py": "a damaged index is not used",
    "records/files.py": "parse_object",
    "fast/distributed.py": "a message of another rank of this run",
    "tools/own_trainer/metric.py": "a file of any JSON value, and its own message",
    "tools/own_trainer/supervise.py": "an order of the parent process",
    "tools/probe/description.py": "its own text",
    "tools/report/page.py": "its own text",
    "integrations/huggingface/folder.py": "a config with Infinity, and its own message",
    "integrations/tokenizers/tokenizer.py": "a text of the library tokenizers",
    "model/resolve.py": "its own text",
    "sweeps/fork_server.py": "a message of the parent process",
    "sweeps/worker.py": "messages of a pipe",
}
"""Files that call json.loads, and why its errors need no other message there."""


def strings_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a source apart from docstrings; an f-string with {} for its values."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings | inner:
                yield node.value


def languages_in(text: str) -> set[str]:
    """The languages that a source writes."""
    found = set()
    for string in strings_of(ast.parse(text)):
        found |= {name for name, (_, sign) in WRITERS.items() if re.search(sign, string)}
    return found


def json_readers_in(text: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("loads", "load")
        and isinstance(node.value, ast.Name)
        and "json" in node.value.id
        for node in ast.walk(ast.parse(text))
    )


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted([*PACKAGE.rglob("*.py"), *LAB.rglob("*.py")]):
        yield os.path.relpath(path, PACKAGE), Path(path).read_text(encoding="utf-8")


@pytest.mark.slow(turn=60)
def test_each_language_is_written_in_one_module() -> None:
    found = {(file, name) for file, text in sources() for name in languages_in(text)}
    owners = {(owner, name) for name, (owner, _) in WRITERS.items()}
    assert sorted(found - owners - ALLOWED.keys()) == []
    unused = (owners | ALLOWED.keys()) - found
    assert sorted(one for one in unused if not is_missing(PACKAGE / one[0])) == []


def test_json_of_files_is_read_by_one_function() -> None:
    known = {file for file in READERS if not is_missing(PACKAGE / file)}
    assert {file for file, text in sources() if json_readers_in(text)} == known


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("x = r'\\\\textbf{' + name + '}'", "LaTeX"), ("x = f'@misc{{{key},'", "BibTeX"),
        ("x = f\"| {' | '.join(cells)} |\"", "Markdown"), ("x = f'<td>{value}</td>'", "HTML"),
    ],
)  # fmt: skip
def test_a_planted_writer_is_seen(text: str, language: str) -> None:
    assert language in languages_in(text)
    assert not languages_in(f'def f():\n    """{language}: \\\\textbf{{x}} <td>"""')
