"""What a residual scheme is: how a layer joins its sublayers to the stream, and how it starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from torch import Tensor, nn

from deepstack.errors import ConfigError, PluginError
from deepstack.options import Option, options_of, validated
from deepstack.registry import Registry
from deepstack.schemes.check_class import check_class
from deepstack.schemes.tap import Tap, with_tap

T = TypeVar("T")
SCHEMES: Registry[type[Scheme]] = Registry("scheme")

Sublayer = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor], Tensor]
Stream = Any
"""What goes from layer to layer: a tensor (batch, seq, d_model), or a tuple that begins with it."""

Family = Literal["encoder", "decoder", "encoder_decoder"]
FAMILIES: tuple[Family, ...] = get_args(Family)


class Place(NamedTuple):
    """Where a stack stands: the family of its model, its side of it, and the depths of both sides.

    encoder_depth N and decoder_depth M count layers; a side that the family lacks has 0.
    decoder_sublayers: of a layer of the decoder that reads an encoder, 3, or 2 where one merged
    attention stands for two.
    """

    family: Family = "encoder"
    side: Literal["encoder", "decoder"] = "encoder"
    encoder_depth: int = 0
    decoder_depth: int = 0
    decoder_sublayers: int = 3

    @property
    def depth(self) -> int:
        """The layers of this side."""
        return self.encoder_depth if self.side == "encoder" else self.decoder_depth


ALONE = Place()
"""An encoder without a decoder, at whatever depth: the place where none is given."""


@dataclass(frozen=True)
class Parts:
    """What a scheme is built from: the sizes of the stack, its norm at any width, its sublayers.

    sublayers: their names in the order in which the stream passes them; place: see `Place`; gated:
    whether the feed-forward has a gate.
    """

    d_model: int
    d_ff: int
    n_heads: int
    make_norm: Callable[[int], nn.Module]
    sublayers: tuple[str, ...] = ("attention", "feed_forward")
    place: Place = ALONE
    gated: bool = False

    def norm(self, width: int | None = None) -> nn.Module:
        """A norm of the stack; of width d_model where none is given."""
        return self.make_norm(width or self.d_model)


class Optim(NamedTuple):
    """What a scheme multiplies learning rate, weight decay and epsilon of a role with."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


class Scheme(nn.Module):
    """One layer's residual wiring: one subclass a scheme, whose docstring opens with its equation.

    Symbols: x (batch, seq, d_model), the stream; G, a sublayer (attention or feed-forward, its
    dropout included); N, the number of layers (two sublayers each; three in a decoder that reads
    an encoder, whose layers M counts); l, the layer, 1..N; LN, a norm of the stack.

    static: declared in the first line of the class, and not inherited.  It promises that every step
    carries out the same operations and reads no Python value that changes while a model is trained,
    so that a step may be recorded once and replayed.

    A subclass overrides `residual` (one sublayer) or, where the sublayers of a layer are joined in
    some other way, `layer`.  It says with `alpha` and `beta` which coefficients it uses at a depth
    (None: it has none), with `gain` how its matrices start, with `optim` how a role is trained,
    with `entry_norm` and `final_norm` whether a stack begins or ends in a norm of its own, with
    `families` and `merges` where its paper has it, with `post_scale` that a GPU may take a kernel
    for all of `residual`.  What it puts inside of a sublayer goes into
    `slots` (see `deepstack.model.sublayers`), what it has once a sublayer into `of_each`.
    More than one stream: `enter` and `leave`.  What changes with the step: `at_step`.  What looks
    at data first: `calibrate`.  Where matrices are kept, after every step too: `project`.  Further
    keyword-only arguments of its `__init__` are its options in a configuration
    (`model.scheme_options`); `alpha`, `beta`, `gain`, `project` and `optim` are given those of them
    that they name, and all but the last `place` if they name it.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    paper: ClassVar[str]
    equation: ClassVar[str]
    static: ClassVar[bool] = False
    families: ClassVar[tuple[Family, ...]] = ("encoder", "decoder")
    merges: ClassVar[bool] = True  # whether one merged attention may stand for two sublayers
    entry_norm: ClassVar[bool] = False
    final_norm: ClassVar[bool] = False
    stream_norms: ClassVar[int] = 0  # norms of the stack, one for each stream that `leave` is given
    normalised: ClassVar[bool] = True  # whether F leaves a norm, and so has a fixed scale
    norms_per_sublayer: ClassVar[int] = 1
    uniform: ClassVar[bool] = True  # whether layers are of one kind, or of few, to a compiler
    # Declared by defining a method, see `CAPABILITIES`.
    changes_by_step: ClassVar[bool] = False  # `at_step` sets buffers before each step
    reads_data: ClassVar[bool] = False  # `calibrate` starts parameters from the first batch
    maps_stream: ClassVar[bool] = False  # `enter` and `leave` convert x to a stream and back
    constrains: ClassVar[bool] = False  # `project` changes matrices after each step
    joins_sublayers: ClassVar[bool] = False  # `layer` is more than `residual` for each sublayer
    tap: Tap | None = None
    norm_functions: tuple[tuple[Any, ...], ...]  # what `layer` calls, for each sublayer

    def __init_subclass__(
        cls, *, name: str = "", label: str = "", paper: str = "", static: bool = False
    ) -> None:
        super().__init_subclass__()
        if not (name and label and paper):
            raise PluginError(
                f"the scheme {cls.__name__}: its first line lacks name, label or paper: class "
                f"{cls.__name__}(Scheme, name='mine', label='Mine', paper='arXiv:… or none')"
            )
        cls.name, cls.label, cls.paper, cls.static = name, label, paper, static
        if not cls.families or not set(cls.families) <= set(FAMILIES):
            raise PluginError(
                f"the scheme {name}: families is {cls.families!r}; allowed: some of "
                f"{', '.join(FAMILIES)}"
            )
        own = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for option in own:
            bare = option.annotation is option.empty or option.default is option.empty
            if bare:
                raise PluginError(
                    f"the scheme {name}: option {option.name!r} needs a type annotation and a "
                    "default"
                )
        check_class(cls, Scheme, [option.name for option in own])
        defined = vars(cls).keys()
        for method in CAPABILITIES.keys() & defined:
            setattr(cls, CAPABILITIES[method], True)
        if "post_scale" not in defined and defined & {"residual", "layer", "at_step"}:
            cls.post_scale = Scheme.post_scale  # type: ignore[method-assign]
        if "residual" in defined:
            cls.residual = with_tap(cls.residual)  # type: ignore[method-assign]
        cls.equation = (inspect.getdoc(cls) or "").split("\n")[0].split(".  ")[0].rstrip(".")
        SCHEMES.register(name, cls)

    def __init__(self, layer: int, depth: int, parts: Parts) -> None:
        super().__init__()
        self.layer_index, self.depth, self.place = layer, depth, parts.place
        self.sublayers = parts.sublayers
        count = self.norms_per_sublayer
        self.of_each("norms", lambda: nn.ModuleList(parts.norm() for _ in range(count)))
        self.slots = nn.ModuleDict()
        self.call_norms(None)

    def of_each(self, what: str, make: Callable[[], nn.Module | nn.Parameter]) -> None:
        """Give the layer one of these a sublayer: `attention_<what>`, `feed_forward_<what>`, …"""
        for sublayer in self.sublayers:
            setattr(self, f"{sublayer}_{what}", make())

    def each(self, what: str) -> list[Any]:
        """What `of_each` made, in the order of the sublayers."""
        return [getattr(self, f"{sublayer}_{what}") for sublayer in self.sublayers]

    def call_norms(self, as_function: Callable[[nn.Module], Norm] | None) -> None:
        """Let `layer` call as_function(norm) instead of each norm; None: the norms themselves."""
        self.norm_functions = tuple(
            tuple(as_function(norm) if as_function else norm for norm in norms)
            for norms in self.each("norms")
        )

    def post_scale(self) -> float | None:
        """The constant a if `residual` is LN(a x + G(x)), for which a GPU has one kernel, or None.

        A subclass that defines `residual`, `layer` or `at_step` states it anew.
        """
        return None

    @classmethod
    def alpha(cls, depth: int) -> float | None:
        """The residual coefficient at this depth, or None."""
        return None

    @classmethod
    def beta(cls, depth: int) -> float | None:
        """The initialisation gain at this depth, or None.  It never appears in a forward pass."""
        return None

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        """What the standard deviation of a role's matrix is multiplied by.

        layer is 1..N, and 0 for what lies outside of the layers (embedding, position, head).  A
        keyword `qkv` is given 'model.init.qkv'.
        """
        return 1.0

    @classmethod
    def optim(cls, role: str, depth: int) -> Optim:
        """What learning rate, weight decay and epsilon of a role are multiplied by.

        A keyword `optimizer` is given the name in 'train.optimizer'.
        """
        return Optim()

    @classmethod
    def project(cls, role: str, matrices: Tensor) -> None:
        """Put a role's matrices back to where they are kept, in place, after each optimizer step.

        And once before the first, as they start.  matrices: (layers, n_out, n_in), of all layers of
        a stack, applied as x Wᵀ; asked for every role that is trained (at the start for all), and
        for q, k and v one by one where a product computes them together.  No gradient is taken,
        and nothing may wait for a value: `torch.where`, not `if`.
        """

    def residual(self, *args: Any, **kwargs: Any) -> Tensor:
        """One sublayer joined to the stream, (x, G, *norms) -> x: (batch, seq, d_model)."""
        raise PluginError(
            f"the scheme {type(self).name} defines neither residual nor layer; write "
            "residual(self, x, G, norm), which returns the new stream"
        )

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        """A whole layer: `residual` around each sublayer in turn, the feed-forward last."""
        for G, norms in zip(sublayers, self.norm_functions, strict=True):
            x = self.residual(x, G, *norms)
        return x

    def pass_over(self, x: Stream) -> Stream:
        """What the layer would hand on if it were the identity, y_l = x_l: diagnostics ask it."""
        return x

    def enter(self, x: Tensor) -> Stream:
        """The stream that the first layer reads, from x_0."""
        return x

    def leave(self, stream: Stream, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
        """F, from what the last layer gives and the final norm, where there is one."""
        return stream if norm is None else norm(stream)

    def at_step(self, step: int) -> None:
        """Set what depends on the step t; called before step t = 1, 2, …, and with 0 at first.

        In place, in buffers: a captured or replayed step reads tensors anew, and Python's numbers
        never again.
        """

    def calibrate(self, x: Stream, *sublayers: Sublayer, seen: dict[str, Any]) -> Stream:
        """Start parameters from data: called layer by layer on the first batch; gives the layer's
        output.  seen: what layers of the same stack before it have noted."""
        return self.layer(x, *sublayers)


# method -> the capability that a class declares by defining it
CAPABILITIES = {
    "at_step": "changes_by_step",
    "calibrate": "reads_data",
    "enter": "maps_stream",
    "leave": "maps_stream",
    "project": "constrains",
    "layer": "joins_sublayers",
}


def visible(stream: Stream) -> Tensor:
    """The tensor of a stream that charts of the stream show."""
    return stream if isinstance(stream, Tensor) else stream[0]


def with_options(method: Callable[..., T], options: Mapping[str, Any]) -> Callable[..., T]:
    """A class method of a scheme, given those options that it names."""
    known = inspect.signature(method).parameters
    return partial(method, **{key: value for key, value in options.items() if key in known})


def find_scheme(name: str, options: Mapping[str, Any]) -> tuple[type[Scheme], dict[str, Any]]:
    """The scheme of a configuration, and all its options, validated against its `__init__`.

    Raises ConfigError with the nearest name for an unknown scheme or option.
    """
    try:
        scheme = SCHEMES[name]
    except ConfigError as error:
        raise ConfigError(f"model.scheme: {error}", key="model.scheme") from None
    section = "model.scheme_options"
    given = validated(scheme, options, kind="scheme", name=name, section=section)
    return scheme, {option.name: option.default for option in scheme_options(name)} | given


def scheme_options(name: str) -> list[Option]:
    """The options of a scheme: the keyword-only arguments of its `__init__`."""
    return options_of(SCHEMES[name], given=(), kind="scheme", name=name)
