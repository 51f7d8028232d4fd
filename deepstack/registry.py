"""Name -> object, with 'did you mean'."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any, Generic, TypeVar

from deepstack.errors import ConfigError, PluginError

T = TypeVar("T")

# The letters beside each key of a keyboard: a slip of the finger is likelier than a wrong letter.
_ROWS = ("1234567890-", "qwertyuiop", "asdfghjkl", "zxcvbnm")
_LONGEST_WORD = 40

PREFIX = "deepstack_plugin_"
"""What the names of plugins' modules begin with."""


class Registry(Generic[T]):
    """The objects of one kind by name; a wrong name raises ConfigError with the nearest one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._objects: dict[str, T] = {}
        self._homes: dict[str, object] = {}  # the module object: a plugin that failed has another

    def register(self, name: str, obj: T) -> None:
        """Add an object.  PluginError for what is no name, or one taken by something else.

        A class or function that is defined again under the same module and name replaces the old,
        as a notebook's cell does that is run again; a plugin's file has no reason to.
        """
        refuse_no_name(self.kind, name)
        if name in self._objects and _origin(self._objects[name]) != _origin(obj):
            taken = _origin(self._objects[name])
            raise PluginError(
                f"the {self.kind} name {name!r} is already taken by {taken}; choose another name"
            )
        home = sys.modules.get(getattr(obj, "__module__", ""))
        if name in self._objects and self._homes[name] is home and PREFIX in str(home):
            raise PluginError(f"the {self.kind} name {name!r} is given twice in this file")
        self._objects[name], self._homes[name] = obj, home

    def __getitem__(self, name: str) -> T:
        try:
            return self._objects[name]
        except (KeyError, TypeError):
            far = nearest(str(name), self.names()) is None
            own = f"; a {self.kind} of your own comes with --plugin FILE" if far else ""
            raise ConfigError(unknown(self.kind, name, self.names()) + own) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._objects

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._objects)

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._objects)

    def items(self) -> list[tuple[str, T]]:
        """The names with their objects, sorted by name."""
        return [(name, self._objects[name]) for name in self.names()]


def refuse_no_name(kind: str, name: object) -> None:
    """Raise PluginError for what cannot be typed as a name, or a decorator without one."""
    if callable(name):
        called = getattr(name, "__name__", "mine")
        raise PluginError(f"@{kind} stands without a name; write @{kind}({called!r})")
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
        return
    spelt = re.sub(r"[^A-Za-z0-9]+", "_", str(name)).strip("_").lower()
    meant = f"; did you mean {spelt!r}?" if re.match(r"[a-z]", spelt) else ""
    raise PluginError(
        f"the {kind} name {name!r}: allowed a word of letters, digits and '_' that begins with a "
        f"letter (at most 64){meant}"
    )


def place_of(function: Any) -> str:
    """'my_file.py:12: ' of a function or method, or ''."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code else ""


def line_of(function: Any) -> str:
    """', line 12' of it, or ''."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f", line {code.co_firstlineno}" if code else ""


def unknown(kind: str, name: object, choices: Iterable[str]) -> str:
    """The message for a name that is not there: what was found, the nearest, what is allowed."""
    choices = list(choices)
    found = name if isinstance(name, str) else str(name)
    near = nearest(found, choices)
    shown = found if len(found) <= 40 else found[:37] + "..."
    hint = f"did you mean {near!r}? " if near else ""
    return f"unknown {kind} {shown!r}; {hint}allowed: {', '.join(choices) or 'none'}"


def import_all(package_name: str, package_path: Iterable[str]) -> None:
    """Import every module of a package, so that what is defined there registers itself."""
    for module in sorted(info.name for info in pkgutil.iter_modules(list(package_path))):
        importlib.import_module(f"{package_name}.{module}")


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a mistyped word most probably meant, or None when none is near.

    Nearness is the edit distance with transpositions (Damerau 1964) in which the slips that
    fingers make (a neighbouring key, a doubled letter, two letters swapped, a missed underscore)
    cost less than other letters; upper case and '-' for '_' cost nothing.  A whole part of a name
    ('batch' for batch_size) counts as near too.
    """
    if not word or len(word) > _LONGEST_WORD:
        return None
    plain = _normal(word)
    choices = list(dict.fromkeys(choices))
    limit = min(max(1.0, len(plain) / 3), 4.0)
    costs = [_distance(plain, _normal(choice), limit) for choice in choices]
    cost = min(costs, default=math.inf)
    best = choices[costs.index(cost)] if choices else None
    if cost <= 1 and (len(plain) > 1 or cost < 1):
        return best
    parts = set(plain.split("_"))
    holders = [c for c in choices if parts <= set(_normal(c).split("_"))]
    if not holders and len(plain) >= 3:
        holders = [c for c in choices if _normal(c).startswith(plain)]
    if len(holders) == 1:
        return holders[0]
    return best if len(plain) > 2 and cost <= limit else None


def _normal(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def _origin(obj: object) -> str:
    obj = getattr(obj, "experiment", obj)  # a claim's: it is defined again as a function is
    name = getattr(obj, "__qualname__", None)
    return f"{getattr(obj, '__module__', '?')}.{name}" if name else repr(obj)


def _beside(row: int, column: int) -> set[str]:
    # each row of keys stands about half a key to the right of the one above
    places = [(row, column - 1), (row, column + 1), (row - 1, column), (row - 1, column + 1)]
    places += [(row + 1, column), (row + 1, column - 1)]
    return {_ROWS[r][c] for r, c in places if 0 <= r < len(_ROWS) and 0 <= c < len(_ROWS[r])}


_BESIDE = {key: _beside(r, c) for r, keys in enumerate(_ROWS) for c, key in enumerate(keys)}


@lru_cache(maxsize=1024)
def _missed(choice: str) -> tuple[float, ...]:
    """What it costs to leave out each letter."""
    before = " " + choice
    return tuple(
        0.5 if letter == "_" else 0.8 if letter == previous else 0.9
        for letter, previous in zip(choice, before, strict=False)
    )


@lru_cache(maxsize=64)
def _extra(word: str) -> tuple[float, ...]:
    """What it costs to have typed each letter needlessly."""
    costs = []
    for i, letter in enumerate(word):
        around = word[max(i - 1, 0) : i] + word[i + 1 : i + 2]
        slip = 0.8 if any(letter in _BESIDE.get(a, ()) for a in around) else 1.0
        costs.append(0.5 if letter == "_" else 0.6 if letter in around else slip)
    return tuple(costs)


def _distance(word: str, choice: str, limit: float) -> float:
    """What it costs to mistype `choice` as `word`; infinity when that is above the limit."""
    # an extra or missing letter costs at least 0.5, so lengths alone rule most choices out
    if abs(len(choice) - len(word)) * 0.5 > limit:
        return math.inf
    extra, missed = _extra(word), _missed(choice)
    # rows of the usual table; row[j] = cost between the letters so far and the first j of choice
    row = [0.0, *accumulate(missed)]
    above: list[float] = []
    before = ""
    for a, cost in zip(word, extra, strict=True):
        above, two_above, row = row, above, [row[0] + cost]
        beside = _BESIDE.get(a, ())
        for j, b in enumerate(choice):
            wrong = 0.0 if a == b else 0.7 if b in beside else 1.0
            best = min(above[j] + wrong, above[j + 1] + cost, row[j] + missed[j])
            if j and two_above and a == choice[j - 1] and before == b and a != b:
                best = min(best, two_above[j - 1] + 0.7)
            row.append(best)
        if min(row) > limit and min(above) > limit:
            return math.inf
        before = a
    return row[-1]
