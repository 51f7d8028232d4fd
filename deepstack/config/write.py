"""Write a configuration as YAML, or one to start from: all settings with their meaning."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from deepstack.base.text import escaped
from deepstack.base.yaml_reader import parse_scalar
from deepstack.config.schema import Config

# words that need no quotes, also inside [a, b]
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.-]*")

# The settings of the written file; all others are comments that show the defaults.
CHOSEN = {"model": {"scheme": "deepnorm", "depth": 48}, "task": {"name": "text"}}

# Comments of a different form than the settings': together they are one example.
SWEEP = """
#| # To make this file a sweep, take away the '#|' and run: deepstack sweep <file> --dry-run
#| sweep:
#|   grid:                        # every combination of these values
#|     model.scheme: [post_ln, deepnorm]
#|     seed: [0, 1, 2]
#|   zip:                         # lists that go together, value by value
#|     model.depth: [6, 48, 200]
#|     train.lr: [1e-3, 5e-4, 2e-4]
#|   exclude:                     # cells that are left out; a list means any of its values
#|     - {model.scheme: post_ln, model.depth: [48, 200]}
#|   overrides:                   # other settings for some cells; of several the last wins
#|     - {where: {model.depth: 200}, set: {train.batch_size: 8}}
"""


def to_yaml(config: Config) -> str:
    """Return every value as YAML; reading it gives an equal configuration."""
    data = config.model_dump(mode="json")
    if config.train.has_budget:
        del data["train"]["steps"]
    unwritten = {"d_model", "d_ff"} - config.model.model_fields_set
    for key in ["parameters"] if config.model.parameters is None else unwritten:
        del data["model"][key]
    for key in ("instruments", "layers_on"):  # the config.yaml of a run names only what is on
        if not data["log"][key]:
            del data["log"][key]
    return yaml_of(data)


def yaml_of(data: Mapping[str, Any]) -> str:
    """Return sections, lists, words and numbers as YAML."""
    return "\n".join(_lines(data, "")) + "\n"


def _lines(data: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{one_line(key)}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{one_line(key)}: {one_line(value)}"


def one_line(value: Any) -> str:
    """Return a value on one line: false, 0.001, null, [a, b]."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(one_line, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{one_line(key)}: {one_line(v)}" for key, v in value.items()) + "}"
    if isinstance(value, float):
        return repr(float(value))  # of NumPy's too; JSON writes inf and nan as other words
    if isinstance(value, str) and _PLAIN.fullmatch(value) and parse_scalar(value) == value:
        return value
    return escaped(json.dumps(value, ensure_ascii=False))


def annotated_defaults(schema_file: str) -> str:
    """Return YAML text: a few settings, and all others as comments with default and meaning."""
    head = [
        f"# yaml-language-server: $schema={schema_file}",
        "# Settings that are commented out show their defaults.  Run with: deepstack train <file>",
        "",
    ]
    return "\n".join([*head, *_annotated(Config, CHOSEN, "")]) + "\n" + SWEEP


def _annotated(section: type[BaseModel], chosen: dict[str, Any], indent: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        start = indent if name in chosen else f"{indent}# "
        if isinstance(field.default, BaseModel):
            if not indent:
                yield ""
            yield f"{start}{name}:"
            yield from _annotated(type(field.default), chosen.get(name, {}), indent + "  ")
        else:
            text = f"{name}: {one_line(chosen.get(name, field.default))}"
            meaning = " ".join((field.description or "").split())
            yield f"{start}{text:<32}  # {meaning}"
