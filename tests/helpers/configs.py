"""Configurations of tests, with some settings changed."""

from __future__ import annotations

from typing import Any

from deepstack.config import Config, with_overrides


def config_with(settings: dict[str, Any], /, **changes: Any) -> Config:
    """The default configuration with these settings and changes, whose `__` stands for a dot."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return with_overrides(Config(), settings | dotted)
