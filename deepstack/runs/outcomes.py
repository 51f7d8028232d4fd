"""Judges runs as trained, stalled, above or diverged, and places them in maps.

Files hold these four values; readers see the words of OUTCOME_WORDS.
"""

from deepstack.records import Run
from deepstack.runs.statistics import context_free_loss, last_row

# The values in files, and the words that charts and printed tables show for them.
OUTCOME_WORDS = {
    "trained": "learnt", "stalled": "at chance", "above": "worse", "diverged": "diverged"
}  # fmt: skip
OUTCOMES = tuple(OUTCOME_WORDS)
# Nats between a loss and the one without context, on the same positions, that count.
CLEAR = 0.1


def in_words(outcomes: str) -> str:
    """Return outcomes as readers see them: '2 trained, 1 stalled' as '2 learnt, 1 at chance'."""
    for value, word in OUTCOME_WORDS.items():
        outcomes = outcomes.replace(value, word)
    return outcomes


def margin(run: Run) -> float | None:
    """Return L - L_0, the final validation loss minus the loss without context, in nats.

    None without an evaluation or anything to compare with.
    """
    loss, floor = loss_and_floor(run)
    return None if loss is None or floor is None else loss - floor


def loss_and_floor(run: Run) -> tuple[float | None, float | None]:
    """Return L and L_0, the final validation loss and that without context, in nats.

    L is taken where [MASK] is shown, if anywhere; L_0 is `context_free_loss` on the same positions.
    A missing value is None.
    """
    row = run.evals.iloc[-1:]
    column = "loss" if last_row(row, "loss_masked") is None else "loss_masked"
    loss = last_row(row, column)
    return loss, context_free_loss(run, column) if len(row) else None


def outcome(run: Run) -> str | None:
    """Return one of OUTCOMES for a finished run with a known floor, or None."""
    if run.state == "diverged":
        return "diverged"
    difference = margin(run) if run.state == "done" else None
    if difference is None:
        return None
    if difference < -CLEAR:
        return "trained"
    return "stalled" if difference <= CLEAR else "above"
