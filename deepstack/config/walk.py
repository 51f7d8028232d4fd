"""Access to the configuration's JSON schema by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from deepstack.config.schema import Config

Path = tuple[str | int, ...]
Schema = dict[str, Any]


@cache
def sections() -> dict[str, list[str]]:
    """Return each section ('' for the whole, 'model', 'model.norm', …) with its keys."""
    models: list[tuple[str, type[BaseModel]]] = [("", Config)]
    for name, model in models:  # grows while it is read
        for key, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                models.append((f"{name}.{key}".strip("."), field.annotation))
    return {name: list(model.model_fields) for name, model in models}


@cache
def keys() -> list[str]:
    """Return every dotted key that is not a section: 'seed', 'model.depth', …"""
    inner = sections()
    every = [f"{name}.{key}".strip(".") for name, found in inner.items() for key in found]
    return [key for key in every if key not in inner]


@cache
def root() -> Schema:
    return Config.model_json_schema()


def resolve(schema: Schema) -> Schema:
    if len(schema.get("allOf", ())) == 1:  # how pydantic before 2.9 refers to what has a default
        schema = schema["allOf"][0]
    if "$ref" in schema:
        return dict(root()["$defs"][schema["$ref"].rsplit("/", 1)[1]])
    return schema


def alternatives(schema: Schema) -> Iterator[Schema]:
    schema = resolve(schema)
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from alternatives(option)
    else:
        yield schema


def at(path: Path) -> Schema:
    """Return the JSON schema at a path; {} where anything is allowed or nothing is known."""
    schema = root()
    for part in path:
        for option in alternatives(schema):
            inner: Any = None
            if isinstance(part, int):
                ahead = option.get("prefixItems", [])
                inner = ahead[part] if part < len(ahead) else option.get("items")
            elif part in option.get("properties", {}):
                inner = option["properties"][part]
            elif isinstance(option.get("additionalProperties"), dict):
                inner = option["additionalProperties"]
            elif option.get("patternProperties"):
                inner = next(iter(option["patternProperties"].values()))
            if isinstance(inner, dict):
                schema = inner
                break
        else:
            return {}
    return resolve(schema)
