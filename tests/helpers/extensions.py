"""Which additions there are: any can be deleted, and the tests outside of it still pass."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

from deepstack.base.extensions import HOMES, ROOT
from deepstack.config.keys import setting_keys

V = TypeVar("V")


ADDITIONS = frozenset(
    "attribution bound noise_scale sharpness answer calibrate conform coordinates depth_use diff "
    "export laws own_trainer probe refine report signal transfer huggingface mlflow ray slurm "
    "tensorboard tokenizers trackio wandb ledger".split()
)
"""The folders of all additions: a name that is not among them is a slip, not a missing folder."""

IMPORT = r"^from (?:deepstack\.(?:instruments|tools|integrations)|deepstack_lab)\.(\w+)"

MAY_IMPORT = {
    "answer": {"transfer"},
    "calibrate": {"probe"},
    "huggingface": {"depth_use"},
    "own_trainer": {"answer"},
}
"""The other additions that one may import, and without which it does not work."""


def has(name: str) -> bool:
    """Return whether an addition is there; name: of its folder."""
    assert name in ADDITIONS, name
    return any((ROOT / home / name).is_dir() for home in HOMES)


def works(name: str) -> bool:
    """Return whether an addition is there, with those that it imports."""
    return has(name) and all(map(works, MAY_IMPORT.get(name, ())))


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test or a case that uses these additions where one of them is missing."""
    missing = [name for name in names if not works(name)]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: missing")


COMMANDS = {
    "analyze": "depth_use", "answer": "answer", "calibrate": "calibrate", "conform": "conform",
    "coordinates": "coordinates", "export": "export", "fit": "laws", "report": "report",
    "reproduce": "ledger", "signal": "signal",
}  # fmt: skip
"""Command -> the addition that it belongs to."""


def needs_command(words: Iterable[object]) -> list[pytest.MarkDecorator]:
    """Skip a case that types a command of a missing addition; words: of the command line."""
    return [needs(COMMANDS[str(word)]) for word in words if str(word) in COMMANDS]


def is_missing(path: Path) -> bool:
    """Return whether a file belongs, or belonged, to a missing addition or to its tests."""
    words = list(path.relative_to(ROOT).parts)
    tests = {home.removeprefix("deepstack").strip("/_"): home for home in HOMES}  # lab, tools, …
    if words[0] == "tests":
        words = [*tests.get(words[1], "tests").split("/"), *words[2:]]
    home = next((home for home in HOMES if words[: home.count("/") + 1] == home.split("/")), None)
    name = words[home.count("/") + 1] if home else ""
    return name in ADDITIONS and not has(name)


def imports_missing(path: Path) -> bool:
    """Return whether a file of tests imports, at its top, a missing addition."""
    if all(has(name) for name in ADDITIONS):
        return False
    names = re.findall(IMPORT, path.read_text(encoding="utf-8"), re.MULTILINE)
    return any(name in ADDITIONS and not works(name) for name in names)


def needs_settings_of(path: Path) -> pytest.MarkDecorator:
    """Skip a case whose configuration has settings of a missing instrument."""
    log = yaml.safe_load(path.read_text(encoding="utf-8")).get("log") or {}
    missing = [key for key in log if not is_known(f"log.{key}")]
    return pytest.mark.skipif(bool(missing), reason=f"no instrument has the settings {missing}")


def known(settings: dict[str, V]) -> dict[str, V]:
    """Return the settings without those of missing instruments; a key may have __ for a dot."""
    return {key: v for key, v in settings.items() if is_known(key)}


def known_words(words: Iterable[str]) -> list[str]:
    """Return words KEY=VALUE without those of missing instruments."""
    return [word for word in words if is_known(word.partition("=")[0])]


def is_known(key: str) -> bool:
    return not key.startswith("log") or key.replace("__", ".") in setting_keys()
