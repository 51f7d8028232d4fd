"""Layers, and a stack of them with one scheme: an encoder, a decoder, or one side of both."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base.errors import ConfigError, PluginError
from deepstack.base.registry import unknown
from deepstack.model.attention import ATTENTIONS, Attention
from deepstack.model.cross_attention import AverageAttention, CrossAttention, MergedAttention
from deepstack.model.feed_forward import FEED_FORWARDS, FeedForward
from deepstack.model.query_key import QueriesAndKeys, Rotation
from deepstack.model.sublayers import Joins, LinearMaps
from deepstack.schemes import NORMS, Parts, Scheme, StackNorm, StackScheme, Stream, Sublayer


class Layer(nn.Module):
    """x_l = scheme(x_{l-1}, attention, [cross-attention,] feed-forward).

    sublayers: name -> module, in the order in which the stream passes them.  Sublayers that read
        the encoder's output receive it as `memory`, (batch, source, d_model), and self-attention
        the mask of documents.  The fast paths set
        `sublayer_functions`, which are equivalent to the sublayers, and `layer_function`, which is
        equivalent to the whole layer if no sublayer reads a memory.
    """

    def __init__(self, scheme: Scheme, sublayers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.scheme = scheme
        for name, module in sublayers.items():
            setattr(self, name, module)
        self.names = tuple(sublayers)
        self.readers = tuple(getattr(m, "reads_memory", False) for m in sublayers.values())
        self.sublayer_functions: tuple[Callable[..., Tensor], ...] = self.modules_in_order()
        self.layer_function: Callable[[Tensor], Tensor] | None = None

    def modules_in_order(self) -> tuple[nn.Module, ...]:
        """Return the sublayers as modules."""
        return tuple(getattr(self, name) for name in self.names)

    def forward(self, x: Stream, memory: Tensor | None = None) -> Stream:
        if self.layer_function is not None and memory is None:
            return self.layer_function(x)
        return self.scheme.layer(x, *self.bind_memory(memory))

    def bind_memory(self, memory: Tensor | None) -> tuple[Sublayer, ...]:
        """Return the sublayers as functions of the stream alone, bound to `memory`."""
        if memory is None:
            return self.sublayer_functions
        pairs = zip(self.sublayer_functions, self.readers, strict=True)
        return tuple(partial(G, memory=memory) if reads else G for G, reads in pairs)

    @property
    def functions(self) -> tuple[Any, ...]:
        """The functions that run sublayers, layer and norms: modules, or those of fast paths."""
        return self.sublayer_functions, self.layer_function, self.scheme.norm_functions

    @functions.setter
    def functions(self, functions: tuple[Any, ...]) -> None:
        self.sublayer_functions, self.layer_function, self.scheme.norm_functions = functions

    def call_modules(self) -> None:
        """Run sublayers and norms as modules, without fast paths."""
        self.sublayer_functions, self.layer_function = self.modules_in_order(), None
        self.scheme.call_norms(None)


Layers = Sequence[nn.Module]


class LayerRunner(Protocol):
    """A function that passes a stream through layers."""

    def __call__(self, layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
        """Return x_N, given x_0; memory: the encoder's output, which a decoder's layers read."""


def run_layers(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
    """Run x_l = layer_l(x_{l-1}); every other implementation must give the same values."""
    for layer in layers:
        x = layer(x, memory)
    return x


def norm_maker(model: conf.Model) -> Callable[..., StackNorm]:
    """Return the function of the width, and of roles, that makes the configured norm."""
    norm = model.norm
    options = norm.model_dump(exclude={"kind", "kind_options", "final_gain"})
    return partial(NORMS.configured(norm.kind, norm.kind_options), **options)


class Stack(nn.Module):
    """x_l = layer_l(x_{l-1}) for l = 1..depth, then the final norm if the scheme has one.

    scheme: the scheme of this stack; its place has the side and the family.  The layers of a
        decoder are causal; in an encoder_decoder they read the encoder's output, `memory`, (batch,
        source, d_model).
    seq_len: the number of positions, for a rotation.
    joins: tells of roles whether their matrices share one tensor.
    """

    def __init__(self, model: conf.Model, scheme: StackScheme, seq_len: int, joins: Joins) -> None:
        super().__init__()
        d, make_norm = model.d_model, norm_maker(model)
        reads_encoder = scheme.place.side == "decoder" and model.family == "encoder_decoder"
        names: tuple[str, ...] = ("attention", "cross_attention", "feed_forward")
        if not reads_encoder or model.decoder_attention == "merged":
            names = ("attention", "feed_forward")
        d_ff = model.d_ff or 4 * d
        parts = Parts(d, d_ff, model.n_heads, make_norm, names, scheme.place, model.gated)
        self.schemes = scheme.layers(parts)
        if not model.dropout:
            refuse_dropout(self.schemes[0])
        if model.qk_norm and {"q", "k"} & set(self.schemes[0].slots):
            raise ConfigError(
                f"model.qk_norm: found true, unused under model.scheme={model.scheme}, which has "
                "its own norms of queries and keys, or scales them; allowed false",
                key="model.qk_norm",
            )
        rotation = Rotation(seq_len, d // model.n_heads) if model.positions == "rotary" else None
        layers = [
            Layer(one, make_sublayers(model, one, parts, rotation, joins)) for one in self.schemes
        ]
        self.layers = cast(Sequence[Layer], nn.ModuleList(layers))  # without an item type
        kind, final_gain = scheme.scheme_class, model.norm.final_gain
        self.entry_norm = make_norm(d) if kind.entry_norm else None
        self.stream_norms = nn.ModuleList(make_norm(d) for _ in range(kind.stream_norms))
        options = {} if final_gain is None else {"gain": final_gain}
        final_norm = partial(make_norm, d, roles=("final_norm", "final_norm"), **options)
        self.final_norm = final_norm() if kind.final_norm else None
        self.runner: LayerRunner = run_layers

    def enter(self, x: Tensor) -> Stream:
        """Return the first layer's input: x_0, (batch, seq, d_model), or the streams made of it."""
        return self.schemes[0].enter(x if self.entry_norm is None else self.entry_norm(x))

    def leave(self, stream: Stream) -> Tensor:
        """Return the stack's output, (batch, seq, d_model), given the last layer's output."""
        if self.stream_norms:
            norms = zip(self.stream_norms, stream, strict=True)
            stream = tuple(norm(one) for norm, one in norms)
        return self.schemes[-1].leave(stream, self.final_norm)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return self.leave(self.runner(self.layers, self.enter(x), memory))

    def calibrate(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Run the layers one by one as the scheme starts its parameters from the data."""
        seen: dict[str, Any] = {}
        stream = self.enter(x)
        for layer in self.layers:
            stream = layer.scheme.calibrate(stream, *layer.bind_memory(memory), seen=seen)
        return self.leave(stream)


def make_sublayers(
    model: conf.Model, scheme: Scheme, parts: Parts, rotation: Rotation | None, joins: Joins
) -> dict[str, LinearMaps]:
    """Return the sublayers of one layer by name; raise PluginError for slots that they lack."""
    is_causal, kind = parts.place.side == "decoder", model.decoder_attention
    common: Any = model, dict(scheme.slots.items()), joins
    qk_norm = parts.make_norm if model.qk_norm else None

    def qk(rotation: Rotation | None = None) -> QueriesAndKeys | None:
        needed = rotation or qk_norm
        return QueriesAndKeys(model.d_model // model.n_heads, qk_norm, rotation) if needed else None

    sublayers: dict[str, LinearMaps] = {}
    if is_causal and kind == "merged":
        sublayers["attention"] = MergedAttention(*common, qk())
    elif is_causal and kind == "average":
        sublayers["attention"] = AverageAttention(*common)
    else:
        attention = ATTENTIONS.configured(model.attention, model.attention_options)
        sublayers["attention"] = attention(*common, qk(rotation), causal=is_causal)
    if "cross_attention" in parts.sublayers:
        sublayers["cross_attention"] = CrossAttention(*common, qk())
    feed_forward = FEED_FORWARDS.configured(model.feed_forward, model.feed_forward_options)
    sublayers["feed_forward"] = feed_forward(*common)
    there = [slot for sublayer in sublayers.values() for slot in sublayer.SLOTS]
    for slot in scheme.slots:
        if slot not in there:
            refuse_other_sublayer(model, slot)
            raise PluginError(f"the scheme {scheme.name}: {unknown('slot', slot, there)}")
    return sublayers


def refuse_other_sublayer(model: conf.Model, slot: str) -> None:
    """Raise ConfigError if a slot is in the standard sublayer and not in the chosen one."""
    for key, standard in (("attention", Attention), ("feed_forward", FeedForward)):
        chosen = getattr(model, key)
        if slot in standard.SLOTS and chosen != standard.name:
            raise ConfigError(
                f"model.{key}: found {chosen}, which has no slot {slot!r} for "
                f"model.scheme={model.scheme}; allowed {standard.name}, or another scheme",
                key=f"model.{key}",
            )


def refuse_dropout(scheme: Scheme) -> None:
    """Raise ConfigError if a scheme has dropout in a stack without dropout.

    A stack without dropout is trained in evaluation mode, so the scheme's would have no effect.
    """
    for name, module in scheme.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            raise ConfigError(
                f"model.dropout: found 0, under which {name} of the scheme {scheme.name} drops "
                "nothing: a stack without dropout is trained in evaluation mode; allowed > 0",
                key="model.dropout",
            )
