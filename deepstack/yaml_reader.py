"""A small, strict YAML: text -> values that know their line and column, or a list of problems.

Taken from YAML 1.2: mappings, sequences, quoted, plain and block scalars, comments, and its core
types (null, true and false, integers, floats), so that `1e-3` is a number and `on` is a string.
Refused by name: anchors, aliases, merge keys, tags, directives, several documents, duplicate keys,
infinities and NaN.  The events come from PyYAML, one after the other; nothing here is recursive
and nothing constructs objects, so that no input can exhaust the stack, the memory or the time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

MAX_BYTES = 64 * 1024
MAX_DEPTH = 16
MAX_PROBLEMS = 20

Scalar = None | bool | int | float | str

_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

# what libyaml and PyYAML say -> what to say; the first that occurs in theirs is taken
_SYNTAX = (
    ("mapping values are not allowed", "a ':' where no key can be", "one `key: value` a line, "
     "keys of one section at the same indentation, and text that holds ': ' in quotes"),
    ("could not find expected ':'", "a line without ':'", "`key: value`"),
    ("unexpected end of stream", "a quote that is never closed", "a closing quote"),
    ("expected ',' or ']'", "a list that is not closed", "`[a, b]`"),
    ("expected ',' or '}'", "a section in braces that is not closed", "`{key: value}`"),
    ("block sequence entries are not allowed", "a '- ' where no list can be", "`[a, b]`"),
    ("did not find expected key", "a line that is not in step with the ones above",
     "keys of one section at the same indentation"),
    ("expected <block end>", "a line that is not in step with the ones above",
     "keys of one section at the same indentation"),
    ("escape", "an unknown escape in double quotes", "\\n, \\t, \\\\ or single quotes"),
    ("expected node content", "a bracket, brace or comma that opens nothing", "`key: value`"),
    ("scanning a block scalar", "text right after '|' or '>'", "the text on the lines below"),
    ("expected <document start>", "a second value after the first", "one value"),
)  # fmt: skip


@dataclass(slots=True)
class Node:
    """A value with its place.  where: 'file:line:column', or the override that it came from."""

    value: dict[str, Node] | list[Node] | Scalar
    where: str
    shown: str
    key_where: str = ""

    def plain(self) -> Any:
        """The value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def at(self, path: tuple[str | int, ...]) -> Node:
        """The node at a path, or the deepest one on the way there."""
        node = self
        for part in path:
            inside = node.value
            if isinstance(inside, dict) and isinstance(part, str) and part in inside:
                node = inside[part]
            elif isinstance(inside, list) and isinstance(part, int) and 0 <= part < len(inside):
                node = inside[part]
            else:
                break
        return node


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it stands, the dotted key (or ''), and what to say.

    relation: the value is wrong only together with that of another key.
    """

    where: str
    key: str
    text: str
    relation: bool = False

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.text) if part)


class _SyntaxProblem(Exception):
    """What stops the reading at once."""


def read(
    data: bytes | str, source: str, limit: int | None = MAX_BYTES
) -> tuple[Node, list[Problem]]:
    """The values of a YAML text and everything that is wrong with it.

    source: what names the text in places.  limit: the bytes that it may have, None for any number.
    """
    empty = Node({}, source, "an empty file")
    try:
        text = _decode(data, source, limit)
    except _SyntaxProblem as error:
        return empty, [error.args[0]]
    reader = _Reader(source)
    try:
        root = reader.build(yaml.parse(text, Loader=_LOADER))
    except _SyntaxProblem as error:
        return empty, [*reader.problems, error.args[0]]
    except yaml.MarkedYAMLError as error:
        return empty, [*reader.problems, _syntax(error, text, source)]
    except (yaml.YAMLError, UnicodeError, ValueError) as error:
        first = str(error).splitlines() or ["unreadable"]
        return empty, [Problem(source, "", f"found what is not YAML: {first[0][:100]}")]
    return root or empty, reader.problems


def scalar(text: str) -> Scalar:
    """A plain scalar by YAML 1.2's core types.  ValueError, saying why, for a refused number."""
    return _short_scalar(text) if len(text) <= 40 else _scalar(text)


def _scalar(text: str) -> Scalar:
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"found {shorten(text)}; allowed a finite number")
    if _INTEGER.fullmatch(text):
        number = int(text, 0) if text[:2] in ("0o", "0x") else _decimal(text)
        if abs(number) >= 2**63:
            raise ValueError(f"found {shorten(text)}; allowed an integer below 2^63")
        return number
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ValueError(f"found {shorten(text)}; allowed a number below 1.8e308")
        return value
    return text


# The configs of a study share most of their values.
_short_scalar = lru_cache(maxsize=1024)(_scalar)


def shorten(text: str, limit: int = 48) -> str:
    """A text cut to a length that fits into a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(text: str) -> str:
    """A text in quotes, cut to a length, with everything that cannot be seen written as escapes."""
    return repr(shorten(text))


def refused(letter: str) -> bool:
    """Whether a character has no business in a configuration: controls, surrogates, strange ends.

    U+2028 and U+2029 would count as ends of lines, and positions were wrong after them.
    """
    if letter.isprintable() or letter in "\t\n\r":
        return False
    return (
        unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or letter in "\ufeff\ufffe\uffff"
    )


def show(value: Scalar, written: str) -> str:
    """A plain scalar for a message: as it was written; text in quotes."""
    if value is None:
        return "nothing"
    return quoted(written) if isinstance(value, str) else shorten(written)


def _decimal(text: str) -> int:
    # int() refuses more than 4300 digits with an error of its own, and is slow before that
    return int(text) if len(text) <= 40 else 2**63


def _decode(data: bytes | str, source: str, limit: int | None) -> str:
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if limit is not None and len(data) > limit:
        size = f"{len(data):,} bytes" if len(data) > limit + 1 else f"more than {limit} bytes"
        raise _SyntaxProblem(
            Problem(source, "", f"found {size}; allowed a configuration of at most 64 KiB")
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = _position(data[: error.start].decode("utf-8"), source)
        found = f"found the byte 0x{data[error.start]:02x}, which is not UTF-8"
        hint = "; save the file as UTF-8"
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            found, hint = "found UTF-16", "; save the file as UTF-8"
        raise _SyntaxProblem(Problem(where, "", f"{found}; allowed UTF-8 text{hint}")) from None
    text = text.removeprefix("\ufeff")
    if not text.replace("\n", "").isprintable():
        for index, letter in enumerate(text):
            if refused(letter):
                where = _position(text[:index], source)
                name = f"the control character {letter!r}"
                raise _SyntaxProblem(Problem(where, "", f"found {name}; allowed printable text"))
    return text


def _position(before: str, source: str) -> str:
    line = before.replace("\r\n", "\n").replace("\r", "\n").rsplit("\n", 1)
    return f"{source}:{before.count(chr(10)) + 1}:{len(line[-1]) + 1}"


def _syntax(error: yaml.MarkedYAMLError, text: str, source: str) -> Problem:
    said = f"{error.context or ''} {error.problem or ''}"
    mark = error.problem_mark or error.context_mark
    # for what is never closed, the place where it was opened says more than the end of the file
    opened = any(word in said for word in ("end of stream", "',' or ']'", "',' or '}'"))
    mark = error.context_mark if opened and error.context_mark else mark
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
    letter = before = ""
    if mark:
        lines = text.split("\n")
        line = lines[mark.line] if mark.line < len(lines) else ""
        letter, before = line[mark.column : mark.column + 1], line[: mark.column]
        if "\t" in line[: len(line) - len(line.lstrip())] or letter == "\t":
            return Problem(where, "", "found a tab; allowed spaces, two for each level")
    if "cannot start any token" in said and letter:
        found = f"found a value that begins with {letter!r}"
        return Problem(where, "", f"{found}; allowed a plain word or number, or text in quotes")
    if re.search(r"""^[^#]*:\s*(".*"|'.*')\s*$""", before) and "expected key" in said:
        return Problem(where, "", "found text after a closing quote; allowed one pair of quotes")
    for theirs, found, allowed in _SYNTAX:
        if theirs in said:
            return Problem(where, "", f"found {found}; allowed {allowed}")
    return Problem(
        where, "", f"found what is not YAML ({said.strip()}); allowed `key: value` lines"
    )


class _Reader:
    """Builds nodes from events with a stack of its own."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []

    def build(self, events: Iterator[Any]) -> Node | None:
        root: Node | None = None
        # open containers, each with the key that waits for its value and the dotted way to it
        stack: list[tuple[Node, tuple[str, str] | None, str]] = []
        documents = 0
        for event in events:
            where = f"{self.source}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"
            if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
                parent, waiting, path = stack[-1] if stack else (None, None, "")
                is_key = parent is not None and isinstance(parent.value, dict) and not waiting
                if is_key:
                    assert parent is not None
                    stack[-1] = (parent, (self._key(event, where, parent, path), where), path)
                    continue
                here = f"{path}.{waiting[0]}".strip(".") if waiting else path
                node = self._node(event, where, here)
                if parent is None:
                    root = node
                elif isinstance(parent.value, list):
                    parent.value.append(node)
                elif isinstance(parent.value, dict) and waiting:
                    node.key_where = waiting[1]
                    parent.value.setdefault(waiting[0], node)
                    stack[-1] = (parent, None, path)
                if isinstance(event, yaml.CollectionStartEvent):
                    if len(stack) >= MAX_DEPTH:
                        self._stop(where, f"found more than {MAX_DEPTH} levels; allowed at most "
                                   f"{MAX_DEPTH}", here)  # fmt: skip
                    stack.append((node, None, here))
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._stop(where, "found a second document ('---'); allowed one a file")
                if event.version or event.tags:
                    self._stop(where, "found a '%' directive; allowed none")
            elif isinstance(event, yaml.AliasEvent):
                self._stop(where, f"found the alias {quoted(f'*{event.anchor}')}; "
                           "allowed no anchors and aliases: write the value again")  # fmt: skip
            elif isinstance(event, yaml.CollectionEndEvent):
                stack.pop()
        return root

    def _key(self, event: Any, where: str, parent: Node, path: str) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            self._stop(where, "found a list or section as a key; allowed a plain word", path)
        self._no_extras(event, where, path)
        key: str = event.value
        if key == "<<" and event.implicit[0]:
            self._stop(where, "found the merge key '<<'; allowed no merging: write the keys", path)
        if isinstance(parent.value, dict) and key in parent.value:
            here = f"{path}.{key}".strip(".")
            first = parent.value[key].key_where.removeprefix(self.source + ":")
            line = first.split(":")[0]
            self._note(where, quoted_key(here), f"found the key twice (first on line {line}); "
                       "allowed once: delete one of them")  # fmt: skip
        return key

    def _node(self, event: Any, where: str, here: str) -> Node:
        self._no_extras(event, where, here)
        if isinstance(event, yaml.MappingStartEvent):
            return Node({}, where, "a section")
        if isinstance(event, yaml.SequenceStartEvent):
            return Node([], where, "a list")
        text: str = event.value
        if not event.implicit[0]:
            bad = next(filter(refused, text), None)
            if bad:
                self._note(where, quoted_key(here), f"found the control character {bad!r}; "
                           "allowed printable text")  # fmt: skip
                text = ""
            return Node(text, where, quoted(text))
        try:
            value = scalar(text)
        except ValueError as error:
            self._note(where, quoted_key(here), str(error))
            value = None
        return Node(value, where, show(value, text))

    def _no_extras(self, event: Any, where: str, here: str) -> None:
        if event.anchor is not None:
            self._stop(where, f"found the anchor {quoted('&' + event.anchor)}; "
                       "allowed no anchors and aliases: write the value again", here)  # fmt: skip
        if event.tag is not None:
            self._stop(where, f"found the tag {quoted(event.tag)}; allowed no tags", here)

    def _note(self, where: str, here: str, text: str) -> None:
        self.problems.append(Problem(where, here, text))
        if len(self.problems) > MAX_PROBLEMS:
            raise _SyntaxProblem(self.problems.pop())

    def _stop(self, where: str, text: str, here: str = "") -> None:
        raise _SyntaxProblem(Problem(where, quoted_key(here), text))


def quoted_key(dotted: str) -> str:
    """A dotted key as it is shown: itself when it is printable and short, else quoted."""
    plain = dotted.isprintable() and len(dotted) <= 100 and dotted == dotted.strip()
    return dotted if plain else repr(shorten(dotted, 100))


# libyaml reads 64 KiB in milliseconds; PyYAML's own parser gives the same events, more slowly
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
