"""Which instruments there are: any can be deleted, and the tests of the core still pass."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pytest
import yaml

from deepstack.base.extensions import HOMES, ROOT
from deepstack.config.keys import setting_keys

V = TypeVar("V")


def has_instrument(name: str) -> bool:
    return any((ROOT / home / name).is_dir() for home in HOMES)


def needs_instrument(name: str) -> pytest.MarkDecorator:
    """Skip a case that tests the core with the help of an instrument."""
    return pytest.mark.skipif(not has_instrument(name), reason=f"{name} is missing")


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
