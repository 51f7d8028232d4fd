"""Analyses of a trained model: what each of its layers contributes.  One function an analysis."""

from deepstack.base import import_all
from deepstack.tools.depth_use.measure import COLUMNS, MEASURES, Request, measure_all

import_all(__name__, __path__)  # each module registers its analyses

__all__ = ["COLUMNS", "MEASURES", "Request", "measure_all"]
