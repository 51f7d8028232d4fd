"""The base class of residual schemes: how sublayers join the stream, and how a layer starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from deepstack.base.errors import PluginError
from deepstack.base.notebook import html_table
from deepstack.base.options import OptionsByName, options_of_class, options_of_function
from deepstack.base.registry import Registry
from deepstack.config import StackSizes
from deepstack.schemes.checks import check_class
from deepstack.schemes.parts import ALONE, FAMILIES, Family, Parts, StackPosition
from deepstack.schemes.tap import Tap, with_tap

SCHEMES: Registry[type[Scheme]] = Registry("scheme")

Sublayer = Callable[..., Any]
"""G(x) -> (batch, seq, d_model); attention with a tensor for the next layer returns that too."""
Norm = Callable[[Tensor], Tensor]
Stream = Any
"""The value passed from layer to layer: x (batch, seq, d_model), or a tuple that begins with it."""


class Optim(NamedTuple):
    """A scheme's factors on the learning rate, weight decay and epsilon of a role."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


MOST_CONFIGURED = 256  # subclasses that are kept: a sweep over depths makes many
_configured: dict[tuple[type, str, StackPosition], Any] = {}


class Scheme(nn.Module):
    """The residual connections of one layer; each scheme is a subclass.

    The docstring of a subclass opens with its equation.  Symbols: x (batch, seq, d_model), the
    stream; G, a sublayer (attention or feed-forward, its dropout included); N, the number of layers
    (two sublayers each; a decoder that reads an encoder has M layers of three); l, the layer, 1..N;
    LN, a norm of the stack.

    static: declared in the first line of the class, and not inherited.  It promises that every step
    runs the same operations and reads no Python value that changes during training, so that a step
    can be recorded once and replayed.

    Options (`model.scheme_options` in a configuration) are annotated class attributes with a
    default, such as `power: float = 0.25`.  A stack runs a subclass in which they have the values
    of its configuration; class methods read `cls.power`, and `cls.place`, the stack's position.

    registered=False in the first line declares a common base of several schemes.

    A subclass overrides `residual` (one sublayer) or, if its sublayers join differently, `layer`.

    - `setup`: makes parameters, `slots` and buffers.
    - `alpha` and `beta`: its coefficients at a depth; None if it has none.
    - `gain`: the factor on the initial matrices; `optim`: the factors on a role's training;
      `head_factor`: the factor on F in the head.
    - `entry_norm`, `final_norm`: whether a stack begins or ends with its own norm.
    - `families`, `merges`: the models for which its paper defines it.
    - `extra_streams`, `extra_memory`: the memory of a training step beyond Pre-LN's.
    - `extra_flops`: the FLOPs of a forward pass beyond those of the sublayers.
    - `post_scale`: the constant with which a GPU can use one kernel for all of `residual`.
    - `slots`: modules inside a sublayer (see `deepstack.model.sublayers`).
    - `enter`, `leave`: convert x to several streams and back.
    - `at_step`: sets values that depend on the step.
    - `calibrate`: starts parameters from data.
    - `project`: constrains matrices, at the start and after every step.

    A plugin can also declare options as keyword-only arguments of `__init__`.  `alpha`, `beta`,
    `gain`, `optim`, `head_factor` and `project` receive each option that they name as an argument,
    and `config`, the whole configuration.  Plugins of earlier versions also name `place`, `qkv` (of
    'model.init') and `optimizer` (of 'train').
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
    mixes_streams: ClassVar[bool] = False  # whether `connections` map H to [… | A_rᵀ], for each
    extra_streams: ClassVar[int] = 0  # tensors like x that each sublayer keeps for its gradients
    # Declared by defining a method, see `CAPABILITIES`.
    changes_by_step: ClassVar[bool] = False  # `at_step` sets buffers before each step
    reads_data: ClassVar[bool] = False  # `calibrate` starts parameters from the first batch
    maps_stream: ClassVar[bool] = False  # `enter` and `leave` convert x to a stream and back
    constrains: ClassVar[bool] = False  # `project` changes matrices after each step
    joins_sublayers: ClassVar[bool] = False  # `layer` is more than `residual` for each sublayer
    # Set for each class.
    attribute_options: ClassVar[OptionsByName] = {}  # options declared as attributes
    argument_options: ClassVar[OptionsByName] = {}  # options declared as arguments of `__init__`
    residual_values: ClassVar[tuple[str, ...]] = ()  # keywords of `residual`, by `per_sublayer`
    place: StackPosition = ALONE
    tap: Tap | None = None
    norm_functions: tuple[tuple[Any, ...], ...]  # the norms that `layer` calls, for each sublayer

    def __init_subclass__(
        cls,
        *,
        name: str = "",
        label: str = "",
        paper: str = "",
        static: bool = False,
        registered: bool = True,
    ) -> None:
        super().__init_subclass__()
        defined = vars(cls).keys()
        for method in CAPABILITIES.keys() & defined:
            setattr(cls, CAPABILITIES[method], True)
        if "post_scale" not in defined and defined & {"residual", "layer", "at_step"}:
            cls.post_scale = Scheme.post_scale  # type: ignore[method-assign]
        if "residual" in defined:
            parameters = inspect.signature(cls.residual).parameters.values()
            keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
            cls.residual_values = tuple(p.name for p in keywords)
            cls.residual = with_tap(cls.residual)  # type: ignore[method-assign]
        inherited, owner = cls.attribute_options, f"the scheme {name or cls.__name__}"
        cls.attribute_options = options_of_class(cls, Scheme, inherited, owner)
        if not registered:
            return
        if not (name and label and paper):
            raise PluginError(
                f"the scheme {cls.__name__}: its first line lacks name, label or paper: class "
                f"{cls.__name__}(Scheme, name='mine', label='Mine', paper='arXiv:… or none')"
            )
        cls.name, cls.label, cls.paper, cls.static = name, label, paper, static
        is_known = isinstance(cls.families, Collection) and all(f in FAMILIES for f in cls.families)
        if not cls.families or not is_known:
            raise PluginError(
                f"{owner}: families is {cls.families!r}; allowed: some of {', '.join(FAMILIES)}"
            )
        cls.argument_options = options_of_function(cls.__init__, owner)
        check_class(cls, Scheme)
        cls.equation = (inspect.getdoc(cls) or "").split("\n")[0].split(".  ")[0].rstrip(".")
        SCHEMES.register(name, cls)

    def __repr__(self) -> str:
        return f"{self.label}: {self.equation}"

    def _repr_html_(self) -> str:
        return html_table(self.label, {"equation": self.equation, "paper": self.paper})

    @classmethod
    def configure(
        cls, options: Mapping[str, Any] | None = None, place: StackPosition = ALONE
    ) -> type[Self]:
        """Return a subclass whose attributes have these values of options, at this position.

        Equal arguments give the same class, so that compiled layers serve later runs too.
        """
        chosen = {
            key: value for key, value in (options or {}).items() if key in cls.attribute_options
        }
        key = cls, repr(sorted(chosen.items())), place
        if key not in _configured:
            named = {key: getattr(cls, key) for key in ("__module__", "__qualname__", "__doc__")}
            values = {**named, **chosen, "place": place}
            _configured[key] = type(cls.__name__, (cls,), values, registered=False)
        while len(_configured) > MOST_CONFIGURED:
            del _configured[next(iter(_configured))]
        return _configured[key]

    def __init__(self, layer: int, depth: int, parts: Parts) -> None:
        super().__init__()
        self.layer_index, self.depth, self.tap = layer, depth, None
        self.sublayers = parts.sublayers
        count = self.norms_per_sublayer
        self.add_per_sublayer("norms", lambda: nn.ModuleList(parts.norm() for _ in range(count)))
        self.slots = nn.ModuleDict()
        self.call_norms(None)
        self.setup(parts)

    def setup(self, parts: Parts) -> None:
        """Make the parameters, slots and buffers of this layer; by default, none."""

    def add_per_sublayer(self, name: str, make: Callable[[], nn.Module | nn.Parameter]) -> None:
        """Set `attention_<name>`, `feed_forward_<name>`, …: one result of `make` a sublayer.

        `layer` passes them to `residual`, if that has a keyword-only argument of this name.
        """
        for sublayer in self.sublayers:
            setattr(self, f"{sublayer}_{name}", make())

    def per_sublayer(self, name: str) -> list[Any]:
        """Return the attributes set by `add_per_sublayer`, in the order of the sublayers."""
        return [getattr(self, f"{sublayer}_{name}") for sublayer in self.sublayers]

    of_each, each = add_per_sublayer, per_sublayer  # the names in earlier plugins

    def call_norms(self, as_function: Callable[[nn.Module], Norm] | None) -> None:
        """Make `layer` call as_function(norm) for each norm; with None, the norms themselves."""
        self.norm_functions = tuple(
            tuple(as_function(norm) if as_function else norm for norm in norms)
            for norms in self.per_sublayer("norms")
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

        layer is 1..N, and 0 outside the layers (embedding, position, head).
        """
        return 1.0

    @classmethod
    def optim(cls, role: str, depth: int) -> Optim:
        """Return the factors on the learning rate, weight decay and epsilon of a role."""
        return Optim()

    @classmethod
    def head_factor(cls) -> float:
        """Return the constant by which the head multiplies F before its first matrix."""
        return 1.0

    @classmethod
    def project(cls, role: str, matrices: Tensor) -> None:
        """Apply the scheme's constraint to a role's matrices in place, after each optimizer step.

        It also runs once at the start, for every role; after a step, for every trained role.

        matrices: (layers, n_out, n_in), of all layers of a stack, applied as x Wᵀ.  The roles q, k
        and v come one by one even if one product computes them.  Gradients are disabled.  Code must
        not wait for a value of a tensor: use `torch.where`, not `if`.
        """

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        """Return the bytes that a stack keeps for its gradients, in addition to Pre-LN's."""
        return cls.extra_streams * sizes.sublayers * sizes.stream

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of a stack's forward pass in further matrix products.

        A multiply-add of a matrix product, or of a weighted sum over streams or layers, counts two.
        """
        return 0

    def residual(self, *args: Any, **kwargs: Any) -> Tensor:
        """Join one sublayer to the stream, (x, G, *norms) -> x: (batch, seq, d_model)."""
        raise PluginError(
            f"the scheme {type(self).name} defines neither residual nor layer; write "
            "residual(self, x, G, norm), which returns the new stream"
        )

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        """Run the whole layer: `residual` around each sublayer in turn, the feed-forward last."""
        for name, G, norms in zip(self.sublayers, sublayers, self.norm_functions, strict=True):
            values = {key: getattr(self, f"{name}_{key}") for key in self.residual_values}
            x = self.residual(x, G, *norms, **values)
        return x

    def pass_over(self, x: Stream) -> Stream:
        """Return the layer's output if it were the identity, y_l = x_l; for diagnostics."""
        return x

    def token_state(self, stream: Stream) -> Tensor:
        """Return z_l, (batch, seq, w): all that layers pass on of a token and change."""
        return visible(stream)

    def set_token_state(self, stream: Stream, state: Tensor) -> Stream:
        """Return the stream with another z_l and everything else unchanged."""
        return state if isinstance(stream, Tensor) else (state, *stream[1:])

    def layer_output(self, before: Stream, after: Stream) -> Tensor:
        """Return what this layer adds to the stream before it, (batch, seq, v); by default z_l."""
        return self.token_state(after)

    def set_layer_output(self, before: Stream, output: Tensor) -> Stream:
        """Return the stream after this layer if it had this output instead of its own."""
        return self.set_token_state(before, output)

    def enter(self, x: Tensor) -> Stream:
        """Convert x_0 to the stream that the first layer reads."""
        return x

    def leave(self, stream: Stream, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return F, given the output of the last layer and the final norm, if there is one."""
        x = visible(stream)
        return x if norm is None else norm(x)

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
