"""The settings that the names of a command mean, and the values that they allow."""

from typing import Any

from deepstack.base import quote
from deepstack.config import DEPTH, LR, SCHEME, SEED, TASK, WIDTH, Key
from deepstack.tools.own_trainer.command import RUN

KNOWN = (SEED, LR, DEPTH, WIDTH, SCHEME, TASK)
"""Settings that tables and charts know; a name of a command means one of them, or itself."""
WORDS = {**{key.last: key for key in (SEED, LR, DEPTH, WIDTH, SCHEME)}, "task": TASK} | {
    "model": SCHEME
}
SECTIONS = ("name", "runtime", "log", "model", "train", "task", RUN)
WHOLE = {SEED: "whole numbers from 0 on", DEPTH: "whole numbers", WIDTH: "whole numbers"}


def setting_of(name: str) -> Key:
    """Return the setting that a name in braces means: `n_layer` is model.depth, others themselves.

    Raises ValueError for a name that a run folder uses otherwise.
    """
    meant = Key.of_other_word(name)
    for key in (Key(name), WORDS.get(name), meant):
        if key in KNOWN:
            return Key(key)
    if name.split(".")[0] in SECTIONS:
        raise ValueError(f"found the name {quote(name)}, which run folders use; allowed another")
    return Key(name)


def key_or_none(name: str) -> Key | None:
    """Return the setting that a name means; None for a name that is not allowed."""
    try:
        return setting_of(name)
    except ValueError:
        return None


def wrong_value(key: Key, value: Any) -> str:
    """Return the values that are allowed for a setting if this is not one of them, else ''."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in WHOLE and not (is_number and isinstance(value, int) and value >= 0):
        return WHOLE[key]
    return "numbers" if key == LR and not is_number else ""


def fitted(key: Key, value: Any) -> Any:
    """Return a value with the type of its setting in config.yaml."""
    return str(value) if key in (SCHEME, TASK) else value
