"""Checks of a scheme: its class at its definition, and its instances in a stack."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from deepstack.errors import PluginError
from deepstack.parameters.role import has_role
from deepstack.registry import line_of, nearest, place_of

GIVEN_BY_NAME = {"place", "config", "qkv", "optimizer"}
SETTINGS = (
    "families",
    "merges",
    "entry_norm",
    "final_norm",
    "stream_norms",
    "normalised",
    "norms_per_sublayer",
    "uniform",
    "extra_streams",
)
SUBLAYERS = ("attention", "cross_attention", "feed_forward")


def check_class(cls: Any, base: Any) -> None:
    """Raise PluginError if a scheme class is unusable or would not do as its author intends.

    It checks the options, the docstring, misspelt names and the arguments of methods.
    cls: a subclass of `base`, which is Scheme.
    """
    owner, defined = f"the scheme {cls.name}", vars(cls)
    for name, option in cls.argument_options.items():
        if option.annotation is Any or option.default is inspect.Parameter.empty:
            raise PluginError(f"{owner}: option {name!r} needs a type annotation and a default")
    if not (defined.get("__doc__") or "").strip():
        raise PluginError(
            f"{owner}: it needs a docstring that opens with its equation; lists show it"
        )
    check_names(owner, cls, base)
    options = {*cls.attribute_options, *cls.argument_options, *GIVEN_BY_NAME}
    count = cls.norms_per_sublayer
    norms = [f"norm{i + 1}" for i in range(count)] if count > 1 else ["norm"] * count
    for name, value in defined.items():
        method = vars(base).get(name)
        if isinstance(method, classmethod):
            passed = tuple(inspect.signature(method.__func__).parameters)
            check_class_method(owner, name, value, passed, options)
        elif name == "layer":
            check_arguments(owner, value, ("self", "x", *SUBLAYERS[::2]))
            if "encoder_decoder" in cls.families:
                check_arguments(owner, value, ("self", "x", *SUBLAYERS))
        elif name == "residual":
            if not cls.joins_sublayers:
                check_arguments(owner, value, ("self", "x", "G", *norms), cls.residual_values)
        elif name == "__init__":
            check_arguments(owner, value, ("self", "layer", "depth", "parts"), cls.argument_options)
        elif inspect.isfunction(method) and not name.startswith("_") and name != "calibrate":
            check_arguments(owner, value, tuple(inspect.signature(method).parameters))


def check_names(owner: str, cls: Any, base: Any) -> None:
    """Raise PluginError for `forward`, and for a name that is nearly one of a scheme's members."""
    methods = [name for name in vars(base) if name[0] != "_" and callable(getattr(base, name))]
    known = (*methods, *SETTINGS)
    for name, value in vars(cls).items():
        if name == "forward":
            raise PluginError(
                f"{owner}{line_of(value)}: forward is called by nobody; write residual(self, x, G, "
                "norm), one sublayer joined to the stream, or layer(self, x, *sublayers)"
            )
        # each scheme has the annotated name, label and paper
        declared = name in base.__annotations__ or name in cls.attribute_options
        inherited = declared or any(hasattr(parent, name) for parent in cls.__bases__)
        meant = None if name.startswith("_") or inherited else nearest(name, known)
        if meant:
            raise PluginError(
                f"{owner}{line_of(value)}: a scheme has no {name}; did you mean {meant}? what "
                "is your own may be called _" + name
            )


def check_class_method(
    owner: str, name: str, value: Any, passed: tuple[str, ...], options: Collection[str]
) -> None:
    """Raise PluginError for a method such as alpha or gain that needs more than its class.

    passed: the arguments of the base class's method.  options: further ones that it may have.
    """
    if not isinstance(value, classmethod | staticmethod):
        kind = "takes self" if callable(value) else f"is {value!r}"
        raise PluginError(
            f"{owner}{line_of(value)}: {name} {kind}; it is asked before there is a layer: "
            f"@classmethod def {name}({', '.join(passed)})"
        )
    named = [key for key in inspect.signature(value.__func__).parameters if key in options]
    check_arguments(owner, value.__func__, passed[isinstance(value, staticmethod) :], named)


def check_arguments(
    owner: str, function: Any, passed: tuple[str, ...], named: Collection[str] = ()
) -> None:
    """Raise PluginError if a function does not take these arguments, in this order."""
    if not callable(function):
        return
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    swapped = any(name in passed and passed.index(name) != i for i, name in enumerate(positional))
    problem = "their order is another" if swapped else ""
    try:
        signature.bind(*passed, **dict.fromkeys(named))
    except TypeError as error:
        problem = str(error)
    if problem:
        name = function.__name__
        shown = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        raise PluginError(
            f"{owner}{line_of(function)}: found {name}({shown}); allowed "
            f"{name}({', '.join(passed)}): {problem}"
        )


def defined_at(cls: Any, method: str) -> str:
    """Return where a scheme defines a method: 'the scheme mine: my_file.py:12: '."""
    return f"the scheme {cls.name}: {place_of(getattr(cls, method))}"


def check_equal_parameters(schemes: Sequence[Any], base: Any) -> None:
    """Raise PluginError if the schemes of a stack's layers differ in their parameters.

    One tensor stores a parameter for all layers, one row each; so each layer needs the same ones.
    """
    owners: dict[int, str] = {}  # by identity: none of the parameters is freed meanwhile
    first: dict[str, tuple[int, ...]] = {}
    for scheme in schemes:
        check_attributes(scheme, base)
        shapes = parameter_shapes(scheme, owners)
        first = first or shapes
        for name in {**first, **shapes}:
            here, there = (
                f"the parameter {name} {all_[name]}" if name in all_ else f"no parameter {name}"
                for all_ in (shapes, first)
            )
            if here != there:
                raise PluginError(
                    f"the scheme {scheme.name}: layer {scheme.layer_index} has {here}, layer 1 "
                    f"{there}; every layer needs the same parameters, used there or not"
                )


def check_attributes(scheme: Any, base: Any) -> None:
    """Raise PluginError for tensors without a role, hidden methods of base and missing values."""
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
        if callable(getattr(base, name, None)):
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


def parameter_shapes(scheme: Any, owners: dict[int, str]) -> dict[str, tuple[int, ...]]:
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


def sizes(tensor: Tensor) -> str:
    """Return a tensor's shape as arguments: '3, 4' for (3, 4)."""
    return ", ".join(map(str, tensor.shape))
