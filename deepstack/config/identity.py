"""The identity of an experiment: the hash of its values, and the names of its run and study."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstack.base.allowed import PATTERNS, RUN_NAME
from deepstack.base.errors import ConfigError
from deepstack.base.text import quote
from deepstack.config.schema import Config, non_defaults
from deepstack.config.section import LONGEST_NAME

NOT_THE_EXPERIMENT = ("name", "runtime", "log.to")
# Settings with the numbers of another one, which alone the hash counts.
ALIASES = {"train.micro_batches": "train.shards"}
# Options of definitions, of tasks and of roles may all be swept: a missing key has its own default,
# so missing and present are different values. Elsewhere a missing key belongs to the config of an
# older version.
OPEN_SECTIONS = ("task.", "train.lr_factors.", "train.lr_exponents.")
OPTIONS = "_options"
"""The end of the keys whose sections hold the options of a definition: model.scheme_options."""


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
    changed = non_defaults(config).items()
    counted = {ALIASES.get(key, key): v for key, v in changed if is_of_experiment(key)}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def run_name(config: Config) -> str:
    """Return the name of a run's folder: 'deepnorm-d1000-s0-3f9a1c'."""
    model = config.model
    return f"{model.scheme}-d{model.depth}-s{config.seed}-{config_hash(config)}"


def study_name(
    config: Config, path: str | os.PathLike[str], given: str | None = None, suffix: str = ""
) -> str:
    """Return the study of a run: the given name, else the configuration's or its file's name.

    The config.yaml of a run without a name stays with the study in whose folder the run lies.

    suffix: of a name that is not given.

    Raises ConfigError for a name that no study may have.
    """
    if given is not None:
        return checked_study(given)
    file = Path(path).absolute()
    of_a_run = file.name == "config.yaml" and file.with_name("status.json").is_file()
    stem = file.parent.parent.name if of_a_run else file.stem
    return checked_study((config.name or name_of_stem(stem)) + suffix)


def name_of_stem(stem: str) -> str:
    """Return the study's name for a file; a hash of six digits marks letters that it cannot hold.

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

    Raises ConfigError for a name that would lead elsewhere ('../x', '/x', 'a/b', '.'), hide ('.x'),
    look like an option ('-x'), name no folder ('') or be too long.
    """
    if re.fullmatch(RUN_NAME, name) and len(name) <= LONGEST_NAME:
        return name
    raise ConfigError(
        f"--study: found {quote(name)}; allowed {PATTERNS[RUN_NAME]} (at most {LONGEST_NAME})"
    )


def is_of_experiment(key: str) -> bool:
    """Return whether a dotted key belongs to the experiment: not `name`, `runtime` or `log.to`."""
    return not {key, key.split(".")[0]} & set(NOT_THE_EXPERIMENT)


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys on which configs differ, in their order, without `name` and `runtime`.

    A key that an older config lacks counts as equal, except options and those in OPEN_SECTIONS.
    """
    seen: dict[str, list[Any]] = {}
    for config in configs:
        for key, value in config.items():
            seen.setdefault(key, []).append(value)
    differing = []
    for key, values in seen.items():
        is_open = f"{OPTIONS}." in key or key.startswith(OPEN_SECTIONS)
        is_absent = len(values) < len(configs) and is_open
        if is_of_experiment(key) and (is_absent or any(value != values[0] for value in values)):
            differing.append(key)
    return differing
