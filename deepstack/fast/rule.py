"""Chooses the fast paths of a run by a fixed rule, so that a resumed run uses the same ones."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from typing import Literal

from deepstack.config.estimate import FEW_STEPS
from deepstack.errors import ConfigError
from deepstack.fast.products import Library

Choice = bool | Literal["auto"]


@dataclass(frozen=True)
class FastPaths:
    """The fast paths of a run.

    fused: a sublayer is one autograd node; compiled: one compiled layer; captured: CUDA graphs;
    replayed: the operations of a step, recorded once; products: the library of large products in
    fused sublayers on a CPU."""

    fused: bool
    compiled: bool
    captured: bool
    replayed: bool = False
    products: Library = "mkl"


STATIC = "a scheme that declares static=True"


def choose_fast_paths(
    *,
    steps: int,
    gpu: bool,
    dropout: bool,
    sharded: bool,
    processes: int,
    uniform: bool,
    static: bool,
    recompute: bool,
    inside: bool,
    fusible: bool,
    fused: Choice,
    compiled: Choice,
    captured: Choice,
    replayed: Choice,
) -> FastPaths:
    """Return the fast paths that a configuration selects; 'auto' follows this rule:

    | path     | where                                              | why                         |
    |----------|----------------------------------------------------|-----------------------------|
    | fused    | no dropout, nothing sharded; GPU:                  | see benchmarks/log.md       |
    |          | no operation inside sublayers, and fusible         |                             |
    | compiled | GPU with Triton and a C compiler, not fused, not   | on a CPU it is not faster   |
    |          | sharded                                            |                             |
    | captured | GPU, one process, static, dropout not recomputed   | launches cost more than work |
    | replayed | CPU, one process, static, nothing compiled,        | the same                    |
    |          | dropout not recomputed, 50 steps or more           |                             |

    inside: whether the scheme adds operations inside sublayers.
    fusible: whether a layer is small, or consists of fused GPU sublayers except for a few sums.
    uniform: whether all layers compile to the same code (DLCL's do not).
    static: whether the scheme declares itself static (see `Scheme`).
    Raises ConfigError for settings that exclude each other.
    """
    # by key: the chosen value, and for each requirement whether it is missing
    need: dict[str, tuple[Choice, dict[str, bool]]] = {
        "runtime.fused": (
            fused,
            {
                "model.dropout=0": dropout,
                "runtime.parallel=data": sharded,
                "runtime.compile=false": compiled is True,
            },
        ),
        "runtime.compile": (
            compiled,
            {"runtime.parallel=data": sharded, "a scheme whose layers are alike": not uniform},
        ),
        "runtime.cuda_graph": (
            captured,
            {"one process with a GPU": not gpu or processes > 1, STATIC: not static},
        ),
        "runtime.replay": (
            replayed,
            {
                "one process": processes > 1,
                STATIC: not static,
                "runtime.device=cpu": gpu,
                "runtime.compile=false": compiled is True,
                "runtime.recompute_every=0 with dropout": dropout and recompute,
            },
        ),
    }
    for key, (chosen, reasons) in need.items():
        if chosen is True and (
            missing := [requirement for requirement, wrong in reasons.items() if wrong]
        ):
            needs = " and ".join(missing)
            raise ConfigError(f"{key}: found true, which needs {needs}; or use auto", key=key)
    can_fuse = not gpu or (fusible and not inside)
    fuse_it = can_fuse and not (dropout or sharded or compiled is True)
    if fused != "auto":
        fuse_it = fused
    can_compile = gpu and not sharded and uniform and not fuse_it and has_triton()
    compile_it = can_compile if compiled == "auto" else compiled
    replay_it = static and not (gpu or processes > 1 or compile_it or (dropout and recompute))
    return FastPaths(
        fused=fuse_it,
        compiled=compile_it,
        captured=(gpu and static and processes == 1 and not (dropout and recompute))
        if captured == "auto"
        else captured,
        replayed=replay_it and steps >= FEW_STEPS if replayed == "auto" else replayed,
    )


def has_triton() -> bool:
    """Return whether torch.compile can build GPU kernels; Triton needs a C compiler."""
    has_c = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    has_header = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    return importlib.util.find_spec("triton") is not None and has_c and has_header
