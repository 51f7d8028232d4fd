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
    from deepstack import schemes as schemes
    from deepstack.base import errors as errors
    from deepstack.base.plugins import load_plugins as load_plugins
    from deepstack.config import load_config as load_config
    from deepstack.integrations import *  # noqa: F403, each names what its folders make public
    from deepstack.model import build_model as build_model
    from deepstack.plots.calls import plot as plot
    from deepstack.runs.comparison import compare as compare
    from deepstack.runs.selection import load_runs as load_runs
    from deepstack.sweeps import sweep as sweep
    from deepstack.tools import *  # noqa: F403
    from deepstack.training import train as train

# name -> module, attribute ("" for the module itself): imported when first used, so that
# `import deepstack` needs no torch.  The folders of tools list their own names.
_PUBLIC = {
    "build_model": ("deepstack.model", "build_model"),
    "compare": ("deepstack.runs.comparison", "compare"),
    "errors": ("deepstack.base.errors", ""),
    "load_config": ("deepstack.config", "load_config"),
    "load_plugins": ("deepstack.base.plugins", "load_plugins"),
    "load_runs": ("deepstack.runs.selection", "load_runs"),
    "plot": ("deepstack.plots.calls", "plot"),
    "schemes": ("deepstack.schemes", ""),
    "sweep": ("deepstack.sweeps", "sweep"),
    "train": ("deepstack.training", "train"),
}


def _names() -> list[str]:
    from deepstack.base.extensions import public_names

    return sorted({*_PUBLIC, *public_names()})


if not TYPE_CHECKING:  # a type checker knows the names above, and reports any other

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return _names()
        if name.startswith("_"):
            raise AttributeError(f"module 'deepstack' has no attribute {name!r}")
        found = _PUBLIC.get(name)
        if found is None:
            from deepstack.base.extensions import public_names

            found = public_names().get(name)
        if found is None:
            known = ", ".join(_names())
            raise AttributeError(f"module 'deepstack' has no attribute {name!r}; it has {known}")
        module, attribute = found
        imported = importlib.import_module(module)
        return getattr(imported, attribute) if attribute else imported


def __dir__() -> list[str]:
    return _names()
