"""Measurements of a run: the model update at every step, layer diagnostics at selected steps."""

from deepstack.diagnostics.divergence import Culprit, culprit
from deepstack.diagnostics.layers import DIAGNOSTICS, Diagnostic, describe, diagnostic, evaluate
from deepstack.diagnostics.snapshot import Snapshot, take
from deepstack.diagnostics.sublayers import SublayerStatistics
from deepstack.diagnostics.update import ModelUpdate, evaluating, model_update
from deepstack.registry import import_all

import_all(__name__, __path__)  # each module registers its diagnostics

__all__ = [
    "DIAGNOSTICS",
    "Culprit",
    "Diagnostic",
    "ModelUpdate",
    "Snapshot",
    "SublayerStatistics",
    "culprit",
    "describe",
    "diagnostic",
    "evaluate",
    "evaluating",
    "model_update",
    "take",
]
