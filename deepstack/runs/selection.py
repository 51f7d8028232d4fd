"""Selects runs by their settings, states, outcomes, tags and last logged values.

A condition is a text such as `lr=0.001,0.002`, `depth>=48`, `state!=done` or `tag=good`.  A key is
a dotted setting or a column of the table of runs, and may be shortened: `lr` is train.lr.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.base.registry import nearest, unknown
from deepstack.base.yaml_reader import parse_scalar, read
from deepstack.records import LOGGED, STATES, Run, Summary, find_runs, rows_of, summarize
from deepstack.records.cells import printable_row
from deepstack.records.run import path_text
from deepstack.runs.settings import DEPTH, hashable, order_of, varying_settings

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("study", "run", "state", "outcome", "tags", "note", *LOGGED)
"""The keys besides settings: columns of the table of runs."""
CONDITION = re.compile(r"\s*([^=<>!]+?)\s*(!=|<=|>=|==?|<|>)(.*)", re.DOTALL)
BETWEEN_VALUES = re.compile(r",(?![^\[]*\])")  # commas outside of brackets
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
MOST_NAMES = 12  # values or keys that an error names

Where = str | Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Condition:
    """One condition on runs: a key, an operator and what to compare with.

    values: texts, which are parsed; or the values themselves, if `parses` is false.
    """

    key: str
    operator: str
    values: Sequence[Any]
    parses: bool = True

    def holds(self, value: Any) -> bool:
        """Return whether a run's value meets the condition; a missing one is neither < nor >."""
        if self.operator in ORDERS:
            limit = parse_scalar(self.values[0])
            return is_number(value) and ORDERS[self.operator](value, limit)
        members, same = (
            value if self.key == "tags" else [value],
            is_equal if self.parses else is_same,
        )
        equal = any(same(member, wanted) for member in members for wanted in self.values)
        return equal == (self.operator == "=")


class Row:
    """A run with the values that conditions and orders read."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.summary = one = summarize(run)
        self.values: dict[str, Any] = {
            **one.config,
            "study": one.path.parent.name,
            "run": one.path.name,
            "state": one.state,
            **one.labels._asdict(),
            **one.logged,
        }

    @cached_property
    def outcome(self) -> str:
        """The outcome of a finished run, else its state."""
        from deepstack.runs.outcomes import outcome

        if self.summary.state == "damaged" or self.run.damage():
            return "damaged"
        return outcome(self.run) or self.summary.state

    def value(self, key: str) -> Any:
        """Return the value of a setting or column, None where the run has none."""
        return self.outcome if key == "outcome" else self.values.get(key)


def load_runs(
    path: str | os.PathLike[str],
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
    best: str | Sequence[str] = (),
    settings: str = "varying",
) -> pd.DataFrame:
    """Return one row a run below a results, study or run folder, as a pandas DataFrame.

    | column          | unit  |                                                                  |
    |-----------------|-------|------------------------------------------------------------------|
    | study, run      |       | names of the folders                                             |
    | state           |       | done, diverged, failed, interrupted, …                           |
    | tags, note      |       | of `deepstack tag` and `deepstack note`, where any run has them  |
    | model.depth, …  |       | settings that vary inside a study, by dotted key                 |
    | step            | steps | the last row of steps.csv                                        |
    | loss            | nats  | training loss of that row                                        |
    | grad_norm       |       | norm of its gradient, before clipping                            |
    | model_update    |       | ‖ΔF‖ there, since the start                                      |
    | val_loss        | nats  | last validation loss over all predicted positions                |
    | val_loss_masked | nats  | the same over those whose token is not shown                     |
    | step_ms         | ms    | median wall-clock time of a step                                 |
    | path            |       | the folder, which tells runs with equal names apart               |

    where: conditions that all hold for each run, such as "depth=6,48", "lr<0.01", "state!=failed"
    or "outcome=trained"; one, several, or {key: value or values}, a list, range or array.  The
    values of a mapping are compared as they are: no comma, `*` or `?` of a text has a meaning.
    sort: a column or setting, descending with `-` before it.  last: the number of runs to keep,
    those created last.  best: keys such as "lr"; each setting and depth keeps the runs with the
    best value, as in `deepstack.compare`.
    settings: 'varying', or 'all' for every setting and the same columns in every study; options of
    schemes and tasks are then one column each.

    Raises NothingMatchedError when there is no run, or none that meets the conditions, and
    ConfigError for an unknown key.
    """
    import pandas as pd

    if settings not in ("varying", "all"):
        raise ConfigError(f"settings: found {settings!r}; allowed 'varying' or 'all'")
    chosen = select(find_runs(path), where, sort, last, best)
    summaries = [summarize(run) for run in chosen]
    rows = rows_of(summaries, all_settings if settings == "all" else None)
    paths = ({"path": path_text(run)} for run in chosen)
    table = pd.DataFrame([printable_row(row | at) for row, at in zip(rows, paths, strict=True)])
    table.attrs["folder"] = os.fspath(path)
    return table


def all_settings(one: Summary) -> dict[str, Any]:
    """Return the value of each setting, the same keys for every run.

    The options of a scheme or a task and the factors of roles are one text each, as JSON.
    """
    from deepstack.config.schema import setting_keys

    rest, settings = dict(one.config), {}
    for key in setting_keys():
        inner = [name for name in rest if name.startswith(f"{key}.")]
        options = {name.removeprefix(f"{key}."): rest.pop(name) for name in inner}
        value = rest.pop(key, options or None)
        plain = value is None or isinstance(value, bool | int | float | str)
        settings[key] = value if plain else json.dumps(value, default=str)
    options = {k.removeprefix("task."): v for k, v in rest.items() if k.startswith("task.")}
    settings["task.options"] = json.dumps(options, default=str) if options else None
    return settings


def select(
    runs: Sequence[Run],
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
    best: str | Sequence[str] = (),
) -> list[Run]:
    """Return the runs that meet all conditions, of these the `last` created, in order of `sort`.

    best: of these runs, those that `compare` with these keys compares, study by study; a damaged
    run is none of them.  Raises NothingMatchedError if none is left, ConfigError for a wrong key or
    condition.
    """
    if best:
        from deepstack.runs.comparison import choose_best

        selected = [run for run in select(runs, where, sort, last) if run.damage() is None]
        studies: dict[Path, list[Run]] = {}
        for run in selected:
            studies.setdefault(run.path.parent, []).append(run)
        chosen = choose_best(studies, best).values()
        return [run for run in selected if any(run in members for members in chosen)]
    texts = texts_of(where)
    if not (texts or sort or last):
        return list(runs)
    rows = [Row(run) for run in runs]
    pairs = list(where.items()) if isinstance(where, Mapping) else [None] * len(texts)
    for text, pair in zip(texts, pairs, strict=True):
        condition = make_condition(*pair, rows) if pair else parse_condition(text, rows)
        matching = [row for row in rows if condition.holds(row.value(condition.key))]
        if not matching:
            raise NothingMatchedError(f"where: no run has {text}; {values_there(rows, condition)}")
        rows = matching
    if last is not None:
        newest = sorted(rows, key=lambda row: row.summary.order)[-last:]
        rows = [row for row in rows if row in newest]
    if sort is not None:
        rows = sort_rows(rows, sort, list_keys(rows), Row.value)
    return [row.run for row in rows]


def sort_rows(
    rows: Sequence[Any], sort: str, keys: Sequence[str], value: Callable[[Any, str], Any]
) -> list[Any]:
    """Return rows in the order of `value(row, key)`; `-key` is descending.

    Rows without a value come last.
    """
    descending, word = sort.startswith("-"), sort.removeprefix("-")
    key = full_key(word, keys, "sort")
    values = [value(row, key) for row in rows]
    known = [i for i, v in enumerate(values) if v is not None and v == v]
    known.sort(key=lambda i: order_of(values[i]), reverse=descending)
    return [rows[i] for i in [*known, *(i for i in range(len(rows)) if i not in set(known))]]


def texts_of(where: Where) -> list[str]:
    """Return conditions as texts: those of {'depth': [6, 48]} are ['depth=6,48'].

    A comma inside a value becomes `?`, which matches any character.
    """
    if isinstance(where, str):
        return [where]
    if isinstance(where, Mapping):
        lists = {key: values_of(key, value) for key, value in where.items()}
        return [f"{key}={','.join(map(quoted, values))}" for key, values in lists.items()]
    return list(where)


def quoted(value: Any) -> str:
    """Return a value as in a condition, with `?` for the commas of a text."""
    return value.replace(",", "?") if isinstance(value, str) else text_of(value)


def values_of(key: str, value: Any) -> list[Any]:
    """Return the values that a mapping gives for a key: the items of a collection, or the value.

    NumPy's, pandas' and torch's numbers and arrays become Python's.  Raises ConfigError for an
    iterator, which can be read only once.
    """
    value = plain(value)
    if isinstance(value, Iterator):
        kind = type(value).__name__
        raise ConfigError(f"where: {key}: found a {kind}; allowed a value or a list of values")
    is_one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection)
    return [value] if is_one else [plain(item) for item in value]


def plain(value: Any) -> Any:
    """Return a value as Python's own: lists of arrays and tuples, texts of paths."""
    value = value.tolist() if hasattr(value, "tolist") else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def make_condition(word: str, value: Any, rows: Sequence[Row]) -> Condition:
    """Return the condition of a mapping's key and value or values.

    A list is also the value of a setting that is a list.  Raises ConfigError for a wrong key, state
    or outcome.
    """
    key = full_key(word, list_keys(rows), "where")
    values, choices = values_of(word, value), names_of(key)
    for one in values if choices else ():
        if one not in choices:
            raise ConfigError(f"where: {unknown(key, text_of(one), choices)}")
    values = [choices[one] for one in values] if choices else values
    return Condition(key, "=", [*values, values], parses=False)


def text_of(value: Any) -> str:
    """Return a value as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def parse_condition(text: str, rows: Sequence[Row]) -> Condition:
    """Return the condition of a text; raise ConfigError if it has a wrong form or key."""
    match = CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"where: found {text!r}; allowed KEY=A,B, or one of !=, <, <=, >, >= for =, such as "
            "depth=6,48 or 'lr<0.01'"
        )
    word, sign, values_text = match[1], match[2].replace("==", "="), match[3].strip()
    key = full_key(word, list_keys(rows), "where")
    if sign in ORDERS and not is_number(parse_scalar(values_text)):
        raise ConfigError(f"where: found {values_text!r} after {word}{sign}; allowed one number")
    values, choices = [part.strip() for part in BETWEEN_VALUES.split(values_text)], names_of(key)
    for value in values if choices else ():
        if not any(is_equal(name, value) for name in choices):
            raise ConfigError(f"where: {unknown(key, value, choices)}")
    return Condition(key, sign, [choices.get(value, value) for value in values])


def names_of(key: str) -> dict[str, str]:
    """Return the values of states or outcomes by name; an outcome has its word as a further name.

    Empty for other keys.
    """
    if key == "state":
        return {name: name for name in (*STATES, "damaged")}
    if key != "outcome":
        return {}
    from deepstack.runs.outcomes import OUTCOME_WORDS

    names = [*OUTCOME_WORDS, *STATES, "damaged"]
    return {name: name for name in names} | {word: v for v, word in OUTCOME_WORDS.items()}


def is_number(value: Any) -> bool:
    """Return whether a value is a number other than true and false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_equal(value: Any, text: str) -> bool:
    """Return whether a text means a value; `*` and `?` match any characters of a text."""
    if isinstance(value, str):
        return fnmatchcase(value, text.replace("[", "[[]"))
    wanted = read(text, "where")[0].plain() if text.startswith("[") else parse_scalar(text)
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def is_same(value: Any, wanted: Any) -> bool:
    """Return whether two values are equal; true and false differ from 1 and 0."""
    return bool(plain(value) == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def list_keys(rows: Iterable[Row]) -> list[str]:
    """Return the keys that conditions on these runs can have: columns, then settings."""
    return list(dict.fromkeys([*COLUMNS, *(key for row in rows for key in row.summary.config)]))


def full_key(word: str, keys: Sequence[str], option: str, prefer: Sequence[str] = ()) -> str:
    """Return the key that a word names: all of it, its last parts, or their beginning.

    Of several such keys, it is the only one in `prefer`.  Raises ConfigError, starting with the
    option's name, for an unknown or ambiguous word.
    """
    if word in keys or f"{word}.name" in keys:
        return word if word in keys else f"{word}.name"
    dotted = [key for key in keys if key.endswith(f".{word}")]
    matches = dotted or [key for key in keys if key.rpartition(".")[2].startswith(word)]
    preferred = [key for key in matches if key in prefer]
    for choice in (preferred, matches):
        if len(choice) == 1:
            return choice[0]
    if matches:
        names = ", ".join(matches[:MOST_NAMES])
        raise ConfigError(f"{option}: {word!r} can mean {names}; give one of them in full")
    lasts = {key.rpartition(".")[2]: key for key in reversed(keys)}
    if near := nearest(word, [*keys, *lasts]):
        key = lasts.get(near, near)
        raise ConfigError(f"{option}: unknown key {word!r}; did you mean {key!r}?")
    raise ConfigError(f"{option}: {unknown('key', word, keys)}")


def find_key(word: str, runs: Sequence[Run], option: str = "setting") -> str:
    """Return the setting of runs that a word names (see `full_key`), of several one that varies."""
    varying = varying_settings(runs)
    known = dict.fromkeys([*varying, *(key for run in runs for key in run.flat_config)])
    return full_key(word, list(known), option, prefer=[DEPTH, *varying])


def values_there(rows: Sequence[Row], condition: Condition) -> str:
    """Return the values that runs have at a condition's key, as part of an error."""
    values = [row.value(condition.key) for row in rows]
    if condition.key == "tags":
        values = [tag for tags in values for tag in tags]
    distinct = {hashable(value): value for value in values}
    texts = [text_of(distinct[key]) for key in sorted(distinct, key=order_of)]
    more = f" and {len(texts) - MOST_NAMES} more" if len(texts) > MOST_NAMES else ""
    return f"{condition.key} there: {', '.join(texts[:MOST_NAMES]) or 'none'}{more}"
