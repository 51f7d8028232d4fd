"""Decoding: a decoder generates one token at a time and caches values of earlier positions.

A self-attention caches all keys and values, so its work and memory grow with the number of tokens;
merged and average attention cache one sum.  Keys and values of the encoder's output are computed
once.  The scheme's own `layer` runs; only its sublayers are replaced.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError
from deepstack.model import (
    Attention,
    AverageAttention,
    Cache,
    CrossAttention,
    MergedAttention,
    Transformer,
)
from deepstack.schemes import Sublayer


def generate(
    model: Transformer, tokens: Tensor, length: int, *, source: Tensor | None = None
) -> Tensor:
    """Generate `length` tokens after `tokens`, each the most probable given those before it.

    tokens: (batch, begin), the first input of the decoder.
    source: (batch, source) with an encoder.

    Returns (batch, length).
    Raises ConfigError for a model without a decoder, for more tokens than positions, or if begin or
    length is 0.  Leaves the model in evaluation mode.
    """
    if min(length, tokens.shape[1]) < 1:
        raise ConfigError(
            f"generate: found length={length} after {tokens.shape[1]} tokens; allowed 1 or more"
        )
    generated = []
    step = decoder_of(model, source)
    logits = [step(tokens[:, i]) for i in range(tokens.shape[1])][-1]
    for _ in range(length):
        generated.append(logits.argmax(dim=-1))
        if len(generated) < length:
            logits = step(generated[-1])
    return torch.stack(generated, dim=1)


def decoder_of(model: Transformer, source: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function from the next position's token, (batch,), to logits, (batch, vocab_size).

    Call it once for each position, in order; it caches earlier positions.

    source: (batch, source) tokens, for a decoder that reads an encoder.  Leaves the model in
        evaluation mode.
    """
    decoder = model.decoder
    if decoder is None or (model.encoder is not None) != (source is not None):
        raise ConfigError(
            "model.family: found one that says nothing, or a source without an encoder; "
            "allowed decoder, and encoder_decoder with a source",
            key="model.family",
        )
    if source is not None and source.shape[1] > model.source_len:
        raise ConfigError(
            f"task.seq_len: found a source of {source.shape[1]} tokens, allowed at most "
            f"{model.source_len}, the positions that this model has for one",
            key="task.seq_len",
        )
    model.eval()
    with torch.no_grad(), model.statistics("followed"):
        memory = None if source is None else model.stacks["encoder"](model.embed(source))
        caching = [
            [one_by_one(module, memory, model.seq_len) for module in layer.modules_in_order()]
            for layer in decoder.layers
        ]
    position = 0

    def step(token: Tensor) -> Tensor:
        nonlocal position
        if position == model.seq_len:
            raise ConfigError(
                f"task.seq_len: found {model.seq_len}, and all these positions are filled",
                key="task.seq_len",
            )
        with torch.no_grad(), model.statistics("followed"):
            stream = decoder.enter(model.embed(token[:, None], model.source_len + position))
            for layer, sublayers in zip(decoder.layers, caching, strict=True):
                stream = layer.scheme.layer(stream, *sublayers)
            logits: Tensor = model.head(decoder.leave(stream), model.embedding)[:, 0]
        position += 1
        return logits

    return step


def one_by_one(module: nn.Module, memory: Tensor | None, seq_len: int) -> Sublayer:
    """Return a sublayer as a function of one position at a time, (batch, 1, d_model).

    memory: the encoder's output.
    seq_len: the largest number of positions.
    """
    if isinstance(module, Attention):
        return partial(module, cache=Cache(seq_len))
    if isinstance(module, CrossAttention):
        assert memory is not None
        k, v = module.keys_and_values(memory)
        if not isinstance(module, MergedAttention):
            return partial(module.read, k=k, v=v)
        mean = running_mean()
        return lambda x: module.read(x, k, v, mean(module.values(x)))
    if isinstance(module, AverageAttention):
        mean = running_mean()
        return lambda x: module(x, mean(x))
    return module  # a feed-forward caches nothing


def running_mean() -> Callable[[Tensor], Tensor]:
    """Return a function that returns the mean of all tensors that it has received."""
    total: Tensor | None = None
    count = 0

    def add(value: Tensor) -> Tensor:
        nonlocal total, count
        total, count = value if total is None else total + value, count + 1
        return total / count

    return add
