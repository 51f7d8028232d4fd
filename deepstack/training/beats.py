"""The slow beats: at which steps every layer is looked at, and the validation loss taken."""

from __future__ import annotations


def snapshot_steps(every: int | str, steps: int) -> set[int]:
    """Steps of the snapshots, step 0 (initialisation) and the last among them; none for 0.

    'log': 0, 1, 2, 3, 5, 8, 13, … (each about 1.6 times the one before).
    """
    if every == 0:
        return set()
    if isinstance(every, int):
        chosen = set(range(0, steps + 1, every))
    else:
        chosen, a, b = {0}, 1, 2
        while a <= steps:
            chosen.add(a)
            a, b = b, a + b
    return chosen | {steps}


def evaluation_steps(every: int, steps: int) -> set[int]:
    """Every so many steps, step 0 (initialisation) and the last among them; for 0 these alone."""
    return {*range(0, steps + 1, every or steps), steps}
