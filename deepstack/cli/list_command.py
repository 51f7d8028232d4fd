"""The command `deepstack list KIND`: configs, settings, schemes, tasks, charts, …"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import typer

from deepstack.allowed import describe
from deepstack.cli.completion import starting
from deepstack.cli.options import Json, Markdown, Plugins, load_plugins, option
from deepstack.cli.tables import emit
from deepstack.config import Config, Family, values, with_overrides
from deepstack.config.examples import description, example_paths
from deepstack.config.walk import at, keys
from deepstack.errors import ConfigError
from deepstack.registry import unknown

Rows = list[dict[str, Any]]

DEPTH = 100  # of the coefficients in JSON and Markdown
JSON_ONLY = {"label", "depth", "gains", "gains_last", "final_norm", "coefficients"}
CELLS: dict[str, Callable[[Any], str]] = {
    "columns": lambda columns: ", ".join(columns),
    "families": lambda families: family_cell(families),
    "options": lambda options: ", ".join(f"{o['name']}={o['default']}" for o in options),
    "source": lambda source: str(source["title"]),
}
"""Nested values as cells of a table."""


def complete_kind(incomplete: str) -> list[str]:
    """Return the kinds that start like the word."""
    return starting(KINDS, incomplete)


def list_command(
    kind: str = typer.Argument(
        metavar="KIND",
        help="Kind of entries.",
        autocompletion=complete_kind,
    ),
    depth: int | None = option("Print the coefficients of schemes at this depth.", min=1),
    plugin: Plugins = [],
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """List configs, settings, schemes, tasks, diagnostics, analyses, charts or claims.

    Each setting has its allowed values: norms, activations, optimizers, …
    """
    if kind not in KINDS:
        raise ConfigError(unknown("kind", kind, KINDS))
    load_plugins(plugin)
    rows = scheme_rows(depth or DEPTH) if kind == "schemes" else KINDS[kind]()
    if not json:
        hidden = JSON_ONLY if markdown or depth else JSON_ONLY | {"alpha", "beta"}
        rows = [
            {k: CELLS[k](v) if k in CELLS else v for k, v in row.items() if k not in hidden}
            for row in rows
        ]
    emit(rows, json, markdown=markdown)


def config_rows() -> Rows:
    """Return name, command and description of every example configuration."""
    rows = []
    for name, path in example_paths().items():
        is_sweep = "\nsweep:" in path.read_text(encoding="utf-8")
        command = "sweep" if is_sweep else "train"
        rows.append({"name": name, "command": command, "description": description(path)})
    return rows


def setting_rows() -> Rows:
    """Return dotted key, default, allowed values and description of every setting."""
    usual, rows = values(Config()), []
    for key in keys():
        schema = at(tuple(key.split(".")))
        row = {"name": key, "default": usual.get(key), "allowed": describe(schema)}
        rows.append(row | {"description": " ".join(schema.get("description", "").split())})
    return rows


def scheme_rows(depth: int = DEPTH) -> Rows:
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

    rows = named_rows(TASKS)
    for row in rows:
        row["families"] = list(task_families(row["name"]))
        row["options"] = [
            {"name": key, "type": o.type, "default": o.default, "description": o.description}
            for key, o in task_options(row["name"]).items()
        ]
    return rows


def family_cell(families: list[str]) -> str:
    """Format families as a table cell."""
    return "all" if set(families) == set(get_args(Family)) else ", ".join(families)


def diagnostic_rows() -> Rows:
    """Return name, symbol and description of every column and every per-layer diagnostic.

    The names are file names, as `plot --diagnostic` accepts them.
    """
    from deepstack.diagnostics import COLUMNS, DIAGNOSTICS
    from deepstack.diagnostics.layers import SYMBOLS, file_names
    from deepstack.diagnostics.noise_scale import COLUMNS as NOISE
    from deepstack.diagnostics.sharpness import COLUMNS as SHARPNESS

    tables = {"every step": COLUMNS, "every layer": NOISE, "sharpness_every": SHARPNESS}
    rows = [
        {"name": name, "symbol": symbol, "interval": interval, "description": sentence}
        for interval, table in tables.items()
        for name, (symbol, _, sentence) in table.items()
    ]
    for name, function in DIAGNOSTICS.items():
        row = {"symbol": SYMBOLS[name], "interval": "every layer"}
        row["description"] = first_sentence(function)
        rows += [{"name": file, **row} for file in file_names(name)]
    return rows


def analysis_rows() -> Rows:
    """Return name, description and columns of every analysis of `deepstack analyze`."""
    from deepstack.depth_use import COLUMNS, MEASURES

    return [row | {"columns": list(COLUMNS[row["name"]])} for row in named_rows(MEASURES)]


def chart_rows() -> Rows:
    """Return name and description of every chart."""
    from deepstack.plots import CHARTS

    return named_rows(CHARTS)


def named_rows(entries: Any) -> Rows:
    """Return name and description of functions."""
    return [{"name": name, "description": first_sentence(one)} for name, one in entries.items()]


def claim_rows() -> Rows:
    """Return id, formula and source of every claim that `deepstack theory` measures."""
    from deepstack.theory import all_claims

    return [
        {"name": claim.id, "formula": claim.formula, "source": claim.source._asdict()}
        for claim in all_claims()
    ]


KINDS: dict[str, Callable[[], Rows]] = {
    "configs": config_rows,
    "settings": setting_rows,
    "schemes": scheme_rows,
    "tasks": task_rows,
    "diagnostics": diagnostic_rows,
    "analyses": analysis_rows,
    "charts": chart_rows,
    "claims": claim_rows,
}


def first_sentence(one: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(one) or "").split("\n")[0]
