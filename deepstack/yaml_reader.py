"""Read a small, strict subset of YAML into values that know their line and column.

Supported parts of YAML 1.2: mappings, sequences, quoted, plain and block scalars, and comments.
Plain scalars have its core types (null, true and false, integers, floats): `1e-3` is a number and
`on` is a string.
Refused: anchors, aliases, merge keys, tags, directives, several documents, duplicate keys,
infinities and NaN.  PyYAML supplies the events; no object is constructed and the depth is limited,
so that no input can exhaust the stack, the memory or the time.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

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

# libyaml reads 64 KiB in milliseconds; PyYAML's own parser gives the same events, more slowly
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# (part of the parser's message, text after 'found', text after 'allowed'); the first match counts
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
    """A value and its place: 'file:line:column', or the override that set it."""

    value: dict[str, Node] | list[Node] | Scalar
    where: str
    shown: str
    key_where: str = ""

    def plain(self) -> Any:
        """Return the value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    @property
    def section(self) -> dict[str, Node]:
        """The nodes of a section by key; empty for any other value."""
        return self.value if isinstance(self.value, dict) else {}

    def items(self) -> list[Node]:
        """Return the values of a list, or a single value as a list."""
        return self.value if isinstance(self.value, list) else [self]

    def at(self, path: tuple[str | int, ...]) -> Node:
        """Return the node at a path, or the deepest existing node on the way to it."""
        node = self
        for part in path:
            inside = node.value
            if isinstance(part, str) and part in node.section:
                node = node.section[part]
            elif isinstance(inside, list) and isinstance(part, int) and 0 <= part < len(inside):
                node = inside[part]
            else:
                break
        return node


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: its place, the dotted key (or '') and the message.

    relation: the value is wrong only in combination with the value of another key.
    """

    where: str
    key: str
    text: str
    relation: bool = False

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.text) if part)


class _FatalProblem(Exception):
    """A problem after which reading cannot continue."""


def read(
    data: bytes | str, source: str, limit: int | None = MAX_BYTES, *, positions: bool = True
) -> tuple[Node, list[Problem]]:
    """Return the values of a YAML text and a list of its mistakes.

    source: the name of the text in messages.  limit: its largest size in bytes; None: unlimited.
    positions: whether places have line and column.
    """
    reader, text = _Reader(source, positions), ""
    try:
        text = _decode(data, source, limit)
        reader.read(yaml.parse(text, Loader=_LOADER))
        return reader.root, reader.problems
    except _FatalProblem as error:
        problem = error.args[0]
    except (yaml.YAMLError, UnicodeError, ValueError) as error:
        problem = _syntax_problem(error, text, source)
    return Node({}, source, "an empty file"), [*reader.problems, problem]


@lru_cache(maxsize=1024)  # the configurations of a study share most of their values
def parse_scalar(text: str) -> Scalar:
    """Return the value of a plain scalar by the core types of YAML 1.2.

    Raises ValueError, with the reason, for a number that is not allowed.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"found {shorten(text)}; allowed a finite number")
    if _INTEGER.fullmatch(text):
        # long digits first: int() is slow for them, and refuses more than 4300 with its own error
        base = 0 if text[:2] in ("0o", "0x") else 10
        if len(text) > 40 or abs(number := int(text, base)) >= 2**63:
            raise ValueError(f"found {shorten(text)}; allowed an integer below 2^63")
        return number
    if _FLOAT.fullmatch(text):
        if math.isinf(value := float(text)):
            raise ValueError(f"found {shorten(text)}; allowed a number below 1.8e308")
        return value
    return text


def shorten(text: str, limit: int = 48) -> str:
    """Return a text cut to a length that fits into a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quote(text: str) -> str:
    """Return a shortened text in quotes, with invisible characters as escapes."""
    return repr(shorten(text))


def quote_key(dotted: str) -> str:
    """Return a dotted key as it is when it is printable and short, else quoted."""
    plain = dotted.isprintable() and len(dotted) <= 100 and dotted == dotted.strip()
    return dotted if plain else repr(shorten(dotted, 100))


def is_forbidden(letter: str) -> bool:
    """Return whether a character may not occur: controls, surrogates, unusual line ends.

    U+2028 and U+2029 would count as line ends and shift the positions after them.
    """
    if letter.isprintable() or letter in "\t\n\r":
        return False
    return (
        unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or letter in "\ufeff\ufffe\uffff"
    )


def display(value: Scalar, written: str) -> str:
    """Return a plain scalar for a message: as it was written; text in quotes."""
    if value is None:
        return "nothing"
    return quote(written) if isinstance(value, str) else shorten(written)


def _decode(data: bytes | str, source: str, limit: int | None) -> str:
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if limit is not None and len(data) > limit:
        size = f"{len(data):,} bytes" if len(data) > limit + 1 else f"more than {limit} bytes"
        _stop(source, f"found {size}; allowed a configuration of at most 64 KiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        utf_16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        byte = f"the byte 0x{data[error.start]:02x}, which is not UTF-8"
        _stop(
            _position(data[: error.start].decode("utf-8"), source),
            f"found {'UTF-16' if utf_16 else byte}; allowed UTF-8 text; save the file as UTF-8",
        )
    text = text.removeprefix("\ufeff")
    if not text.replace("\n", "").isprintable():
        for index, letter in enumerate(text):
            if is_forbidden(letter):
                where = _position(text[:index], source)
                _stop(where, f"found the control character {letter!r}; allowed printable text")
    return text


def _position(before: str, source: str) -> str:
    line = before.replace("\r\n", "\n").replace("\r", "\n").rsplit("\n", 1)
    return f"{source}:{before.count(chr(10)) + 1}:{len(line[-1]) + 1}"


def _syntax_problem(error: Exception, text: str, source: str) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        first = (str(error).splitlines() or ["unreadable"])[0]
        return Problem(source, "", f"found what is not YAML: {first[:100]}")
    message, mark = f"{error.context or ''} {error.problem or ''}", error.problem_mark
    if error.context_mark and re.search(r"end of stream|',' or '[]}]'", message):
        mark = error.context_mark  # where it was opened, and not the end of the file
    line = "".join(text.splitlines()[mark.line : mark.line + 1])
    before, letter = line[: mark.column], line[mark.column : mark.column + 1]
    wrong, allowed = f"what is not YAML ({message.strip()})", "`key: value` lines"
    if "\t" in line[: len(line) - len(line.lstrip())] or letter == "\t":
        wrong, allowed = "a tab", "spaces, two for each level"
    elif "cannot start any token" in message and letter:
        wrong = f"a value that begins with {letter!r}"
        allowed = "a plain word or number, or text in quotes"
    elif "expected key" in message and re.search(r"""^[^#]*:\s*(".*"|'.*')\s*$""", before):
        wrong, allowed = "text after a closing quote", "one pair of quotes"
    else:
        for part, *row in _SYNTAX:
            if part in message:
                wrong, allowed = row
                break
    where = f"{source}:{mark.line + 1}:{mark.column + 1}"
    return Problem(where, "", f"found {wrong}; allowed {allowed}")


class _Reader:
    """Builds nodes from the events of a parser, in one pass."""

    def __init__(self, source: str, positions: bool) -> None:
        self.source, self.positions = source, positions
        self.root = Node({}, source, "an empty file")
        self.problems: list[Problem] = []

    def read(self, events: Iterator[Any]) -> None:
        """Read every event; the root is the value of the one document."""
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    _stop(self._place(event), "found a second document ('---'); allowed one a file")
                if event.version or event.tags:
                    _stop(self._place(event), "found a '%' directive; allowed none")
            elif isinstance(event, yaml.NodeEvent):
                self.root = self._node(event, events, "", 0)

    def _node(self, event: Any, events: Iterator[Any], path: str, depth: int) -> Node:
        where = self._refuse_extras(event, path)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, where, path)
        if depth >= MAX_DEPTH:
            _stop(where, f"found more than {MAX_DEPTH} levels; allowed at most {MAX_DEPTH}", path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self._node(event, events, path, depth + 1))
            return Node(items, where, "a list")
        section: dict[str, Node] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key, key_where = self._key(event, path)
            inner = f"{path}.{key}".strip(".")
            if key in section:
                line = section[key].key_where.removeprefix(self.source + ":").split(":")[0]
                text = (
                    f"found the key twice (first on line {line}); allowed once: delete one of them"
                )
                self._note(key_where, inner, text)
            node = self._node(next(events), events, inner, depth + 1)
            node.key_where = key_where
            section.setdefault(key, node)
        return Node(section, where, "a section")

    def _key(self, event: Any, path: str) -> tuple[str, str]:
        where = self._place(event)
        if isinstance(event, yaml.CollectionStartEvent):
            _stop(where, "found a list or section as a key; allowed a plain word", path)
        self._refuse_extras(event, path)
        if event.value == "<<" and event.implicit[0]:
            _stop(where, "found the merge key '<<'; allowed no merging: write the keys", path)
        return event.value, where

    def _scalar(self, event: Any, where: str, path: str) -> Node:
        text: str = event.value
        if event.implicit[0]:
            try:
                value = parse_scalar(text)
            except ValueError as error:
                self._note(where, path, str(error))
                value = None
            return Node(value, where, display(value, text))
        if bad := next(filter(is_forbidden, text), None):
            self._note(where, path, f"found the control character {bad!r}; allowed printable text")
            text = ""
        return Node(text, where, quote(text))

    def _refuse_extras(self, event: Any, path: str) -> str:
        where, allowed = self._place(event), "allowed no anchors and aliases: write the value again"
        if isinstance(event, yaml.AliasEvent):
            _stop(where, f"found the alias {quote(f'*{event.anchor}')}; {allowed}")
        if event.anchor is not None:
            _stop(where, f"found the anchor {quote(f'&{event.anchor}')}; {allowed}", path)
        if event.tag is not None:
            _stop(where, f"found the tag {quote(event.tag)}; allowed no tags", path)
        return where

    def _place(self, event: Any) -> str:
        mark = event.start_mark
        return f"{self.source}:{mark.line + 1}:{mark.column + 1}" if self.positions else self.source

    def _note(self, where: str, path: str, text: str) -> None:
        problem = Problem(where, quote_key(path), text)
        if len(self.problems) == MAX_PROBLEMS:
            raise _FatalProblem(problem)
        self.problems.append(problem)


def _stop(where: str, text: str, path: str = "") -> NoReturn:
    raise _FatalProblem(Problem(where, quote_key(path), text))
