"""Residual schemes, one class each; importing this package registers them all."""

from deepstack.parameters.role import RoleParameter, has_role, parameter, with_storage
from deepstack.registry import import_all
from deepstack.schemes.checks import defined_at
from deepstack.schemes.norms import NORMS, BatchNorm, LayerNorm, StackNorm, Statistics
from deepstack.schemes.scheme import (
    FAMILIES,
    SCHEMES,
    Family,
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
    "Family",
    "LayerNorm",
    "Optim",
    "Parts",
    "Place",
    "RoleParameter",
    "Scheme",
    "StackNorm",
    "StackPosition",
    "StackScheme",
    "Statistics",
    "Stream",
    "Sublayer",
    "Tap",
    "defined_at",
    "has_role",
    "parameter",
    "scheme_flops",
    "scheme_memory",
    "scheme_options",
    "stack_positions",
    "stack_schemes",
    "visible",
    "with_storage",
]
