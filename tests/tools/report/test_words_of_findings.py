"""Verdicts, steps and counts in the finding of a report."""

import math

import pytest

from deepstack.runs import Mean
from deepstack.tools.report.finding import listed, verdict_of


@pytest.mark.parametrize(
    ("low", "high", "n", "words"),
    [
        (0.05, 0.2, 3, "clear"),
        (-0.05, 0.2, 3, "not clear: the interval includes 0"),
        (-0.2, -0.05, 3, "not clear: the settings have other seeds"),
        (math.nan, math.nan, 3, "no interval: the seeds change nothing"),
        (math.nan, math.nan, 0, "no interval: no shared seed"),
    ],
)
def test_a_margin_is_clear_only_above_zero(low: float, high: float, n: int, words: str) -> None:
    assert verdict_of(Mean(0.1, 0.01, 0.01, low, high, n)) == words


@pytest.mark.parametrize(
    ("number", "end"),
    [(4, "s3 (3)"), (5, "; and 1 other setting"), (6, "; and 2 other settings")],
)
def test_four_settings_are_listed_and_the_others_counted(number: int, end: str) -> None:
    text = listed([(f"s{i}", str(i)) for i in range(number)])
    assert text.startswith("s0 (0); s1 (1)") and text.endswith(end)
