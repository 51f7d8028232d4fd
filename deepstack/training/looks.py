"""The slow beat: every layer looked at, and what was seen written to the run folder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.diagnostics import evaluate, take
from deepstack.model.build import Built
from deepstack.records import RunFolder
from deepstack.speed import Processes
from deepstack.training import checkpoint as ckpt
from deepstack.training.beats import snapshot_steps
from deepstack.training.evaluation import mean_loss
from deepstack.training.together import whole_copy


class Looks:
    """Looks at every layer on the probe batch; training is not disturbed by one.

    Made before a checkpoint is loaded: what it finds the parameters to be is θ_0.
    """

    def __init__(
        self,
        config: conf.Config,
        folder: RunFolder,
        built: Built,
        probe: tuple[Tensor, Tensor],
        processes: Processes,
    ) -> None:
        self.config, self.folder, self.built, self.processes = config, folder, built, processes
        self.inputs, self.targets = probe
        self.steps = snapshot_steps(config.log.layers_every, config.train.steps)
        self._banks = [bank for bank in built.banks if bank.in_layers]
        self._initial = [on_host(b.values()) for b in self._banks] if self.steps else []
        self._before: list[Tensor] | None = None
        self._values: dict[str, list[Tensor]] = {}
        self._taken: list[int] = []

    def prepare(self, step: int) -> None:
        """Remember the parameters before a step after which there is a look."""
        here = step in self.steps
        self._before = [bank.values().clone() for bank in self._banks] if here else None

    def take(self, step: int) -> None:
        """Look at every layer and write what was seen."""
        device = self.inputs.device
        whole = whole_copy(self.config, self.built, device, self.processes)
        before, self._before = self._before if step else None, None
        if whole is None:
            return
        values = evaluate(
            take(
                whole.model,
                [bank for bank in whole.banks if bank.in_layers],
                self.inputs,
                lambda logits: mean_loss(logits, self.targets),
                before=[b.to(device) for b in before] if before else None,
                initial=self._initial,
            )
        )
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.cpu())
            self.folder.write_layers(name, torch.stack(self._values[name]).numpy())
        self._taken.append(step)
        self.folder.write_layer_steps(self._taken)

    def records(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the looks so far."""
        return ckpt.layer_records(self._values, self._taken)

    def load(self, records: Mapping[str, Tensor]) -> None:
        """Take from a checkpoint what `records` gave."""
        self._taken = records["steps"].tolist()
        self._values = {name: list(rows) for name, rows in records.items() if name != "steps"}


def on_host(values: Tensor) -> Tensor:
    """A copy that leaves a GPU's memory alone, of θ_0, which is read once a look only."""
    return values.cpu() if values.is_cuda else values.clone()
