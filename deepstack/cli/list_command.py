"""The command `deepstack list KIND`: configs, settings, schemes, tasks, charts, …"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import typer

from deepstack.base.allowed import describe
from deepstack.base.errors import ConfigError
from deepstack.base.registry import unknown
from deepstack.cli.commands import command
from deepstack.cli.completion import starting
from deepstack.cli.declarations import Declaration, attributes, constants, declarations
from deepstack.cli.options import Json, Markdown, Plugins, load_plugins, option
from deepstack.cli.output import emit
from deepstack.config import Config, Family, values, with_overrides
from deepstack.config.load import description, example_paths
from deepstack.config.schema import schema_at, setting_keys
from deepstack.records import MODEL_UPDATE_COLUMNS

Rows = list[dict[str, Any]]
Columns = Mapping[str, tuple[str, str, str]]

DEPTH = 100  # of the coefficients in JSON and Markdown
JSON_ONLY = {"label", "depth", "gains", "gains_last", "final_norm", "coefficients", "beat"}
CELLS: dict[str, Callable[[Any], str]] = {
    "columns": lambda columns: ", ".join(columns),
    "families": lambda families: (
        "all" if set(families) == set(get_args(Family)) else ", ".join(families)
    ),
    "options": lambda options: ", ".join(f"{o['name']}={o['default']}" for o in options),
    "source": lambda source: str(source["title"]),
}
"""Nested values as cells of a table."""


@command("Runs", "deepstack list schemes", place=5)
def list_command(
    kind: str = typer.Argument(
        metavar="KIND",
        help="Kind of entries.",
        autocompletion=lambda incomplete: starting(KINDS, incomplete),
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
    if kind in DECLARED and not (plugin or json or markdown or depth):
        rows = DECLARED[kind]()
    else:
        rows = scheme_rows(depth or DEPTH) if kind == "schemes" else KINDS[kind]()
    if not json:
        rows = [
            {k: CELLS[k](v) if k in CELLS else v for k, v in row.items() if k not in JSON_ONLY}
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
    for key in setting_keys():
        schema = schema_at(tuple(key.split(".")))
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


def diagnostic_rows() -> Rows:
    """Return name, symbol and description of every column and every per-layer diagnostic.

    The names are file names, as `plot --diagnostic` accepts them.  JSON repeats `interval` as
    `beat`, its former name, for one version.
    """
    from deepstack.diagnostics import DIAGNOSTICS
    from deepstack.instruments.noise_scale.measure import COLUMNS as NOISE
    from deepstack.instruments.sharpness.measure import COLUMNS as SHARPNESS

    rows = column_rows((MODEL_UPDATE_COLUMNS, NOISE, SHARPNESS))
    for _, one in DIAGNOSTICS.items():
        rows += [layer_row(file, one.symbol, one) for file in one.files]
    return [row | {"beat": row["interval"]} for row in rows]


def column_rows(tables: Sequence[Columns]) -> Rows:
    """Return the rows of the columns of model update, noise scale and sharpness."""
    intervals = ("every step", "every layer", "sharpness_every")
    return [
        {"name": name, "symbol": symbol, "interval": interval, "description": sentence}
        for table, interval in zip(tables, intervals, strict=True)
        for name, (symbol, _, sentence) in table.items()
    ]


def layer_row(name: str, symbol: str, one: Any) -> dict[str, Any]:
    """Return the row of a file of a per-layer diagnostic."""
    text = first_sentence(one)
    return {"name": name, "symbol": symbol, "interval": "every layer", "description": text}


def analysis_rows() -> Rows:
    """Return name, description and columns of every analysis of `deepstack analyze`."""
    from deepstack.instruments.depth_use.analyses import COLUMNS, MEASURES

    return [row | {"columns": list(COLUMNS[row["name"]])} for row in named_rows(MEASURES)]


def chart_rows() -> Rows:
    """Return name and description of every chart."""
    from deepstack.plots import CHARTS

    return named_rows(CHARTS)


def named_rows(entries: Any) -> Rows:
    """Return name and description of functions or declarations."""
    return [{"name": name, "description": first_sentence(one)} for name, one in entries.items()]


def claim_rows() -> Rows:
    """Return id, formula and source of every claim that `deepstack theory` measures."""
    from deepstack.instruments.ledger.claims import all_claims

    return [
        {"name": claim.id, "formula": claim.formula, "source": claim.source._asdict()}
        for claim in all_claims()
    ]


def declared_schemes() -> Rows:
    """Return name, equation, families and paper of every scheme in the source."""
    return [
        {
            "name": name,
            "equation": one.document.split("\n")[0].split(".  ")[0].rstrip("."),
            "families": list(attributes("schemes", one.class_name)["families"]),
            "paper": one.keywords["paper"],
        }
        for name, one in declarations("schemes", "").items()
    ]


def declared_diagnostics() -> Rows:
    """Return the rows of `diagnostic_rows` that the source declares."""
    usual = constants("deepstack.diagnostics.layers")["SUBLAYERS"]
    more = [
        constants(f"deepstack.instruments.{name}.measure")["COLUMNS"]
        for name in ("noise_scale", "sharpness")
    ]
    rows = column_rows([MODEL_UPDATE_COLUMNS, *more])
    for name, one in declarations("diagnostics", "diagnostic").items():
        names = [f"{name}_{part}" for part in one.keywords.get("parts", usual)] or [name]
        rows += [layer_row(file, one.arguments[0], one) for file in names]
    return rows


def declared_claims() -> Rows:
    """Return id, formula and title of the source of every claim in the source, by number."""
    claims = declarations("instruments/ledger/claims", "claim")
    return [
        {
            "name": name,
            "formula": claims[name].document.split("\n\n")[0].replace("\n", " ").rstrip("."),
            "source": {"title": claims[name].arguments[0][0]},
        }
        for name in sorted(claims, key=lambda name: int(name[1:]))
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
DECLARED: dict[str, Callable[[], Rows]] = {
    "schemes": declared_schemes,
    "diagnostics": declared_diagnostics,
    "analyses": lambda: named_rows(declarations("instruments/depth_use/analyses", "measure")),
    "charts": lambda: named_rows(declarations("plots", "chart")),
    "claims": declared_claims,
}
"""Tables that need no torch: they are read from the source, without coefficients."""


def first_sentence(one: Any) -> str:
    """Return the first line of the docstring of a function or a declaration."""
    text = one.document if isinstance(one, Declaration) else inspect.getdoc(one)
    return (text or "").split("\n")[0]
