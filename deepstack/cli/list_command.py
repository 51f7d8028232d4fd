"""deepstack list schemes|tasks|diagnostics|charts"""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Annotated, Any

import typer

from deepstack.cli.options import Json, Plugins, load_plugins


class Kind(StrEnum):
    """What can be listed."""

    schemes = "schemes"
    tasks = "tasks"
    diagnostics = "diagnostics"
    charts = "charts"


def register(app: typer.Typer) -> None:
    app.command("list")(list_)


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    depth: Annotated[int, typer.Option(min=1, help="Depth at which coefficients are given.")] = 100,
    plugin: Plugins = [],
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """List what deepstack knows: schemes, tasks, diagnostics or charts."""
    from deepstack.cli.tables import emit

    load_plugins(plugin)
    rows = {
        Kind.schemes: lambda: scheme_rows(depth, nested=json),
        Kind.tasks: lambda: task_rows(nested=json),
        Kind.diagnostics: diagnostic_rows,
        Kind.charts: chart_rows,
    }[kind]()
    emit(rows, json, markdown=markdown)


def scheme_rows(depth: int, nested: bool) -> list[dict[str, Any]]:
    """Name, equation, coefficients and gains of every scheme at a depth."""
    from deepstack.model.initialise import IN_LAYERS
    from deepstack.schemes import SCHEMES, find_scheme, with_options

    rows = []
    for name, scheme in SCHEMES.items():
        _, options = find_scheme(name, {})
        gain = with_options(scheme.gain, options)
        gains = {role: gain(role, 1, depth) for role in IN_LAYERS}
        row: dict[str, Any] = {"name": name, "equation": scheme.equation}
        row["alpha"] = with_options(scheme.alpha, options)(depth)
        row["beta"] = with_options(scheme.beta, options)(depth)
        if nested:
            row |= {"label": scheme.label, "depth": depth, "gains": gains}
            row["final_norm"] = scheme.final_norm
        rows.append(row | {"paper": scheme.paper})
    return rows


def task_rows(nested: bool) -> list[dict[str, Any]]:
    """Name, what it is, and options of every task."""
    from deepstack.tasks import TASKS, task_options

    rows = []
    for name, function in TASKS.items():
        options = task_options(name)
        row: dict[str, Any] = {"name": name, "description": first_sentence(function)}
        if nested:
            row["options"] = [option._asdict() for option in options]
        else:
            row["options"] = ", ".join(f"{o.name}={o.default}" for o in options)
        rows.append(row)
    return rows


def diagnostic_rows() -> list[dict[str, Any]]:
    """Name, symbol and sentence of every diagnostic: every step's and every layer's."""
    from deepstack.diagnostics import COLUMNS, DIAGNOSTICS
    from deepstack.diagnostics.layers import SYMBOLS

    rows = [
        {"name": name, "symbol": symbol, "beat": "every step", "description": sentence}
        for name, (symbol, _, sentence) in COLUMNS.items()
    ]
    return rows + [
        {
            "name": name,
            "symbol": SYMBOLS[name],
            "beat": "every layer",
            "description": first_sentence(function),
        }
        for name, function in DIAGNOSTICS.items()
    ]


def chart_rows() -> list[dict[str, Any]]:
    """Name and sentence of every chart."""
    from deepstack.plots import CHARTS

    return [{"name": n, "description": first_sentence(f)} for n, f in CHARTS.items()]


def first_sentence(function: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(function) or "").split("\n")[0]
