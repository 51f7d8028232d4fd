"""Checks of the schemes in a stack: their attributes and parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepstack.errors import PluginError
from deepstack.parameters.role import has_role
from deepstack.schemes.check_class import defined_at
from deepstack.schemes.scheme import Scheme


def check_equal_parameters(schemes: Sequence[Scheme]) -> None:
    """Raise PluginError if the schemes of a stack's layers differ in their parameters.

    One tensor stores a parameter for all layers, one row each; so each layer needs the same ones.
    """
    owners: dict[int, str] = {}  # by identity: none of the parameters is freed meanwhile
    first: dict[str, tuple[int, ...]] = {}
    for scheme in schemes:
        check_attributes(scheme)
        shapes = parameter_shapes(scheme, owners)
        first = first or shapes
        name = next((n for n in {**first, **shapes} if first.get(n) != shapes.get(n)), None)
        if name is not None:
            raise PluginError(
                f"the scheme {scheme.name}: layer {scheme.layer_index} has "
                f"{describe(name, shapes)}, layer 1 {describe(name, first)}; every layer needs the "
                "same parameters, used there or not"
            )


def check_attributes(scheme: Scheme) -> None:
    """Raise PluginError for tensors without a role, hidden methods and missing values."""
    owner = f"the scheme {scheme.name}"
    if "slots" not in vars(scheme).get("_modules", {}):
        raise PluginError(
            f"{owner}: its __init__ does not call super().__init__(layer, depth, parts); that "
            "comes first"
        )
    for name, value in vars(scheme).items():
        if isinstance(value, Tensor):
            raise PluginError(
                f"{owner}: {name} is a tensor of its own, neither trained nor kept nor moved to a "
                f"device; trained: deepstack.schemes.parameter({sizes(value)}, role='scheme', "
                f"start=…); constant: self.register_buffer({name!r}, …, persistent=False)"
            )
        if callable(getattr(Scheme, name, None)):
            raise PluginError(
                f"{owner}: its __init__ sets self.{name}, which is a method of schemes; choose "
                f"another name, such as self.own_{name}"
            )
    for name in () if scheme.joins_sublayers else scheme.residual_values:
        if not hasattr(scheme, f"{scheme.sublayers[0]}_{name}"):
            raise PluginError(
                f"{defined_at(type(scheme), 'residual')}residual has the argument {name}, which no "
                f"sublayer has; make it in __init__: self.of_each({name!r}, lambda: parameter(…))"
            )


def parameter_shapes(scheme: Scheme, owners: dict[int, str]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a layer's parameters; raise PluginError for unusable ones.

    owners: id -> name of the parameters of earlier layers; those of this layer are added.
    """
    shapes = {}
    for name, value in scheme.named_parameters(remove_duplicate=False):
        if not has_role(value):
            raise PluginError(
                f"the scheme {scheme.name}: its parameter {name} is torch's, without role and "
                f"start; make it as deepstack.schemes.parameter({sizes(value)}, role='scheme', "
                "start=…)"
            )
        full_name = f"{name} of layer {scheme.layer_index}"
        other = owners.setdefault(id(value), full_name)
        if other != full_name:
            raise PluginError(
                f"the scheme {scheme.name}: {full_name} is the same parameter as {other}; make one "
                "for each: their storage is not shared"
            )
        shapes[name] = tuple(value.shape)
    return shapes


def describe(name: str, shapes: dict[str, tuple[int, ...]]) -> str:
    return f"the parameter {name} {shapes[name]}" if name in shapes else f"no parameter {name}"


def sizes(tensor: Tensor) -> str:
    """Return a tensor's shape as arguments: '3, 4' for (3, 4)."""
    return ", ".join(map(str, tensor.shape))
