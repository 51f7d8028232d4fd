"""From a configuration back to YAML, and the JSON schema that editors read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from deepstack.config.schema import Config
from deepstack.config.yaml_reader import scalar

# what needs no quotes anywhere, also inside [a, b]
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.-]*")


def to_yaml(config: Config) -> str:
    """Every value as YAML; reading it gives an equal configuration."""
    return "\n".join(_lines(config.model_dump(mode="json"), "")) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON schema of configurations and studies, for completion and checks in editors."""
    schema = Config.model_json_schema()
    values = {"type": "array", "minItems": 1, "uniqueItems": True}
    grid = {
        "type": "object",
        "description": "A dotted key with its values: `model.depth: [6, 48]`.",
        "additionalProperties": values,
    }
    sweep = {
        "type": "object",
        "description": "Makes the file a study: one run for every combination of the values.",
        "properties": {"grid": grid},
        "additionalProperties": False,
    }
    schema["properties"]["sweep"] = sweep
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _lines(data: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{_scalar(key)}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{_scalar(key)}: {_flow(value)}"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str):
        return repr(value)
    if _PLAIN.fullmatch(value) and isinstance(_read(value), str):
        return value
    return '"' + "".join(map(_escaped, value)) + '"'


def _read(text: str) -> Any:
    try:
        return scalar(text)
    except ValueError:
        return None


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
