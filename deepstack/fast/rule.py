"""Chooses the fast paths of a run by a fixed rule, so that a resumed run uses the same ones."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass

from deepstack import config as conf
from deepstack.config.estimate import FEW_STEPS
from deepstack.errors import ConfigError
from deepstack.fast.products import Library
from deepstack.schemes import SCHEMES


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
    config: conf.Config, *, gpu: bool, parallel: str | None, inside: bool, fusible: bool
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

    parallel: of several processes, 'data' or 'fully_sharded'; None for one.
    inside: whether the scheme adds operations inside sublayers.
    fusible: whether a layer is small, or consists of fused GPU sublayers except for a few sums.
    Compilation needs a scheme with `uniform`: all layers compile to the same code (DLCL's do not).
    Raises ConfigError for settings that exclude each other.
    """
    runtime, scheme = config.runtime, SCHEMES[config.model.scheme]
    dropout, sharded = config.model.dropout > 0, parallel == "fully_sharded"
    redrawn = dropout and conf.recompute_every(config) > 0
    compiled = runtime.compile is True
    # by key: the chosen value, and for each requirement whether it is missing
    need: dict[str, tuple[bool | str, dict[str, bool]]] = {
        "runtime.fused": (
            runtime.fused,
            {
                "model.dropout=0": dropout,
                "runtime.parallel=data": sharded,
                "runtime.compile=false": compiled,
            },
        ),
        "runtime.compile": (
            runtime.compile,
            {
                "runtime.parallel=data": sharded,
                "a scheme whose layers are alike": not scheme.uniform,
            },
        ),
        "runtime.cuda_graph": (
            runtime.cuda_graph,
            {
                "one process with a GPU": not gpu or parallel is not None,
                STATIC: not scheme.static,
            },
        ),
        "runtime.replay": (
            runtime.replay,
            {
                "one process": parallel is not None,
                STATIC: not scheme.static,
                "runtime.device=cpu": gpu,
                "runtime.compile=false": compiled,
                "runtime.recompute_every=0 with dropout": redrawn,
            },
        ),
    }
    for key, (chosen, reasons) in need.items():
        missing = [requirement for requirement, wrong in reasons.items() if wrong]
        if chosen is True and missing:
            needs = " and ".join(missing)
            raise ConfigError(f"{key}: found true, which needs {needs}; or use auto", key=key)

    def choose(chosen: bool | str, by_rule: bool) -> bool:
        return by_rule if isinstance(chosen, str) else chosen

    can_fuse = not gpu or (fusible and not inside)
    fused = choose(runtime.fused, can_fuse and not (dropout or sharded or compiled))
    can_compile = gpu and not sharded and scheme.uniform and not fused and has_triton()
    compiled = choose(runtime.compile, can_compile)
    records = scheme.static and parallel is None and not redrawn
    replays = records and not (gpu or compiled) and config.train.steps >= FEW_STEPS
    return FastPaths(
        fused=fused,
        compiled=compiled,
        captured=choose(runtime.cuda_graph, gpu and records),
        replayed=choose(runtime.replay, replays),
    )


def has_triton() -> bool:
    """Return whether torch.compile can build GPU kernels; Triton needs a C compiler."""
    has_c = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    has_header = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    return importlib.util.find_spec("triton") is not None and has_c and has_header
