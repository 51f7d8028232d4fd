"""Access to the configuration's JSON schema by dotted keys."""

from __future__ import annotations

from functools import cache
from typing import Any

from deepstack.allowed import Schema, alternatives, schema_of
from deepstack.config.schema import Config, SweepFile
from deepstack.yaml_reader import quote_key

Path = tuple[str | int, ...]


@cache
def root() -> Schema:
    """Return the JSON schema of a configuration."""
    return schema_of(Config)


@cache
def _sweep() -> Schema:
    return schema_of(SweepFile)


@cache
def sections() -> dict[str, list[str]]:
    """Return each section ('' for the whole, 'model', 'model.norm', …) with its keys."""
    inner = [("", root())]
    for name, section in inner:  # grows while it is read
        below = section["properties"].items()
        inner += [(f"{name}.{key}".strip("."), each) for key, each in below if "properties" in each]
    return {name: list(section["properties"]) for name, section in inner}


@cache
def keys() -> list[str]:
    """Return every dotted key that is not a section: 'seed', 'model.depth', …"""
    inner = sections()
    every = [f"{name}.{key}".strip(".") for name, names in inner.items() for key in names]
    return [key for key in every if key not in inner]


def at(path: Path) -> Schema:
    """Return the JSON schema at a path; {} where anything is allowed or nothing is known."""
    schema = _sweep() if path[:1] == ("sweep",) else root()
    for part in path:
        inside = (_inside(option, part) for option in alternatives(schema))
        schema = next((inner for inner in inside if isinstance(inner, dict)), {})
    return schema


def dotted(path: Path) -> str:
    """Return a path as it is written in messages: 'train.betas[0]'."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return quote_key(text.removeprefix("."))


def _inside(option: Schema, part: str | int) -> Any:
    if isinstance(part, int):
        first = option.get("prefixItems", [])
        return first[part] if part < len(first) else option.get("items")
    if part in option.get("properties", {}):
        return option["properties"][part]
    by_pattern = option.get("patternProperties", {}).values()
    return option.get("additionalProperties") or next(iter(by_pattern), None)
