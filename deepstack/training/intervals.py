"""The slow beats: at which steps every layer is looked at, and the validation loss taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set


class Steps(Set[int]):
    """A set of steps that takes no memory: those of a range, and a few besides."""

    def __init__(self, regular: range, besides: Iterable[int] = ()) -> None:
        self.regular = regular
        self.besides = sorted(step for step in set(besides) if step not in regular)

    def __contains__(self, step: object) -> bool:
        return step in self.regular or step in self.besides

    def __iter__(self) -> Iterator[int]:
        yield from self.regular
        yield from self.besides

    def __len__(self) -> int:
        return len(self.regular) + len(self.besides)


def snapshot_steps(every: int | str, steps: int) -> Steps:
    """Steps of the snapshots, step 0 (initialisation) and the last among them; none for 0.

    'log': 0, 1, 2, 3, 5, 8, 13, … (each about 1.6 times the one before).
    """
    if every == 0:
        return Steps(range(0))
    if isinstance(every, int):
        return evaluation_steps(every, steps)
    chosen, a, b = {0, steps}, 1, 2
    while a <= steps:
        chosen.add(a)
        a, b = b, a + b
    return Steps(range(0), chosen)


def evaluation_steps(every: int, steps: int) -> Steps:
    """Every so many steps, step 0 (initialisation) and the last among them; for 0 these alone."""
    return Steps(range(0, steps + 1, every or steps), {steps})
