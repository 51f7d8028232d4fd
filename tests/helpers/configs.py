"""Configurations of tests with some settings changed, and their runs."""

from pathlib import Path
from typing import Any

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.config.instruments import SNAPSHOTS, specs
from deepstack.records import Run


def config_with(settings: dict[str, Any], /, **changes: Any) -> Config:
    """The default configuration with these settings and changes, in which `__` means a dot."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return with_overrides(Config(), settings | dotted)


def every_instrument(every: int) -> dict[str, Any]:
    """The settings that turn on each instrument with a log; `every` for those between snapshots."""
    found = {one.key: every for one in specs().values() if one.every != SNAPSHOTS}
    return found | {f"log.{one.switch}": True for one in specs().values() if one.switch}


def runs_with(config: Config, folder: Path, *changes: dict[str, Any]) -> list[Run]:
    """The runs of a configuration under each of these changes, in folders of their own."""
    return [
        deepstack.train(with_overrides(config, change), out=folder / str(index))
        for index, change in enumerate(changes)
    ]
