"""The kinds of `deepstack list` in the core: configs, settings, schemes, tasks, …"""

from pathlib import Path
from typing import Any, NamedTuple, get_args

from deepstack.base.allowed import describe
from deepstack.cli.listing import (
    Entries,
    Listing,
    Rows,
    definition_kinds,
    described,
    first_line,
    names_of_setting,
    option_row,
    short_table,
    words_of_options,
)
from deepstack.config import Config, Family, load_config, values, with_overrides
from deepstack.config.instruments import SNAPSHOTS, specs
from deepstack.config.keys import schema_at, setting_keys
from deepstack.config.load import (
    description,
    example_paths,
    facts_of_recipe,
    recipe_paths,
)
from deepstack.records import folder
from deepstack.runs import spikes


def config_rows(name: str, path: Path, depth: int | None) -> Rows:
    """Return name, command and description of an example configuration."""
    is_sweep = "\nsweep:" in path.read_text(encoding="utf-8")
    command = "sweep" if is_sweep else "train"
    return [{"name": name, "command": command, "description": description(path)}]


def configs() -> Entries:
    """Return the path of every example configuration that is not a recipe."""
    recipes = recipe_paths()
    return {name: path for name, path in example_paths().items() if name not in recipes}


def recipe_rows(name: str, path: Path, depth: int | None) -> Rows:
    """Return the norm, its place, positions and rate of a recipe, its source, and what it lacks."""
    config, facts = load_config(path), facts_of_recipe(path)
    model = config.model
    norm = {"layer": "LayerNorm", "rms": "RMSNorm"}.get(model.norm.kind, model.norm.kind)
    schemes = {row["name"]: row["equation"] for row in short_table("schemes")}
    row = {
        "name": name,
        "norm": norm + (", also of q and k" if model.qk_norm else ""),
        "where": schemes[model.scheme],
        "positions": model.positions,
        "lr": config.train.lr,
    }
    words = {key: facts.get(key, "") for key in ("rate", "published", "lacks", "source")}
    return [row | words | {"description": description(path)}]


def setting_rows(key: str, default: Any, depth: int | None) -> Rows:
    """Return dotted key, default, allowed values and description of a setting."""
    schema = schema_at(tuple(key.split(".")))
    sentence = " ".join(schema.get("description", "").split())
    names = names_of_setting(key) if key in definition_kinds() else []
    row = {"name": key, "default": default, "allowed": ", ".join(names) or describe(schema)}
    return [row | {"description": sentence}]


def settings() -> Entries:
    """Return the default of every setting by its dotted key."""
    usual = values(Config())
    return {key: usual.get(key) for key in setting_keys()}


def schemes() -> Entries:
    """Return the registry of schemes."""
    from deepstack.schemes import SCHEMES

    return SCHEMES


def scheme_rows(name: str, scheme: Any, depth: int | None) -> Rows:
    """Return name, equation, families and paper of a scheme; in the full table coefficients too.

    alpha, beta and the gains of the first and last layer are an encoder's. `coefficients` has the
    values of every family and side; an encoder-decoder has as many layers on both sides.
    """
    row: dict[str, Any] = {"name": name, "equation": first_line(scheme).split(".  ")[0].rstrip(".")}
    if depth is None:
        return [row | {"families": list(scheme.families), "paper": scheme.paper}]
    coefficients = {family: coefficients_by_side(name, family, depth) for family in scheme.families}
    row |= next(iter(coefficients[scheme.families[0]].values())) | {"depth": depth}
    row |= {"label": scheme.label, "final_norm": scheme.final_norm}
    row |= {"families": list(coefficients), "coefficients": coefficients}
    return [row | {"paper": scheme.paper}]


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


def tasks() -> Entries:
    """Return the registry of tasks."""
    from deepstack.tasks import TASKS

    return TASKS


def task_rows(name: str, task: Any, depth: int | None) -> Rows:
    """Return name, description, families and options of a task."""
    from deepstack.tasks import task_families, task_options

    options = [option_row(key, option) for key, option in task_options(name).items()]
    row = {"name": name, "description": first_line(task)}
    return [row | {"families": list(task_families(name)), "options": options}]


class Column(NamedTuple):
    """A column of a log: its symbol, interval and description, and the module that declares it."""

    symbol: str
    interval: str
    sentence: str
    module: str


def diagnostics() -> Entries:
    """Return every logged column, and every diagnostic."""
    from deepstack.diagnostics import DIAGNOSTICS  # declares the instruments

    columns = {
        name: Column(symbol, interval, sentence, module)
        for interval, module, table in logged_columns()
        for name, (symbol, _, sentence) in table.items()
    }
    return {**columns, **DIAGNOSTICS}


def logged_columns() -> list[tuple[str, str, dict[str, tuple[str, str, str]]]]:
    """Return interval, module and columns of each log that an instrument writes."""
    tables = [("every step", folder.__name__, folder.MODEL_UPDATE_COLUMNS)]
    for spec in specs().values():
        interval = "every layer" if spec.every == SNAPSHOTS else spec.key.removeprefix("log.")
        tables.append((interval, spec.module, dict(spec.columns or {})))
    of_spikes = {name: row for name, row in spikes.SPIKES_COLUMNS.items() if name != "step"}
    return [*tables, ("layers_on", spikes.__name__, of_spikes)]


def diagnostic_rows(name: str, one: Any, depth: int | None) -> Rows:
    """Return name, symbol, interval and description of a column, or of a diagnostic's files.

    The names are file names, as `plot --diagnostic` accepts them.  JSON repeats `interval` as
    `beat`, its former name, for one version.
    """
    names, interval = [name], "every layer"
    if isinstance(one, Column):
        symbol, interval, sentence, _ = one
    else:
        names, symbol, sentence = one.files, one.symbol, first_line(one)
    row = {"symbol": symbol, "interval": interval, "description": sentence, "beat": interval}
    return [{"name": each} | row for each in names]


def charts() -> Entries:
    """Return the registry of charts."""
    from deepstack.plots import CHARTS

    return CHARTS


def words_of_families(families: list[str]) -> str:
    """Return the families of models as a cell."""
    return "all" if set(families) == set(get_args(Family)) else ", ".join(families)


LISTED = {
    "configs": Listing(configs, config_rows, in_index=False),
    "settings": Listing(settings, setting_rows, in_index=False),
    "schemes": Listing(
        schemes,
        scheme_rows,
        json_only=frozenset(
            {"label", "depth", "gains", "gains_last", "final_norm", "coefficients"}
        ),
        cells={"families": words_of_families},
    ),
    "tasks": Listing(
        tasks, task_rows, cells={"families": words_of_families, "options": words_of_options}
    ),
    "diagnostics": Listing(diagnostics, diagnostic_rows, json_only=frozenset({"beat"})),
    "charts": Listing(charts, described),
    "recipes": Listing(
        recipe_paths, recipe_rows, in_index=False, json_only=frozenset({"description"})
    ),
}
