"""Selects the fast paths of a run from its configuration and device (`choose_fast_paths`)."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from torch import nn

from deepstack import config as conf
from deepstack.distributed import Processes
from deepstack.errors import ConfigError
from deepstack.fast.gpu.nodes import heads_fit
from deepstack.fast.rule import FastPaths, choose_fast_paths, has_triton
from deepstack.model import Transformer, build_model
from deepstack.model.sublayers import Attention, FeedForward
from deepstack.schemes import SCHEMES, LayerNorm, StackNorm

# Largest tokens * d_model * d_ff at which kernel launches dominate a layer's time on a GPU.
SMALL_LAYER = 2**26

ALONE = Processes()


def parallel_of(config: conf.Config, processes: Processes) -> str | None:
    """Return the parallelism of the processes ('data' or 'fully_sharded'); None for one."""
    return config.runtime.parallel if processes.size > 1 else None


def fast_paths_of(
    config: conf.Config, device: torch.device, processes: Processes = ALONE
) -> FastPaths:
    """Return the fast paths that this run uses on this device."""
    runtime = config.runtime
    tokens = config.train.batch_size * config.task.seq_len
    layer = tokens * config.model.d_model * conf.width_inside(config)
    gpu = device.type == "cuda"
    shallow = two_layers(config) if gpu else None
    if config.model.norm.kind == "batch" and processes.size > 1:
        key = "model.norm.kind"
        raise ConfigError(f"{key}: found batch, which needs one process; or use rms", key=key)
    return choose_fast_paths(
        steps=config.train.steps,
        gpu=gpu,
        bf16=config.train.precision == "bf16",
        dropout=config.model.dropout > 0,
        sharded=parallel_of(config, processes) == "fully_sharded",
        processes=processes.size,
        uniform=SCHEMES[config.model.scheme].uniform,
        static=SCHEMES[config.model.scheme].static,
        recompute=runtime.recompute_every > 0,
        inside=shallow is not None and has_more_inside(shallow),
        nodes=shallow is not None and (layer <= SMALL_LAYER or is_nodes(shallow)),
        fused=runtime.fused,
        compiled=runtime.compile,
        captured=runtime.cuda_graph,
        replayed=runtime.replay,
    )


def triton_version() -> str | None:
    """Return the version of Triton, which compiles GPU kernels; None if it is unusable."""
    return metadata.version("triton") if has_triton() else None


def two_layers(config: conf.Config) -> Transformer:
    """Build the model with two layers per stack on the meta device, without storage."""
    few: dict[str, Any] = {"model.depth": 2}
    if config.model.decoder_depth:
        few["model.decoder_depth"] = 2
    built = build_model(conf.with_overrides(config, few), vocab_size=2, device="meta")
    return built.model


def has_more_inside(model: Transformer) -> bool:
    """Return whether sublayers contain operations that fused GPU sublayers lack."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    turned = any(attention.qk is not None for attention in attentions)
    return turned or any(len(scheme.slots) for scheme in model.schemes)


def is_nodes(model: Transformer) -> bool:
    """Return whether every sublayer and norm has a fused GPU kernel and there is one stream.

    Operations between fused sublayers are launched one by one.
    """

    def has_node(module: nn.Module) -> bool:
        if isinstance(module, Attention):
            return is_bare(module) and heads_fit(module.o.shape[1] // module.n_heads)
        return isinstance(module, FeedForward) and module.fused

    sublayers = [module for layer in model.layers for module in layer.modules_in_order()]
    norms = [m for scheme in model.schemes for m in scheme.modules() if isinstance(m, StackNorm)]
    return (
        all(has_node(module) for module in sublayers)
        and all(isinstance(norm, LayerNorm) and norm.gain is not None for norm in norms)
        and not model.schemes[0].maps_stream
    )


def is_bare(attention: Attention) -> bool:
    """Return whether attention uses the heads of the fused product unchanged."""
    return attention.fused and attention.qk is None and not attention.slots
