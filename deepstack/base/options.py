"""Options of tasks and schemes: their types and defaults, validated and described."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, get_origin, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from deepstack.base.allowed import describe, schema_of
from deepstack.base.errors import ConfigError, PluginError
from deepstack.base.registry import nearest, unknown

STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class FirstDefault:
    """States, in an option's annotation, the default that it had before the present one.

    The identity of a run leaves out options with their first default.  So a changed default changes
    no hash: a run of the first default keeps its folder and its checkpoints.
    """

    value: Any


class Option(NamedTuple):
    """An option: its annotation and its default."""

    annotation: Any
    default: Any

    @property
    def first_default(self) -> Any:
        """The value that the identity of a run leaves out (see `FirstDefault`)."""
        marks = getattr(self.annotation, "__metadata__", ())
        return next((m.value for m in marks if isinstance(m, FirstDefault)), self.default)

    @property
    def type(self) -> str:
        """Its type in words: "a number above 0 up to 1", "non-empty text or null"."""
        try:
            return describe(schema_of(self.annotation))
        except PydanticUserError:
            return getattr(self.annotation, "__name__", str(self.annotation))

    @property
    def description(self) -> str:
        """The description in its annotation, or ''."""
        return FieldInfo.from_annotation(self.annotation).description or ""


OptionsByName = Mapping[str, Option]
"""The options of one task or scheme, by name."""


def validated(
    options: OptionsByName, values: Mapping[str, Any], *, kind: str, name: str, section: str
) -> dict[str, Any]:
    """Return the values with the types of their options.

    kind, name: the owner in messages ('task', 'text').
    section: the dotted key of the options in a configuration.

    Raises ConfigError with one line for each unknown option (with the nearest known one), wrong
    type and value out of range.
    """
    problems: dict[str, str] = {}
    result = {}
    names = sorted(options)
    beside = ["name", "seq_len"] if section == "task" else []  # keys of the section for all tasks
    for key, value in values.items():
        if key not in options:
            problems[key] = unknown(
                f"{name} option", key, names if nearest(key, names) else names + beside
            )
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(options[key].annotation, config=STRICT)
            if isinstance(value, list):  # in JSON a list may be a tuple
                result[key] = adapter.validate_json(json.dumps(value, default=str))
            else:
                result[key] = adapter.validate_python(value)
        except PydanticUserError as error:
            raise PluginError(f"{kind} {name!r}: option {key!r}: {error.message}") from error
        except ValidationError as error:
            reasons = [e["msg"] for e in error.errors() if e["type"] == "value_error"]
            reason = "".join(f"; {text.removeprefix('Value error, ')}" for text in reasons)
            problems[key] = f"found {_show(value)}; allowed {options[key].type}{reason}"
    if problems:
        lines = [f"{section}.{key}: {problem}" for key, problem in problems.items()]
        raise ConfigError("\n".join(lines), key=f"{section}.{next(iter(problems))}")
    return result


@cache
def options_of_function(function: Callable[..., Any], owner: str) -> dict[str, Option]:
    """Return the keyword-only parameters of a function, a method or `__init__`.

    owner: in messages ("task 'text'").

    Raises PluginError for annotations that cannot be read.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # evaluating an annotation can raise anything
        raise PluginError(f"{owner}: its annotations cannot be read: {error}") from error
    return {
        key: Option(hints.get(key, Any), parameter.default)
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def options_of_class(
    cls: type, base: type, inherited: OptionsByName, owner: str
) -> dict[str, Option]:
    """Return the inherited options and the annotated attributes of a class that have a default.

    Excluded are names that begin with '_', attributes of `base`, and those annotated as ClassVar.
    Raises PluginError for a name that every object of `base` has: the object's value would hide it.
    """
    known = {*dir(base), *inspect.get_annotations(base)}
    names = [
        key
        for key in inspect.get_annotations(cls)
        if key in vars(cls) and key[0] != "_" and key not in known
    ]
    try:
        hints = inspect.get_annotations(cls, eval_str=True) if names else {}
    except Exception as error:  # evaluating an annotation can raise anything
        raise PluginError(f"{owner}: its annotations cannot be read: {error}") from error
    hidden = {key for key in inspect.get_annotations(base) if key not in vars(base)}
    for key in [key for key in inspect.get_annotations(cls) if key in hidden & {*vars(cls)}]:
        raise PluginError(f"{owner}: every one has {key}; give the option another name")
    annotations = {key: option.annotation for key, option in inherited.items()}
    for key in names:
        if ClassVar not in (hints[key], get_origin(hints[key])):
            annotations[key] = hints[key]
    return {key: Option(annotation, getattr(cls, key)) for key, annotation in annotations.items()}


def _show(value: Any) -> str:
    """Return a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
