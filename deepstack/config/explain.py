"""Turn pydantic's errors into messages: the found value, allowed values, the nearest one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from deepstack.allowed import IDENTIFIER, PATTERNS, Schema, alternatives, describe, literals
from deepstack.config.schema import ROLES, Config
from deepstack.config.section import LONGEST_NAME
from deepstack.config.walk import Path, at, keys, sections
from deepstack.errors import ConfigError
from deepstack.registry import MOST_CHOICES, nearest
from deepstack.yaml_reader import (
    MAX_PROBLEMS,
    Node,
    Problem,
    parse_scalar,
    quote,
    quote_key,
    shorten,
)

_NUMBERS: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float)}
_SEVERAL = re.compile(r".*,.*|\d+(-|\.\.\.?|:)\d+")

# Keys and values in other programs, and their names here.
_ELSEWHERE = {
    "batch": "train.batch_size", "bs": "train.batch_size", "beta1": "train.betas",
    "beta2": "train.betas", "block_size": "task.seq_len", "clip_norm": "train.clip",
    "context": "task.seq_len", "context_length": "task.seq_len", "data": "task",
    "dataset": "task.name", "dff": "model.d_ff", "dim": "model.d_model",
    "dim_feedforward": "model.d_ff", "dtype": "train.precision", "embed_dim": "model.d_model",
    "ffn_dim": "model.d_ff", "grad_clip": "train.clip", "gradient_clipping": "train.clip",
    "head_count": "model.n_heads", "hidden_dim": "model.d_model", "hidden_size": "model.d_model",
    "init_fan": "model.init.fan", "layers": "model.depth", "learning_rate": "train.lr",
    "length": "task.seq_len", "lr_schedule": "train.schedule", "max_grad_norm": "train.clip",
    "max_iters": "train.steps", "max_steps": "train.steps", "n_embd": "model.d_model",
    "n_head": "model.n_heads", "n_layer": "model.depth", "n_layers": "model.depth",
    "nhead": "model.n_heads", "norm_eps": "model.norm.eps", "num_heads": "model.n_heads",
    "num_layers": "model.depth", "num_steps": "train.steps", "p_dropout": "model.dropout",
    "random_seed": "seed", "residual": "model.scheme", "scheduler": "train.schedule",
    "sequence_length": "task.seq_len", "training": "train", "warmup": "train.warmup_steps",
    "wd": "train.weight_decay", "width": "model.d_model",
}  # fmt: skip
_WORDS_ELSEWHERE = {
    "batch_norm": "batch", "batchnorm": "batch", "bfloat16": "bf16",
    "ddp": "data", "derf": "dynamic_erf", "dyt": "dynamic_tanh", "float32": "fp32",
    "fsdp": "fully_sharded", "fsdp2": "fully_sharded", "gpu": "cuda", "layer_norm": "layer",
    "layernorm": "layer", "relu_squared": "relu2", "rms_norm": "rms", "rmsnorm": "rms",
    "rope": "rotary", "squared_relu": "relu2", "swish": "silu",
    **dict.fromkeys(("yes", "y", "on", "true", "1"), "true"),
    **dict.fromkeys(("no", "n", "off", "false", "0"), "false"),
    **dict.fromkeys(("none", "nan", "nil", "null"), "null"),
}  # fmt: skip

# Gated feed-forwards in other programs, and the activation of their gate.
_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid"}


def raise_problems(problems: list[Problem]) -> None:
    """Raise ConfigError if there are problems, with one line for each, in the order of the file."""
    if problems:
        problems = sorted(problems, key=lambda problem: place_order(problem.where))
        lines = list(dict.fromkeys(map(str, problems)))
        if len(lines) > MAX_PROBLEMS:
            lines = [*lines[:MAX_PROBLEMS], f"... and {len(lines) - MAX_PROBLEMS} more"]
        raise ConfigError("\n".join(lines), key=problems[0].key or None)


def validate(tree: Node) -> tuple[Config | None, list[Problem]]:
    """Return the configuration that a tree describes, or None and its mistakes."""
    if not isinstance(tree.value, dict):
        text = f"found {tree.shown}; allowed `key: value` lines"
        return None, [Problem(tree.where, "", text)]
    data = tree.plain()
    try:
        return Config.model_validate(data), []
    except ValidationError as error:
        wrong = distinct_errors(error, data)
    wrong.sort(key=lambda pair: place_order(tree.at(pair[0]).where))
    problems = [_problem(path, item, tree) for path, item in wrong[:MAX_PROBLEMS]]
    for path, _ in wrong[MAX_PROBLEMS:]:  # of thousands, the rest is counted and not examined
        problems.append(Problem(tree.at(path).where, _dotted(path), "found one more mistake"))
    return None, problems


def distinct_errors(error: ValidationError, data: Any) -> list[tuple[Path, dict[str, Any]]]:
    """Return pydantic's errors, one for each path in the data.

    A union reports each of its branches: of two errors the one deeper in the data is kept.
    """
    errors: dict[Path, dict[str, Any]] = {}
    for item in error.errors(include_url=False):
        errors.setdefault(_path(item["loc"], data), dict(item))
    covered = {path[:i] for path in errors for i in range(len(path))}
    return [(path, item) for path, item in errors.items() if path not in covered]


def place_order(where: str) -> tuple[int, ...]:
    """Return a sort key of a place: line and column; overrides come last."""
    position = re.search(r":(\d{1,9}):(\d{1,9})$", where)
    return tuple(map(int, position.groups())) if position else (10**9,)


def _path(loc: tuple[str | int, ...], data: Any) -> Path:
    """Return pydantic's location without the names of union branches."""
    path: Path = ()
    for part in loc:
        if part == "[key]":
            break
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif isinstance(part, str) and part in at(path).get("properties", ()):
            data = None
        else:
            continue  # the name of a branch of a union
        path = (*path, part)
    return path


def _problem(path: Path, item: dict[str, Any], tree: Node) -> Problem:
    node, dotted = tree.at(path), _dotted(path)
    if item["type"] == "extra_forbidden":
        return Problem(node.key_where or node.where, dotted, _unknown_key(path, node))
    if item["loc"][-1] == "[key]":
        names = ROLES if item["type"] == "literal_error" else ()
        allowed = ", ".join(names) or PATTERNS[IDENTIFIER]
        text = f"found the key {quote(str(path[-1]))}; allowed {allowed}"
        hint = hint_for(nearest(str(path[-1]), names))
        return Problem(node.key_where or node.where, dotted, text + hint)
    if item["type"] == "relation":
        relation_to = tree.at((*path[:-1], "d_model")) if node is tree.at(path[:-1]) else node
        return Problem(relation_to.where, dotted, shorten(item["msg"], 200), relation=True)
    schema = at(path)
    shown = node.shown
    if isinstance(node.value, list):
        shown = f"the list {shorten(str(node.plain()))}"
    elif isinstance(node.value, dict) and node.value:
        shown = "a section"
    typed = "command line" in node.where
    text = f"found {shown}; allowed {describe(schema)}"
    if dotted == "model.activation" and (inner := _GATED.get(str(node.value).lower())):
        text += f"; {node.value} is model.activation={inner} with model.gated=true"
    elif inside := suggest_inner_key(path, [node.value]):
        text += f"; did you mean {dotted}.{inside}" + (f"={node.value}?" if typed else "?")
    else:
        text += hint_for(_suggest_value(node.value, schema))
    if isinstance(node.value, str) and typed and _SEVERAL.fullmatch(node.value):
        text += "; several values make a sweep: deepstack sweep, with commas between them (0,1,2)"
    return Problem(node.where, dotted, text)


def suggest_inner_key(path: Path, values: Sequence[object]) -> str | None:
    """Return the key of a section that all values were meant for: 'kind' for `norm: rms`."""
    inside = at(path).get("properties", {})
    words = [value for value in values if isinstance(value, str) and value]
    if not inside or not words or len(words) < len(values):
        return None
    for key, setting in inside.items():
        known = [word for option in alternatives(setting) for word in literals(option)]
        if known and all(word in known or _suggest_value(word, setting) for word in words):
            return str(key)
    return "name" if "name" in inside else None


def hint_for(meant: str | None) -> str:
    """Return '; did you mean …?', or '' for no suggestion."""
    if meant is None:
        return ""
    plain = meant in ("true", "false", "null") or not isinstance(parse_scalar(meant), str)
    return f"; did you mean {meant if plain else repr(meant)}?"


def _unknown_key(path: Path, node: Node) -> str:
    word, section = str(path[-1]), _dotted(path[:-1])
    siblings = sections().get(section, [])
    if not siblings:
        return (
            f"found {quote(word)} below a key that takes no keys; allowed {describe(at(path[:-1]))}"
        )
    allowed = ", ".join(siblings)
    if "." in word:
        first, _, rest = word.partition(".")
        full = f"{section}.{word}".strip(".")
        if full in keys() or full in sections():
            return f"found a key with a dot; allowed a section `{first}:` with `{rest}:` below it"
    hint = hint_for(suggest_key(path))
    if hint and len(siblings) > MOST_CHOICES:
        return f"found the unknown key {quote(word)}{hint}"
    return f"found the unknown key {quote(word)}{hint or ';'} allowed {allowed}"


def suggest_key(path: Path) -> str | None:
    """Return the known key nearest to an unknown one: of its section, else of any."""
    word, section = str(path[-1]), _dotted(path[:-1])
    inner = sections()
    meant = nearest(word, inner.get(section, []))
    if meant:
        return meant
    last = {dotted.rpartition(".")[2]: dotted for dotted in reversed([*keys(), *inner])}
    known = _ELSEWHERE | last
    plain = word.lower().replace("-", "_")
    near = plain if plain in known else nearest(word, last) or nearest(word, _ELSEWHERE)
    return known[near].removeprefix(f"{section}.") if near else None


def suggest_full_key(path: Path) -> str | None:
    """Return `suggest_key` with its section, as it is typed on a command line."""
    meant, section = suggest_key(path), _dotted(path[:-1])
    within = f"{section}.{meant}"
    return within if meant and (within in keys() or within in sections()) else meant


def _suggest_value(value: object, schema: Schema) -> str | None:
    """Return the allowed value that was probably meant, or None."""
    if isinstance(value, list | dict):
        return None
    options = list(alternatives(schema))
    if number := _suggest_number(value, options):
        return number
    word = "" if value is None else str(value)
    plain = word.strip().lower().replace("-", "_")
    words = [each for option in options for each in _words(option)]
    known = _WORDS_ELSEWHERE.get(plain)
    if known in words or not isinstance(value, str):
        return known if known in words else None
    if near := nearest(word, words):
        return near
    pattern = next((option["pattern"] for option in options if "pattern" in option), "")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", word)  # 'post_ln' for 'post ln'
    if pattern == IDENTIFIER:
        name = re.sub(r"[^a-z0-9_]+", "_", plain)
    fits = pattern and len(word) <= LONGEST_NAME and re.search("[A-Za-z]", name)
    return name if fits and re.fullmatch(pattern, name) else None


def _words(option: Schema) -> list[str]:
    kinds = {"boolean": ["true", "false"], "null": ["null"]}
    return literals(option) or kinds.get(str(option.get("type")), [])


def _suggest_number(value: object, options: Sequence[Schema]) -> str | None:
    """Return an allowed number that a value of another type denotes: 12 for '12', 1000 for 1e3."""
    try:
        number: Any = parse_scalar(str(value).strip().lower().replace("_", ""))
    except ValueError:
        return None
    for option in options:
        kind = option.get("type")
        if kind == "integer" and isinstance(number, float) and number.is_integer():
            number = int(number)
        if type(number) in _NUMBERS.get(str(kind), ()):
            fits = option.get("minimum", number) <= number <= option.get("maximum", number)
            if fits and repr(number) != repr(value):
                return repr(number)
    return None


def _dotted(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return quote_key(text.removeprefix("."))
