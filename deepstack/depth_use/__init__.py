"""Analyses of a trained model: what each of its layers contributes."""

from deepstack.depth_use.external import (
    analyze_folder,
    analyze_huggingface,
    analyze_model,
)
from deepstack.depth_use.huggingface import is_huggingface, other_format
from deepstack.depth_use.measure import COLUMNS, MEASURES, Request, measure_all
from deepstack.depth_use.runs import analyze_run
from deepstack.registry import import_all

import_all(__name__, __path__)  # each module registers its analyses

__all__ = [
    "COLUMNS",
    "MEASURES",
    "Request",
    "analyze_folder",
    "analyze_huggingface",
    "analyze_model",
    "analyze_run",
    "is_huggingface",
    "measure_all",
    "other_format",
]
