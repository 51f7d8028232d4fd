"""Parameters with roles, and banks that stack those of all layers."""

from deepstack.parameters.banks import Bank, Banks, global_norm, layer_norms
from deepstack.parameters.role import RoleParameter, Start, has_role, parameter, with_storage

__all__ = [
    "Bank",
    "Banks",
    "RoleParameter",
    "Start",
    "global_norm",
    "has_role",
    "layer_norms",
    "parameter",
    "with_storage",
]
