"""A command with names in braces, which becomes a list of arguments for each run.

No shell reads it: a value is one argument, or a part of one, whatever letters it has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

RUN = "run"  # {run}: the folder for the files of the command
NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
# an escaped brace, a name in braces, or a brace that is neither
BRACES = re.compile(r"\{\{|\}\}|\{(" + NAME + r")\}|[{}]")
OF_A_SHELL = ("|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1", "&>")


@dataclass(frozen=True)
class Command:
    """The arguments of a command, in which names in braces stand for values.

    words: the arguments as they stand in the file; `{{` and `}}` are braces.
    """

    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The command in one line, quoted for a shell."""
        plain = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)
        return " ".join(one if plain.fullmatch(one) else shlex.quote(one) for one in self.words)

    @property
    def names(self) -> list[str]:
        """The names in braces, each once, in their order."""
        found = (match[1] for word in self.words for match in BRACES.finditer(word))
        return list(dict.fromkeys(name for name in found if name))

    def arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Return the arguments with the values of the names."""

        def fill(match: re.Match[str]) -> str:
            return argument_text(values[match[1]]) if match[1] else match[0][0]

        return [BRACES.sub(fill, word) for word in self.words]


def argument_text(value: Any) -> str:
    """Return a value as an argument: numbers as Python writes them, true and false as YAML does."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def split_command(value: object) -> Command:
    """Return the command in a text, divided as a shell divides it, or in a list of arguments.

    Raises ValueError with the found and the allowed text.
    """
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"found a text that cannot be divided ({error}); close it") from None
        for word in words:
            if word in OF_A_SHELL:
                raise ValueError(
                    f"found {word!r}, and no shell runs the command; put it into a script, and "
                    "name that"
                )
        if words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
            name, _, text = words[0].partition("=")
            raise ValueError(f"found {words[0]!r}; write environment: {{{name}: {text!r}}}")
    elif isinstance(value, list) and not any(isinstance(one, dict | list) for one in value):
        words = [argument_text(one) for one in value]
    else:
        words = []
    if not words or not words[0]:
        raise ValueError("found no command; allowed a line such as python train.py --lr {lr}")
    for word in words:
        if odd := next((m[0] for m in BRACES.finditer(word) if m[0] in "{}"), ""):
            raise ValueError(
                f"found {odd!r} in {word!r} without a name; allowed {{name}}, and {odd * 2} for "
                "the sign itself"
            )
    return Command(tuple(words))


def names_of(commands: Iterable[Command]) -> list[str]:
    """Return the names in the braces of several commands."""
    return list(dict.fromkeys(name for command in commands for name in command.names))


def script_of(command: Command) -> str:
    """Return the name of a command: that of its script, `train` for python train.py."""
    words = [PurePosixPath(word) for word in command.words if "{" not in word]
    scripts = [word for word in words if word.suffix in (".py", ".sh")]
    return (scripts or words)[0].stem
