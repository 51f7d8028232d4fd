"""Residual schemes, one class each; importing this package registers them all."""

from deepstack.parameters.role import RoleParameter, parameter, with_storage
from deepstack.registry import import_all
from deepstack.schemes.check_instance import (
    check_equal_parameters,
    checked_gain,
    checked_optim,
    written,
)
from deepstack.schemes.norms import NORMS, BatchNorm, LayerNorm, StackNorm, Statistics
from deepstack.schemes.scheme import (
    FAMILIES,
    SCHEMES,
    Family,
    Optim,
    Parts,
    Place,
    Scheme,
    Stream,
    Sublayer,
    find_scheme,
    scheme_options,
    visible,
    with_options,
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
    "Statistics",
    "Stream",
    "Sublayer",
    "Tap",
    "check_equal_parameters",
    "checked_gain",
    "checked_optim",
    "find_scheme",
    "parameter",
    "scheme_options",
    "visible",
    "with_options",
    "with_storage",
    "written",
]
