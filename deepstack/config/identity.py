"""The identity of an experiment: its values, their hash and the name of its run."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from deepstack.base.allowed import PATTERNS, RUN_NAME
from deepstack.base.errors import ConfigError
from deepstack.base.yaml_reader import quote
from deepstack.config.schema import Config
from deepstack.config.section import LONGEST_NAME

NOT_THE_EXPERIMENT = ("name", "runtime", "log.to")


def values(config: Config) -> dict[str, Any]:
    """Return every value by its dotted key: {'seed': 0, 'model.depth': 6, …}; tuples as lists."""
    return dict(flatten(config.model_dump(mode="json")))


def non_defaults(config: Config) -> dict[str, Any]:
    """Return the values that differ from the defaults; a d_ff of 4 d_model does not."""
    usual = _usual() | {"model.d_ff": 4 * config.model.d_model}
    settings = values(config)
    return {  # 1 is neither 1.0 nor true
        key: value
        for key, value in settings.items()
        if key not in usual or type(value) is not type(usual[key]) or value != usual[key]
    }


@cache
def _usual() -> dict[str, Any]:
    return values(Config())


def same_experiment(a: Config, b: Config) -> bool:
    """Return whether two configurations are equal apart from `name`, `runtime`, `log.to`."""
    return digest(a) == digest(b)


def config_hash(config: Config) -> str:
    """Return six hex digits of the values other than the defaults, without `name` and `runtime`.

    A key that is added later, with a default, changes no hash.
    """
    return digest(config)[:6]


def digest(config: Config) -> str:
    """Return the sha256 of which `config_hash` is the first part."""
    counted = {key: v for key, v in non_defaults(config).items() if is_of_experiment(key)}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def run_name(config: Config) -> str:
    """Return the name of a run's folder: 'deepnorm-d1000-s0-3f9a1c'."""
    model = config.model
    return f"{model.scheme}-d{model.depth}-s{config.seed}-{config_hash(config)}"


def study_name(
    config: Config, path: str | os.PathLike[str], given: str | None = None, suffix: str = ""
) -> str:
    """Return the study of a run: the given name, else that of the configuration or its file.

    The config.yaml of a run without a name stays with the study in whose folder the run lies.
    suffix: of a name that is not given.  Raises ConfigError for a name that no study may have.
    """
    if given is not None:
        return checked_study(given)
    file = Path(path).absolute()
    of_a_run = file.name == "config.yaml" and file.with_name("status.json").is_file()
    stem = file.parent.parent.name if of_a_run else file.stem
    return checked_study((config.name or name_of_stem(stem)) + suffix)


def name_of_stem(stem: str) -> str:
    """Return the study's name for a file; six digits of a hash stand for what a name cannot hold.

    Spaces and signs become underscores.  Other letters than ASCII's, and those beyond the longest
    name, are lost, so that two files would have one study without the hash.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", stem).lstrip(".-")
    if stem.isascii() and len(name) <= LONGEST_NAME:
        return name or "runs"
    code = hashlib.sha256(os.fsencode(stem)).hexdigest()[:6]
    return f"{name[: LONGEST_NAME - 7].strip('_') or 'study'}-{code}"


def checked_study(name: str) -> str:
    """Return the name of a study if a configuration's `name` may have it.

    Raises ConfigError for what would lead elsewhere ('../x', '/x', 'a/b', '.'), hide ('.x'),
    look like an option ('-x'), be no folder at all ('') or be too long.
    """
    if re.fullmatch(RUN_NAME, name) and len(name) <= LONGEST_NAME:
        return name
    raise ConfigError(
        f"--study: found {quote(name)}; allowed {PATTERNS[RUN_NAME]} (at most {LONGEST_NAME})"
    )


def is_of_experiment(key: str) -> bool:
    """Return whether a dotted key belongs to the experiment: not `name`, `runtime` or `log.to`."""
    return not {key, key.split(".")[0]} & set(NOT_THE_EXPERIMENT)


def flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of nested sections."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
