"""The complete files of docs/extending for schedules, optimizers, activations, …, as plugins."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.small_runs import small

import deepstack
from deepstack.base.kinds import KINDS, Kind
from deepstack.cli.declarations import DEFINITIONS, declared_names
from deepstack.config import Config
from deepstack.records import Run
from deepstack.training.schedule import learning_rate

# setting -> (page, the name that its file defines, an option with another value than the default)
RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "train.schedule": ("schedule", "polynomial", {"power": 3.0}),
}


def train_recipe(setting: str, folder: Path, **more: Any) -> tuple[Config, Run]:
    """Load the file of a page and train a short run with it; return its configuration too."""
    page, name, options = RECIPES[setting]
    text = (ROOT / "docs" / "extending" / f"{page}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = folder / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    deepstack.load_plugins([path])
    key = setting.replace(".", "__")
    config = small(train__steps=4, **{key: name, f"{key}_options": options}, **more)
    return config, deepstack.train(config, out=folder)


def test_every_kind_has_a_recipe_and_is_listed_without_torch() -> None:
    assert set(KINDS) == set(RECIPES) == set(DEFINITIONS)
    for setting, kind in KINDS.items():
        assert isinstance(kind, Kind) and declared_names(setting) == kind.names()
        assert all(definition.equation() for definition in kind.values())


def test_the_schedule_of_the_recipe_is_the_rate_of_every_step(tmp_path: Path) -> None:
    config, run = train_recipe("train.schedule", tmp_path, train__warmup_steps=2)
    lr = config.train.lr
    rates = [1 / 2, 1, (2 / 3) ** 3, (1 / 3) ** 3]
    assert run.steps.lr.tolist() == pytest.approx([lr * rate for rate in rates])
    assert [learning_rate(config.train, step) for step in (1, 4)] == pytest.approx(
        [lr / 2, lr / 27]
    )
    assert run.config["train"]["schedule_options"] == {"power": 3.0}
