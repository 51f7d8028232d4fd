"""The instrument of docs/extending/instrument.md as a plugin, and a run that uses it."""

import re
from pathlib import Path

from deepstack.base import plugins
from deepstack.config import Config
from helpers import ROOT
from helpers.small_runs import small

PAGE = (ROOT / "docs/extending/instrument.md").read_text(encoding="utf-8")
NAME, COLUMN = "descent_angle", "descent_cosine"
EVERY = 3


def recipe() -> str:
    """Return the file of the page."""
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block
    return block[1]


def load_recipe(folder: Path) -> Path:
    """Write the plugin into a folder and load it; return its path."""
    path = folder / f"{NAME}.py"
    path.write_text(recipe(), encoding="utf-8")
    plugins.load_plugins([path])
    return path


def measured_config(steps: int = 8) -> Config:
    """Return a small run with the instrument."""
    settings = {"train.steps": steps, f"log.instruments.{NAME}": EVERY}
    return small(**{key.replace(".", "__", 1): value for key, value in settings.items()})
