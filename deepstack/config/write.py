"""Write a configuration as YAML, or one to start from: all settings with their meaning."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from deepstack.config.schema import Config
from deepstack.yaml_reader import parse_scalar, printable

# words that need no quotes, also inside [a, b]
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.-]*")

# The settings of the written file; all others are comments that show the defaults.
CHOSEN = {"model": {"scheme": "deepnorm", "depth": 48}, "task": {"name": "text"}}

# Comments of another kind than the settings': all of them together are one example.
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
    quoted = value.replace("\\", r"\\").replace('"', r"\"")
    return f'"{printable(quoted)}"'


def annotated_defaults(schema_file: str) -> str:
    """Return YAML text: a few settings, and all others as comments with default and meaning."""
    head = [
        f"# yaml-language-server: $schema={schema_file}",
        "# Settings that are commented out show their defaults.  Run with: deepstack train <file>",
        "",
    ]
    return "\n".join([*head, *_annotated(Config(), CHOSEN, 0)]) + "\n" + SWEEP


def _annotated(section: BaseModel, chosen: dict[str, Any], level: int) -> Iterator[str]:
    indent = "  " * level
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            if level == 0:
                yield ""
            picked = chosen.get(name, {})
            yield f"{indent}{'' if picked else '# '}{name}:"
            yield from _annotated(value, picked, level + 1)
            continue
        shown = field.default if name not in chosen else chosen[name]
        shown = list(shown) if isinstance(shown, tuple) else shown
        text = f"{name}: {one_line(shown)}"
        mark = "" if name in chosen else "# "
        meaning = " ".join((field.description or "").split())
        yield f"{indent}{mark}{text:<32}  # {meaning}"
