"""Checks of schemes: a class at its definition, its instances in a stack, and the norm."""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from deepstack.base.errors import PluginError
from deepstack.base.registry import line_of, nearest, place_of
from deepstack.schemes.role import has_role

# Members of a scheme's class that are not methods.
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
ROUNDING = 1e-4  # of the largest number of an output
# Arguments that class methods receive if they name them; all but `config` for earlier plugins.
GIVEN_BY_NAME = ("config", "place", "qkv", "optimizer")


def check_class(cls: Any, base: Any) -> None:
    """Raise PluginError if a scheme class is unusable or would not do as its author intends.

    It checks the options, the docstring, the settings, misspelt names and the arguments of methods.

    cls: a subclass of `base`, which is Scheme.
    """
    owner = f"the scheme {cls.name}"
    check_settings(owner, cls, base)
    count = cls.norms_per_sublayer
    norms = [f"norm{i + 1}" for i in range(count)] if count > 1 else ["norm"] * count
    arguments = {
        "__init__": (("self", "layer", "depth", "parts"), cls.argument_options),
        "residual": (("self", "x", "G", *norms), cls.residual_values),
        "layer": (("self", "x", "attention", "feed_forward"), ()),
    }
    for name, value in vars(cls).items():
        check_name(owner, name, value, cls, base)
        if name == "residual" and cls.joins_sublayers:
            continue  # the scheme's own `layer` calls it
        if name in arguments:
            check_arguments(owner, value, *arguments[name])
        elif isinstance(method := vars(base).get(name), classmethod):
            check_class_method(owner, name, value, method, cls)
        elif inspect.isfunction(method) and name[0] != "_" and name != "calibrate":
            check_arguments(owner, value, tuple(inspect.signature(method).parameters), ())
    if "layer" in vars(cls) and "encoder_decoder" in cls.families:
        three = ("self", "x", "attention", "cross_attention", "feed_forward")
        check_arguments(owner, cls.layer, three, ())


def check_settings(owner: str, cls: Any, base: Any) -> None:
    """Raise PluginError for an option without a type, a missing docstring or a wrong setting."""
    for name, option in cls.argument_options.items():
        if option.annotation is Any or option.default is inspect.Parameter.empty:
            raise PluginError(f"{owner}: option {name!r} needs a type annotation and a default")
    if not (vars(cls).get("__doc__") or "").strip():
        raise PluginError(
            f"{owner}: it needs a docstring that opens with its equation; lists show it"
        )
    for name in SETTINGS[1:]:  # all but families
        if not isinstance(value := getattr(cls, name), int) or value < 0:
            is_bool = isinstance(getattr(base, name), bool)
            allowed = "True or False" if is_bool else "a whole number from 0 on"
            raise PluginError(f"{owner}: {name} is {value!r}; allowed {allowed}")


def check_name(owner: str, name: str, value: Any, cls: Any, base: Any) -> None:
    """Raise PluginError for a new public name that is nearly one of a scheme's members."""
    methods = [n for n in vars(base) if n[0] != "_" and callable(getattr(base, n))]
    known = (*methods, *SETTINGS)
    declared = name in base.__annotations__ or name in cls.attribute_options
    is_new = not declared and not any(hasattr(parent, name) for parent in cls.__bases__)
    if is_new and not name.startswith("_") and (meant := nearest(name, known)):
        raise PluginError(
            f"{owner}{line_of(value)}: a scheme has no {name}; did you mean {meant}? what is your "
            f"own may be called _{name}"
        )


def check_class_method(owner: str, name: str, value: Any, method: Any, cls: Any) -> None:
    """Raise PluginError for a method such as alpha or gain that needs more than its class.

    method: of the base class.  It may also name options and the names in GIVEN_BY_NAME.
    """
    passed = tuple(inspect.signature(method.__func__).parameters)
    if not isinstance(value, classmethod | staticmethod):
        kind = "takes self" if callable(value) else f"is {value!r}"
        raise PluginError(
            f"{owner}{line_of(value)}: {name} {kind}; it is asked before there is a layer: "
            f"@classmethod def {name}({', '.join(passed)})"
        )
    options = {*cls.attribute_options, *cls.argument_options, *GIVEN_BY_NAME}
    named = options & inspect.signature(value.__func__).parameters.keys()
    check_arguments(owner, value.__func__, passed[isinstance(value, staticmethod) :], named)


def check_arguments(
    owner: str, function: Any, passed: tuple[str, ...], named: Collection[str]
) -> None:
    """Raise PluginError if a function does not take these arguments, in this order."""
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


def check_layers(schemes: Sequence[Any], base: Any) -> None:
    """Raise PluginError unless the schemes of a stack's layers have equal parameters with roles.

    One tensor stores a parameter for all layers, one row each; so each layer needs the same ones.
    """
    owners: dict[int, str] = {}  # of each parameter, by identity
    first: dict[str, str] | None = None
    for scheme in schemes:
        check_attributes(scheme, base)
        shapes = {}
        for name, value in scheme.named_parameters(remove_duplicate=False):
            here = f"{name} of layer {scheme.layer_index}"
            if (other := owners.setdefault(id(value), here)) != here:
                raise PluginError(
                    f"the scheme {scheme.name}: {here} is the same parameter as {other}; make one "
                    "for each: their storage is not shared"
                )
            if not has_role(value):
                raise PluginError(
                    f"the scheme {scheme.name}: its parameter {name} is torch's, without role and "
                    f"start; make it as {as_parameter(value)}"
                )
            shapes[name] = f"the parameter {name} {tuple(value.shape)}"
        first = shapes if first is None else first
        for name in first | shapes:
            here, there = (every.get(name, f"no parameter {name}") for every in (shapes, first))
            if here != there:
                raise PluginError(
                    f"the scheme {scheme.name}: layer {scheme.layer_index} has {here}, layer 1 "
                    f"{there}; every layer needs the same parameters, used there or not"
                )


def check_roles(norm: Any) -> None:
    """Raise PluginError unless the parameters of a norm have roles."""
    for name, value in norm.named_parameters():
        if not has_role(value):
            raise PluginError(
                f"the norm {norm.name}: its parameter {name} is torch's, without role and start; "
                f"make it as {as_parameter(value, 'self.roles[0]')}"
            )


def reads_later(compute: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether the values of a position change with the later positions of x.

    x: (batch, seq, width).  Numbers that are not finite before do not count, and both passes draw
    the same random numbers.
    """
    for cut in range(1, x.shape[1]):
        random = torch.Generator().manual_seed(cut)
        other = x.clone()
        other[:, cut:] = torch.randn(other[:, cut:].shape, generator=random)
        passes = []
        for one in (x, other):
            torch.manual_seed(0)
            passes.append(compute(one)[:, :cut])
        before, after = passes
        counts = torch.isfinite(before)
        if counts.any():
            known = before[counts]
            if not (after[counts] - known).abs().max() <= ROUNDING * known.abs().max():
                return True
    return False


def check_norm(norm: Any, z: Tensor) -> None:
    """Raise PluginError unless a norm's output for z is a tensor like z, token by token.

    z: (batch, seq, width).
    """
    found = norm(z)
    if isinstance(found, Tensor) and found.shape == z.shape and found.dtype == z.dtype:
        if norm.by_token and reads_later(norm, z):
            raise PluginError(
                f"the norm {norm.name}: {place_of(type(norm).forward)}a token's output depends on "
                "other tokens; add by_token = False to the class, and a decoder refuses it"
            )
        return
    text = "None, as without `return`" if found is None else type(found).__name__
    if isinstance(found, Tensor):
        text = f"{tuple(found.shape)} of {found.dtype}"
    raise PluginError(
        f"the norm {norm.name}: {place_of(type(norm).forward)}forward gave {text} for z = "
        f"{tuple(z.shape)} of {z.dtype}; allowed a tensor like z"
    )


def check_attributes(scheme: Any, base: Any) -> None:
    """Raise PluginError for tensors without a role, hidden methods of base and missing values."""
    owner = f"the scheme {scheme.name}"
    if "slots" not in vars(scheme).get("_modules", {}):
        raise PluginError(
            f"{defined_at(type(scheme), '__init__')}its __init__ does not call super().__init__("
            "layer, depth, parts); that comes first"
        )
    for name, value in (vars(scheme) | scheme._modules).items():
        if isinstance(value, Tensor):
            raise PluginError(
                f"{owner}: {name} is a tensor of its own, neither trained nor kept nor moved to a "
                f"device; trained: {as_parameter(value)}; constant: "
                f"self.register_buffer({name!r}, …, persistent=False)"
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
                f"sublayer has; make it in setup: self.add_per_sublayer({name!r}, …)"
            )


def as_parameter(tensor: Tensor, role: str = "'scheme'") -> str:
    """Return the call that makes a trained parameter of a tensor's shape; role: its expression."""
    sizes = ", ".join(map(str, tensor.shape or (1,)))
    return f"deepstack.schemes.parameter({sizes}, role={role}, start=…)"
