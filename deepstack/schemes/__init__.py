"""Residual schemes, one class each; importing this package registers them all."""

from deepstack.base.registry import import_all
from deepstack.schemes.checks import defined_at
from deepstack.schemes.norms import NORMS, BatchNorm, LayerNorm, StackNorm, Statistics
from deepstack.schemes.role import parameter, with_storage
from deepstack.schemes.scheme import (
    FAMILIES,
    SCHEMES,
    Optim,
    Parts,
    Place,
    Scheme,
    StackPosition,
    Stream,
    Sublayer,
    visible,
)
from deepstack.schemes.stack_scheme import (
    StackScheme,
    scheme_flops,
    scheme_memory,
    scheme_options,
    stack_positions,
    stack_schemes,
)
from deepstack.schemes.tap import Tap

import_all(__name__, __path__)

__all__ = [
    "FAMILIES",
    "NORMS",
    "SCHEMES",
    "BatchNorm",
    "LayerNorm",
    "Optim",
    "Parts",
    "Place",
    "Scheme",
    "StackNorm",
    "StackPosition",
    "StackScheme",
    "Statistics",
    "Stream",
    "Sublayer",
    "Tap",
    "defined_at",
    "parameter",
    "scheme_flops",
    "scheme_memory",
    "scheme_options",
    "stack_positions",
    "stack_schemes",
    "visible",
    "with_storage",
]
