"""A verdict speaks of the measured size alone, unless that lies in the range of the source."""

import random
from itertools import product
from typing import Any, get_args

import pytest

from deepstack import config as conf
from deepstack_lab.ledger.claims import CLAIMS, all_claims
from deepstack_lab.ledger.measured import Measured
from deepstack_lab.ledger.reach import Extent, Verdict, extent_of, outside, reached

DECIDED: tuple[Verdict, ...] = (
    "agrees", "agrees in part", "disagrees", "undecided", "not measured",
)  # fmt: skip
FAMILIES = ("encoder", "decoder", "encoder_decoder", "residual MLP")
IDENTITIES = ["C12", "C14", "C20", "C23", "C61"]


def any_range(numbers: random.Random, width: int) -> tuple[float, float] | None:
    """Return a range of up to `width` whole numbers below 6, or None in one of eight cases."""
    low = numbers.randrange(6 - width + 1)
    return None if numbers.random() < 1 / 8 else (low, low + numbers.randrange(width))


def any_extent(numbers: random.Random, width: int, families: int) -> Extent:
    family = tuple(numbers.sample(FAMILIES, numbers.randrange(families)))
    return Extent(family, *(any_range(numbers, width) for _ in range(3)))


def points(ends: tuple[float, float] | None) -> set[float]:
    """Return the whole numbers of a range."""
    return set() if ends is None else {n for n in range(6) if ends[0] <= n <= ends[1]}


@pytest.mark.parametrize("seed", range(3))
def test_a_measurement_is_inside_if_each_of_its_points_is_one_of_the_source(seed: int) -> None:
    numbers, seen = random.Random(seed), set()
    for _ in range(2000):
        measured, source = any_extent(numbers, 2, 3), any_extent(numbers, 6, 5)
        expected = [
            name
            for name, few, many in (
                ("family", set(measured.family), set(source.family)),
                *((one, points(getattr(measured, one)), points(getattr(source, one)))
                  for one in ("width", "depth", "tokens")),
            )
            if not few or few - many
        ]  # fmt: skip
        assert list(outside(measured, source)) == expected
        seen.add(not expected)
        for decided, identity in product(DECIDED, (False, True)):
            verdict = reached(decided, source, measured, identity)
            if decided in ("undecided", "not measured"):
                assert verdict == decided
            elif identity and decided == "agrees":
                assert verdict == "holds as an identity"
            elif expected:
                assert verdict.endswith("at this size")
                assert verdict.startswith("not") == (decided == "disagrees")
                assert (" in part " in verdict) == (decided == "agrees in part")
            else:
                assert verdict == decided
    assert seen == {True, False}, "both cases were drawn"


@pytest.mark.parametrize("decided", DECIDED)
def test_an_exact_statement_keeps_its_verdict(decided: Verdict) -> None:
    for measured in (None, Extent(), Extent(("encoder",), (32, 32), (6, 6), (0, 0))):
        assert reached(decided, None, measured) == decided
    assert decided in get_args(Verdict)


def test_an_unknown_measurement_lies_outside() -> None:
    source = Extent(("decoder",), (64, 64), (6, 6), (20, 20))
    assert outside(Extent(), source) == ("family", "width", "depth", "tokens")
    assert reached("disagrees", source, None) == "not seen at this size"
    assert reached("disagrees", source, source) == "disagrees"


def test_a_range_is_put_into_words() -> None:
    one = Extent(("encoder_decoder",), (64, 64), (6, 100), (0.0184, 1640.0), "IWSLT-14")
    words = "encoder-decoder, width 64, 6 to 100 layers, 0.018 to 1640 tokens a parameter, IWSLT-14"
    assert str(one) == words and str(Extent()) == "no sizes"
    assert str(Extent(tokens=(0, 0))) == "at the start"


def test_what_trains_states_the_range_of_its_source() -> None:
    for entry in all_claims():
        if entry.study or entry.trials or entry.tier != "seconds":
            assert entry.source_range is not None, entry.id
    assert [entry.id for entry in all_claims() if entry.identity] == IDENTITIES


MEASURES = [e.id for e in all_claims() if e.source_range and not e.needs and e.id != "C43"]


@pytest.mark.parametrize("name", MEASURES)
def test_the_measured_range_follows_from_study_or_trials(name: str) -> None:
    measured = Measured(CLAIMS[name]).measured_range
    assert measured is not None
    assert measured.family and measured.width and measured.depth and measured.tokens is not None


def test_the_range_of_a_study_is_that_of_its_file() -> None:
    """rates.yaml: 50 steps of 32 sequences of 4 tokens, width 32, 4 to 64 layers."""
    measured: Any = Measured(CLAIMS["CP-2"]).measured_range
    assert (measured.family, measured.width, measured.depth) == (("encoder",), (32, 32), (4, 64))
    d, hidden, layer = 32, 64, 0
    layer = 4 * d * d + 2 * d * hidden + 4 * d + hidden + d + 4 * d  # matrices, biases, two norms
    tables = 9 * d + 4 * d + 9  # tokens with [MASK], positions, the head's bias
    for depth, tokens in zip((64, 4), measured.tokens, strict=True):
        assert tokens == pytest.approx(50 * 32 * 4 / (depth * layer + tables), rel=0.02)


def test_a_range_of_depths_has_both_sides_of_an_encoder_decoder() -> None:
    text = "model: {family: encoder_decoder, depth: 3, decoder_depth: 5, d_model: 8, n_heads: 2}"
    for decoder, depths in ((5, (3, 5)), (2, (2, 3))):
        given = text.replace("decoder_depth: 5", f"decoder_depth: {decoder}")
        assert extent_of([conf.parse_config(given)]).depth == depths
