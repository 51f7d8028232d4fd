"""Residual schemes, one class each; importing this package registers them all."""

from deepstack.registry import import_all
from deepstack.schemes.norms import LayerNorm
from deepstack.schemes.scheme import SCHEMES, Scheme, Sublayer, find_scheme, scheme_options
from deepstack.speed.parameter import RoleParameter, parameter, with_storage

import_all(__name__, __path__)

__all__ = [
    "SCHEMES",
    "LayerNorm",
    "RoleParameter",
    "Scheme",
    "Sublayer",
    "find_scheme",
    "parameter",
    "scheme_options",
    "with_storage",
]
