"""What grows with the length of a run grows in proportion, counted in bytes and rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from deepstack.records import RunFolder
from deepstack.training.layer_records import LayerRecords


class Counting(RunFolder):
    """A run folder that counts the records it is given to write."""

    records = 0

    def write_layers(self, values: Mapping[str, ArrayLike], steps: ArrayLike) -> None:
        self.records += len(np.asarray(steps))
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
        assert torch.equal(torch.from_numpy(values), torch.stack([seen(s)[name] for s in steps]))


@pytest.mark.parametrize("looks", [0, 3, 100])
def test_records_of_layers_go_on_from_a_checkpoint(tmp_path: Path, looks: int) -> None:
    folder, whole = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    records, alone = LayerRecords(folder), LayerRecords(whole)
    for step in range(looks):
        records.add(step, seen(step))
    again = LayerRecords(folder)
    again.load(records.state())
    for step in range(looks, looks + 40):
        again.add(step, seen(step))
        assert step - folder.read_layers("a")[0][-1] <= step // 32
    again.write()
    for step in range(looks + 40):
        alone.add(step, seen(step))
    alone.write()
    for path in whole.layers_dir.iterdir():
        assert path.read_bytes() == (folder.layers_dir / path.name).read_bytes()
