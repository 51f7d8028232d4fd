"""experiments/worth_of_a_loop: the numbers of its page, by a plain search and plain means."""

import csv
import math
import re
import statistics
from collections import defaultdict

import numpy as np
import pytest
from helpers import ROOT

FOLDER = ROOT / "experiments/worth_of_a_loop"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8").replace("−", "-")
LABELS = {"pre_ln": "Pre-LN", "hyper_connections": "Hyper-connections"}
T_OF_FIVE = 2.7764451  # Student's t, 4 degrees of freedom, 95 %

Losses = dict[tuple[int, int], dict[int, float]]


def losses_of(scheme: str) -> Losses:
    """(width, unique layers) -> seed -> loss of the reported runs of a scheme."""
    found: Losses = defaultdict(dict)
    with (FOLDER / "runs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["kind"] == "reported" and row["scheme"] == scheme:
                cell = int(row["width"]), int(row["unique"])
                found[cell][int(row["seed"])] = float(row["val_loss"])
    assert len(found) == 12 and all(len(by_seed) == 5 for by_seed in found.values())
    return found


def best_phi(losses: Losses, seeds: range) -> float:
    """The φ of least squares, by trying every pair of φ and a on a grid."""
    y = np.array([statistics.fmean(by_seed[seed] for seed in seeds) for by_seed in losses.values()])
    errors = {}
    for phi in np.arange(0.2, 0.91, 0.01):
        sizes = np.array([(2 + (8 / u) ** phi * u) * w**2 for w, u in losses])
        for a in np.geomspace(0.001, 3, 60):
            x = (sizes / sizes.mean()) ** -a
            slope, level = np.polyfit(x, y, 1)
            errors[phi] = min(errors.get(phi, math.inf), np.square(level + slope * x - y).sum())
    return float(min(errors, key=lambda phi: errors[phi]))


@pytest.mark.parametrize("scheme", LABELS)
def test_the_page_has_the_worth_of_a_loop(scheme: str) -> None:
    losses = losses_of(scheme)
    (row,) = re.findall(rf"^\| {LABELS[scheme]} \| 0\.\d+ \| (0.*)$", PAGE, re.M)
    shown = [float(cell.split(" (")[0]) for cell in row.rstrip("| ").split(" | ")]
    found = [best_phi(losses, range(3)), best_phi(losses, range(5))]
    assert shown == pytest.approx(found, abs=0.02)


@pytest.mark.parametrize("scheme", LABELS)
def test_the_page_has_the_price_of_one_layer(scheme: str) -> None:
    losses = losses_of(scheme)
    (row,) = re.findall(rf"^\| {LABELS[scheme]} \| (0\.0.*)$", PAGE, re.M)
    cells = [list(map(float, re.findall(r"-?0\.\d+", cell))) for cell in row.split(" | ")]
    for shown, width in zip(cells, (32, 48, 64), strict=True):
        gaps = [losses[width, 1][seed] - losses[width, 8][seed] for seed in range(5)]
        half = T_OF_FIVE * statistics.stdev(gaps) / math.sqrt(5)
        mean = statistics.fmean(gaps)
        assert shown == pytest.approx([mean, mean - half, mean + half], abs=6e-4)
