"""Tasks as a reader writes them: a batch that cannot be trained on is refused by name."""

from typing import Any

import numpy as np
import pytest
import torch

from deepstack.errors import PluginError
from deepstack.tasks import IGNORE, Batch, Task

TOKENS = np.arange(12).reshape(3, 4) % 7
NONE = np.zeros((3, 4), dtype=bool)


def own(given: Any) -> Task:
    return Task(name="own", vocab_size=7, seed=0, draw=lambda random, size, held_out: given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((TOKENS, TOKENS), "draw gave tuple; allowed a Batch"),
        (Batch(TOKENS + 1, TOKENS, NONE), "draw gave inputs with 7; allowed 0 to 6"),
        (Batch(TOKENS, TOKENS - 1, NONE), "draw gave targets with -1; allowed 0 to 6"),
        (Batch(TOKENS / 1, TOKENS, NONE), "inputs of float64; allowed a numpy array of int64"),
        (Batch(TOKENS, TOKENS.astype("int32"), NONE), "targets of int32; allowed .* int64"),
        (Batch(TOKENS, TOKENS, NONE.tolist()), "masked of list; allowed .* bool"),  # type: ignore
        (Batch(TOKENS[:2], TOKENS, NONE), r"inputs \(2, 4\); allowed \(3, length\)"),
        (Batch(TOKENS, TOKENS, NONE[:, :3]), r"masked \(3, 3\); allowed .* \(3, 4\)"),
        (Batch(TOKENS, np.full_like(TOKENS, IGNORE), NONE), "nothing to predict"),
        (Batch(TOKENS, np.where(TOKENS, TOKENS, IGNORE), ~NONE), "masked where the target is IGN"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused(given: Any, said: str) -> None:
    with pytest.raises(PluginError, match=f"task 'own': .*{said}"):
        own(given).train_batch(1, 3)
    batch = Batch(TOKENS, np.where(TOKENS, TOKENS, IGNORE), TOKENS > 3)
    assert all(map(np.array_equal, own(batch).probe_batch(3), batch))


def test_a_batch_may_be_of_reversed_views() -> None:
    batch = Batch(TOKENS[:, ::-1], TOKENS[::-1], NONE[:, ::-1])
    for value, given in zip(own(batch).train_batch(1, 3), batch, strict=True):
        assert np.array_equal(torch.from_numpy(value), given)
