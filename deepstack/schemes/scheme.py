"""What a residual scheme is: how a layer joins its sublayers to the stream, and how it starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from deepstack.errors import ConfigError
from deepstack.options import Option, options_of, validated
from deepstack.registry import Registry

SCHEMES: Registry[type[Scheme]] = Registry("scheme")

Sublayer = Callable[[Tensor], Tensor]


class Scheme(nn.Module):
    """One layer's residual wiring: one subclass a scheme, whose docstring opens with its equation.

    Symbols: x (batch, seq, d_model), the stream; G, a sublayer (attention or feed-forward, its
    dropout included); N, the number of layers (two sublayers each); LN, a norm of the stack.

    A subclass overrides `residual` (one sublayer) or, where the two sublayers of a layer are
    joined in some other way, `layer`.  It says with `alpha` and `beta` which coefficients it uses
    at a depth (None: it has none), with `gain` how its matrices start, with `final_norm` whether
    the stack ends in a norm of its own.  Further keyword-only arguments of its `__init__` are its
    options in a configuration (`model.scheme_options`).
    """

    name: ClassVar[str]
    label: ClassVar[str]
    paper: ClassVar[str]
    equation: ClassVar[str]
    final_norm: ClassVar[bool] = False
    normalised: ClassVar[bool] = True  # whether F leaves a norm, and so has a fixed scale
    norms_per_sublayer: ClassVar[int] = 1

    def __init_subclass__(cls, *, name: str, label: str, paper: str) -> None:
        super().__init_subclass__()
        cls.name, cls.label, cls.paper = name, label, paper
        cls.equation = (inspect.getdoc(cls) or "").split("\n")[0].split(".  ")[0].rstrip(".")
        SCHEMES.register(name, cls)

    def __init__(self, layer: int, depth: int, make_norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer_index, self.depth = layer, depth
        count = self.norms_per_sublayer
        self.attention_norms = nn.ModuleList(make_norm() for _ in range(count))
        self.feed_forward_norms = nn.ModuleList(make_norm() for _ in range(count))
        # As tuples too: a ModuleList takes longer to look into than a norm of a narrow layer.
        self._norms = tuple(self.attention_norms), tuple(self.feed_forward_norms)

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
        """What the Xavier standard deviation of a role's matrix is multiplied by; layer is 1..N."""
        return 1.0

    def residual(self, x: Tensor, G: Sublayer, *norms: Any) -> Tensor:
        """One sublayer joined to the stream: (batch, seq, d_model) -> the same."""
        raise TypeError(f"the scheme {type(self).name} defines neither residual nor layer")

    def layer(self, x: Tensor, attention: Sublayer, feed_forward: Sublayer) -> Tensor:
        """A whole layer: `residual` around the attention and then around the feed-forward."""
        before, after = self._norms
        return self.residual(self.residual(x, attention, *before), feed_forward, *after)


def find_scheme(name: str, options: Mapping[str, Any]) -> tuple[type[Scheme], dict[str, Any]]:
    """The scheme of a configuration, and its options validated against its `__init__`.

    Raises ConfigError with the nearest name for an unknown scheme or option.
    """
    try:
        scheme = SCHEMES[name]
    except ConfigError as error:
        raise ConfigError(f"model.scheme: {error}", key="model.scheme") from None
    section = "model.scheme_options"
    return scheme, validated(scheme, options, kind="scheme", name=name, section=section)


def scheme_options(name: str) -> list[Option]:
    """The options of a scheme: the keyword-only arguments of its `__init__`."""
    return options_of(SCHEMES[name], given=(), kind="scheme", name=name)
