"""Chooses the fast paths of a run by a fixed rule, so that a resumed run uses the same ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepstack import config as conf
from deepstack.base.ending import Stop
from deepstack.base.errors import ConfigError
from deepstack.base.kinds import definition_of
from deepstack.config.estimate import FEW_STEPS
from deepstack.config.sizes import layer_counts
from deepstack.fast.distributed import ALONE, RankGroup, parallelism
from deepstack.fast.fuse import has_plain_attention
from deepstack.fast.gpu.available import has_triton
from deepstack.fast.gpu.heads import has_head_kernels
from deepstack.fast.gpu.sublayer import heads_fit
from deepstack.fast.native import Kernels, find_kernels
from deepstack.fast.products import Library, choose_library
from deepstack.model import Transformer, build_model, shallow
from deepstack.model.attention import AttentionSublayer
from deepstack.model.feed_forward import FeedForward
from deepstack.schemes import NORMS, SCHEMES, StackNorm
from deepstack.schemes.norms import norm_with_kernels

# Largest tokens * d_model * d_ff at which kernel launches dominate a layer's time on a GPU.
SMALL_LAYER = 2**26
# Seconds that torch's compiler takes for the layers of a stack, forward, backward and without
# gradients (benchmarks/log.md: 4 to 6 for an encoder and a decoder whose kernels are in its cache).
COMPILING = 5.0
# Seconds that a compiled layer saves in a captured step: fixed, and for each byte of activations
# that it does not read and write, at about the speed of memory of a GPU.
SAVED, SAVED_PER_BYTE = 5e-5, 4e-13


@dataclass(frozen=True)
class FastPaths:
    """The fast paths of a run.

    fused: a sublayer is one autograd node; compiled: one compiled layer; captured: CUDA graphs;
    replayed: the operations of a step, recorded once; products: the library of large products in
    fused sublayers on a CPU; executor: which C++ kernels replay the step, '' for torch's;
    recompute_every: layers between those whose stream is kept for the backward pass, 0 for all."""

    fused: bool
    compiled: bool
    captured: bool
    replayed: bool = False
    products: Library = "mkl"
    executor: str = ""
    recompute_every: int = 0


STATIC = "a scheme that declares static=True"
STATIC_NORM = "a norm that declares static=True"
STATIC_OPTIMIZER = "an optimizer that declares static = True"
NOT_REDRAWN = "runtime.recompute_every=0 with dropout"


@dataclass(frozen=True)
class PathRule:
    """The rule of one fast path.

    key: its setting in `runtime`.
    automatic: whether 'auto' takes the path where its needs are met.
    needs: each need in words -> whether it is met.
    """

    key: str
    automatic: bool
    needs: dict[str, bool]

    def decide(self, runtime: conf.Runtime) -> bool:
        """Return whether a run takes the path.  Raises ConfigError for one that lacks a need."""
        setting = getattr(runtime, self.key)  # of replay also the executor, which implies true
        missing = [need for need, is_met in self.needs.items() if not is_met]
        if setting is False:
            return False
        if setting == "auto":
            return self.automatic and not missing
        if missing:
            key, found = f"runtime.{self.key}", str(setting).lower()
            needed = " and ".join(missing)
            raise ConfigError(f"{key}: found {found}, which needs {needed}; or use auto", key=key)
        return True


def choose_fast_paths(
    config: conf.Config, *, gpu: bool, parallel: str | None, fusible: bool
) -> FastPaths:
    """Return the fast paths that a configuration selects; 'auto' follows this rule:

    | path     | where                                              | why                         |
    |----------|----------------------------------------------------|-----------------------------|
    | fused    | no dropout, nothing sharded; GPU: fusible          | see benchmarks/log.md       |
    | compiled | GPU with Triton and a C compiler, not fused, not   | on a CPU it is not faster;  |
    |          | sharded, and more time saved than the compiler     | in a short run the compiler |
    |          | takes (`compiling_pays`); else fused               | takes longer than it saves  |
    | captured | GPU, one process, static, dropout not recomputed   | launches cost more than work |
    | replayed | CPU, one process, static, nothing compiled,        | the same                    |
    |          | dropout not recomputed, 50 steps or more           |                             |

    parallel: of several processes, 'data' or 'fully_sharded'; None for one.
    fusible: whether a GPU's fused sublayers make the layers faster.

    Compilation needs a scheme with `uniform`: all layers compile to the same code (DLCL's do not).
    Raises ConfigError for settings that exclude each other.
    """
    runtime, scheme = config.runtime, SCHEMES[config.model.scheme]
    norm = NORMS[config.model.norm.kind]
    dropout, sharded = config.model.dropout > 0, parallel == "fully_sharded"
    recompute_every = conf.recompute_every(config)
    redrawn = dropout and recompute_every > 0
    compiled = runtime.compile is True
    optimizer = definition_of(config, "train.optimizer")
    compiles, pays = gpu and has_triton(), compiling_pays(config)

    fused = PathRule(
        "fused",
        not gpu or fusible or (compiles and not pays),
        {
            "model.dropout=0": not dropout,
            "runtime.parallel=data": not sharded,
            "runtime.compile=false": not compiled,
        },
    ).decide(runtime)
    compiled = PathRule(
        "compile",
        compiles and pays and not fused,
        {"runtime.parallel=data": not sharded, "a scheme whose layers are alike": scheme.uniform},
    ).decide(runtime)
    captured = PathRule(
        "cuda_graph",
        True,
        {
            "one process with a GPU": gpu and parallel is None,
            STATIC: scheme.static,
            STATIC_NORM: norm.static,
            STATIC_OPTIMIZER: optimizer is None or optimizer.static,
            NOT_REDRAWN: not redrawn,
        },
    ).decide(runtime)
    replayed = PathRule(
        "replay",
        config.train.steps >= FEW_STEPS,
        {
            "one process": parallel is None,
            STATIC: scheme.static,
            STATIC_NORM: norm.static,
            STATIC_OPTIMIZER: optimizer is None or optimizer.static,
            "runtime.device=cpu": not gpu,
            "runtime.compile=false": not compiled,
            NOT_REDRAWN: not redrawn,
        },
    ).decide(runtime)
    return FastPaths(fused, compiled, captured, replayed, recompute_every=recompute_every)


def compiling_pays(config: conf.Config) -> bool:
    """Return whether compiled layers save more seconds of a run on a GPU than compiling takes.

    A function of shape and steps, so that a run that continues chooses the same path.
    """
    layers, tokens = layer_counts(config), config.train.batch_size * config.task.seq_len
    # The stream is read and written about 20 times a layer, the inside of a feed-forward 6 times.
    unfused = 4 * tokens * (20 * config.model.d_model + 6 * conf.width_inside(config))
    saved = SAVED + SAVED_PER_BYTE * unfused
    stacks = 2 if layers.decoder else 1
    return config.train.steps * layers.all * saved > stacks * COMPILING


def fast_paths_of(
    config: conf.Config,
    device: torch.device,
    ranks: RankGroup = ALONE,
    model: Transformer | None = None,
    notify: Callable[[str], None] = lambda line: None,
    *,
    recorded: Mapping[str, Any] | None = None,
    stop: Stop = lambda: None,
) -> FastPaths:
    """Return the fast paths that this run uses on this device.

    model: the configuration's model, with few layers or without storage, where there is one.
    notify: receives a line before C++ kernels are compiled.
    recorded: the environment in which the run began, if it did: torch's kernels continue it where
        they began it.
    stop: returns the number of a signal that came, which ends a compilation.
    """
    runtime = config.runtime
    tokens = config.train.batch_size // config.train.micro_batches * config.task.seq_len
    layer = tokens * config.model.d_model * conf.width_inside(config)
    gpu, fusible = device.type == "cuda", False
    if gpu:
        model = model or two_layers(config)
        small = layer <= SMALL_LAYER and not has_more_inside(model)
        fusible = small or is_fully_fused(model)
    paths = choose_fast_paths(config, gpu=gpu, parallel=parallelism(config, ranks), fusible=fusible)
    if paths.replayed and not began_by_torch(config, recorded):
        paths = replace(paths, executor=choose_executor(runtime.replay, notify, stop))
    if not paths.fused or gpu:
        if runtime.products == "onednn":
            raise ConfigError(
                "runtime.products: found onednn, which needs fused sublayers on a CPU; use auto",
                key="runtime.products",
            )
        return paths
    shards = config.train.shards
    bf16 = config.train.precision == "bf16"
    library = choose_library(runtime.products, layer / shards, threads=shards > 1, bf16=bf16)
    return replace(paths, products=library)


def began_by_torch(config: conf.Config, recorded: Mapping[str, Any] | None) -> bool:
    """Return whether a run that may choose its kernels began with torch's, as when none compiled.

    recorded: the environment in which it began, or None.
    """
    is_free = config.runtime.replay != "native"
    return is_free and bool(recorded and recorded.get("replayed") and not recorded.get("executor"))


def choose_executor(setting: bool | str, notify: Callable[[str], None], stop: Stop) -> str:
    """Return the description of the C++ kernels that replay a step, or '' for torch's kernels.

    setting: runtime.replay; 'native' raises ConfigError where there are no kernels.
    """
    if setting == "python":
        return ""
    kernels = find_kernels(notify, stop)
    if not isinstance(kernels, str):
        return f"C++, {kernels.description}"
    if setting == "native":
        raise ConfigError(
            f"runtime.replay: found native, but {kernels}; use auto or python", key="runtime.replay"
        )
    return ""


def executor_notice(
    config: conf.Config, paths: FastPaths, recorded: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the line that says which kernels replay the steps, and why.

    recorded: as of `fast_paths_of`.
    """
    if not paths.replayed:
        return []
    if paths.executor:
        return [f"steps are replayed by {paths.executor}"]
    reason: Kernels | str = "runtime.replay=python"
    if config.runtime.replay != "python":
        began = began_by_torch(config, recorded)
        reason = "this run began with them" if began else find_kernels(lambda line: None)
    return [f"steps are replayed by torch's kernels: {reason}"]


def two_layers(config: conf.Config) -> Transformer:
    """Build the model with at most two layers per stack on the meta device, without storage."""
    return build_model(shallow(config), vocab_size=2, device="meta").model


def has_more_inside(model: Transformer) -> bool:
    """Return whether sublayers contain operations that fused GPU sublayers lack."""
    attentions = [module for module in model.modules() if isinstance(module, AttentionSublayer)]
    others = any(not (has_plain_attention(one) and has_head_kernels(one)) for one in attentions)
    return others or any(len(scheme.slots) for scheme in model.schemes)


def is_fully_fused(model: Transformer) -> bool:
    """Return whether wide layers of this model are faster fused than compiled on a GPU.

    So they are if every sublayer and norm has a fused kernel and there is one stream: operations
    between fused sublayers are launched one by one.  A gate, a rotation and grouped queries are
    such operations: with all three, fused layers take 1.14 of compiled ones (benchmarks/log.md).
    """

    def is_fusible(module: nn.Module) -> bool:
        if has_plain_attention(module):
            is_rotated = module.qk is not None and module.qk.rotation is not None
            is_plain = module.n_kv_heads == module.n_heads and not is_rotated
            return is_plain and module.fused and heads_fit(module.o.shape[1] // module.n_heads)
        return type(module) is FeedForward and module.fused and not module.gated

    sublayers = [module for layer in model.layers for module in layer.modules_in_order()]
    norms = [m for scheme in model.schemes for m in scheme.modules() if isinstance(m, StackNorm)]
    return (
        all(is_fusible(module) for module in sublayers)
        and all(norm_with_kernels(norm) and norm.gain is not None for norm in norms)
        and not (model.schemes[0].maps_stream or has_more_inside(model))
    )
