"""The width at which the matrices of the layers have a wanted number of parameters.

The count depends on the model's settings alone, so all schemes of a study have the same widths.  It
leaves out embedding, positions, head, biases, norms, and the parameters that a scheme adds.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

LARGEST_WIDTH = 65_536
TOLERANCE = 0.1  # of the wanted number of parameters


class Model(Protocol):
    """The settings of a `deepstack.config.Model` that decide the sizes of its matrices."""

    @property
    def depth(self) -> int: ...
    @property
    def family(self) -> str: ...
    @property
    def decoder_depth(self) -> int | None: ...
    @property
    def decoder_attention(self) -> str: ...
    @property
    def prelude_layers(self) -> int: ...
    @property
    def coda_layers(self) -> int: ...
    @property
    def unique_layers(self) -> int | None: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int | None: ...
    @property
    def d_ff(self) -> int | None: ...
    @property
    def gated(self) -> bool: ...
    @property
    def positions(self) -> str: ...
    @property
    def model_fields_set(self) -> set[str]: ...


class LayerCounts(NamedTuple):
    """The numbers of layers of a model.

    depth: of its stack, or of its encoder.
    decoder: of the decoder that reads an encoder, else 0.
    cross: layers of that decoder whose cross-attention is a sublayer, not merged with another.
    """

    depth: int
    decoder: int
    cross: int

    @property
    def all(self) -> int:
        """The layers of both stacks."""
        return self.depth + self.decoder

    @property
    def sublayers(self) -> int:
        """The sublayers of both stacks."""
        return 2 * self.all + self.cross


def layers_of(model: Model) -> LayerCounts:
    """Return the numbers of layers of a model; a layer that repeats another one counts too."""
    decoder = (model.decoder_depth or model.depth) if model.family == "encoder_decoder" else 0
    return LayerCounts(model.depth, decoder, decoder * (model.decoder_attention != "merged"))


def unique_layers_of(model: Model) -> LayerCounts:
    """Return the numbers of layers with parameters that no earlier layer has."""
    depth, decoder, cross = layers_of(model)
    if model.unique_layers is None:
        return LayerCounts(depth, decoder, cross)
    owners = model.prelude_layers + model.unique_layers + model.coda_layers
    return LayerCounts(owners, owners * bool(decoder), owners * bool(cross))


def matrix_parameters(model: Model, layers: LayerCounts, width: int, d_ff: int) -> dict[str, int]:
    """Return the number of parameters in the matrices of the layers, by role.

    width: d_model.
    """
    d, every, cross = width, layers.all, layers.cross
    d_kv = d // model.n_heads * (model.n_kv_heads or model.n_heads)
    averaged = layers.decoder * (model.decoder_attention == "average")  # gates read two streams
    return {
        "q": (every + averaged) * d * d,
        "k": (every + averaged) * d * d_kv,
        "v": every * d * d_kv,
        "o": every * d * d,
        **dict.fromkeys(("cross_q", "cross_k", "cross_v", "cross_o"), cross * d * d),
        "w1": every * d * d_ff,
        "w2": every * d_ff * d,
        "w3": every * d_ff * d * model.gated,
    }


def parameters_at(model: Model, width: int) -> int:
    """Return the parameters in the matrices of the layers at a width; a repeated layer counts once.

    A d_ff that was not given is 4 widths.
    """
    d_ff = model.d_ff if model.d_ff and "d_ff" in model.model_fields_set else 4 * width
    return sum(matrix_parameters(model, unique_layers_of(model), width, d_ff).values())


def nearest_width(model: Model, wanted: int) -> int:
    """Return the width whose parameters in the matrices of the layers are nearest to a number.

    The widths are multiples of n_heads, with rotary positions of 2 n_heads.  Raises ValueError with
    the nearest numbers where none is within a tenth of the wanted one.
    """
    step = model.n_heads * (2 if model.positions == "rotary" else 1)
    low, high = 1, max(2, LARGEST_WIDTH // step)
    while high - low > 1:  # the wanted number lies between their numbers, or outside of all
        middle = (low + high) // 2
        if parameters_at(model, middle * step) <= wanted:
            low = middle
        else:
            high = middle
    counts = {width * step: parameters_at(model, width * step) for width in (low, high)}
    nearest = min(counts, key=lambda width: abs(counts[width] - wanted))
    if abs(counts[nearest] - wanted) > TOLERANCE * wanted:
        possible = " or ".join(f"{count:,} (d_model={width})" for width, count in counts.items())
        raise ValueError(
            f"found parameters={wanted:,}, which no multiple of {step} as d_model has to a tenth "
            f"at {model.depth} layers; the nearest are {possible}"
        )
    return nearest
