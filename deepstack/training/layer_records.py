"""Snapshots of every layer: all of them in memory, and on the disk after some delay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepstack.records import RunFolder

# Number of written records for each one that may be missing on the disk.
RECORDS_PER_PENDING = 32


class LayerRecords:
    """Records of every layer in the order of their steps, and in layers/ of a run folder.

    A file in layers/ is replaced atomically, with all records.  Replacing it for every snapshot
    would cost time that grows with the square of their number.  From 64 records on it is replaced
    when one in 32 is missing, and whenever `write` is called.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._steps: list[int] = []
        self._values: dict[str, list[Tensor]] = {}  # each (records, depth), to be joined
        self._written = 0

    def add(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Add the values of every layer after a step: name -> (depth,)."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.cpu().reshape(1, -1))
        self._steps.append(step)
        if len(self._steps) - self._written >= max(1, self._written // RECORDS_PER_PENDING):
            self.write()

    def write(self) -> None:
        """Write all records to the folder, if any are missing there."""
        if len(self._steps) == self._written:
            return
        values = {name: value.numpy() for name, value in self._joined().items()}
        self.folder.write_layers(values, self._steps)
        self._written = len(self._steps)

    def state(self) -> dict[str, Tensor]:
        """Return the records for a checkpoint: name -> (records, depth), and their steps."""
        return self._joined() | {"steps": torch.tensor(self._steps, dtype=torch.int64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the records that `state` returned; the folder may lack some of them."""
        self._steps = state["steps"].tolist()
        self._values = {name: [rows] for name, rows in state.items() if name != "steps"}
        self._written = 0

    def _joined(self) -> dict[str, Tensor]:
        """Return name -> (records, depth)."""
        for rows in self._values.values():
            rows[:] = [torch.cat(rows)]
        return {name: rows[0] for name, rows in self._values.items()}
