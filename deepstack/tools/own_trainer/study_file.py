"""The file of a study of commands: its keys, the names of its grid, and the commands' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from deepstack import config as conf
from deepstack.base import ConfigError, quote, unknown
from deepstack.config import (
    LR,
    SCHEME,
    SEED,
    Key,
    Node,
    Problem,
    parse_override,
    printable_path,
    raise_problems,
    read_file,
    read_tree,
    to_node,
)
from deepstack.tools.own_trainer.command import RUN, Command, names_of, script_of, split_command
from deepstack.tools.own_trainer.command_file import BASELINE, CANDIDATE, ONE, CommandFile
from deepstack.tools.own_trainer.live import parse_trackers
from deepstack.tools.own_trainer.metric import (
    ENDINGS,
    Metric,
    MetricFile,
    Pattern,
    parse_pattern,
)
from deepstack.tools.own_trainer.names import fitted, key_or_none, setting_of, wrong_value

KEYS = (ONE, BASELINE, CANDIDATE, *"metric loss environment log resume name sweep".split())


def load_commands(path: Path, settings: Sequence[str] = ()) -> CommandFile:
    """Return the study in a file; settings KEY=A,B replace lists of its grid.

    Raises ConfigError with a line for each mistake and its place.
    """
    source = printable_path(path)
    tree, problems = read_tree(read_file(path), source, [])
    raise_problems(problems)
    return _Reader(tree, source).file(path, settings)


class _Reader:
    """Reads the keys of a file one after the other, and collects their mistakes."""

    def __init__(self, tree: Node, source: str) -> None:
        self.tree, self.source = tree, source
        self.problems: list[Problem] = []
        self.nodes: dict[str, Node] = {}  # of the commands, by the names of their settings

    def add(self, node: Node, key: str, text: str, *, at_key: bool = False) -> None:
        where = (node.key_where if at_key else "") or node.where or self.source
        self.problems.append(Problem(where, key, text))

    def file(self, path: Path, settings: Sequence[str]) -> CommandFile:
        section = self.tree.section
        for key, node in section.items():
            if key not in KEYS:
                self.add(node, key, f"found the {unknown('key', key, KEYS)}", at_key=True)
        commands = self.commands(section)
        metric, loss = self.metric(section.get("metric")), self.loss(section.get("loss"))
        environment = self.environment(section.get("environment"))
        trackers = self.trackers(section.get("log"))
        resume = section.get("resume", Node(False, ""))
        if not isinstance(resume.value, bool):
            self.add(resume, "resume", f"found {resume.shown}; allowed true or false")
        sides, settings = self.sides(settings, commands)
        raise_problems(self.problems)
        groups = self.groups(
            section.get("sweep", Node({}, self.source)), names_of(commands.values())
        )
        groups = self.with_settings(groups, settings, names_of(commands.values()))
        keys = self.keys(groups, commands)
        raise_problems(self.problems)
        assert metric is not None
        study = self.study(groups, keys, sides, section.get("name"))
        more = (loss, environment, resume.value is True, trackers)
        return CommandFile(path, commands, metric, study, keys, *more)

    def commands(self, section: Mapping[str, Node]) -> dict[str, Command]:
        """Return the commands by the names of their settings."""
        given = [name for name in (ONE, BASELINE, CANDIDATE) if name in section]
        if given not in ([ONE], [BASELINE, CANDIDATE]):
            text = f"found {' and '.join(given)}; allowed command, or baseline and candidate"
            if len(given) == 1:
                other = CANDIDATE if given == [BASELINE] else BASELINE
                text = f"{other} is missing; {text}"
            self.add(section[given[-1]], given[-1], text, at_key=True)
        commands = {}
        for name in given:
            try:
                command = split_command(section[name].plain())
            except ValueError as error:
                self.add(section[name], name, str(error))
                continue
            label = script_of(command) if name == ONE else name
            commands[label], self.nodes[label] = command, section[name]
        return commands

    def sides(
        self, settings: Sequence[str], commands: Mapping[str, Command]
    ) -> tuple[list[str], list[str]]:
        """Return the commands of a comparison that run, and the other settings.

        Both run unless a setting names one: scheme=baseline.
        """
        if len(commands) < 2:
            return [], list(settings)
        chosen, others = list(commands), []
        for word in settings:
            key, _, text = word.partition("=")
            if key_or_none(key) != SCHEME:
                others.append(word)
                continue
            chosen = text.split(",")
            for name in filter(lambda name: name not in commands, chosen):
                node = to_node(None, f"{word} on the command line")
                self.add(node, "", unknown("command", name, commands))
        return chosen, others

    def metric(self, node: Node | None) -> Metric | None:
        """Return the metric: a pattern, or {file, key}."""
        if node is None:
            text = "found no metric; allowed a pattern, as in 'val loss ([0-9.]+)', or {file, key}"
            self.add(self.tree, "metric", text)
            return None
        value = node.plain()
        try:
            if isinstance(value, str):
                return parse_pattern(value)
            if not isinstance(value, dict) or set(value) != {"file", "key"}:
                raise ValueError(
                    f"found {node.shown}; allowed a pattern, or {{file: NAME, key: NAME}}"
                )
            name, key = str(value["file"]), str(value["key"])
            place = PurePosixPath(name.removeprefix(f"{{{RUN}}}/"))
            if place.is_absolute() or ".." in place.parts or place.suffix not in ENDINGS:
                raise ValueError(
                    f"found the file {quote(name)}; allowed one below {{{RUN}}} with the ending "
                    f"{', '.join(ENDINGS)}"
                )
            return MetricFile(place.as_posix(), key)
        except ValueError as error:
            self.add(node, "metric", str(error))
            return None

    def loss(self, node: Node | None) -> Pattern | None:
        """Return the pattern of the training loss."""
        if node is None:
            return None
        try:
            if not isinstance(node.value, str):
                raise ValueError(f"found {node.shown}; allowed a pattern with a group named step")
            pattern = parse_pattern(node.value)
            if not pattern.has_step:
                raise ValueError(
                    "found a pattern without a step; allowed one with (?P<step>…), as in "
                    "'iter (?P<step>[0-9]+): loss ([0-9.]+)'"
                )
            return pattern
        except ValueError as error:
            self.add(node, "loss", str(error))
            return None

    def environment(self, node: Node | None) -> dict[str, str]:
        """Return the variables for the commands."""
        if node is None:
            return {}
        value = node.plain()
        if not isinstance(value, dict) or any(isinstance(v, dict | list) for v in value.values()):
            self.add(node, "environment", f"found {node.shown}; allowed {{NAME: VALUE}}")
            return {}
        return {name: "" if v is None else str(v) for name, v in value.items()}

    def trackers(self, node: Node | None) -> tuple[str, ...]:
        """Return the trackers of log.to."""
        try:
            return parse_trackers(node.plain()) if node else ()
        except ValueError as error:
            self.add(node or self.tree, "log", str(error))
        return ()

    def groups(self, sweep: Node, names: Sequence[str]) -> list[dict[str, Node]]:
        """Return the factors of the grid: a list a name, or the lists of a zip together."""
        for key, node in sweep.section.items():
            if key not in ("grid", "zip"):
                text = f"found the {unknown('key', key, ['grid', 'zip'])}"
                self.add(node, f"sweep.{key}", text, at_key=True)
        grid, zips = (sweep.section.get(key, Node({}, sweep.where)) for key in ("grid", "zip"))
        if not isinstance(sweep.value, dict) or not isinstance(grid.value, dict):
            self.add(sweep, "sweep", "found no lists; allowed {grid: {NAME: [VALUE, VALUE]}}")
            return []
        groups = [{name: node} for name, node in grid.section.items()]
        groups += [dict(group.section) for group in zips.items() if group.section]
        for group in groups:
            first = next(iter(group.values()))
            for name, node in group.items():
                key = f"sweep.{'zip' if len(group) > 1 else 'grid'}.{name}"
                self.check_values(node, key)
                if len(node.items()) != len(first.items()):
                    self.add(node, key, f"found {len(node.items())} values; allowed "
                             f"{len(first.items())}, as {next(iter(group))} has")  # fmt: skip
        return groups

    def check_values(self, node: Node, key: str) -> None:
        """Add a problem for a list without values, and for values that are not plain."""
        if not isinstance(node.value, list) or not node.value:
            self.add(node, key, f"found {node.shown}; allowed a list of values, as in [1, 2]")
        for value in node.items():
            if value.value is None or isinstance(value.value, dict | list):
                self.add(value, key, f"found {value.shown}; allowed text, numbers, true and false")

    def with_settings(
        self, groups: list[dict[str, Node]], settings: Sequence[str], names: Sequence[str]
    ) -> list[dict[str, Node]]:
        """Return the grid with the lists that the command line gives."""
        for word in settings:
            try:
                key, equals, _ = word.partition("=")
                path, _ = parse_override(f"{key}=0" if equals else word)
            except Problem as problem:
                self.problems.append(problem)
                continue
            given, text = ".".join(path), word.partition("=")[2]
            tree, wrong = read_tree(f"values: [{text}]", word, [])
            self.problems += wrong
            name = next((one for one in names if given in (one, key_or_none(one))), None)
            if name is None:
                allowed = [one for one in names if one != RUN]
                self.add(to_node(None, f"{word} on the command line"), "",
                         unknown("name", given, allowed))  # fmt: skip
                continue
            node = tree.section["values"]
            self.check_values(node, name)
            if not any(name in group for group in groups):
                groups.append({})
                groups[-1][name] = node
            for group in groups:
                if name in group:
                    group[name] = node
        return groups

    def keys(
        self, groups: Sequence[Mapping[str, Node]], commands: Mapping[str, Command]
    ) -> dict[str, Key]:
        """Return the setting of each name; add a problem for a name that no command or list has."""
        lists = {name: node for group in groups for name, node in group.items()}
        self.check_names(lists, commands)
        keys: dict[str, Key] = {}
        for name in names_of(commands.values()):
            if name == RUN:
                continue
            try:
                key = setting_of(name)
                if key == SCHEME and len(commands) > 1:
                    raise ValueError(
                        f"found {{{name}}}, and the settings are baseline and candidate; allowed "
                        "another name, such as {arch}"
                    )
                if (other := next((n for n, k in keys.items() if k == key), None)) is not None:
                    raise ValueError(f"found {{{other}}} and {{{name}}}, which mean {key}")
            except ValueError as error:
                self.add(lists.get(name, self.tree), f"sweep.{name}", str(error), at_key=True)
                continue
            keys[name] = key
            for value in lists[name].items() if name in lists else ():
                if wrong := wrong_value(key, value.value):
                    self.add(value, f"sweep.{name}", f"found {value.shown}; allowed {wrong}")
        return keys

    def check_names(self, lists: Mapping[str, Node], commands: Mapping[str, Command]) -> None:
        """Add a problem for a list that a command lacks, and for a name without a list."""
        for label, command in commands.items():
            where = f" of {label}" if len(commands) > 1 else ""
            for name, node in lists.items():
                if name not in command.names:
                    others = [one for one in command.names if one != RUN and one not in lists]
                    hint = unknown("name", name, others or command.names)
                    text = f"the command{where} has no {{{name}}}: {hint}"
                    self.add(node, f"sweep.{name}", text, at_key=True)
            for name in command.names:
                if name not in lists and name not in (RUN, self.seed_of(command)):
                    idle = [one for one in lists if one not in command.names]
                    text = (
                        f"{{{name}}} has no list in sweep: {unknown('name', name, idle or lists)}"
                    )
                    self.add(self.nodes[label], label, text)

    @staticmethod
    def seed_of(command: Command) -> str | None:
        """Return the name in a command that means the seed, which is 0 without a list."""
        return next((name for name in command.names if key_or_none(name) == SEED), None)

    def study(
        self,
        groups: Sequence[Mapping[str, Node]],
        keys: Mapping[str, Key],
        sides: Sequence[str],
        name: Node | None,
    ) -> conf.Study:
        """Return the grid by settings; the sides of a comparison are its first factor."""
        plain = [
            {keys[n]: [fitted(keys[n], value.plain()) for value in node.items()]
             for n, node in group.items()}
            for group in groups
        ]  # fmt: skip
        grid: dict[str, list[Any]] = {SCHEME: list(sides)} if sides else {}
        grid |= {key: values for group in plain if len(group) == 1 for key, values in group.items()}
        zips = tuple({str(key): group[key] for key in group} for group in plain if len(group) > 1)
        base: dict[str, Any] = {} if name is None else {"name": name.plain()}
        rates = next((group[LR] for group in plain if LR in group), None)
        base |= {LR: rates[0]} if rates and rates[0] > 0 else {}
        study = conf.Study(conf.with_overrides(conf.parse_config(""), base), grid, zips)
        if study.total > conf.MAX_RUNS:
            raise ConfigError(
                f"{self.source}: sweep: found {study.total:,} runs; allowed at most "
                f"{conf.MAX_RUNS:,}: give fewer values"
            )
        return study
