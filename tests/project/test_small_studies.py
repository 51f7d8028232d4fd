"""Numbers on the pages of routing_and_depth, norm_or_tanh and grown_depth, by plain loops."""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

import pytest
from helpers import ROOT

T_OF_FIVE = 2.7764451  # Student's t, 4 degrees of freedom, 95 %

Losses = dict[tuple[str, str], dict[int, float]]


def page_of(name: str) -> str:
    return (ROOT / f"experiments/{name}/README.md").read_text("utf-8").replace("−", "-")


def losses_of(name: str, keys: tuple[str, str], loss: str = "val_loss") -> Losses:
    """Two settings -> seed -> loss of the reported runs of a study."""
    found: Losses = defaultdict(dict)
    path = ROOT / f"experiments/{name}/runs.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["kind"] == "reported":
                found[row[keys[0]], row[keys[1]]][int(row["seed"])] = float(row[loss])
    assert len(found) == 6 and all(sorted(by_seed) == [0, 1, 2, 3, 4] for by_seed in found.values())
    return found


def interval(values: Sequence[float], form: str) -> str:
    mean = statistics.fmean(values)
    half = T_OF_FIVE * statistics.stdev(values) / math.sqrt(5)
    low, high = format(mean - half, form), format(mean + half, form)
    return f"({low} to {high})"


def test_the_page_of_routing_has_the_gains_and_their_slope() -> None:
    page, losses = page_of("routing_and_depth"), losses_of("routing_and_depth", ("scheme", "depth"))
    x = [math.log(depth) for depth in (12, 24, 48)]
    gains = []
    for depth in ("12", "24", "48"):
        one, other = losses["pre_ln", depth], losses["attn_res", depth]
        gains.append([one[seed] - other[seed] for seed in range(5)])
        cells = [f"{statistics.fmean(by_seed.values()):.3f}" for by_seed in (one, other)]
        mean = statistics.fmean(gains[-1])
        row = f"| {depth} | {cells[0]} | {cells[1]} | {mean:.3f} {interval(gains[-1], '.3f')}"
        assert row in page
    # Three equally spaced points: the slope is that between the outer ones.
    slopes = [(last - first) / (x[2] - x[0]) for first, _, last in zip(*gains, strict=True)]
    assert f"{statistics.fmean(slopes):.3f} nats a unit of ln N {interval(slopes, '.3f')}" in page


@pytest.mark.parametrize(
    "loss, words", [("val_loss", "final validation loss"), ("least_loss", "least validation loss")]
)
def test_the_page_of_tanh_has_the_differences(loss: str, words: str) -> None:
    page, losses = page_of("norm_or_tanh"), losses_of("norm_or_tanh", ("norm", "held_out"), loss)
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {words}")]
    for held_out, cell in zip(("0.99", "0.9", "0.1"), row.split(" | ")[1:], strict=True):
        tanh, layer = losses["dynamic_tanh", held_out], losses["layer", held_out]
        gaps = [100 * (tanh[seed] / layer[seed] - 1) for seed in range(5)]
        shown = f"{statistics.fmean(gaps):+.1f} % {interval(gaps, '.1f')}"
        assert cell.removesuffix(" |") == shown


def test_the_page_of_growth_has_the_rise_of_late_layers() -> None:
    page, found = page_of("grown_depth"), defaultdict(list)
    path = ROOT / "experiments/grown_depth/runs.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "reported"]
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        found[row["grow"]].append({key: float(row[key]) for key in ("val_loss", "rise_late")})
    assert {len(by_seed) for by_seed in found.values()} == {5}
    for grow, by_seed in found.items():
        loss, late = (
            statistics.fmean(r[key] for r in by_seed) for key in ("val_loss", "rise_late")
        )
        row = f"| {grow} | {loss:.3f} | {late:.4f} |"
        if grow != "not grown":
            pairs = zip(by_seed, found["not grown"], strict=True)
            gaps = [one["rise_late"] - other["rise_late"] for one, other in pairs]
            row += f" {statistics.fmean(gaps):.4f} {interval(gaps, '.4f')} |"
        assert row in page, row
