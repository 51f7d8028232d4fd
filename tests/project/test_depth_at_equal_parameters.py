"""experiments/depth_at_equal_parameters: the slopes of its page, by plain loops."""

import csv
import math
import re
import statistics
import sys
from importlib import import_module
from typing import Any

import pandas as pd
import pytest
from helpers import ROOT

FOLDER = ROOT / "experiments/depth_at_equal_parameters"
T_OF_FIVE = 2.7764451  # Student's t, 4 degrees of freedom, 95 %


@pytest.fixture(scope="module")
def slopes() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module("slopes")
    finally:
        sys.path.remove(str(FOLDER))


def reported() -> dict[str, dict[int, dict[int, float]]]:
    """Scheme -> seed -> depth -> loss of the reported runs."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    with (FOLDER / "runs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["kind"] == "reported":
                by_seed = found.setdefault(row["scheme"], {}).setdefault(int(row["seed"]), {})
                by_seed[int(row["depth"])] = float(row["val_loss"])
    return found


def slope(losses: dict[int, float]) -> float:
    x = [math.log(depth) for depth in losses]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(losses.values())
    pairs = zip(x, losses.values(), strict=True)
    above = sum((a - mean_x) * (b - mean_y) for a, b in pairs)
    return above / sum((a - mean_x) ** 2 for a in x)


def test_the_page_has_the_slopes_of_its_runs() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8").replace("−", "-")
    found = {
        scheme: {seed: slope(losses) for seed, losses in by_seed.items()}
        for scheme, by_seed in reported().items()
    }
    labels = {"hyper_connections": "Hyper-connections", "attn_res": "Attention residuals"}
    for scheme, label in labels.items():
        gaps = [found[scheme][seed] - found["pre_ln"][seed] for seed in range(5)]
        half = T_OF_FIVE * statistics.stdev(gaps) / math.sqrt(5)
        mean = statistics.fmean(gaps)
        shown = f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})"
        (line,) = re.findall(rf"^\| {label} \| .*to.*$", page, re.M)
        assert shown in line, shown
        assert f"| {statistics.fmean(found[scheme].values()):.3f} (" in line


def test_a_seed_without_all_cells_is_not_used(slopes: Any) -> None:
    rows = [
        {"scheme": scheme, "depth": depth, "seed": seed, "val_loss": math.log(depth) * factor}
        for scheme, factor in (("pre_ln", 2.0), ("attn_res", -1.0))
        for depth in (4, 16, 64)
        for seed in (0, 1, 2)
    ]
    table = pd.DataFrame(rows)
    table.loc[0, "val_loss"] = math.inf  # seed 0 of Pre-LN at 4 layers
    found = slopes.slopes_of(table)
    assert found.index.tolist() == [1, 2]
    assert found["pre_ln"].tolist() == pytest.approx([2.0, 2.0])
    assert found["attn_res"].tolist() == pytest.approx([-1.0, -1.0])
