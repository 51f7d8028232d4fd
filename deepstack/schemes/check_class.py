"""Checks of a scheme class at its definition; errors name the file and line."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from deepstack.errors import PluginError
from deepstack.registry import line_of, nearest

# class methods -> their positional arguments; further arguments are options, or listed in MORE
OF_A_DEPTH: dict[str, tuple[str, ...]] = {
    "alpha": ("depth",),
    "beta": ("depth",),
    "gain": ("role", "layer", "depth"),
    "optim": ("role", "depth"),
    "project": ("role", "matrices"),
}
MORE = {"optim": {"optimizer"}, "gain": {"place", "qkv"}}
# methods of a layer -> their positional arguments
OF_A_LAYER: dict[str, tuple[str, ...]] = {
    "__init__": ("layer", "depth", "parts"),
    "enter": ("x",),
    "leave": ("stream", "norm"),
    "pass_over": ("x",),
    "at_step": ("step",),
    "post_scale": (),
}
SETTINGS = (
    "families",
    "merges",
    "entry_norm",
    "final_norm",
    "stream_norms",
    "normalised",
    "norms_per_sublayer",
    "uniform",
)
# methods that an instance attribute must not hide
CALLED = (
    *OF_A_DEPTH,
    *(n for n in OF_A_LAYER if n != "__init__"),
    "residual",
    "layer",
    "calibrate",
    "tap",
)
KNOWN = (*OF_A_DEPTH, *OF_A_LAYER, "residual", "layer", "calibrate", *SETTINGS)


def check_class(cls: Any, base: Any, options: Sequence[str]) -> None:
    """Raise PluginError if a scheme class is unusable or would not do as its author intends.

    It checks the docstring, misspelt names and the arguments of methods.  cls: a subclass of
    `base`, which is Scheme; options: the keyword-only arguments of its __init__.
    """
    what = f"the scheme {cls.name}"
    if not (vars(cls).get("__doc__") or "").strip():
        raise PluginError(
            f"{what}: it needs a docstring that opens with its equation; lists show it"
        )
    for name, value in vars(cls).items():
        if name == "forward":
            raise PluginError(
                f"{what}{line_of(value)}: forward is called by nobody; write residual(self, x, G, "
                "norm), one sublayer joined to the stream, or layer(self, x, *sublayers)"
            )
        declared = name in base.__annotations__  # name, label, paper: each scheme has them
        inherited = declared or any(hasattr(parent, name) for parent in cls.__bases__)
        if not name.startswith("_") and not inherited:
            meant = nearest(name, KNOWN)
            if meant:
                raise PluginError(
                    f"{what}{line_of(value)}: a scheme has no {name}; did you mean {meant}? what "
                    "is your own may be called _" + name
                )
    for name, given in OF_A_DEPTH.items():
        if name in vars(cls):
            known = {*options, *MORE.get(name, {"place"})}
            refuse_class_method(what, cls, name, given, known)
    for name, given in OF_A_LAYER.items():
        if name in vars(cls):
            named = options if name == "__init__" else ()
            refuse_call(what, vars(cls)[name], ("self", *given), named)
    if "layer" in vars(cls):
        between: list[tuple[str, ...]] = [()]
        if "encoder_decoder" in cls.families:
            between.append(("cross_attention",))
        for more in between:
            sublayers = ("attention", *more, "feed_forward")
            refuse_call(what, vars(cls)["layer"], ("self", "x", *sublayers))
    if "residual" in vars(cls) and cls.layer is base.layer:
        count = cls.norms_per_sublayer
        norms = [f"norm{i}" for i in range(1, count + 1)] if count > 1 else ["norm"] * count
        refuse_call(what, vars(cls)["residual"], ("self", "x", "G", *norms))


def refuse_class_method(
    what: str, cls: type, name: str, given: tuple[str, ...], known: set[str]
) -> None:
    """Raise PluginError for a method such as alpha or gain that needs more than its class."""
    value, right = vars(cls)[name], f"@classmethod def {name}(cls, {', '.join(given)})"
    if not isinstance(value, classmethod | staticmethod):
        found = "takes self" if callable(value) else f"is {value!r}"
        raise PluginError(
            f"{what}{line_of(value)}: {name} {found}; it is asked before there is a layer: {right}"
        )
    function = value.__func__
    own = ("cls", *given) if isinstance(value, classmethod) else given
    passed = known & set(inspect.signature(function).parameters)
    refuse_call(what, function, own, sorted(passed))


def refuse_call(
    what: str, function: Any, given: tuple[str, ...], named: Sequence[str] = ()
) -> None:
    """Raise PluginError if a function does not take these arguments, in this order."""
    if not callable(function):
        return
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    swapped = any(place in given and given.index(place) != i for i, place in enumerate(places))
    try:
        signature.bind(*given, **dict.fromkeys(named))
        wrong = "their order is another" if swapped else ""
    except TypeError as error:
        wrong = str(error)
    if wrong:
        name = function.__name__
        written = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        raise PluginError(
            f"{what}{line_of(function)}: found {name}({written}); allowed "
            f"{name}({', '.join(given)}): {wrong}"
        )
