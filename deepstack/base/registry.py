"""Registries that map names to objects and suggest the nearest name for an unknown one."""

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from deepstack.base.errors import ConfigError, PluginError

T = TypeVar("T")

LONGEST_WORD = 40
MOST_CHOICES = 8  # the number of names that a message lists after a suggestion
# The least similarity (`difflib`, 0 to 1) of a suggestion; one mistake weighs more in a short word.
SIMILAR, SIMILAR_SHORT, SHORT = 0.65, 0.5, 3
SIMILAR_MIDDLE, MIDDLE = 0.72, 6  # of words up to so many letters
LISTED = {
    **{kind: f"{kind}s" for kind in ("scheme", "task", "chart", "diagnostic", "claim")},
    "analysis": "analyses",
}
"""Kinds whose names `deepstack list` prints, and the word for it."""

PREFIX = "deepstack_plugin_"
"""Prefix of the names of plugins' modules."""


class Registry(Mapping[str, T]):
    """The objects of one kind by name, sorted; a wrong name raises ConfigError with the nearest.

    hyphens: whether names may contain '-', as in DN-5.
    """

    def __init__(self, kind: str, hyphens: bool = False) -> None:
        self.kind = kind
        self.hyphens = hyphens
        self._objects: dict[str, T] = {}

    def register(self, name: str, obj: T) -> None:
        """Add an object.  Raise PluginError for an invalid name, or one that another object has.

        A class or function defined again under the same module and name replaces the old one, as
        when a notebook cell runs again.
        """
        may_have = self.hyphens and isinstance(name, str)
        refuse_no_name(self.kind, name.replace("-", "_") if may_have else name)
        if name in self and (origin := _origin(self[name])) != _origin(obj):
            raise PluginError(
                f"the {self.kind} name {name!r} is already taken by {origin}; choose another name"
            )
        self._objects[name] = obj

    def __getitem__(self, name: str) -> T:
        if name in self:
            return self._objects[name]
        if nearest(str(name), self) is not None:
            raise ConfigError(unknown(self.kind, name, self))
        files = [one.removeprefix(PREFIX) + ".py" for one in sys.modules if one.startswith(PREFIX)]
        article = "an" if self.kind[0] in "aeiou" else "a"
        hint = f"{article} {self.kind} of your own comes with --plugin FILE"
        if files:
            hint = f"{', '.join(sorted(files))} of --plugin defines no {self.kind} of that name"
        command = f"deepstack list {LISTED[self.kind]}" if self.kind in LISTED else ""
        raise ConfigError(f"{unknown(self.kind, name, self, command)}; {hint}")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._objects

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._objects))

    def __len__(self) -> int:
        return len(self._objects)

    def __repr__(self) -> str:
        return f"Registry of {len(self)} {self.kind}s: {', '.join(self)}"

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return list(self)


def refuse_no_name(kind: str, name: object) -> None:
    """Raise PluginError for an invalid name, or for a decorator without a name."""
    if callable(name):
        called = getattr(name, "__name__", "mine")
        raise PluginError(f"@{kind} stands without a name; write @{kind}({called!r})")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
        raise PluginError(
            f"the {kind} name {name!r}: allowed a word of letters, digits and '_' that begins with "
            "a letter (at most 64)"
        )


def place_of(function: Any) -> str:
    """Return 'my_file.py:12: ' for a function or method, or ''."""
    code = _code_of(function)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code else ""


def line_of(function: Any) -> str:
    """Return ', line 12' for a function or method, or ''."""
    code = _code_of(function)
    return f", line {code.co_firstlineno}" if code else ""


def _code_of(function: Any) -> Any:
    return getattr(inspect.unwrap(function), "__code__", None)


def unknown(
    kind: str,
    name: object,
    choices: Iterable[str],
    command: str = "",
    most: int = MOST_CHOICES,
) -> str:
    """Return the message for an unknown name, with the nearest name and the allowed names.

    If there are more than `most` allowed names, they are left out after a suggestion: the nearest
    name, or those of which the word is a part.  With a command that lists them, the message has the
    nearest ones and the command.
    """
    word, names = str(name), list(choices)
    # The same word has another type, such as the text '0' for the number 0.
    near = None if word in names else nearest(word, names)
    more = len(names) - most
    shown = word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..."
    if near and more > 0:
        return f"unknown {kind} {shown!r}; did you mean {near!r}?"
    wholes = [name for name in names if word in name.split("_")]
    if more > 0 and 0 < len(wholes) <= most and word not in names:
        *first, last = wholes
        listed = f"{', '.join(first)} or {last}" if first else last
        return f"unknown {kind} {shown!r}; did you mean {listed}?"
    if command and more > 0:
        names = get_close_matches(shown, names, most, cutoff=0.0)
        names[-1] += f" and {more} more ({command})"
    hint = f"did you mean {near!r}? " if near else ""
    return f"unknown {kind} {shown!r}; {hint}allowed: {', '.join(names) or 'none'}"


def import_all(package_name: str, package_path: Iterable[str]) -> None:
    """Import every module of a package, so that its definitions register themselves."""
    for module in pkgutil.iter_modules(package_path):
        importlib.import_module(f"{package_name}.{module.name}")


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a mistyped word most probably meant, or None if none is similar.

    Letter case and '-' for '_' do not count.  The longest choice that begins the word is meant:
    rms by RMSNorm.
    """
    if len(word) > LONGEST_WORD:
        return None
    cutoff, longer = (SIMILAR_SHORT, 1) if len(word) <= SHORT else (SIMILAR, LONGEST_WORD)
    by_form = {_normal(name): name for name in choices if len(name) - len(word) <= longer}
    normal = _normal(word)
    matches = get_close_matches(normal, by_form, 1, cutoff)
    if matches and SHORT < len(word) <= MIDDLE and not matches[0].startswith(normal):
        matches = get_close_matches(normal, by_form, 1, SIMILAR_MIDDLE)
    begin = [form for form in by_form if len(form) >= SHORT and normal.startswith(form)]
    matches = matches or sorted(begin, key=len, reverse=True)
    return by_form[matches[0]] if matches else None


def _normal(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def _origin(obj: object) -> str:
    obj = getattr(obj, "experiment", obj)  # a claim holds its function, which may be redefined
    name = getattr(obj, "__qualname__", None)
    return f"{getattr(obj, '__module__', '?')}.{name}" if name else repr(obj)
