"""A configuration to start from: every setting with its default and its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from deepstack.config.schema import Config
from deepstack.config.write import one_line

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


def annotated_defaults(schema_file: str) -> str:
    """Return YAML text: a few settings, and all others as comments with default and meaning."""
    head = [
        f"# yaml-language-server: $schema={schema_file}",
        "# Settings that are commented out show their defaults.  Run with: deepstack train <file>",
        "",
    ]
    return "\n".join([*head, *_lines(Config(), CHOSEN, 0)]) + "\n" + SWEEP


def _lines(section: BaseModel, chosen: dict[str, Any], level: int) -> Iterator[str]:
    indent = "  " * level
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            if level == 0:
                yield ""
            picked = chosen.get(name, {})
            yield f"{indent}{'' if picked else '# '}{name}:"
            yield from _lines(value, picked, level + 1)
            continue
        shown = field.default if name not in chosen else chosen[name]
        shown = list(shown) if isinstance(shown, tuple) else shown
        text = f"{name}: {one_line(shown)}"
        mark = "" if name in chosen else "# "
        meaning = " ".join((field.description or "").split())
        yield f"{indent}{mark}{text:<32}  # {meaning}"
