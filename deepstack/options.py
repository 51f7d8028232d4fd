"""Options of a function: its keyword-only parameters, validated and described."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from deepstack.errors import ConfigError, PluginError
from deepstack.registry import unknown


class Option(NamedTuple):
    """One option, as `deepstack list` shows it."""

    name: str
    type: str
    default: Any
    description: str


def options_of(
    function: Callable[..., Any], *, given: tuple[str, ...], kind: str, name: str
) -> list[Option]:
    """Return the keyword-only parameters of a function that are options.

    given: parameters that are not options.  kind, name: owner in messages ('task', 'text').
    """
    owner = f"{kind} {name!r}"
    return [
        Option(
            name=key,
            type=_describe(annotation),
            default=default,
            description=FieldInfo.from_annotation(annotation).description or "",
        )
        for key, (annotation, default) in _signature(function, given, owner).items()
    ]


def validated(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    *,
    given: tuple[str, ...] = (),
    kind: str,
    name: str,
    section: str,
) -> dict[str, Any]:
    """Return the values with the types of the function's parameters, ready to be passed to it.

    section: their dotted key in a configuration.  Raises ConfigError with one line for each unknown
    option (with the nearest known one), wrong type and value out of range.
    """
    owner = f"{kind} {name!r}"
    known = _signature(function, given, owner)
    problems: dict[str, str] = {}
    result = {}
    for key, value in values.items():
        if key not in known:
            problems[key] = unknown(f"{name} option", key, sorted(known))
            continue
        annotation = known[key][0]
        try:
            result[key] = _adapter(owner, key, annotation).validate_python(value)
        except ValidationError as error:
            reasons = [e["msg"] for e in error.errors() if e["type"] == "value_error"]
            reason = "".join(f"; {text.removeprefix('Value error, ')}" for text in reasons)
            problems[key] = f"found {_show(value)}; allowed {_describe(annotation)}{reason}"
    if problems:
        lines = [f"{section}.{key}: {problem}" for key, problem in problems.items()]
        raise ConfigError("\n".join(lines), key=f"{section}.{next(iter(problems))}")
    return result


@cache
def _signature(
    function: Callable[..., Any], given: tuple[str, ...], owner: str
) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and the default of every option."""
    called = function
    if isinstance(function, type):  # the __init__ of the class, or the inherited one
        called = next(vars(c)["__init__"] for c in function.__mro__ if "__init__" in vars(c))
    try:
        hints = get_type_hints(called, include_extras=True)
    except Exception as error:  # evaluating an annotation can raise anything
        raise PluginError(f"{owner}: its annotations cannot be read: {error}") from error
    return {
        key: (hints.get(key, Any), parameter.default)
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in given
    }


def _adapter(owner: str, key: str, annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))
    except PydanticUserError as error:
        raise PluginError(f"{owner}: option {key!r}: {error.message}") from error


def _show(value: Any) -> str:
    """Return a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


_WORDS = {int: "integer", float: "number", str: "string", bool: "true or false", NoneType: "null"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _describe(annotation: Any, bounds: Mapping[str, Any] | None = None) -> str:
    """Return an annotation in words: "number > 0, <= 1", "non-empty string or null"."""
    bounds = bounds or {}
    if get_origin(annotation) is Annotated:
        info = FieldInfo.from_annotation(annotation)
        names = (*_SIGNS, "min_length", "max_length")
        limits = {n: getattr(m, n) for m in info.metadata for n in names if hasattr(m, n)}
        return _describe(info.annotation, limits)
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_describe(part, bounds) for part in inside)
    if origin is Literal:
        return " or ".join(_show(choice) for choice in inside)
    least, most = bounds.get("min_length"), bounds.get("max_length")
    if origin is not None and inside:
        size = f"{most} values" if least == most is not None else "values"
        return f"list of {size}, each {_describe(inside[0])}"
    word = _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))
    if annotation is str and least:
        return f"non-empty {word}"
    ranges = ", ".join(f"{sign} {bounds[n]:g}" for n, sign in _SIGNS.items() if n in bounds)
    return f"{word} {ranges}" if ranges and annotation in (int, float) else word
