"""The command `deepstack list settings|schemes|tasks|diagnostics|charts|claims`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from deepstack.cli.options import Json, Markdown, Plugins, load_plugins

Rows = list[dict[str, Any]]
Kind = StrEnum("Kind", ["settings", "schemes", "tasks", "diagnostics", "charts", "claims"])
"""The kinds of entries that can be listed."""

JSON_ONLY = {"label", "depth", "gains", "gains_last", "final_norm", "coefficients", "beat"}
CELLS: dict[str, Callable[[Any], str]] = {
    "families": lambda families: family_cell(families),
    "options": lambda options: ", ".join(f"{o['name']}={o['default']}" for o in options),
    "source": lambda source: str(source["title"]),
}
"""Nested values as cells of a table."""


def list_command(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="Kind of entries.")],
    depth: Annotated[int, typer.Option(min=1, help="Depth of the printed coefficients.")] = 100,
    plugin: Plugins = [],
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """List settings, schemes, tasks, diagnostics, charts or claims.

    Each setting has its allowed values: norms, activations, optimizers, …
    """
    from deepstack.cli.tables import emit

    load_plugins(plugin)
    functions: dict[Kind, Callable[[], Rows]] = {
        Kind.settings: setting_rows,
        Kind.schemes: lambda: scheme_rows(depth),
        Kind.tasks: task_rows,
        Kind.diagnostics: diagnostic_rows,
        Kind.charts: chart_rows,
        Kind.claims: claim_rows,
    }
    rows = functions[kind]()
    if not json:
        rows = [
            {k: CELLS[k](v) if k in CELLS else v for k, v in row.items() if k not in JSON_ONLY}
            for row in rows
        ]
    emit(rows, json, markdown=markdown)


def setting_rows() -> Rows:
    """Return dotted key, default, allowed values and description of every setting."""
    from deepstack.allowed import describe
    from deepstack.config import Config, values
    from deepstack.config.walk import at, keys

    usual, rows = values(Config()), []
    for key in keys():
        schema = at(tuple(key.split(".")))
        row = {"name": key, "default": usual.get(key), "allowed": describe(schema)}
        rows.append(row | {"description": " ".join(schema.get("description", "").split())})
    return rows


def scheme_rows(depth: int) -> Rows:
    """Return name, equation, families, coefficients and gains of every scheme at a depth.

    alpha, beta and the gains of the first and last layer are an encoder's. `coefficients` has those
    of every family and side; an encoder-decoder has as many layers on both sides.
    """
    from deepstack.schemes import SCHEMES

    rows = []
    for name, scheme in SCHEMES.items():
        coefficients = {
            family: coefficients_by_side(name, family, depth) for family in scheme.families
        }
        first_side = next(iter(coefficients[scheme.families[0]].values()))
        row = {"name": name, "equation": scheme.equation, **first_side, "depth": depth}
        row |= {"label": scheme.label, "final_norm": scheme.final_norm}
        row |= {"families": list(coefficients), "coefficients": coefficients}
        rows.append(row | {"paper": scheme.paper})
    return rows


def coefficients_by_side(name: str, family: str, depth: int) -> dict[str, dict[str, Any]]:
    """Return alpha, beta and all roles' gains in layers 1 and N, per stack of a family."""
    from deepstack.config import Config, with_overrides
    from deepstack.model.initialise import IN_LAYERS
    from deepstack.schemes import stack_schemes

    changes = {"model.family": family, "model.depth": depth, "model.scheme": name}
    sides = {}
    for side, scheme in stack_schemes(with_overrides(Config(), changes)).items():
        crosses = family == "encoder_decoder" and side == "decoder"
        roles = (*IN_LAYERS, *(f"cross_{role}" for role in "qkvo" if crosses))
        sides[side] = {
            "alpha": scheme.alpha,
            "beta": scheme.beta,
            "gains": {role: scheme.gain(role, 1) for role in roles},
            "gains_last": {role: scheme.gain(role, scheme.place.depth) for role in roles},
        }
    return sides


def task_rows() -> Rows:
    """Return name, description, families and options of every task."""
    from deepstack.tasks import TASKS, task_families, task_options

    return [
        {
            "name": name,
            "description": first_sentence(function),
            "families": list(task_families(name)),
            "options": [
                {"name": key, "type": o.type, "default": o.default, "description": o.description}
                for key, o in task_options(name).items()
            ],
        }
        for name, function in TASKS.items()
    ]


def family_cell(families: list[str]) -> str:
    """Format families as a table cell."""
    from deepstack.schemes import FAMILIES

    return "all" if set(families) == set(FAMILIES) else ", ".join(families)


def diagnostic_rows() -> Rows:
    """Return name, symbol and description of every column and every per-layer diagnostic.

    The names are file names, as `plot --diagnostic` accepts them.  JSON repeats `interval` as
    `beat`, its former name, for one version.
    """
    from deepstack.diagnostics import COLUMNS, DIAGNOSTICS
    from deepstack.diagnostics.layers import SYMBOLS, file_names

    entries = [
        (name, symbol, "every step", sentence) for name, (symbol, _, sentence) in COLUMNS.items()
    ]
    entries += [
        (file, SYMBOLS[name], "every layer", first_sentence(function))
        for name, function in DIAGNOSTICS.items()
        for file in file_names(name)
    ]
    keys = ("name", "symbol", "interval", "description")
    return [dict(zip(keys, entry, strict=True)) | {"beat": entry[2]} for entry in entries]


def chart_rows() -> Rows:
    """Return name and description of every chart."""
    from deepstack.plots import CHARTS

    return [{"name": n, "description": first_sentence(f)} for n, f in CHARTS.items()]


def claim_rows() -> Rows:
    """Return id, formula and source of every claim that `deepstack theory` measures."""
    from deepstack.theory import all_claims

    return [
        {"name": claim.id, "formula": claim.formula, "source": claim.source._asdict()}
        for claim in all_claims()
    ]


def first_sentence(function: Any) -> str:
    """Return the first line of a function's docstring."""
    return (inspect.getdoc(function) or "").split("\n")[0]
