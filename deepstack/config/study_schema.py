"""The form of a `sweep:` section: its model, its JSON schema for editors, and mistakes in it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepstack.config.explain import distinct_errors, hint_for
from deepstack.config.schema import Config
from deepstack.config.walk import Path
from deepstack.registry import nearest
from deepstack.yaml_reader import Node, Problem, quote, quote_key

MAX_RULES = 100

Values = Annotated[list[Any], Field(min_length=1)]
Group = Annotated[dict[str, Values], Field(min_length=2)]
Settings = Annotated[dict[str, Any], Field(min_length=1)]


_FORM = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class SweepOverride(BaseModel):
    """Settings for the cells that match."""

    model_config = _FORM

    where: Settings
    """A key with a value, or with a list: any of them."""
    set: Settings
    """Dotted keys with their values in these cells."""


class Sweep(BaseModel):
    """Makes the file a study: one run for every combination of the values."""

    model_config = _FORM

    grid: dict[str, Values] = {}
    """A dotted key with its values: `model.depth: [6, 48]`."""
    zip: Group | list[Group] = []
    """Lists that go together: one group of keys, or a list of groups."""
    exclude: Annotated[list[Settings], Field(max_length=MAX_RULES)] = []
    """Partial cells; every cell that matches one is left out."""
    overrides: Annotated[list[SweepOverride], Field(max_length=MAX_RULES)] = []
    """Settings for the cells that match; of several the last wins."""


_FORMS = {
    "": "a section with `grid:`, and below it lines such as `model.depth: [6, 48]`",
    "grid": "lines such as `model.depth: [6, 48]`",
    "zip": "two keys or more with lists of one length, such as {model.depth: [6, 48], "
    "train.lr: [1e-3, 5e-4]}",
    "exclude": "a list such as [{model.scheme: post_ln, model.depth: [500, 1000]}]",
    "overrides": "a list such as [{where: {model.depth: 1000}, set: {train.lr: 1e-4}}]",
}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of configurations and studies, for editors."""
    schema, sweep = Config.model_json_schema(), Sweep.model_json_schema()
    schema["$defs"] |= sweep.pop("$defs")
    schema["properties"]["sweep"] = sweep
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def form_problems(sweep: Node, given: Collection[str]) -> list[Problem]:
    """Return the mistakes in the form of a `sweep:` section.

    given: the keys whose values the command line replaces.
    """
    data = sweep.plain()
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if value is not None}
    try:
        Sweep.model_validate({} if data is None else data)
    except ValidationError as error:
        return [
            _form_problem(path, item, sweep)
            for path, item in distinct_errors(error, data)
            if not (_is_axis(path) and path[-1] in given)
        ]
    return []


def _is_axis(path: Path) -> bool:
    return len(path) > 1 and path[0] in ("grid", "zip") and isinstance(path[-1], str)


def _form_problem(path: Path, item: dict[str, Any], sweep: Node) -> Problem:
    node, position = sweep.at(path), sweep.at(path).where
    missing = item["type"] == "missing"
    words = [part for part in (*path, item["loc"][-1] if missing else 0) if isinstance(part, str)]
    shown = "nothing" if missing else node.shown
    if node.value in ({}, []):
        shown = shown.replace("a ", "an empty ")
    allowed = _FORMS.get(words[0] if words else "", "")
    if item["type"] == "extra_forbidden":
        fields = list((SweepOverride if len(path) > 1 else Sweep).model_fields)
        shown, position = f"the unknown key {quote(str(path[-1]))}", node.key_where
        allowed = ", ".join(fields) + hint_for(nearest(str(path[-1]), fields))
    elif item["type"] == "too_long" and isinstance(node.value, list):
        shown, allowed = f"{len(node.value)} entries", f"at most {MAX_RULES}"
    elif _is_axis(path):
        allowed = "a list of values, such as [6, 48]"
        if not isinstance(node.value, dict | list | None):
            allowed += f"; did you mean [{node.shown}]?"
    elif path[:1] == ("zip",) and isinstance(node.value, dict) and len(node.value) == 1:
        shown = "one key, which belongs under grid"
    key = quote_key(".".join(["sweep", *words]))
    return Problem(position, key, f"found {shown}; allowed {allowed}")
