"""FLOPs of the backward pass that fixed roles make unnecessary, counted by torch."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepstack import config as conf
from deepstack.model.build import build_model
from deepstack.schemes import SCHEMES, Scheme

FEW = 8  # layers up to which a stack is counted as it is
FEW_OF_OTHERS = 64  # of schemes with own products, whose number may depend on depth in steps
_known: dict[str, int] = {}  # runs of a study differ in settings that change no product


def unneeded_flops(config: conf.Config, length: int, vocab_size: int) -> int:
    """Return the FLOPs of a backward pass that a configuration's fixed roles make unnecessary.

    length: tokens of a sequence as the model reads it.

    Products that are not needed grow with depth as a polynomial: those before the first trained
    parameter are constant, gradients of fixed weights linear, of weights between all layers
    quadratic.  Above FEW layers smaller stacks determine it.
    """
    depth, decoder = config.model.depth, config.model.decoder_depth

    def unneeded(layers: int, of_decoder: int = 0) -> int:
        few = conf.with_overrides(
            config,
            {"model.depth": layers, "model.unique_layers": None, "model.prelude_layers": 0}
            | {"model.coda_layers": 0, "model.decoder_depth": of_decoder if decoder else None},
        )
        return difference(few, length, vocab_size)

    bases = set(SCHEMES[config.model.scheme].__mro__) - set(Scheme.__mro__)
    has_own = any("extra_flops" in vars(base) for base in bases)
    few_layers = FEW_OF_OTHERS if has_own else FEW
    if max(depth, decoder or 0) <= few_layers:
        return difference(config, length, vocab_size)
    last = few_layers - 2
    if decoder:
        first = unneeded(last, last)
        a, b = unneeded(last + 1, last) - first, unneeded(last, last + 1) - first
        return first + (depth - last) * a + (decoder - last) * b
    first, second, third = (unneeded(layers) for layers in (last, last + 1, few_layers))
    n, bend = depth - last, third - 2 * second + first
    return first + n * (second - first) + n * (n - 1) // 2 * bend


def difference(config: conf.Config, length: int, vocab_size: int) -> int:
    """Return the FLOPs of the backward pass of all roles minus those of a configuration's roles."""
    every = conf.with_overrides(config, {"train.trainable": "all"})
    return counted(every, length, vocab_size) - counted(config, length, vocab_size)


def counted(config: conf.Config, length: int, vocab_size: int) -> int:
    """Return the FLOPs that torch counts in the backward pass, on tensors without values."""
    from torch.utils.flop_counter import FlopCounterMode

    train = config.train
    key = repr((config.model, config.task.seq_len, train.batch_size, train.trainable, length))
    if (known := _known.get(f"{key} {vocab_size}")) is not None:
        return known
    model = build_model(config, vocab_size=vocab_size, device="meta").model
    tokens = torch.zeros(train.batch_size, length, dtype=torch.int64, device="meta")
    with sdpa_kernel(SDPBackend.MATH):
        total = model(tokens).sum()
        with FlopCounterMode(display=False) as counter:
            if total.requires_grad:
                total.backward()
    return _known.setdefault(f"{key} {vocab_size}", int(counter.get_total_flops()))
