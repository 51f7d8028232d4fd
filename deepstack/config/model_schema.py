"""The settings of the model: stack, norms, initialisation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deepstack.config.section import (
    Fraction,
    Identifier,
    Options,
    Section,
    divisor_of,
    unused_without,
)
from deepstack.config.width import nearest_width

Family = Literal["encoder", "decoder", "encoder_decoder"]
Distribution = Literal[
    "xavier_normal", "xavier_uniform", "kaiming_normal", "kaiming_uniform", "orthogonal",
    "truncated_normal", "normal", "zero_identity", "ntk", "torch_linear",
]  # fmt: skip
_XAVIER = ("xavier_normal", "xavier_uniform", "truncated_normal")


class Norm(Section):
    """The norms of a stack, in the place of LN in a scheme's equation."""

    kind: Identifier = "layer"
    """The norm (`deepstack list norms`)."""
    gain: bool = True
    """Whether the norms of the layers have a gain."""
    bias: bool = True
    """Whether the norms of the layers have a bias."""
    final_gain: bool | None = None
    """Whether the final norm has a gain; null: as `gain`.  A folded model with a tied head."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """The number that is added to the variance, or to the mean square."""
    start: Annotated[float, Field(gt=0, le=1e6)] = 0.5
    """dynamic_tanh, dynamic_erf: the scalar a at the start."""
    kind_options: Options = {}
    """Options of the norm."""

    _check_use = unused_without(start={"model.norm.kind": ("dynamic_tanh", "dynamic_erf")})


class Init(Section):
    """How weight matrices start, before the scheme's own gain."""

    distribution: Distribution = "xavier_normal"
    """The distribution of matrices; ntk: N(0, gain^2), and products are divided by sqrt(n_in);
    torch_linear: nn.Linear's own, U(-gain/sqrt(n_in), gain/sqrt(n_in)), also of biases."""
    fan: Literal["in_out", "in"] = "in_out"
    """xavier: 'in_out': variance gain^2 * 2 / (n_in + n_out), as published; 'in': gain^2 / n_in."""
    qkv: Literal["separate", "packed"] = "separate"
    """xavier: n_out of q, k and v is d_model; 'packed': 3 d_model as in fairseq (std / sqrt(2))."""
    std: Annotated[float, Field(gt=0, le=1e6)] = 0.02
    """normal: the standard deviation of every matrix."""

    _check_use = unused_without(
        fan={"model.init.distribution": _XAVIER},
        qkv={"model.init.fan": ("in_out",), "model.init.distribution": _XAVIER},
        std={"model.init.distribution": ("normal",)},
    )


class Model(Section):
    """The stack of layers, or the two of an encoder-decoder."""

    scheme: Identifier = "deepnorm"
    """The residual scheme (`deepstack list schemes`)."""
    scheme_options: Options = {}
    """Options of the scheme's own."""
    depth: Annotated[int, Field(ge=1, le=1_000_000)] = 6
    """The number of layers N; a layer is attention and feed-forward, so 2 N sublayers."""
    family: Family = "encoder"
    """encoder: sees all positions; decoder: those before; encoder_decoder: one reads the other."""
    decoder_depth: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """encoder_decoder: the number of decoder layers M; null: depth, which the encoder has."""
    decoder_attention: Literal["separate", "merged", "average"] = "separate"
    """encoder_decoder: self- and cross-attention, merged, or an average and cross-attention."""
    prelude_layers: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """The first layers of a looped stack, with parameters that no other layer repeats."""
    coda_layers: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """The last layers of a looped stack, with parameters that repeat no other layer's."""
    unique_layers: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, validate_default=True
    )
    """The layers whose parameters the layers after them, up to the coda, repeat; null: none."""
    d_model: Annotated[int, Field(ge=1, le=65_536)] = 64
    """The width of the stream."""
    parameters: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """Instead of d_model: the parameters in the layers' matrices; the nearest width is taken."""
    n_heads: Annotated[int, Field(ge=1, le=65_536, validate_default=True)] = 2
    """The number of attention heads; it divides d_model."""
    n_kv_heads: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Heads of keys and values in self-attention, each read by a group of heads; null: n_heads."""
    attention: Identifier = "softmax"
    """The self-attention (`deepstack list attentions`)."""
    attention_options: Options = {}
    """Options of the self-attention: window and soft_cap of softmax."""
    document_end: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The token that ends a document of packed sequences, of which a position reads its own only;
    null: a position reads all documents."""
    d_ff: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """The width inside the feed-forward; null means 4 * d_model."""
    activation: Identifier = "relu"
    """The nonlinearity of the feed-forward (`deepstack list activations`)."""
    activation_options: Options = {}
    """Options of the activation."""
    feed_forward: Identifier = "mlp"
    """The feed-forward (`deepstack list feed_forwards`)."""
    feed_forward_options: Options = {}
    """Options of the feed-forward."""
    gated: bool = False
    """Whether a third matrix, w3, gates the feed-forward's hidden values; with silu: SwiGLU."""
    bias: bool = True
    """Whether the linear maps of the layers (q, k, v, o, w1, w2, w3) have biases."""
    dropout: Fraction = 0.0
    """The dropout rate on attention weights and sublayer outputs."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    """How positions enter: added to the embedding, or turning queries and keys (RoPE)."""
    qk_norm: bool = False
    """Whether queries and keys are normed before their logits, head by head."""
    norm: Norm = Norm()
    init: Init = Init()
    head: Literal["tied", "separate", "bert"] = "tied"
    """The output: the token table again, a separate matrix, or BERT's masked-token head."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """The folder of a finished run with whose weights it begins; null: drawn from the seed."""
    grow: Literal["stack", "interleave", "middle", "identity"] | None = None
    """start: how a deeper stack begins: 1212, 1122, the middle twice, or new layers that add 0."""

    _check_use = unused_without(
        decoder_depth={"model.family": ("encoder_decoder",)},
        decoder_attention={"model.family": ("encoder_decoder",)},
        grow={"model.start": ()},
    )
    _check_heads = divisor_of("n_heads", "model.d_model", unless="parameters")
    _check_kv_heads = divisor_of("n_kv_heads", "model.n_heads")

    @field_validator("unique_layers")
    @classmethod
    def _divide_the_loop(cls, value: int | None, info: Any) -> int | None:
        around = info.data.get("prelude_layers", 0) + info.data.get("coda_layers", 0)
        if around and value is None:
            text = "found null; allowed the number of repeated layers between prelude and coda"
            raise PydanticCustomError("relation", text)
        for key in ("depth", "decoder_depth"):
            total = info.data.get(key)
            if value and total and (total - around) % value + (total - around < value):
                whole = f"model.{key} = {total}"
                if around:
                    whole = f"the {total - around} layers between prelude and coda, {whole} in all"
                text = f"found {value}; allowed a divisor of {whole}"
                raise PydanticCustomError("relation", text)
        return value

    @model_validator(mode="after")
    def _resolve_widths(self) -> Model:
        # past the frozen setter, and without marking the fields as ones that the user has set
        if self.parameters is not None:
            if "d_model" in self.model_fields_set:
                text = "found d_model and parameters; allowed one of d_model, parameters"
                raise PydanticCustomError("relation", text)
            try:
                self.__dict__["d_model"] = nearest_width(self, self.parameters)
            except ValueError as error:
                raise PydanticCustomError("relation", str(error)) from None
        if self.d_ff is None:
            self.__dict__["d_ff"] = 4 * self.d_model
            self.model_fields_set.discard("d_ff")
        return self
