"""Write a configuration as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from deepstack.config.schema import Config
from deepstack.yaml_reader import parse_scalar

# words that need no quotes, also inside [a, b]
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.-]*")


def to_yaml(config: Config) -> str:
    """Return every value as YAML; reading it gives an equal configuration."""
    data = config.model_dump(mode="json")
    if config.train.has_budget:
        del data["train"]["steps"]
    return yaml_of(data)


def yaml_of(data: Mapping[str, Any]) -> str:
    """Return sections, lists, words and numbers as YAML."""
    return "\n".join(_lines(data, "")) + "\n"


def _lines(data: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{_scalar(key)}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{_scalar(key)}: {one_line(value)}"


def one_line(value: Any) -> str:
    """Return a value on one line: false, 0.001, null, [a, b]."""
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(one_line, value))}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):  # those of NumPy's that are one of these too
        return repr(float(value) if isinstance(value, float) else int(value))
    if _PLAIN.fullmatch(value) and isinstance(parse_scalar(value), str):
        return value
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
