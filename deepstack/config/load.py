"""Load configurations from YAML files and overrides, with the place of every mistake."""

import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from deepstack.base.errors import ConfigError
from deepstack.base.registry import nearest, unknown
from deepstack.base.text import escaped, quote, quote_key, shorten
from deepstack.base.yaml_reader import (
    MAX_DEPTH,
    Node,
    Problem,
    parse_scalar,
    read,
    refuse_forbidden,
)
from deepstack.config.estimate import refuse_absurd
from deepstack.config.explain import hint_for, raise_problems, validate
from deepstack.config.key import WIDTH, Key
from deepstack.config.keys import sections, setting_keys
from deepstack.config.schema import LENGTHS, Config

MAX_BYTES = 64 * 1024
RIVALS = (tuple(f"train.{key}" for key in LENGTHS), (WIDTH, "model.parameters"))
"""Settings of which one is given: the length of a run, and the width of its model."""

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent / "configs")  # installed, and in a checkout


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a YAML file, changed by `key=value` overrides.

    path: of a file, or the name of an example as in `deepstack list configs`: `quick`.

    Raises ConfigError with one line for each problem: place, key, value found, values allowed.
    """
    file = path if os.path.exists(path) else example_paths().get(os.fspath(path), path)
    return parse_config(read_file(file), printable_path(file), overrides)


def parse_config(
    text: str | bytes, source: str = "<string>", overrides: Sequence[str] = ()
) -> Config:
    """Return the configuration in a YAML text.  source: its name in messages."""
    tree, mistakes = read_tree(text, source, overrides)
    if sweep := tree.section.pop("sweep", None):
        message = f"this file describes a sweep; use: deepstack sweep {shlex.quote(str(source))}"
        mistakes.append(Problem(sweep.key_where or sweep.where, "sweep", message))
    config, problems = validate(tree)
    raise_problems(merge_problems(mistakes, problems))
    try:
        refuse_absurd(config)
    except ConfigError as error:
        where = tree.at(tuple((error.key or "").split("."))).where
        raise ConfigError(f"{where}: {error}", key=error.key) from None
    return config


def checked_config(value: object) -> Config:
    """Return the argument if it is a configuration.

    Raises ConfigError for anything else, with the call that loads one.
    """
    if isinstance(value, Config):
        return value
    raise ConfigError(
        f"found a {type(value).__name__} for a configuration; "
        "allowed what deepstack.load_config(PATH) returns"
    )


def with_overrides(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values for some dotted keys: {'model.depth': 48}.

    A d_ff that was not given follows d_model.  Raises ConfigError as `load_config`, without places.
    """
    tree = to_node(config.model_dump(exclude_unset=True), "")  # d_ff may follow d_model
    for key, value in values.items():
        tree = put(tree, tuple(key.split(".")), to_node(value, ""))
    changed, problems = validate(tree)
    raise_problems(problems)
    return changed


def locate(path: str | os.PathLike[str], overrides: Sequence[str], key: str) -> str:
    """Return the place of a dotted key: 'file:line:column', the override, or the file alone.

    For errors of other packages, which know the key and not its place.  In the file of a study:
    the place of the axis of that key, if there is one.
    """
    tree, _ = read_tree(read_file(path), printable_path(path), overrides)
    if all(override.partition("=")[0].strip() != key for override in overrides):
        zips = tree.at(("sweep", "zip"))
        for axes in (tree.at(("sweep", "grid")), zips, *zips.items()):
            if key in axes.section:
                return axes.section[key].where
    node = tree.at(tuple(key.split(".")))
    return printable_path(path) if node is tree else node.where


def read_tree(
    text: str | bytes, source: str, overrides: Sequence[str]
) -> tuple[Node, list[Problem]]:
    """Return the values of a text with its overrides, and the mistakes in their syntax."""
    if isinstance(overrides, str | Mapping):  # a text would be read as a list of letters
        raise ConfigError(
            f"overrides: found {type(overrides).__name__}; "
            "allowed a list of texts, such as ['model.depth=3']"
        )
    if len(text) > MAX_BYTES:
        raise ConfigError(
            f"{source}: found more than 64 KiB; allowed a configuration of at most 64 KiB"
        )
    tree, problems = read(text, source)
    if tree.value is None:
        tree = replace(tree, value={})
    tree = with_example(tree, problems)
    for override in join_words(overrides):
        try:
            path, node = parse_override(override)
            if isinstance(tree.value, dict):  # else `validate` refuses the text
                tree = put(tree, path, node)
        except Problem as problem:
            problems.append(problem)
    return tree, problems


def with_example(tree: Node, problems: list[Problem]) -> Node:
    """Return the values of a file over those of the example that its key `extends` names.

    The example's name and sweep are left out.  Adds a Problem for an unknown example.
    """
    if "extends" not in tree.section:
        return tree
    name = tree.section["extends"]
    own = replace(tree, value={k: node for k, node in tree.section.items() if k != "extends"})
    path = example_paths().get(str(name.value))
    if path is None:
        text = f"{unknown('example', name.plain(), example_paths())}"
        problems.append(Problem(name.where, "extends", text))
        return own
    base, _ = read(read_file(path), printable_path(path))
    return merged({k: v for k, v in base.section.items() if k not in ("name", "sweep")}, own)


def merged(base: Mapping[str, Node], own: Node, section: str = "") -> Node:
    """Return a section of a file over the same one of its example.

    Keys of sections are merged, and any other value is replaced, also a mapping such as
    train.lr_factors.
    """
    values = dict(base)
    for key, node in own.section.items():
        path = f"{section}.{key}".strip(".")
        for rival in rivals(path):
            values.pop(Key(rival).last, None)
        is_section = path in sections() and isinstance(node.value, dict)
        values[key] = merged(base[key].section, node, path) if is_section and key in base else node
    return replace(own, value=values)


def is_empty(path: str | os.PathLike[str]) -> bool:
    """Return whether a configuration file has no key."""
    return not read(read_file(path), printable_path(path))[0].value


def join_words(words: Sequence[str]) -> list[str]:
    """Return the overrides; one that spaces divide is one text: 'model.depth = 3'."""
    joined: list[str] = []
    rest = list(words)
    while rest:
        word, *after = rest
        count = 1
        if word.removesuffix("=") in setting_keys() and after:
            count += after[0].startswith("=") or "=" not in after[0]
            count += after[0] == "=" and len(after) > 1
        joined.append(" ".join(rest[:count]))
        del rest[:count]
    return joined


def parse_override(text: str) -> tuple[tuple[str, ...], Node]:
    """Return path and node of `key=value`.  Raises Problem.

    Values are YAML scalars, [lists], {k: v} or 'quoted'.
    """
    place = override_place(text)
    key, equals, value = (part.strip() for part in text.partition("="))
    path = tuple(key.split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH or len(text) > MAX_BYTES:
        meant = re.fullmatch(r"([\w.]+?)\s*[ :]\s*(\S+)", text)
        is_setting = meant and meant[1] in setting_keys()
        hint = hint_for(f"{meant[1]}={meant[2]}" if meant and is_setting else None)
        allowed = "allowed key=value without spaces, such as model.depth=48"
        raise Problem(place, "", f"found {quote(text)}; {allowed}{hint}")
    if refusal := refuse_forbidden(text):
        raise Problem(place, "", refusal)
    if not value.startswith(("[", "{", '"', "'")):
        return path, to_node(parse_scalar(value), place)
    node, problems = read(value, place)
    if problems:
        raise Problem(place, quote_key(key), problems[0].text)
    return path, to_node(node.plain(), place)


def override_place(override: str) -> str:
    """Return the place of an override in messages."""
    return f"{escaped(shorten(override))} on the command line"


def put(tree: Node, path: tuple[str, ...], node: Node) -> Node:
    """Return a copy of the tree with another node at a path; unchanged nodes are shared.

    `train.steps`, `train.tokens` and `train.flops` replace one another, and so do `model.d_model`
    and `model.parameters`.
    """
    key, *below = path
    if below:
        inner = tree.section.get(key, Node({}, node.where, node.where))
        node = put(inner, tuple(below), node)
        for rival in rivals(".".join(path)):
            node.section.pop(Key(rival).last, None)
    return replace(tree, value=tree.section | {key: node})


def rivals(key: str) -> set[str]:
    """Return the dotted keys that a dotted key replaces: other lengths of a run, or the width."""
    return {other for group in RIVALS if key in group for other in group if other != key}


def to_node(value: Any, where: str) -> Node:
    """Return plain values as a tree with one place for all its nodes."""
    if hasattr(value, "tolist"):  # numpy's
        value = value.tolist()
    if isinstance(value, Mapping):
        value = {str(key): to_node(each, where) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        value = [to_node(each, where) for each in value]
    return Node(value, where, where)


def merge_problems(form: list[Problem], meaning: list[Problem]) -> list[Problem]:
    """Return all problems of syntax, and the problems of meaning at other places."""
    places = {problem.where for problem in form}
    return form + [problem for problem in meaning if problem.where not in places]


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a configuration file, at most one more than the limit."""
    name = printable_path(path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):  # opening a pipe would wait for a writer
            with open(path, "rb") as file:
                return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        wanted = Path(path)
        beside = {file.stem: str(file) for file in sorted(wanted.parent.glob("*.y*ml"))}
        names = {name: name for name in example_paths()} | beside
        near = nearest(wanted.stem, names)
        hint = hint_for(printable_path(names[near])) if near else ""
        if "=" in name:
            hint = f"; a setting comes after the configuration, as in: FILE.yaml {name}"
        elif not hint:
            hint = "; allowed a YAML file, or a name of deepstack list configs"
        raise ConfigError(f"{name}: no such file{hint}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name}: cannot be read: {why}") from None
    kind = "a folder" if stat.S_ISDIR(mode) else "something that is not a file"
    inside = Path(path, "config.yaml")
    hint = hint_for(printable_path(inside)) if inside.is_file() else ""
    allowed = "allowed a YAML file, or a name of deepstack list configs"
    raise ConfigError(f"{name}: found {kind}; {allowed}{hint}")


def printable_path(path: str | os.PathLike[str]) -> str:
    """Return a path as one printable line."""
    return escaped(os.fspath(path))


def example_paths() -> dict[str, Path]:
    """Return the path of every example configuration and recipe by name."""
    paths = [path for folder in _FOLDERS for path in folder.glob("*.yaml")]
    return {path.stem: path for path in sorted(paths)} | recipe_paths()


def recipe_paths() -> dict[str, Path]:
    """Return the path of every recipe of a published language model by name."""
    paths = [path for folder in _FOLDERS for path in folder.glob("recipes/*.yaml")]
    return {path.stem: path for path in sorted(paths)}


def example(name: str) -> Path:
    """Return the path of an example configuration by name, as in example('quick').

    Raises ConfigError with the nearest name when there is none of that name.
    """
    paths = example_paths()
    if name not in paths:
        raise ConfigError(unknown("example", name, paths))
    return paths[name]


def example_or_file(path: Path) -> Path:
    """Return the example that a bare name means if there is no such file, else the path."""
    return path if path.exists() else example_paths().get(str(path), path)


def facts_of_recipe(path: Path) -> dict[str, str]:
    """Return what the opening comment of a recipe states: source, published, rate and lacks.

    Each begins a line, as in `# Source: URL`, and goes on in lines that are indented further.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    facts: dict[str, str] = {}
    for line in takewhile(lambda line: line.startswith("#"), lines):
        if start := re.match(r"# (Source|Published|Rate|Lacks): ", line):
            facts[start[1].lower()] = line[start.end() :]
        elif line.startswith("#   ") and facts:
            facts[list(facts)[-1]] += " " + line.removeprefix("#   ")
    return facts


def description(path: Path) -> str:
    """Return the first sentence of the comment that opens a configuration."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.lstrip("# ") for line in comment)
    return text.replace("  ", " ").partition(". ")[0].rstrip(".") + "."
