"""Former names of modules, so that plugins and scripts written for them still run."""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

_BASE = "allowed ending errors notebook options plugins registry torchrun yaml_reader"
_RUNS = (
    "captions comparison fit intervals learning outcomes quantities selection settings statistics "
    "studies tidy"
)
_LEDGER = ("claim", "claim_stack", "draws", "sources", "statistics")
FORMER = {
    **{f"deepstack.{name}": f"deepstack.base.{name}" for name in _BASE.split()},
    "deepstack.analysis": "deepstack.runs",
    **{f"deepstack.analysis.{name}": f"deepstack.runs.{name}" for name in _RUNS.split()},
    "deepstack.distributed": "deepstack.fast.distributed",
    "deepstack.depth_use": "deepstack.instruments.depth_use",
    "deepstack.theory": "deepstack.instruments.ledger.claims",
    **{f"deepstack.theory.{name}": f"deepstack.instruments.ledger.{name}" for name in _LEDGER},
    "deepstack.training.external": "deepstack.instruments.probe.probe",
}
"""Former name -> present name."""


def present_name(former: str) -> str | None:
    """Return the present name of a module or of a module inside it; None for any other name."""
    package, _, module = former.rpartition(".")
    return FORMER.get(former) or (f"{FORMER[package]}.{module}" if package in FORMER else None)


class _Former:
    """Finds a module by its former name: the module of the present name, under both."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, cast(Any, self)) if present_name(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(present_name(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # the import system has replaced the module's own
        module.__spec__ = module.__spec__.loader_state


def find_former_names() -> None:
    """Let `import` find modules by their former names too."""
    sys.meta_path.insert(0, _Former())
