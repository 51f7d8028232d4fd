"""Kinds of definitions that a setting names: schedules, optimizers, activations, …

A definition is a class with a name.  It registers itself, and its options are annotated class
attributes with a default:

    class Polynomial(Schedule, name="polynomial"):
        power: Annotated[float, Field(gt=0, description="the power of the decay")] = 1.0
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, cast

from deepstack.base.errors import ConfigError, PluginError
from deepstack.base.options import OptionsByName, options_of_class, validated
from deepstack.base.registry import Registry

KINDS: dict[str, "Kind[Any]"] = {}
"""The kinds whose modules are imported, by the setting that names a definition."""

D = TypeVar("D", bound="Definition")


class Kind(Registry[type[D]]):
    """The definitions of one kind by name.

    key: the setting that names one; its options are in the section `options_key`.
    base: the base class of the kind's definitions.
    """

    base: type[D]

    def __init__(self, kind: str, key: str) -> None:
        super().__init__(kind)
        self.key, self.options_key = key, f"{key}_options"
        self._configured: dict[tuple[type[D], str], type[D]] = {}
        KINDS[key] = self

    def look_up(self, name: str) -> type[D]:
        """Return a definition; raise ConfigError with the setting for an unknown name."""
        try:
            return self[name]
        except ConfigError as error:
            raise ConfigError(f"{self.key}: {error}", key=self.key) from None

    def configured(self, name: str, values: Mapping[str, Any]) -> type[D]:
        """Return a definition whose attributes have these values of options.

        Raises ConfigError for an unknown name or option, and for a value that is not allowed.
        """
        cls = self.look_up(name)
        if not values:
            return cls
        key = cls, json.dumps(values, sort_keys=True, default=str)
        if key not in self._configured:
            section = self.options_key
            known = validated(cls.options, values, kind=self.kind, name=name, section=section)
            named = {one: getattr(cls, one) for one in ("__module__", "__qualname__", "__doc__")}
            self._configured[key] = cast(type[D], type(cls.__name__, (cls,), {**named, **known}))
        return self._configured[key]

    def of(self, config: Any) -> type[D]:
        """Return the definition that a configuration names, with its options."""
        return self.configured(*self.chosen(config))

    def chosen(self, config: Any) -> tuple[str, dict[str, Any]]:
        """Return the name and the options in a configuration."""
        return attrgetter(self.key)(config), dict(attrgetter(self.options_key)(config))


class Definition:
    """The base of all definitions; the first class below it is the base of a kind.

    name: the name in a configuration; a class without one is not registered.
    options: its options and the inherited ones.
    """

    name: ClassVar[str] = ""
    options: ClassVar[OptionsByName] = {}
    _kind: ClassVar[Any] = None
    _base: ClassVar[Any] = None

    def __init_subclass__(cls, *, kind: Kind[Any] | None = None, name: str = "") -> None:
        if isinstance(kind, Kind):
            cls._kind, cls._base, kind.base = kind, cls, cls
            return
        if kind is not None:
            raise PluginError(f"{cls.__name__}: found kind={kind!r}; allowed name={str(kind)!r}")
        owner = f"the {cls._kind.kind} {name or cls.__name__}"
        if name and not (cls.__doc__ or "").strip():
            raise PluginError(f"{owner}: its class needs a docstring with its equation")
        cls.options = options_of_class(cls, cls._base, cls.options, owner)
        if name:
            cls.name = name
            cls._kind.register(name, cls)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ConfigError for settings that do not go with this definition."""

    @classmethod
    def equation(cls) -> str:
        """Return the first sentence of the docstring."""
        return (inspect.getdoc(cls) or "").split("\n")[0].split(".  ")[0].rstrip(".")


def definition_of(config: Any, key: str) -> Any:
    """Return the definition that a configuration names, for an estimate.

    None if its kind is not imported, or has no such name: plugins may not be loaded yet, and
    `check_definitions` refuses a wrong one.
    """
    name = attrgetter(key)(config)
    return KINDS[key][name] if key in KINDS and name in KINDS[key] else None


def kinds_of(config: Any) -> Iterator[tuple[Kind[Any], str, dict[str, Any]]]:
    """Yield every imported kind, with the name and the options that a configuration gives."""
    for kind in KINDS.values():
        yield kind, *kind.chosen(config)


def check_definitions(config: Any) -> None:
    """Raise ConfigError for an unknown name, wrong options and settings that do not go with it."""
    for kind, name, values in kinds_of(config):
        kind.configured(name, values).check(config)
