"""What a comparison of schemes at the size of a desk says about decoders of 400M parameters."""

from collections.abc import Iterable

from deepstack.records import Run
from deepstack.runs import DEPTH, SCHEME, TASK, WIDTH

AGREE, PAIRS, SHUFFLED = 20, 34, 30
"""Pairs of designs that experiments/desk_against_400m orders as 400M parameters do, of all pairs
that the published losses separate; percent of shuffled designs that agree as often."""
WIDEST, SHALLOWEST, DEEPEST = 64, 8, 32  # within a factor of two of that study: 16 layers of 32


def size_sentence(runs: Iterable[Run]) -> str:
    """Return how often studies of this size order two schemes as 400M parameters do, or ''.

    It is known for several schemes of decoders on text, of width 64 at most and 8 to 32 layers.
    """
    runs = list(runs)
    is_known = len({run.get(SCHEME) for run in runs}) > 1 and all(
        run.get("model.family") == "decoder"
        and run.get(TASK) == "text"
        and run.get(WIDTH) <= WIDEST
        and SHALLOWEST <= run.get(DEPTH) <= DEEPEST
        for run in runs
    )
    if not is_known:
        return ""
    return (
        f"Studies of this size agreed with decoders of 400M parameters in {AGREE} of {PAIRS} pairs "
        f"of designs; {SHUFFLED} % of shuffled designs agree as often "
        "(experiments/desk_against_400m)."
    )
