"""Name the options of a file that belong to another task or scheme than an override chooses."""

import os
import shlex
from collections.abc import Sequence

from deepstack.base.yaml_reader import Node
from deepstack.config.key import TASK, Key
from deepstack.config.load import printable_path, read_file, read_tree
from deepstack.config.schema import Config
from deepstack.config.write import one_line


def name_left_over(
    path: str | os.PathLike[str], overrides: Sequence[str], key: str, message: str
) -> str | None:
    """Return a message on options of the file that an override of their owner leaves behind.

    path, overrides: of a configuration, such as task.name=tokens for a file of the task text.
    key, message: of the ConfigError on its unknown options.

    Returns None if the file's options are not the mistake.
    """
    owner = Key(key).owner
    given = {one.partition("=")[0].strip(): one for one in overrides}
    if owner is None or owner not in given:
        return None
    section = "task" if owner == TASK else f"{owner}_options"
    file, _ = read_tree(read_file(path), printable_path(path), ())
    options = node_at(file, section).section
    lost = [
        f"{section}.{name}"
        for name in options
        if f"{section}.{name}: unknown " in message and f"{section}.{name}" not in given
    ]
    if not lost:
        return None
    first = options[lost[0].rpartition(".")[2]]
    allowed = message.partition("allowed: ")[2].partition("\n")[0]
    text = f"{first.where}: {', '.join(lost)}: found {first.shown} of the file's {owner} "
    text += f"{owner_in(file, owner)!r}, without meaning under {given[owner]}"
    text += f" (allowed: {allowed})" if allowed else ""
    return f"{text}; type {replacement(path, overrides, owner, section, lost, given[owner])}"


def replacement(
    path: str | os.PathLike[str],
    overrides: Sequence[str],
    owner: Key,
    section: str,
    lost: Sequence[str],
    override: str,
) -> str:
    """Return the words to type in place of an override that leaves options behind."""
    tree, _ = read_tree(read_file(path), printable_path(path), overrides)
    if "," in override:  # a sweep
        return (
            f"{shlex.quote(f'{section}={{}}')} too, and options of one value below sweep.overrides"
        )
    values = node_at(tree, section).section
    kept = {name: one.plain() for name, one in values.items() if f"{section}.{name}" not in lost}
    line = shlex.quote(f"{section}={one_line(kept)}")
    return f"{line} in place of {override}" if owner == TASK else f"{override} {line}"


def node_at(tree: Node, key: str) -> Node:
    """Return the node at a dotted key, without values if there is none."""
    for part in key.split("."):
        tree = tree.section.get(part, Node({}, tree.where))
    return tree


def owner_in(file: Node, owner: Key) -> object:
    """Return the value of a setting in a file, or its default."""
    *sections, name = owner.split(".")
    default: object = Config()
    for part in (*sections, name):
        default = getattr(default, part)
    return node_at(file, owner).plain() or default
