"""What grows with the length of a run grows in proportion, counted in bytes and rows."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.record_runs import python

from deepstack.records import RunFolder
from deepstack.training.snapshot_writer import LayerRecords


class Counting(RunFolder):
    """A run folder that counts the records it is given to write."""

    records = 0

    def write_layers(self, values: Any, steps: Any) -> None:
        self.records += len(steps)
        super().write_layers(values, steps)


def seen(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor([step, step + 0.5]), "b": torch.tensor([-step, 1.0])}


def test_records_of_layers_are_not_written_anew_at_every_look(tmp_path: Path) -> None:
    folder = Counting(tmp_path)
    records = LayerRecords(folder)
    written = {}
    for step in range(1000):
        records.add(step, seen(step))
        steps, values = folder.read_layers("a")
        assert step + 1 - len(steps) <= len(steps) / 32 and values[-1, 0] == steps[-1]
        written[step + 1] = folder.records
    assert written[1000] < 40 * 1000 and written[1000] < 2.5 * written[500]
    records.write()
    before = folder.records
    records.write()
    assert folder.records == before
    for name in ("a", "b"):
        steps, values = folder.read_layers(name)
        assert steps.tolist() == list(range(1000))
        assert np.array_equal(values, np.stack([seen(s)[name] for s in steps]))


DEEP = """
import threading
from helpers.snapshots import ToyModel
toy = ToyModel(**{"model.depth": 300, "model.d_model": 2, "model.n_heads": 1})
threading.stack_size(2**17)
thread = threading.Thread(target=lambda: print(len(toy.snapshots())))
thread.start()
thread.join()
"""


def test_a_look_takes_no_more_of_the_stack_the_deeper_a_model_is() -> None:
    process = python(DEEP)
    assert (process.communicate()[0].strip(), process.returncode) == ("1", 0)
