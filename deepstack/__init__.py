"""deepstack: depth-scaling studies of Transformers, from a YAML to a chart.

config = deepstack.load_config("configs/quick.yaml", ["model.depth=12"])
run = deepstack.train(config)
table = deepstack.load_runs("results")

Every intended error is a `deepstack.errors.DeepstackError`; its subclasses name the kinds.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    sys.tracebacklimit = 0  # the sentence alone
    raise ImportError("deepstack runs on Linux and macOS; on Windows, use it inside WSL 2")

if sys.flags.optimize > 1:
    sys.tracebacklimit = 0
    raise ImportError(
        "deepstack reads equations and help from docstrings, which PYTHONOPTIMIZE=2 (python -OO) "
        "removes; first: unset PYTHONOPTIMIZE, or use python -O"
    )

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deepstack import errors as errors
    from deepstack import schemes as schemes
    from deepstack.analysis.selection import load_runs as load_runs
    from deepstack.config import load_config as load_config
    from deepstack.depth_use import analyze_huggingface as analyze_huggingface
    from deepstack.depth_use import analyze_model as analyze_model
    from deepstack.depth_use import analyze_run as analyze  # noqa: F401
    from deepstack.model import build_model as build_model
    from deepstack.plots.files import plot as plot
    from deepstack.plugins import load_plugins as load_plugins
    from deepstack.reports import compare as compare
    from deepstack.reports import report as report
    from deepstack.sweeps import calibrate as calibrate
    from deepstack.sweeps import signal as signal
    from deepstack.sweeps import sweep as sweep
    from deepstack.training import train as train
    from deepstack.training.external import Probe as probe  # noqa: F401
    from deepstack.training.external_calibration import calibrate_model as calibrate_model

# name -> module, attribute ("" for the module itself): imported when first used, so that
# `import deepstack` needs no torch
_PUBLIC = {
    "analyze": ("deepstack.depth_use", "analyze_run"),
    "analyze_huggingface": ("deepstack.depth_use", "analyze_huggingface"),
    "analyze_model": ("deepstack.depth_use", "analyze_model"),
    "build_model": ("deepstack.model", "build_model"),
    "calibrate": ("deepstack.sweeps", "calibrate"),
    "calibrate_model": ("deepstack.training.external_calibration", "calibrate_model"),
    "compare": ("deepstack.reports", "compare"),
    "errors": ("deepstack.errors", ""),
    "load_config": ("deepstack.config", "load_config"),
    "load_plugins": ("deepstack.plugins", "load_plugins"),
    "load_runs": ("deepstack.analysis.selection", "load_runs"),
    "plot": ("deepstack.plots.files", "plot"),
    "probe": ("deepstack.training.external", "Probe"),
    "report": ("deepstack.reports", "report"),
    "schemes": ("deepstack.schemes", ""),
    "signal": ("deepstack.sweeps", "signal"),
    "sweep": ("deepstack.sweeps", "sweep"),
    "train": ("deepstack.training", "train"),
}

__all__ = sorted(_PUBLIC)


if not TYPE_CHECKING:  # a type checker knows the names above, and reports any other

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(
                f"module 'deepstack' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        module, attribute = _PUBLIC[name]
        imported = importlib.import_module(module)
        return getattr(imported, attribute) if attribute else imported


def __dir__() -> list[str]:
    return sorted(__all__)
