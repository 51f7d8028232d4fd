"""A claim's chart and its JSON have the numbers of its finding."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from deepstack.theory.claim import Claim, Curves, Finding, Line, Part, Source
from deepstack.theory.report import as_json, lines

DRAWS = torch.tensor([[1.0, 10.0], [2.0, 30.0], [6.0, 20.0]])
MEANS = [3.0, 20.0]
ERRORS = [statistics.stdev(column) / 3**0.5 for column in DRAWS.T.tolist()]


@pytest.mark.parametrize("measured", [True, False])
def test_a_claims_chart_draws_means_and_standard_errors(measured: bool) -> None:
    """Bars at measured points, a band along a line."""
    axes = Figure().add_subplot()
    lines(axes, Curves("N", "value", [Line.mean("measured", [4, 8], DRAWS, measured)]))
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[4, MEANS[0]], [8, MEANS[1]]]
    ends = {
        (float(x), round(float(y), 4))
        for path in axes.collections[0].get_paths()
        for x, y in path.vertices
    }
    assert ends == {
        (x, round(mean + sign * error, 4))
        for x, mean, error in zip((4, 8), MEANS, ERRORS, strict=True)
        for sign in (-1, 1)
    }


def test_json_says_of_each_part_whether_it_agrees() -> None:
    """Whether the claim states the part does not matter."""
    parts = [
        Part("right", 1.0, 1.0, 0.01), Part("wrong", 1.0, 2.0, 0.01),
        Part("right beside", 1.0, 1.0, 0.01, stated=False),
        Part("wrong beside", 1.0, 2.0, 0.01, stated=False),
    ]  # fmt: skip
    claim = Claim("C0", "1 = 1", Source("a title", "an address"), lambda seed: finding)
    finding = Finding(parts, "a note")
    (row,) = json.loads(json.dumps(as_json([(claim, finding)])))
    assert [part["agrees"] for part in row["parts"]] == [True, False, True, False]
    assert [part["stated"] for part in row["parts"]] == [True, True, False, False]
