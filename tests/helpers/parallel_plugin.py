"""A scheme and a task with what is hard to share: see parallel_runs.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepstack.parameters import parameter
from deepstack.schemes import Scheme
from deepstack.tasks import IGNORE, Batch, Task, task


class OneNumber(Scheme, name="one_number", label="One number", paper="none"):
    """x <- LN(x + a G(x)), a one trained number; b is not used."""

    def __init__(self, layer: int, depth: int, make_norm: Any) -> None:
        super().__init__(layer, depth, make_norm)
        self.a = parameter(1, role="scheme", start="one")
        self.b = parameter(3, role="scheme", start="zero")

    def residual(self, x: Any, G: Any, norm: Any) -> Any:
        return norm(x + self.a * G(x))


@task("uneven")
def uneven(*, seq_len: int, seed: int) -> Task:
    """Predict i + 1 tokens of sequence i: shares of a batch have different numbers of them."""

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        tokens = random.integers(0, 11, (batch_size, seq_len))
        shown = np.arange(seq_len)[None] <= np.arange(batch_size)[:, None]
        return Batch(tokens, np.where(shown, tokens, IGNORE), np.zeros_like(shown))

    return Task(name="uneven", vocab_size=11, seed=seed, draw=draw)
