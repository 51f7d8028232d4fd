"""Selects the fast paths of a run from its configuration and device (`choose_fast_paths`)."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import torch
from torch import nn

from deepstack import config as conf
from deepstack.distributed import ALONE, RankGroup, parallelism
from deepstack.errors import ConfigError
from deepstack.fast.gpu.attention import heads_fit
from deepstack.fast.products import choose_library
from deepstack.fast.rule import FastPaths, choose_fast_paths, has_triton
from deepstack.model import Transformer, build_model, shallow
from deepstack.model.sublayers import Attention, FeedForward
from deepstack.schemes import SCHEMES, LayerNorm, StackNorm

# Largest tokens * d_model * d_ff at which kernel launches dominate a layer's time on a GPU.
SMALL_LAYER = 2**26


def fast_paths_of(
    config: conf.Config,
    device: torch.device,
    ranks: RankGroup = ALONE,
    model: Transformer | None = None,
) -> FastPaths:
    """Return the fast paths that this run uses on this device.

    model: the configuration's model, with few layers or without storage, where there is one.
    """
    runtime = config.runtime
    tokens = config.train.batch_size * config.task.seq_len
    layer = tokens * config.model.d_model * conf.width_inside(config)
    gpu = device.type == "cuda"
    if gpu and model is None:
        model = two_layers(config)
    paths = choose_fast_paths(
        steps=config.train.steps,
        gpu=gpu,
        dropout=config.model.dropout > 0,
        sharded=parallelism(config, ranks) == "fully_sharded",
        processes=ranks.size,
        uniform=SCHEMES[config.model.scheme].uniform,
        static=SCHEMES[config.model.scheme].static,
        recompute=conf.recompute_every(config) > 0,
        inside=gpu and model is not None and has_more_inside(model),
        fusible=gpu and model is not None and (layer <= SMALL_LAYER or is_fully_fused(model)),
        fused=runtime.fused,
        compiled=runtime.compile,
        captured=runtime.cuda_graph,
        replayed=runtime.replay,
    )
    if not paths.fused or gpu:
        if runtime.products == "onednn":
            raise ConfigError(
                "runtime.products: found onednn, which needs fused sublayers on a CPU; use auto",
                key="runtime.products",
            )
        return paths
    shards = config.train.shards
    library = choose_library(runtime.products, layer / shards, threads=shards > 1)
    return replace(paths, products=library)


def triton_version() -> str | None:
    """Return the version of Triton, which compiles GPU kernels; None if it is unusable."""
    return metadata.version("triton") if has_triton() else None


def two_layers(config: conf.Config) -> Transformer:
    """Build the model with at most two layers per stack on the meta device, without storage."""
    return build_model(shallow(config), vocab_size=2, device="meta").model


def has_more_inside(model: Transformer) -> bool:
    """Return whether sublayers contain operations that fused GPU sublayers lack."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    turned = any(attention.qk is not None for attention in attentions)
    return turned or any(len(scheme.slots) for scheme in model.schemes)


def is_fully_fused(model: Transformer) -> bool:
    """Return whether every sublayer and norm has a fused GPU kernel and there is one stream.

    Operations between fused sublayers are launched one by one.
    """

    def is_fusible(module: nn.Module) -> bool:
        if isinstance(module, Attention):
            return is_bare(module) and heads_fit(module.o.shape[1] // module.n_heads)
        return isinstance(module, FeedForward) and module.fused

    sublayers = [module for layer in model.layers for module in layer.modules_in_order()]
    norms = [m for scheme in model.schemes for m in scheme.modules() if isinstance(m, StackNorm)]
    return (
        all(is_fusible(module) for module in sublayers)
        and all(isinstance(norm, LayerNorm) and norm.gain is not None for norm in norms)
        and not model.schemes[0].maps_stream
    )


def is_bare(attention: Attention) -> bool:
    """Return whether attention uses the heads of the fused product unchanged."""
    return attention.fused and attention.qk is None and not attention.slots
