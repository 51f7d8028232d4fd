"""The command `deepstack list KIND`: configs, settings, schemes, tasks, charts, …"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from deepstack.cli.declarations import declare, declared
from deepstack.cli.options import Json, Markdown, Plugins, load_plugins

Rows = list[dict[str, Any]]
Kind = StrEnum(
    "Kind",
    ["configs", "settings", "schemes", "tasks", "diagnostics", "analyses", "charts", "claims"],
)
"""The kinds of entries that can be listed."""

JSON_ONLY = {"label", "depth", "gains", "gains_last", "final_norm", "coefficients", "beat"}
CELLS: dict[str, Callable[[Any], str]] = {
    "columns": lambda columns: ", ".join(columns),
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
    """List configs, settings, schemes, tasks, diagnostics, analyses, charts or claims.

    Each setting has its allowed values: norms, activations, optimizers, …
    """
    from deepstack.cli.tables import emit

    load_plugins(plugin)
    scheme_row = scheme_rows if plugin or json else scheme_table
    functions: dict[Kind, Callable[[], Rows]] = {
        Kind.configs: config_rows,
        Kind.settings: setting_rows,
        Kind.schemes: lambda: scheme_row(depth),
        Kind.tasks: task_rows,
        Kind.diagnostics: diagnostic_rows,
        Kind.analyses: analysis_rows,
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


def config_rows() -> Rows:
    """Return name, command and description of every example configuration."""
    from deepstack.config.examples import description, example_paths

    return [
        {"name": name, "command": command_of(path), "description": description(path)}
        for name, path in example_paths().items()
    ]


def command_of(path: Path) -> str:
    """Return the command that runs a configuration: `sweep` if it describes one."""
    return "sweep" if "\nsweep:" in path.read_text(encoding="utf-8") else "train"


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


def scheme_table(depth: int) -> Rows:
    """Return the columns of `scheme_rows` that a table has, of built-in schemes, without torch."""
    from deepstack.config import Config, with_overrides

    positions = declared("schemes", "stack_scheme")["stack_positions"]
    equation_of = declared("schemes", "scheme")["equation_of"]
    rows = []
    for name, scheme in declare("schemes", "").items():
        changes = {"model.family": scheme.families[0], "model.depth": depth}
        model = with_overrides(Config(), changes).model
        scheme.place = next(iter(positions(model).values()))
        row = {"name": name, "equation": equation_of(scheme), "alpha": scheme.alpha(depth)}
        row |= {"beta": scheme.beta(depth), "families": list(scheme.families)}
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
    from deepstack.config import Family

    return "all" if set(families) == set(get_args(Family)) else ", ".join(families)


def diagnostic_rows() -> Rows:
    """Return name, symbol and description of every column and every per-layer diagnostic.

    The names are file names, as `plot --diagnostic` accepts them.  JSON repeats `interval` as
    `beat`, its former name, for one version.
    """
    layers = names_of("diagnostics", "layers", "diagnostic")
    entries = [
        (name, symbol, interval, sentence)
        for module, interval in (("update", "every step"), ("sharpness", "sharpness_every"))
        for name, (symbol, _, sentence) in names_of("diagnostics", module)["COLUMNS"].items()
    ]
    entries += [
        (file, layers["SYMBOLS"][name], "every layer", first_sentence(function))
        for name, function in layers["DIAGNOSTICS"].items()
        for file in layers["file_names"](name)
    ]
    keys = ("name", "symbol", "interval", "description")
    return [dict(zip(keys, entry, strict=True)) | {"beat": entry[2]} for entry in entries]


def analysis_rows() -> Rows:
    """Return name, description and columns of every analysis of `deepstack analyze`."""
    from deepstack.depth_use import COLUMNS, MEASURES

    return [
        {"name": name, "description": first_sentence(function), "columns": list(COLUMNS[name])}
        for name, function in MEASURES.items()
    ]


def chart_rows() -> Rows:
    """Return name and description of every chart."""
    charts = names_of("plots", "chart", "chart")["CHARTS"]
    return [{"name": n, "description": first_sentence(f)} for n, f in charts.items()]


def claim_rows() -> Rows:
    """Return id, formula and source of every claim that `deepstack theory` measures."""
    return [
        {"name": claim.id, "formula": claim.formula, "source": claim.source._asdict()}
        for claim in names_of("theory", "claim", "claim")["all_claims"]()
    ]


def names_of(package: str, module: str, kind: str = "") -> Mapping[str, Any]:
    """Return the names of a module after its package has registered all objects of a kind.

    With a plugin, these are the names of the imported module, otherwise those that
    `declarations` reads, which needs no torch.
    """
    from deepstack.plugins import LOADED

    if LOADED:
        import_module(f"deepstack.{package}")
        return vars(import_module(f"deepstack.{package}.{module}"))
    if kind:
        declare(package, kind)
    return declared(package, module)


def first_sentence(function: Any) -> str:
    """Return the first line of a function's docstring."""
    return (inspect.getdoc(function) or "").split("\n")[0]
