"""Generates the pages of the reference from the code."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepstack
from deepstack.cli.listing import listings

# A field of a docstring, or several with the same meaning: `steps, evals: pandas DataFrames.`
FIELD = re.compile(r"^`?\w+`?(?:, `?\w+`?)*: ", re.MULTILINE)
HEAD = "This page is generated from the code.\n\n"


def pages(root: Path) -> dict[str, str]:
    """Return the text of every generated page by its path."""
    return {
        "reference/schemes.md": schemes(),
        "reference/diagnostics.md": diagnostics(),
        "reference/settings.md": settings(),
        "reference/tasks.md": tasks(),
        "reference/charts.md": charts(),
        "reference/commands.md": commands(),
        "reference/python.md": python(),
        "reference/gallery.md": gallery(root),
        "experiments/README.md": experiments(root),
    }


def schemes() -> str:
    """Return every scheme with equation, coefficients, options and paper."""
    from deepstack.schemes import SCHEMES, scheme_options

    parts = [
        "# Schemes",
        HEAD + f"{len(SCHEMES)} schemes. N is the depth, G a sublayer, x the stream.",
    ]
    for row in listings()["schemes"].table(100):
        scheme = SCHEMES[row["name"]]
        facts = [("`model.scheme`", code(row["name"])), ("families", ", ".join(row["families"]))]
        facts += [("paper", link_paper(row["paper"]))]
        facts += [
            (f"{name} at N = 100", f"{row[name]:.4g}")
            for name in ("alpha", "beta")
            if row[name] is not None
        ]
        facts.append(("norm at the end of the stack", "yes" if row["final_norm"] else "no"))
        options = [
            (
                code(f"model.scheme_options.{key}"),
                f"{option.description} (default {option.default})",
            )
            for key, option in scheme_options(row["name"]).items()
        ]
        parts += [
            f"## {row['label']}" if row["label"] != row["name"] else f"## {row['name']}",
            f"```text\n{row['equation']}\n```",
            table(("setting or property", "value"), [*facts, *options]),
            prose(without_first_line(scheme)),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def diagnostics() -> str:
    """Return every column and every per-layer value with its formula."""
    from deepstack.diagnostics import DIAGNOSTICS

    rows = [
        (code(row["name"]), row["symbol"], row["description"])
        for row in listings()["diagnostics"].table(100)
        if row["interval"] == "every step"
    ]
    parts = [
        "# Diagnostics",
        HEAD + "## Columns, at every step",
        table(("column", "symbol", "meaning"), rows),
    ]
    parts.append("## Files, for every layer at selected steps")
    for name, one in DIAGNOSTICS.items():
        files = ", ".join(code(f"layers/{file}.npy") for file in one.files)
        parts += [f"### {name}", f"{one.symbol}: {escaped(first_line(one))}"]
        parts += [f"Files: {files}", prose(without_first_line(one))]
    return "\n\n".join(part for part in parts if part) + "\n"


def settings() -> str:
    """Return every setting by section, with default, allowed values and meaning."""
    sections: dict[str, list[Sequence[Any]]] = {}
    for row in listings()["settings"].table(100):
        section, _, name = row["name"].rpartition(".")
        cells = (code(name), shown(row["default"]), row["allowed"], row["description"])
        sections.setdefault(section or "top level", []).append(cells)
    parts = [
        "# Settings",
        HEAD + "A setting is written in the YAML file, or as `section.key=value` in a command.",
    ]
    for section, rows in sections.items():
        parts += [f"## {section}", table(("key", "default", "allowed", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def tasks() -> str:
    """Return every task with its options."""
    parts = [
        "# Tasks",
        HEAD + "Choose one with `task.name`. The others are keys of the section `task`.",
    ]
    for row in listings()["tasks"].table(100):
        options = [
            (code(o["name"]), shown(o["default"]), o["type"], o["description"])
            for o in row["options"]
        ]
        parts += [f"## {row['name']}", escaped(row["description"])]
        parts.append(f"Families: {', '.join(row['families'])}.")
        parts.append(table(("option", "default", "allowed", "meaning"), options) if options else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def charts() -> str:
    """Return every chart with its description."""
    from deepstack.plots import CHARTS

    parts = [
        "# Charts",
        HEAD
        + "`deepstack plot NAME DIR` draws one, `deepstack plot DIR` at most five main ones, and\n"
        "`deepstack plot DIR --all` all that fit.",
    ]
    for name, function in CHARTS.items():
        parts += [
            f"## {name}",
            escaped(first_line(function)),
            prose(without_first_line(function)),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def commands() -> str:
    """Return every command with its arguments and options as lists."""
    from typer.main import get_command

    from deepstack.cli import app
    from deepstack.cli.commands import find_commands

    parts = ["# Commands", HEAD + "`deepstack COMMAND --help` prints the same on a terminal."]
    group: Any = get_command(app)
    for name in find_commands():
        command = group.commands[name]
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [f"## {name}", f"```console\n$ deepstack {name} {usage}\n```"]
        parts.append(prose(inspect.cleandoc(command.help or "")))
        panels: dict[str, list[str]] = {}
        for one in command.params:
            record = one.get_help_record(context)
            if one.param_type_name == "argument":
                panels.setdefault("Arguments", []).append(
                    f"- {code(one.metavar)}: {escaped(one.help or '')}"
                )
            elif record:
                panel = one.rich_help_panel or "Options"
                panels.setdefault(panel, []).append(f"- {code(record[0])}: {escaped(record[1])}")
        for panel, items in panels.items():
            parts += [f"**{panel}**", "\n".join(items)]
        if command.epilog:
            parts.append(escaped(command.epilog))
    return "\n\n".join(part for part in parts if part) + "\n"


def python() -> str:
    """Return signature and docstring of every public name."""
    parts = [
        "# Python",
        HEAD + "`import deepstack` needs no torch. Each name is imported when first used.",
    ]
    for name in deepstack.__all__:
        thing = getattr(deepstack, name)
        parts.append(f"## deepstack.{name}")
        if not inspect.ismodule(thing):
            parts.append(f"```python\n{name}{signature(thing)}\n```")
        parts.append(prose(inspect.getdoc(thing) or ""))
    from deepstack.records import Run

    parts += ["## Run", prose(inspect.getdoc(Run) or "")]
    for name, member in inspect.getmembers(Run):
        text = inspect.getdoc(member)
        if not name.startswith("_") and text and name not in ("folder", "path"):
            parts += [f"### Run.{name}", prose(text)]
    return "\n\n".join(parts) + "\n"


def experiments(root: Path) -> str:
    """Return the list of experiments by their questions."""
    lines = [
        f"- [{path.parent.name}]({path.parent.name}/README.md): {title(path)}"
        for path in sorted(root.glob("experiments/*/README.md"))
    ]
    intro = "Each page has question, prediction, commands, figures, finding and certainty."
    return "\n".join(["# Experiments", "", intro, "", *lines]) + "\n"


def gallery(root: Path) -> str:
    """Return figures of the experiments, each below the question of its page, with what to see."""
    parts = [
        "# Gallery",
        "A figure of an experiment, and below it what to see. All pages, with commands, further "
        "figures and certainty: [experiments](../experiments/README.md).",
        '<div class="gallery" markdown>',
    ]
    for line in Path(__file__).with_name("gallery.txt").read_text("utf-8").splitlines():
        picture, _, sentence = line.partition(": ")
        page = f"experiments/{picture.split('/')[1]}/README.md"
        parts += [
            f"## [{title(root / page)}](../{page})",
            f"![{sentence.replace('`', '')}](../{picture})",
            sentence,
        ]
    return "\n\n".join([*parts, "</div>"]) + "\n"


def title(path: Path) -> str:
    """Return the first heading of a page."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines
    )


def code(text: str) -> str:
    """Return text as code."""
    return f"`{text}`"


def shown(value: Any) -> str:
    """Return a default as YAML would have it."""
    if isinstance(value, bool) or value is None:
        return code({True: "true", False: "false", None: "null"}[value])
    return code(str(list(value) if isinstance(value, tuple) else value))


def escaped(text: str) -> str:
    """Return text without meaning to Markdown and HTML, except for code between backticks."""
    parts = re.split(r"(`[^`\n]+`)", text)
    plain = [re.sub(r"([\\*_\[\]#])", r"\\\1", html.escape(p, quote=False)) for p in parts[::2]]
    parts[::2] = plain
    return "".join(parts)


def literal(text: str) -> str:
    """Return text with its line breaks, or nothing."""
    return f"```console\n{text}\n```" if text.strip() else ""


def prose(text: str) -> str:
    """Return a docstring: paragraphs as text, fields as a list, indented lines as they are."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if FIELD.match(block):
            blocks.append(fields(block))
        elif block.strip() and not block.startswith((" ", "|", "-")):
            blocks.append(escaped(" ".join(block.split())))
        else:
            blocks.append(literal(block.strip("\n")))
    return "\n\n".join(blocks)


def fields(block: str) -> str:
    """Return a list of the fields `name: text` of a docstring, each of which begins a line."""
    starts = [match.start() for match in FIELD.finditer(block)]
    items = []
    for start, end in pairwise([*starts, len(block)]):
        names, _, text = " ".join(block[start:end].split()).partition(": ")
        items.append(f"- {code(names.replace('`', ''))}: {escaped(text)}")
    return "\n".join(items)


def first_line(thing: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def without_first_line(thing: Any) -> str:
    """Return a docstring without its first line."""
    return (inspect.getdoc(thing) or "").partition("\n")[2].strip()


def signature(thing: Any) -> str:
    """Return the signature, with one parameter a line if it is long."""
    words = []
    for name, one in inspect.signature(thing).parameters.items():
        kind = getattr(one.annotation, "__name__", None) or str(one.annotation)
        kind = str(one.annotation) if "[" in str(one.annotation) else kind
        word = name if one.annotation is one.empty else f"{name}: {kind}"
        default = "..." if callable(one.default) else repr(one.default)
        words.append(word if one.default is one.empty else f"{word} = {default}")
    short = f"({', '.join(words)})"
    return short if len(short) < 80 else "(\n" + "".join(f"    {word},\n" for word in words) + ")"


def link_paper(paper: str) -> str:
    """Return a paper as a link, if it is an arXiv number or an address."""
    if match := re.match(r"arXiv:(\d{4}\.\d{4,5})", paper):
        return f"[{paper}](https://arxiv.org/abs/{match.group(1)})"
    if "/" in paper and " " not in paper:
        return f"[{paper}](https://{paper})"
    return escaped(paper)
