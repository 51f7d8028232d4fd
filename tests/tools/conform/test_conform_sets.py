"""Dated sets of checks in `conform`: their counts, their JSON, their badge, and their limits."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.attention_blocks import block as attention_block
from helpers.command_line import refusal, typed
from helpers.conform_blocks import block as block_of
from helpers.pages import shown

from deepstack.base.errors import ConfigError
from deepstack.schemes import SCHEMES
from deepstack.tools.conform.conform import examine
from deepstack.tools.conform.sets import SETS, badge_of, set_of

DATED = "--scheme", "deepnorm", "--set", "2026-12"
NAMES = 16  # of the block: q, k, v, o, w1, w2 with biases, and gain and bias of two norms
# Checks at one depth: F; x_0 and each parameter; each parameter; each parameter twice.
WHOLE = 1 + (1 + NAMES) + NAMES + 2 * NAMES


@pytest.fixture
def block(tmp_path: Path) -> Path:
    path = tmp_path / "my_block.py"
    text = shown("conform.md", "my_block.py").replace("(2 * 2 * N)", "(2 * N)")
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_right_block_passes_all_checks_of_the_set(block: Path, tmp_path: Path) -> None:
    badge = tmp_path / "badge.json"
    done = typed("conform", block, *DATED, "--json", "--badge", badge)
    found = json.loads(done.stdout)
    whole = 3 * WHOLE  # of three depths
    assert len(found["rows"]) == found["checks"] == found["passed"] == whole
    assert found["set"] == "schemes 2026-12" and found["scheme"] == "deepnorm"
    assert all(row["agrees"] for row in found["rows"])
    assert Counter(row["check"] for row in found["rows"]) == {
        "forward": 3, "gradients": 51, "start": 48, "sgd step": 48, "adam step": 48,
    }  # fmt: skip
    assert f"{whole} of {whole} checks of schemes 2026-12 agree\n" in done.stderr
    assert json.loads(badge.read_text()) == {
        "schemaVersion": 1,
        "label": "deepstack schemes 2026-12",
        "message": f"DeepNorm: {whole} of {whole} checks",
        "color": "brightgreen",
    }


@pytest.mark.slow
def test_a_wrong_start_counts_the_checks_that_agree_before_it(block: Path, tmp_path: Path) -> None:
    block.write_text(block.read_text().replace("(8 * N) ** -0.25", "(8 * N) ** -0.5"))
    badge = tmp_path / "badge.json"
    message = refusal(6, "conform", block, *DATED, "--badge", badge)
    # v, o, w1 and w2 at three depths have another deviation
    made = 3 * (1 + 1 + NAMES + NAMES)
    assert f"{made - 12} of {made} checks of schemes 2026-12 agree" in message
    assert "the first difference ends the set" in message
    shown = json.loads(badge.read_text())
    assert (shown["color"], shown["message"]) == ("red", "DeepNorm: start differs")


@pytest.mark.parametrize(
    ("fault", "color", "result"),
    [("", "brightgreen", f"{WHOLE} of {WHOLE} checks"), ("logits", "red", "forward differs")],
)
def test_a_badge_is_green_only_where_all_checks_agree(
    fault: str, color: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of a set with stacks of two layers alone."""
    monkeypatch.setitem(SETS, "2026-12", replace(SETS["2026-12"], depths=(2,)))
    report = examine(block_of("post_ln", fault), "post_ln", set_name="2026-12")
    badge = badge_of(report)
    assert (badge["color"], badge["message"]) == (color, f"Post-LN: {result}")


@pytest.mark.slow(turn=39)
def test_a_fault_beside_the_numbers_is_a_check_that_fails() -> None:
    report = examine(attention_block("in place"), "pre_ln", checks=["forward"])
    assert report.difference is not None and report.passed < len(report.rows)


def test_a_set_states_its_own_numbers(block: Path, tmp_path: Path) -> None:
    message = refusal(2, "conform", block, *DATED, "--checks", "forward")
    assert "set 2026-12 states its own checks and tolerance" in message
    assert "states its own" in refusal(2, "conform", block, *DATED, "--tolerance", "1e-5")
    assert "did you mean '2026-12'" in refusal(2, "conform", block, *DATED[:3], "2026-11")
    there = tmp_path / "badge.json"
    message = refusal(2, "conform", block, *DATED[:2], "--badge", there)
    assert "--badge needs --set, which dates it: 2026-12" in message and not there.exists()


def test_a_set_lacks_later_schemes_and_has_no_removed_one() -> None:
    for chosen in SETS.values():
        assert set(chosen.schemes) <= {*SCHEMES.names()}
        numbers: Any = chosen.checks, chosen.depths, chosen.tolerance, chosen.update_tolerance
        assert numbers == (("forward", "gradients", "start", "update"), (2, 7, 20), 1e-9, 1e-6)
    with pytest.raises(ConfigError, match="set 2026-12 lacks the scheme 'a_later_scheme'"):
        set_of("2026-12", "a_later_scheme")


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_tolerance_that_judges_nothing_is_refused(tolerance: float) -> None:
    with pytest.raises(ConfigError, match="allowed a number above 0 and below 1"):
        set_of(None, "deepnorm", tolerance=tolerance)
