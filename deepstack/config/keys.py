"""The keys of configurations and studies: their JSON schema, and the type of each value."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from deepstack.base.allowed import Schema, alternatives, schema_of
from deepstack.base.text import quote_key
from deepstack.config.schema import Config
from deepstack.config.study_schema import StudyFile

KeyPath = tuple[str | int, ...]
"""The keys and positions that lead to a value."""


def json_schema(names: Mapping[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """Return the JSON schema of configurations and studies, for editors.

    names: setting -> names of definitions, which editors propose; a plugin's are allowed too.
    """
    schema = StudyFile.model_json_schema()
    for key, examples in (names or {}).items():
        *_, section, name = key.split(".")
        schema["$defs"][section.capitalize()]["properties"][name]["examples"] = list(examples)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_cached_schema = cache(schema_of)


@cache
def sections() -> dict[str, list[str]]:
    """Return each section ('' for the whole, 'model', 'model.norm', …) with its keys."""
    inner = [("", _cached_schema(Config))]
    for name, section in inner:  # grows while it is read
        below = section["properties"].items()
        inner += [(f"{name}.{key}".strip("."), each) for key, each in below if "properties" in each]
    return {name: list(section["properties"]) for name, section in inner}


@cache
def setting_keys() -> list[str]:
    """Return every dotted key that is not a section: 'seed', 'model.depth', …"""
    inner = sections()
    every = [f"{name}.{key}".strip(".") for name, names in inner.items() for key in names]
    return [key for key in every if key not in inner]


def schema_at(path: KeyPath) -> Schema:
    """Return the JSON schema at a path; {} where anything is allowed or nothing is known."""
    schema = _cached_schema(StudyFile if path[:1] == ("sweep",) else Config)
    for part in path:
        inside = (_inside(option, part) for option in alternatives(schema))
        schema = next((inner for inner in inside if isinstance(inner, dict)), {})
    return schema


def dotted_key(path: KeyPath) -> str:
    """Return a path as it is written in messages: 'train.betas[0]'."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return quote_key(text.removeprefix("."))


def _inside(option: Schema, part: str | int) -> Any:
    if isinstance(part, int):
        return option.get("prefixItems", [option.get("items")])[0]  # all have one schema
    others = option.get("patternProperties", {}).values()
    named = option.get("properties", {}).get(part) or option.get("additionalProperties")
    return named or next(iter(others), None)
