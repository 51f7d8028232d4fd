"""SnapshotWriter at the layers whose pass through the model is made once and gone through again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch

from deepstack.config import Config, with_overrides
from deepstack.diagnostics.snapshot import Pass
from deepstack.training import temporary_run
from deepstack.training.snapshot_writer import SnapshotWriter

SMALL = {"model.depth": 3, "model.d_model": 16, "task.seq_len": 16, "train.steps": 5}


class Kept:
    """Gives what the function gave first, as a captured pass gives the same tensors."""

    def __init__(self, function: Callable[[], Pass]) -> None:
        self.function, self.calls = function, 0
        self.found: Pass | None = None

    def __call__(self) -> Pass:
        self.calls += 1
        self.found = self.found or self.function()
        return self.found


def test_a_pass_can_be_looked_at_again_and_is_freed_with_its_looks() -> None:
    with temporary_run(with_overrides(Config(), SMALL)) as run:
        probe = run.snapshots.inputs, run.snapshots.targets
        about = run.prepared, run.built, probe, run.update, run.optimizer
        plain, kept = SnapshotWriter(*about), SnapshotWriter(*about, Kept)
        for step in (0, 1):
            plain.take(step)
            kept.take(step)
        passed = kept._passed
        assert isinstance(passed, Kept) and passed.calls == 2
        one, two = plain.records.state(), kept.records.state()
        assert one.keys() == two.keys() and len(one) > 20
        for name in one:
            assert torch.equal(one[name].nan_to_num(7.0), two[name].nan_to_num(7.0)), name
        alive = weakref.ref(passed)
        gc.collect()
        gc.disable()
        try:
            del passed
            kept.close()  # a traceback may know these looks for longer
            assert alive() is None
        finally:
            gc.enable()
