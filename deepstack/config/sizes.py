"""Sizes that a configuration determines: its parameters, its layers and its stacks."""

from typing import NamedTuple

from deepstack.base.kinds import definition_of
from deepstack.config.schema import Config
from deepstack.config.width import (
    LayerCounts,
    layers_of,
    matrix_parameters,
    unique_layers_of,
)

FP32 = 4  # bytes of a number
# Logits of a forward pass from which on a loss takes them in chunks, and the logits of a chunk.
MOST_LOGITS, CHUNK_OF_LOGITS = 2**27, 2**21


def chunk_rows(positions: int, vocab_size: int) -> int | None:
    """Return the positions in a chunk of the head and the loss; None for all at once."""
    is_large = positions * vocab_size > MOST_LOGITS
    return max(1, CHUNK_OF_LOGITS // vocab_size) if is_large else None


class NormSize(NamedTuple):
    """What a norm adds to estimates.

    scalars: trained numbers beside gain and bias.
    keeps_output: whether a step keeps its output before the gain.
    """

    scalars: int = 0
    keeps_output: bool = True


NORM_SIZES = {
    "layer": NormSize(keeps_output=False),
    "rms": NormSize(),
    "batch": NormSize(keeps_output=False),
    "dynamic_tanh": NormSize(scalars=1),
    "dynamic_erf": NormSize(scalars=2),
    "bounded_tanh": NormSize(scalars=1),
}
"""Of the norms of deepstack, which estimates need without torch; their classes read it."""


def norm_size(config: Config) -> NormSize:
    """Return what the norm of a configuration adds to estimates; the usual for an unknown one."""
    kind = config.model.norm.kind
    norm = definition_of(config, "model.norm.kind")
    usual = NORM_SIZES.get(kind, NormSize())
    return NormSize(
        int(getattr(norm, "scalars", usual.scalars)),
        bool(getattr(norm, "keeps_output", usual.keeps_output)),
    )


def parameter_count(config: Config, vocab_size: int) -> dict[str, int]:
    """Return the number of parameters by role, without empty roles and those that a scheme adds.

    A layer that repeats another one has none.  A scheme decides whether there is a final norm too.
    """
    model, layers = config.model, unique_layers_of(config.model)
    d, d_ff, every, cross = model.d_model, width_inside(config), layers.all, layers.cross
    d_kv = width_of_keys(config)
    averaged = layers.decoder * (model.decoder_attention == "average")  # gates read two streams
    biases = 2 * (d + d_kv) + d_ff * (1 + model.gated) + d  # of self-attention and feed-forward
    scalar = norm_size(config).scalars
    gain, bias = d * model.norm.gain + scalar, d * model.norm.bias
    of_heads, d_head = 2 * (every + cross - averaged) * model.qk_norm, d // model.n_heads
    head = {"tied": 0, "separate": vocab_size * d, "bert": d * d + 3 * d}[model.head]
    counts = {
        **matrix_parameters(model, layers, d, d_ff),
        "bias": (every * biases + cross * 4 * d) * model.bias,
        "norm_gain": layers.sublayers * gain + of_heads * (d_head * model.norm.gain + scalar),
        "norm_bias": layers.sublayers * bias + of_heads * d_head * model.norm.bias,
        "embedding": vocab_size * d,
        "position": positions(config) * d if model.positions == "learned" else 0,
        "head": head + vocab_size,
    }
    return {role: count for role, count in counts.items() if count}


def layer_counts(config: Config) -> LayerCounts:
    """Return the numbers of layers of a model."""
    return layers_of(config.model)


def positions(config: Config) -> int:
    """The rows of the table of positions: a sequence, or two."""
    return config.task.seq_len * (2 if config.model.family == "encoder_decoder" else 1)


def width_inside(config: Config) -> int:
    """d_ff, which the schema has resolved."""
    return config.model.d_ff or 4 * config.model.d_model


def width_of_keys(config: Config) -> int:
    """Return the width of all heads of keys, n_kv_heads d_head, in self-attention."""
    model = config.model
    return model.d_model // model.n_heads * (model.n_kv_heads or model.n_heads)


class StackSizes(NamedTuple):
    """The sizes of a stack from which a scheme computes the memory and the FLOPs that it adds.

    sublayers: of all layers.
    seq: positions.
    replayed: whether the step is replayed on a CPU, which keeps the gradients of activations as
        well.
    """

    depth: int
    sublayers: int
    batch: int
    seq: int
    heads: int
    d_model: int
    replayed: bool
    d_ff: int = 0

    @property
    def numbers(self) -> int:
        """The numbers of one stream, (batch, seq, d_model)."""
        return self.batch * self.seq * self.d_model

    @property
    def stream(self) -> int:
        """The bytes of one stream in fp32."""
        return self.numbers * FP32
