"""Checks of the schemes in a stack: their parameters, gains and optimizer factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from deepstack.errors import PluginError
from deepstack.parameters.role import RoleParameter
from deepstack.registry import place_of
from deepstack.schemes.check_class import CALLED
from deepstack.schemes.scheme import Optim, Scheme


def check_equal_parameters(schemes: Sequence[Scheme]) -> None:
    """Raise PluginError if the schemes of a stack's layers differ in their parameters.

    One tensor stores a parameter for all layers, one row each; so each layer needs the same ones.
    """
    names: dict[int, str] = {}  # by identity: none of the parameters is freed meanwhile
    first = parameters_of(schemes[0], names)
    for own in schemes[1:]:
        found = parameters_of(own, names)
        if found == first:
            continue
        name = next(name for name in {**first, **found} if first.get(name) != found.get(name))
        raise PluginError(
            f"the scheme {own.name}: layer {own.layer_index} has {said(name, found)}, layer 1 "
            f"{said(name, first)}; every layer needs the same parameters, used there or not"
        )


def parameters_of(own: Scheme, names: dict[int, str]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a layer's parameters; raise PluginError for unusable ones.

    names: id -> name of the parameters of earlier layers; those of this layer are added.
    """
    what = f"the scheme {own.name}"
    if "slots" not in vars(own).get("_modules", {}):
        raise PluginError(
            f"{what}: its __init__ does not call super().__init__(layer, depth, parts); that comes "
            "first"
        )
    for name, value in vars(own).items():
        if isinstance(value, Tensor):
            raise PluginError(
                f"{what}: {name} is a tensor of its own, neither trained nor kept nor moved to a "
                f"device; trained: deepstack.schemes.parameter({shape(value)}, role='scheme', "
                f"start=…); constant: self.register_buffer({name!r}, …, persistent=False)"
            )
        if name in CALLED:
            raise PluginError(
                f"{what}: its __init__ sets self.{name}, which is a method of schemes; choose "
                f"another name, such as self.own_{name}"
            )
    found = {}
    for name, value in own.named_parameters(remove_duplicate=False):
        if not isinstance(value, RoleParameter):
            raise PluginError(
                f"{what}: its parameter {name} is torch's, without role and start; make it as "
                f"deepstack.schemes.parameter({shape(value)}, role='scheme', "
                "start=…)"
            )
        other = names.setdefault(id(value), f"{name} of layer {own.layer_index}")
        if other != f"{name} of layer {own.layer_index}":
            raise PluginError(
                f"{what}: {name} of layer {own.layer_index} is the same parameter as {other}; make "
                "one for each: their storage is not shared"
            )
        found[name] = tuple(value.shape)
    return found


def said(name: str, shapes: dict[str, tuple[int, ...]]) -> str:
    return f"the parameter {name} {shapes[name]}" if name in shapes else f"no parameter {name}"


def shape(tensor: Tensor) -> str:
    """Return a tensor's shape as arguments: '3, 4' for (3, 4)."""
    return ", ".join(map(str, tensor.shape))


def checked_gain(scheme: type[Scheme], gain: Callable[..., Any]) -> Callable[..., float]:
    """Wrap `gain` of a scheme to raise PluginError unless it returns a finite number >= 0."""

    def checked(role: str, layer: int, depth: int) -> float:
        asked = f"gain({role!r}, {layer}, {depth})"
        try:
            found = gain(role, layer, depth)
        except ZeroDivisionError as error:
            raise PluginError(
                f"{written(scheme, 'gain')}{asked}: {error}; layer is 1..N, and 0 for what lies "
                "outside of the layers (embedding, position, head)"
            ) from error
        if not isinstance(found, Real) or not 0 <= float(found) < math.inf:
            raise PluginError(
                f"{written(scheme, 'gain')}{asked} gave {found!r}; allowed a finite number >= 0"
            )
        return float(found)

    return checked


def checked_optim(scheme: type[Scheme], optim: Callable[..., Any]) -> Callable[..., Optim]:
    """Wrap `optim` of a scheme to raise PluginError unless it returns an Optim of numbers >= 0."""

    def checked(role: str, depth: int) -> Optim:
        found = optim(role, depth)
        if not isinstance(found, Optim) or not all(
            isinstance(value, Real) and 0 <= value < math.inf for value in found
        ):
            raise PluginError(
                f"{written(scheme, 'optim')}optim({role!r}, {depth}) gave {found!r}; allowed "
                "deepstack.schemes.Optim(lr=…, weight_decay=…, eps=…), factors >= 0"
            )
        return found

    return checked


def written(scheme: type[Scheme], method: str) -> str:
    """Return where a method is defined: 'the scheme mine: my_file.py:12: '."""
    return f"the scheme {scheme.name}: {place_of(getattr(scheme, method))}"
