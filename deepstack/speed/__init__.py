"""What makes a deep stack fast: parameters stacked by role, and the training step."""

from deepstack.speed.banks import Bank, Banks, layer_norms
from deepstack.speed.parameter import RoleParameter, parameter, with_storage
from deepstack.speed.step import Measured, make_step

__all__ = [
    "Bank",
    "Banks",
    "Measured",
    "RoleParameter",
    "layer_norms",
    "make_step",
    "parameter",
    "with_storage",
]
