"""Rates by depth for the parameter groups of a model that deepstack did not build."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.probe_models import batch_of, encoder

import deepstack
from deepstack.errors import ConfigError

GUIDE = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of the guide's example after it has run."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(code.splitlines()) <= 30
    out = tmp_path_factory.mktemp("guide")
    names: dict[str, Any] = {}
    exec(code.replace("results/", f"{out}/"), names)
    return names


def test_the_factors_make_the_update_independent_of_depth(example: dict[str, Any]) -> None:
    result = example["result"]
    before = {row.role: row for row in result.rows if row.step == 1}
    after = {row.role: row for row in result.rows_after if row.step == 1}
    assert set(before) == {"matrices", "biases", "rest", "together"}
    assert all(row.exponent > 0.8 for row in before.values())
    assert all(abs(row.exponent) < 0.05 for row in after.values()), after
    # not only a slope of 0: the updates are within a few tens of percent at all depths
    whole, free = after["together"], before["together"]
    assert whole.largest / whole.smallest < 1.6 < 4 < free.largest / free.smallest
    assert free.linearity == pytest.approx(0.5, abs=0.01)


def test_the_guide_states_its_exponents(example: dict[str, Any]) -> None:
    stated = {name: float(x) for name, x in re.findall(r"'(\w+)': ([\d.]+)", GUIDE)}
    assert stated == pytest.approx(example["result"].exponents, abs=0.02)


def test_groups_of_an_optimizer_have_the_rates_of_the_depth(example: dict[str, Any]) -> None:
    result, model = example["result"], example["model"]
    groups = {group["name"]: group for group in example["optimizer"].param_groups}
    for name, power in result.exponents.items():
        assert groups[name]["lr"] == pytest.approx(1e-3 * (24 / 2) ** -power)
    assert sum(len(group["params"]) for group in groups.values()) == len([*model.parameters()])
    assert result.factors(2) == pytest.approx(dict.fromkeys(groups, 1.0))
    assert result.factors(2, interpolate=True) == pytest.approx(dict.fromkeys(groups, 1.0))
    between = result.factors(4, interpolate=True)["matrices"]
    updates = {run.get("model.depth"): run for run in result.before if run.get("seed") == 0}
    assert between == pytest.approx(
        updates[2].attribution["matrices"][0] / updates[4].attribution["matrices"][0], rel=0.5
    )


def test_mistakes_are_refused(tmp_path: Path) -> None:
    def build(depth: int, seed: int) -> Any:
        model = encoder(depth)
        return model, batch_of(0), lambda step: model(batch_of(step)).square().mean()

    given = {"depths": (2, 4), "groups": {"all": "*"}, "lr": 1e-5, "out": tmp_path / "s"}
    for wrong, message in (
        ({"depths": (4, 4)}, "depths: found"),
        ({"steps": (0,)}, "steps: found"),
        ({"groups": {"all": "layer.*"}}, "no trained parameter is named 'layer"),
    ):
        with pytest.raises(ConfigError, match=message):
            deepstack.calibrate_model(build, **given | wrong)
