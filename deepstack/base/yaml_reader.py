"""Read a small, strict subset of YAML into values that know their line and column.

Supported parts of YAML 1.2: mappings, sequences, quoted, plain and block scalars, and comments.
Plain scalars have its core types (null, true and false, integers, floats): `1e-3` is a number and
`on` is a string.
Refused: anchors, aliases, tags, directives, several documents and duplicate keys.  PyYAML supplies
the events; no object is constructed and the depth is limited, so that no input can exhaust the
stack, the memory or the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from deepstack.base.text import quote, quote_key, shorten

MAX_DEPTH = 16

Scalar = None | bool | int | float | str

_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# longer digits are a float, which takes no time and that no setting allows as an integer
_INTEGER = re.compile(r"[-+]?[0-9]{1,19}|0o[0-7]{1,20}|0x[0-9a-fA-F]{1,15}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# Controls, surrogates and unusual line ends, which would shift the positions after them.
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"
)

# Signs that look like those of YAML, as word processors and other keyboards write them.
_LOOKALIKES = re.compile("[\u00a0\u2000-\u200a\u202f\u3000\uff1a]")

# Parts of a parser's messages, and the mistake in a user's words.
_MEANINGS = {
    "mapping values": "a second ': ' on one line, or a line further in than the line above: "
    "write it as far in",
    "escape character": "a \\ in double quotes: use single quotes, as in 'loss (\\d+)'",
    "quoted scalar": "a quote without its end: add it",
    "flow mapping": "a '{' without '}', or no ', ' between two entries: write {a: 1, b: 2}",
    "flow sequence": "a '[' without ']', or no ', ' between two values: write [1, 2]",
    "expected key": "a line that is not as far in as the lines beside it, or without 'key: '",
}

# libyaml reads 64 KiB in milliseconds; PyYAML's own parser gives the same events, more slowly
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True)
class Node:
    """A value and its place: 'file:line:column', or the override that set it."""

    value: dict[str, Node] | list[Node] | Scalar
    where: str
    key_where: str = ""

    def plain(self) -> Any:
        """Return the value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    @property
    def shown(self) -> str:
        """The value as messages show it: text in quotes, and nothing for null."""
        value = self.plain()
        if isinstance(value, dict):
            return "a section"
        if isinstance(value, list):
            return f"the list {shorten(str(value))}"
        if isinstance(value, str):
            return quote(value)
        return "nothing" if value is None else str(value).lower()

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
            elif isinstance(inside, list) and isinstance(part, int) and part < len(inside):
                node = inside[part]
            else:
                break
        return node


@dataclass(eq=False)
class Problem(Exception):
    """One mistake: its place, the dotted key (or '') and the message.

    relation: the value is wrong only in combination with the value of another key.
    """

    where: str
    key: str
    text: str
    relation: bool = False

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.text) if part)


def read(data: bytes | str, source: str) -> tuple[Node, list[Problem]]:
    """Return the values of a YAML text and a list of its mistakes.

    source: the name of the text in messages.
    """
    reader, text = _Reader(source), ""
    try:
        text = _decode(data, source)
        return reader.read(yaml.parse(text, Loader=_LOADER)), reader.problems
    except Problem as error:
        problem = error
    except yaml.YAMLError as error:
        problem = _syntax_problem(error, source, text)
    return Node({}, source), [*reader.problems, problem]


@lru_cache(maxsize=1024)  # the configurations of a study share most of their values
def parse_scalar(text: str) -> Scalar:
    """Return the value of a plain scalar by the core types of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def refuse_forbidden(text: str) -> str:
    """Return why a text may not be in a configuration, or ''."""
    bad = _FORBIDDEN.search(text)
    return f"found the control character {bad[0]!r}; allowed printable text" if bad else ""


def _decode(data: bytes | str, source: str) -> str:
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8")
        wrong = f"the byte 0x{error.object[error.start]:02x}, which is not UTF-8"
        message = f"found {wrong}; allowed UTF-8 text; save the file as UTF-8"
        raise Problem(_position(before, source), "", message) from None
    text = text.removeprefix("\ufeff")
    if bad := _FORBIDDEN.search(text):
        raise Problem(_position(text[: bad.start()], source), "", refuse_forbidden(bad[0]))
    return text


def _position(before: str, source: str) -> str:
    lines = f"{before}.".splitlines()
    return f"{source}:{len(lines)}:{len(lines[-1])}"


def _sign_problem(lines: list[str], last: int, source: str) -> Problem | None:
    """Return the mistake in the signs of a line or the one before it, which YAML reports late."""
    for i in (last, last - 1):
        line = lines[i] if 0 <= i < len(lines) else ""
        before = line[: len(line) - len(line.lstrip())]
        plain = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", lambda part: " " * len(part[0]), line)
        joined = re.match(r"\s*([\w.]+):([^\s:/]\S*)$", plain)
        if "\t" in before:
            column, text = (
                before.index("\t"),
                "found a tab before the text; allowed spaces: write two",
            )
        elif found := _LOOKALIKES.search(plain):
            column, text = found.start(), lookalike(found[0])
        elif joined:
            pair = f"{joined[1]}: {joined[2]}"
            column, text = joined.start(1), f"found {quote(joined[0].strip())}; write {quote(pair)}"
        else:
            continue
        return Problem(f"{source}:{i + 1}:{column + 1}", "", text)
    return None


def lookalike(sign: str) -> str:
    """Return the message on a sign that only looks like one of YAML."""
    if sign == "\uff1a":
        return "found a full-width colon (U+FF1A); allowed a colon and a space"
    name = "a no-break space" if sign == "\u00a0" else "an unusual space"
    return f"found {name} (U+{ord(sign):04X}); allowed a space"


def _syntax_problem(error: yaml.YAMLError, source: str, content: str) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(source, "", f"found invalid YAML: {shorten(str(error), 100)!r}")
    found = _sign_problem(content.splitlines(), error.problem_mark.line, source)
    if found is not None:
        return found
    message, mark = f"{error.context or ''} {error.problem or ''}".strip(), error.problem_mark
    if error.context_mark and re.search(r"end of stream|',' or '[]}]'", message):
        mark = error.context_mark  # where it was opened, and not the end of the file
    message = next((words for part, words in _MEANINGS.items() if part in message), message)
    text = f"found invalid YAML ({message}); allowed `key: value` lines, indented with "
    text += "spaces, one value each, in quotes if it holds ': ' or begins with a special letter"
    return Problem(f"{source}:{mark.line + 1}:{mark.column + 1}", "", text)


class _Reader:
    """Builds nodes from the events of a parser, in one pass."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []

    def read(self, events: Iterator[Any]) -> Node:
        """Read every event; return the value of the one document."""
        root = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root:
                    text = "found a second document ('---'); allowed one a file"
                    raise self._problem(event, text)
                if event.version or event.tags:
                    raise self._problem(event, "found a '%' directive; allowed none")
                root = self._node(next(events), events, "", 0)
        return root or Node({}, self.source)

    def _node(self, event: Any, events: Iterator[Any], path: str, depth: int) -> Node:
        self._refuse_extras(event, path)
        where = self._place(event)
        if isinstance(event, yaml.ScalarEvent):
            if refusal := refuse_forbidden(event.value):
                self.problems.append(self._problem(event, refusal, path))
            value = parse_scalar(event.value) if event.implicit[0] else event.value
            return Node(value, where)
        if depth >= MAX_DEPTH:
            text = f"found more than {MAX_DEPTH} levels; allowed at most {MAX_DEPTH}"
            raise self._problem(event, text, path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self._node(event, events, path, depth + 1))
            return Node(items, where)
        section: dict[str, Node] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            self._refuse_extras(event, path)
            if not isinstance(event, yaml.ScalarEvent):
                text = "found a list or section as a key; allowed a plain word"
                raise self._problem(event, text, path)
            key, key_where = event.value, self._place(event)
            inner = f"{path}.{key}".strip(".")
            if sign := _LOOKALIKES.search(key):
                raise self._problem(event, lookalike(sign[0]), path)
            if key in section:
                line = section[key].key_where.rsplit(":", 2)[1]
                text = f"found the key twice (first on line {line}); allowed once"
                self.problems.append(self._problem(event, f"{text}: delete one of them", inner))
            node = self._node(next(events), events, inner, depth + 1)
            node.key_where = key_where
            section.setdefault(key, node)
        return Node(section, where)

    def _refuse_extras(self, event: Any, path: str) -> None:
        extra = ""
        if isinstance(event, yaml.AliasEvent):
            extra = f"the alias {quote(f'*{event.anchor}')}"
        elif event.anchor is not None:
            extra = f"the anchor {quote(f'&{event.anchor}')}"
        elif event.tag is not None:
            extra = f"the tag {quote(event.tag)}"
        if extra:
            text = f"found {extra}; allowed no anchors, aliases and tags: write the value itself"
            raise self._problem(event, text, path)

    def _place(self, event: Any) -> str:
        return f"{self.source}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"

    def _problem(self, event: Any, text: str, path: str = "") -> Problem:
        return Problem(self._place(event), quote_key(path), text)
