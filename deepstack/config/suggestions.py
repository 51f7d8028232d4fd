"""Suggest the key or the value that a mistake in a configuration was probably meant to be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from deepstack.allowed import Schema, alternatives, literals
from deepstack.config.section import LONGEST_NAME
from deepstack.config.walk import Path, at, dotted, keys, sections
from deepstack.registry import nearest
from deepstack.yaml_reader import parse_scalar

# Keys and values of other programs, and their names here.
_KEYS_ELSEWHERE = {
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

_NUMBERS: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float)}


def hint_for(suggestion: str | None) -> str:
    """Return '; did you mean …?', or '' for none, and for one that is long or not printable."""
    if suggestion is None or len(suggestion) > 100 or not suggestion.isprintable():
        return ""
    is_text = isinstance(parse_scalar(suggestion), str) and suggestion[:1] != "["
    return f"; did you mean {repr(suggestion) if is_text else suggestion}?"


def suggest_key(path: Path) -> str | None:
    """Return the known key nearest to an unknown one: of its section, else of any."""
    word, section = str(path[-1]), dotted(path[:-1])
    if sibling := nearest(word, at(path[:-1]).get("properties", ())):
        return sibling
    by_name = {key.rpartition(".")[2]: key for key in reversed([*keys(), *sections()])}
    known = _KEYS_ELSEWHERE | by_name
    name: str | None = _normal(word)
    if name not in known:
        name = nearest(word, by_name) or nearest(word, _KEYS_ELSEWHERE)
    return known[name].removeprefix(f"{section}.") if name else None


def suggest_full_key(path: Path) -> str | None:
    """Return `suggest_key` with its section, as it is typed on a command line."""
    key = suggest_key(path)
    full = f"{dotted(path[:-1])}.{key}"
    return full if key and (full in keys() or full in sections()) else key


def suggest_inner_key(path: Path, values: Sequence[object]) -> str | None:
    """Return the key of a section that all values were meant for: 'kind' for `norm: rms`."""
    settings = at(path).get("properties", {})
    words = [value for value in values if isinstance(value, str) and value]
    if not settings or not words or len(words) < len(values):
        return None
    for key, setting in settings.items():
        known = [word for option in alternatives(setting) for word in literals(option)]
        if known and all(word in known or suggest_value(word, setting) for word in words):
            return str(key)
    return "name" if "name" in settings else None


def suggest_value(value: object, schema: Schema) -> str | None:
    """Return the allowed value that was probably meant, or None."""
    if isinstance(value, list | dict):
        return None
    options = list(alternatives(schema))
    is_list = schema.get("type") == "array" and "maxItems" not in schema
    if is_list and value is not None:
        return f"[{value}]"
    return (
        _suggest_number(value, options)
        or _suggest_word(value, options)
        or _suggest_name(value, options)
    )


def _suggest_number(value: object, options: Sequence[Schema]) -> str | None:
    """Return an allowed number that a value of another type denotes: 12 for '12', 1000 for 1e3."""
    number: Any = parse_scalar(str(value).strip().lower().replace("_", ""))
    for option in options:
        kind = option.get("type")
        if kind == "integer" and isinstance(number, float) and number.is_integer():
            number = int(number)
        if type(number) in _NUMBERS.get(str(kind), ()):
            fits = option.get("minimum", number) <= number <= option.get("maximum", number)
            if fits and repr(number) != repr(value):
                return repr(number)
    return None


def _suggest_word(value: object, options: Sequence[Schema]) -> str | None:
    """Return the allowed word that another program calls by this value, or the nearest one."""
    kinds = {"boolean": ["true", "false"], "null": ["null"]}
    words = [
        word
        for option in options
        for word in literals(option) or kinds.get(str(option.get("type")), [])
    ]
    synonym = _WORDS_ELSEWHERE.get(_normal("" if value is None else str(value)))
    if synonym in words:
        return synonym
    return nearest(value, words) if isinstance(value, str) else None


def _suggest_name(value: object, options: Sequence[Schema]) -> str | None:
    """Return the text as a name that the pattern allows: 'post_ln' for 'post ln'."""
    name = re.sub(r"[^a-z0-9_]+", "_", _normal(str(value)))
    is_word = isinstance(value, str) and len(value) <= LONGEST_NAME and re.search("[a-z]", name)
    for option in options:
        if is_word and "pattern" in option and re.fullmatch(option["pattern"], name):
            return name
    return None


def _normal(word: str) -> str:
    return word.strip().lower().replace("-", "_")
