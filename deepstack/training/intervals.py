"""The intervals of snapshots and evaluations, as sets of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set


class Steps(Set[int]):
    """A set of steps that takes no memory: a range and a few more steps."""

    def __init__(self, regular: range, extra: Iterable[int] = ()) -> None:
        self.regular = regular
        self.extra = sorted(step for step in set(extra) if step not in regular)

    def __contains__(self, step: object) -> bool:
        return step in self.regular or step in self.extra

    def __iter__(self) -> Iterator[int]:
        yield from self.regular
        yield from self.extra

    def __len__(self) -> int:
        return len(self.regular) + len(self.extra)


def snapshot_steps(every: int | str, steps: int) -> Steps:
    """Return the steps of the snapshots, with step 0 (initialisation) and the last; none for 0.

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
    """Return every so many steps, with step 0 and the last one; for 0 only these two."""
    return Steps(range(0, steps + 1, every or steps), {steps})
