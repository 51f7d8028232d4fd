"""The base class of residual schemes: how sublayers join the stream, and how a layer starts."""

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
"""The value passed from layer to layer: x (batch, seq, d_model), or a tuple that begins with it."""

Family = Literal["encoder", "decoder", "encoder_decoder"]
FAMILIES: tuple[Family, ...] = get_args(Family)


class Place(NamedTuple):
    """The position of a stack in its model: family, side, and the depths of both sides.

    encoder_depth N and decoder_depth M count layers; a side that the family lacks has 0.
    decoder_sublayers counts the sublayers of a decoder layer that reads an encoder: 3, or 2 if
    one merged attention replaces two sublayers.
    """

    family: Family = "encoder"
    side: Literal["encoder", "decoder"] = "encoder"
    encoder_depth: int = 0
    decoder_depth: int = 0
    decoder_sublayers: int = 3

    @property
    def depth(self) -> int:
        """The number of layers of this side."""
        return self.encoder_depth if self.side == "encoder" else self.decoder_depth


ALONE = Place()
"""The default position: an encoder without a decoder, of any depth."""


@dataclass(frozen=True)
class Parts:
    """The parts from which a scheme is built: the stack's sizes, its norm and its sublayers.

    sublayers: their names in the order in which the stream passes them.  place: see `Place`.
    gated: whether the feed-forward has a gate.  make_norm builds a norm of a given width.
    """

    d_model: int
    d_ff: int
    n_heads: int
    make_norm: Callable[[int], nn.Module]
    sublayers: tuple[str, ...] = ("attention", "feed_forward")
    place: Place = ALONE
    gated: bool = False

    def norm(self, width: int | None = None) -> nn.Module:
        """Return a norm of the stack's kind; the default width is d_model."""
        return self.make_norm(width or self.d_model)


class Optim(NamedTuple):
    """A scheme's factors on the learning rate, weight decay and epsilon of a role."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


class Scheme(nn.Module):
    """The residual connections of one layer; each scheme is a subclass.

    The docstring of a subclass opens with its equation.  Symbols: x (batch, seq, d_model), the
    stream; G, a sublayer (attention or feed-forward, its dropout included); N, the number of layers
    (two sublayers each; a decoder that reads an encoder has M layers of three); l, the layer, 1..N;
    LN, a norm of the stack.

    static: declared in the first line of the class, and not inherited.  It promises that every step
    runs the same operations and reads no Python value that changes during training, so that a step
    can be recorded once and replayed.

    A subclass overrides `residual` (one sublayer) or, if its sublayers join differently, `layer`.

    - `alpha` and `beta`: its coefficients at a depth; None if it has none.
    - `gain`: the factor on the initial matrices; `optim`: the factors on a role's training.
    - `entry_norm`, `final_norm`: whether a stack begins or ends with its own norm.
    - `families`, `merges`: the models for which its paper defines it.
    - `post_scale`: the constant with which a GPU can use one kernel for all of `residual`.
    - `slots`: modules inside a sublayer (see `deepstack.model.sublayers`).
    - `of_each`: registers one module or parameter for each sublayer.
    - `enter`, `leave`: convert x to several streams and back.
    - `at_step`: sets values that depend on the step.
    - `calibrate`: starts parameters from data.
    - `project`: constrains matrices, at the start and after every step.

    Further keyword-only arguments of `__init__` are its options in a configuration
    (`model.scheme_options`).  `alpha`, `beta`, `gain`, `project` and `optim` receive the options
    that they name; all but `optim` also receive `place` if they name it.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    paper: ClassVar[str]
    equation: ClassVar[str]
    static: ClassVar[bool] = False
    families: ClassVar[tuple[Family, ...]] = ("encoder", "decoder")
    merges: ClassVar[bool] = True  # whether one merged attention can replace two sublayers
    entry_norm: ClassVar[bool] = False
    final_norm: ClassVar[bool] = False
    stream_norms: ClassVar[int] = 0  # norms of the stack, one for each stream passed to `leave`
    normalised: ClassVar[bool] = True  # whether F is a norm's output, and so has a fixed scale
    norms_per_sublayer: ClassVar[int] = 1
    uniform: ClassVar[bool] = True  # whether a compiler sees one kind of layer, or a few kinds
    # Declared by defining a method, see `CAPABILITIES`.
    changes_by_step: ClassVar[bool] = False  # `at_step` sets buffers before each step
    reads_data: ClassVar[bool] = False  # `calibrate` starts parameters from the first batch
    maps_stream: ClassVar[bool] = False  # `enter` and `leave` convert x to a stream and back
    constrains: ClassVar[bool] = False  # `project` changes matrices after each step
    joins_sublayers: ClassVar[bool] = False  # `layer` is more than `residual` for each sublayer
    tap: Tap | None = None
    norm_functions: tuple[tuple[Any, ...], ...]  # the norms that `layer` calls, for each sublayer

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
        """Set `attention_<what>`, `feed_forward_<what>`, …: one result of `make` a sublayer."""
        for sublayer in self.sublayers:
            setattr(self, f"{sublayer}_{what}", make())

    def each(self, what: str) -> list[Any]:
        """Return the attributes set by `of_each`, in the order of the sublayers."""
        return [getattr(self, f"{sublayer}_{what}") for sublayer in self.sublayers]

    def call_norms(self, as_function: Callable[[nn.Module], Norm] | None) -> None:
        """Make `layer` call as_function(norm) for each norm; with None, the norms themselves."""
        self.norm_functions = tuple(
            tuple(as_function(norm) if as_function else norm for norm in norms)
            for norms in self.each("norms")
        )

    def post_scale(self) -> float | None:
        """Return the constant a if `residual` is LN(a x + G(x)), else None.

        A GPU has one kernel for that equation.  The value is not inherited by a subclass that
        defines `residual`, `layer` or `at_step`.
        """
        return None

    @classmethod
    def alpha(cls, depth: int) -> float | None:
        """Return the residual coefficient at this depth, or None."""
        return None

    @classmethod
    def beta(cls, depth: int) -> float | None:
        """Return the initialisation gain at this depth, or None; forward passes never use it."""
        return None

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        """Return the factor on the standard deviation of a role's initial matrix.

        layer is 1..N, and 0 outside the layers (embedding, position, head).  A keyword `qkv`
        receives 'model.init.qkv'.
        """
        return 1.0

    @classmethod
    def optim(cls, role: str, depth: int) -> Optim:
        """Return the factors on the learning rate, weight decay and epsilon of a role.

        A keyword `optimizer` receives the name in 'train.optimizer'.
        """
        return Optim()

    @classmethod
    def project(cls, role: str, matrices: Tensor) -> None:
        """Apply the scheme's constraint to a role's matrices in place, after each optimizer step.

        It also runs once at the start, for every role; after a step, for every trained role.
        matrices: (layers, n_out, n_in), of all layers of a stack, applied as x Wᵀ; q, k and v come
        one by one even if one product computes them.  Gradients are disabled.  Code must not wait
        for a value of a tensor: use `torch.where`, not `if`.
        """

    def residual(self, *args: Any, **kwargs: Any) -> Tensor:
        """Join one sublayer to the stream, (x, G, *norms) -> x: (batch, seq, d_model)."""
        raise PluginError(
            f"the scheme {type(self).name} defines neither residual nor layer; write "
            "residual(self, x, G, norm), which returns the new stream"
        )

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        """Run the whole layer: `residual` around each sublayer in turn, the feed-forward last."""
        for G, norms in zip(sublayers, self.norm_functions, strict=True):
            x = self.residual(x, G, *norms)
        return x

    def pass_over(self, x: Stream) -> Stream:
        """Return the layer's output if it were the identity, y_l = x_l; for diagnostics."""
        return x

    def enter(self, x: Tensor) -> Stream:
        """Convert x_0 to the stream that the first layer reads."""
        return x

    def leave(self, stream: Stream, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return F, given the output of the last layer and the final norm, if there is one."""
        return stream if norm is None else norm(stream)

    def at_step(self, step: int) -> None:
        """Set the values that depend on the step t, before t = 1, 2, …; at first, with t = 0.

        Write them in place into buffers: a captured or replayed step reads tensors again, but
        never Python numbers.
        """

    def calibrate(self, x: Stream, *sublayers: Sublayer, seen: dict[str, Any]) -> Stream:
        """Start parameters from the first batch, layer by layer; return the layer's output.

        seen: values that earlier layers of the same stack stored for later ones.
        """
        return self.layer(x, *sublayers)


# method -> the capability that a class declares when it defines the method
CAPABILITIES = {
    "at_step": "changes_by_step",
    "calibrate": "reads_data",
    "enter": "maps_stream",
    "leave": "maps_stream",
    "project": "constrains",
    "layer": "joins_sublayers",
}


def visible(stream: Stream) -> Tensor:
    """Return the tensor that represents a stream in charts: the stream itself or its first item."""
    return stream if isinstance(stream, Tensor) else stream[0]


def with_options(method: Callable[..., T], options: Mapping[str, Any]) -> Callable[..., T]:
    """Bind to a class method of a scheme the options that it names."""
    known = inspect.signature(method).parameters
    return partial(method, **{key: value for key, value in options.items() if key in known})


def find_scheme(name: str, options: Mapping[str, Any]) -> tuple[type[Scheme], dict[str, Any]]:
    """Return a configuration's scheme and all its options, validated against its `__init__`.

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
    """Return the options of a scheme: the keyword-only arguments of its `__init__`."""
    return options_of(SCHEMES[name], given=(), kind="scheme", name=name)
