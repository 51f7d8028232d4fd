"""A file for a user's block, with the names of a scheme's parameters to fill in."""

from collections.abc import Mapping
from typing import Any

from deepstack.instruments.conform.reference import Reference

TEMPLATE = '''"""{label}: {equation}"""

import torch
from torch import nn


def build(depth, d_model, n_heads, d_ff):
    """Return the stack: x (batch, seq, d_model) -> F, the stream after the last layer and norm."""
    return nn.Sequential(*[MyLayer(l, depth, d_model, n_heads, d_ff) for l in range(depth)])


# name in the reference -> a module with weight and bias, or a parameter; {{l}}: the layer, from 0
PARAMETERS = {{
{lines}
}}
'''


def template_of(scheme: str, settings: Mapping[str, Any]) -> str:
    """Return the text of a file with all parameters of a scheme."""
    reference = Reference(scheme, 2, settings)
    lines, known = [], reference.entries.keys()
    for (name, layer), entry in reference.entries.items():
        base, _, kind = name.rpartition(".")
        is_second = kind == "bias" and {(base, layer), (f"{base}.gain", layer)} & known
        if layer > 1 or is_second:
            continue
        short = base if kind == "gain" else name
        own = f"{{l}}.{short}" if layer else short
        size = " x ".join(map(str, entry.shape))
        lines.append(f'    "{short}": "{own}",  # {size}')
    cls = reference.scheme.scheme_class
    return TEMPLATE.format(label=cls.label, equation=cls.equation, lines="\n".join(lines))
