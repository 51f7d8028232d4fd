"""What a comparison of schemes at the size of a desk says about decoders of 400M parameters."""

from deepstack.runs import DEPTH, LR, SCHEME, TASK, WIDTH, Runs

AGREE, PAIRS, SHUFFLED = 20, 34, 30
"""Pairs of designs that experiments/desk_against_400m orders as 400M parameters do, of all pairs
that the published losses separate; percent of shuffled designs that agree as often."""
WIDEST, SHALLOWEST, DEEPEST = 64, 8, 32  # within a factor of two of that study: 16 layers of 32


def size_sentence(runs: Runs) -> str:
    """Return how often a study of this size orders two schemes as 400M parameters do, or ''.

    It is known where schemes, their options and rates alone vary, for decoders on text, of width 64
    at most and 8 to 32 layers.
    """
    is_of_schemes = SCHEME in runs.varying and all(
        key == LR or key.startswith(SCHEME) for key in runs.varying
    )
    is_known = is_of_schemes and all(
        run.get("model.family") == "decoder"
        and run.get(TASK) == "text"
        and run.get(WIDTH) <= WIDEST
        and SHALLOWEST <= run.get(DEPTH) <= DEEPEST
        for run in runs
    )
    if not is_known:
        return ""
    return (
        f"A study of this size agreed with decoders of 400M parameters in {AGREE} of {PAIRS} pairs "
        f"of designs; {SHUFFLED} % of shuffled designs agree as often "
        "(experiments/desk_against_400m)."
    )
