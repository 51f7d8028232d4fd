"""What no stack can be built of: schemes that are not what they must be, refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from deepstack.errors import PluginError
from deepstack.schemes.scheme import Scheme
from deepstack.speed.parameter import RoleParameter


def refuse_unlike(schemes: Sequence[Scheme]) -> None:
    """Raise PluginError where the schemes of a stack's layers cannot be given storage.

    A parameter over all layers is one tensor, a row a layer; so each layer needs the same ones.
    """
    names: dict[int, str] = {}  # by identity: all of them are alive
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
    """Name -> shape of a layer's own parameters; names: of those of the layers before it."""
    what = f"the scheme {own.name}"
    if "slots" not in vars(own).get("_modules", {}):
        raise PluginError(
            f"{what}: its __init__ does not call super().__init__(layer, depth, parts); that comes "
            "first"
        )
    found = {}
    for name, value in own.named_parameters(remove_duplicate=False):
        if not isinstance(value, RoleParameter):
            raise PluginError(
                f"{what}: its parameter {name} is torch's, without role and start; make it as "
                f"deepstack.schemes.parameter({', '.join(map(str, value.shape))}, role='scheme', "
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
