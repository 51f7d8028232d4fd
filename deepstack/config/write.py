"""From a configuration back to YAML."""

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
