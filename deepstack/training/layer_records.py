"""What looks at the layers found: all of it in memory, and on the disk as more of it has come."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepstack.records import RunFolder

# How many records there must be for each one that is not on the disk yet.
BEHIND = 32


class LayerRecords:
    """Records of every layer in the order of their steps, and in layers/ of a run folder.

    A file in layers/ is replaced whole, so that it is the old or the new one at any moment.  Were
    it replaced after every look, bytes and time would grow with the square of their number: from
    64 records on it is replaced when one in 32 is missing there, and whenever `write` is called.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._steps: list[int] = []
        self._values: dict[str, list[Tensor]] = {}  # each (records, depth), to be joined
        self._written = 0

    def add(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Keep what was seen of every layer after a step: name -> (depth,)."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.cpu().reshape(1, -1))
        self._steps.append(step)
        if len(self._steps) - self._written >= max(1, self._written // BEHIND):
            self.write()

    def write(self) -> None:
        """Bring the folder up to date, with what is not there yet."""
        if len(self._steps) == self._written:
            return
        found = self._joined()
        self.folder.write_layers({name: v.numpy() for name, v in found.items()}, self._steps)
        self._written = len(self._steps)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: name -> (records, depth), and their steps."""
        return self._joined() | {"steps": torch.tensor(self._steps, dtype=torch.int64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take from a checkpoint what `state` gave; it is not known what the folder has of it."""
        self._steps = state["steps"].tolist()
        self._values = {name: [rows] for name, rows in state.items() if name != "steps"}
        self._written = 0

    def _joined(self) -> dict[str, Tensor]:
        """Name -> (records, depth)."""
        for rows in self._values.values():
            rows[:] = [torch.cat(rows)]
        return {name: rows[0] for name, rows in self._values.items()}
