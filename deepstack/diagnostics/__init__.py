"""Measurements of a run: the model update at every step, layer diagnostics at selected steps."""

from deepstack.base.extensions import import_extensions
from deepstack.base.registry import import_all
from deepstack.diagnostics.divergence import Culprit, culprit
from deepstack.diagnostics.instrument import (
    INSTRUMENTS,
    Instrument,
    Row,
    RunState,
    check_instruments,
)
from deepstack.diagnostics.layers import DIAGNOSTICS, Diagnostic, describe, diagnostic, evaluate
from deepstack.diagnostics.snapshot import Snapshot, take
from deepstack.diagnostics.sublayer_statistics import SublayerStatistics
from deepstack.diagnostics.update import (
    ModelUpdate,
    evaluating,
    measuring,
    model_update,
    token_distance,
)

import_all(__name__, __path__)
import_extensions("measure")  # each module registers its diagnostics and instruments

__all__ = [
    "DIAGNOSTICS",
    "INSTRUMENTS",
    "Culprit",
    "Diagnostic",
    "Instrument",
    "ModelUpdate",
    "Row",
    "RunState",
    "Snapshot",
    "SublayerStatistics",
    "check_instruments",
    "culprit",
    "describe",
    "diagnostic",
    "evaluate",
    "evaluating",
    "measuring",
    "model_update",
    "take",
    "token_distance",
]
