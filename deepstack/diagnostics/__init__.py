"""What a run measures: the model update at every step, every layer at a slower beat."""

from deepstack.diagnostics.divergence import Culprit, culprit
from deepstack.diagnostics.layers import DIAGNOSTICS, Diagnostic, describe, diagnostic, evaluate
from deepstack.diagnostics.snapshot import Snapshot, take
from deepstack.diagnostics.update import COLUMNS, ModelUpdate, evaluating, model_update
from deepstack.registry import import_all

import_all(__name__, __path__)  # what a module defines registers itself

__all__ = [
    "COLUMNS",
    "DIAGNOSTICS",
    "Culprit",
    "Diagnostic",
    "ModelUpdate",
    "Snapshot",
    "culprit",
    "describe",
    "diagnostic",
    "evaluate",
    "evaluating",
    "model_update",
    "take",
]
