"""A file for a user's block: the scheme's formulas, and the names of its parameters to fill in."""

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from deepstack.model import ACTIVATIONS
from deepstack.schemes import Scheme, StackNorm
from deepstack.tools.conform.reference import Entry, Reference
from deepstack.tools.conform.sublayer_causes import PAIRS

TEMPLATE = '''"""{label}: {formulas}"""

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
WIDTH = 100
STARTS = {"zero": "0", "one": "1", "table": "N(0, 1/d_model)"}


def template_of(scheme: str, settings: Mapping[str, Any]) -> str:
    """Return the text of a file with the formulas and all parameters of a scheme."""
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
        start = start_of(reference, entry, layer)
        lines.append(f'    "{short}": "{own}",  # {size}, {start}')
    formulas = "\n\n".join(formulas_of(reference))
    label = reference.scheme.scheme_class.label
    return TEMPLATE.format(label=label, formulas=formulas, lines="\n".join(lines))


def start_of(reference: Reference, entry: Entry, layer: int) -> str:
    """Return the start of a parameter in words."""
    if entry.start != "matrix":
        return f"starts at {STARTS.get(entry.start, entry.start)}"
    gain = reference.scheme.gain(entry.role, layer)
    return "random" if gain == 1 else f"random times a gain, {gain:.4g} in layer 1 of 2"


def formulas_of(reference: Reference) -> Iterator[str]:
    """Yield the docstring of the scheme, of its modules, and the rest of a sublayer."""
    model, scheme = reference.config.model, reference.scheme.scheme_class
    yield doc_of(scheme)
    if options := ", ".join(f"{key}={value}" for key, value in reference.scheme.options.items()):
        yield f"Options here: {options}."
    layer = reference.stack.schemes[0]
    modules: list[nn.Module] = [m for m in layer.modules() if own_parameters(m)]
    inner = [each for module in modules for each in module.modules()]
    kinds = dict.fromkeys(type(m) for m in inner if not isinstance(m, (Scheme, StackNorm)))
    for kind in kinds:
        if kind.__module__.startswith("deepstack."):
            yield f"{kind.__name__}: {doc_of(kind)}"
    activation = inspect.cleandoc(ACTIVATIONS[model.activation].__doc__ or "").split("\n\n")[0]
    gate = " * (x W_3ᵀ + b_3)" if model.gated else ""
    facts = [
        f"Norms: {model.norm.kind}, with epsilon {model.norm.eps:g} inside the root.",
        "Attention: softmax(q kᵀ / sqrt(d_head)) v W_oᵀ + b_o; the first d_head coordinates of q, "
        "k and v are the first head's.",
        f"Feed-forward: (phi(x W_1ᵀ + b_1){gate}) W_2ᵀ + b_2, phi {model.activation}: {activation}",
        f"Matrices are (n_out, n_in); random ones are drawn as {model.init.distribution}. Biases "
        "start at 0.",
    ]
    if model.family == "decoder":
        facts[1] += " A position reads itself and those before it."
    if model.positions == "rotary":
        facts[1] += (
            " Queries and keys are turned by the angle p 10000^(-2i/d_head) at position p, in the "
            f"pairs {' or '.join(PAIRS.values())}."
        )
    yield "\n".join(textwrap.fill(fact, WIDTH) for fact in facts)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module holds itself."""
    return list(module.parameters(recurse=False))


def doc_of(kind: type) -> str:
    """Return the docstring of a class without indentation."""
    return inspect.cleandoc(kind.__doc__ or "")
