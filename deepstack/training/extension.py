"""Extension of a finished run: a new run that begins with the parent's rows, weights and optimizer.

The new run has its own folder; meta.json names the parent under `extends`.  If the learning rate
does not depend on the number of steps, the new run equals one that was trained with all its steps
at once, byte for byte.  Else the user chooses the schedule of the further steps, and the run's
first rows are those of the parent under its own schedule (`exact` is false).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.errors import ConfigError, DifferenceError
from deepstack.model import with_defaults, without_defaults
from deepstack.records import RunFolder, extent, problems
from deepstack.records.files import read, replace
from deepstack.training import checkpoint as ckpt
from deepstack.training.schedule import depends_on_steps, row_is_due
from deepstack.training.start import changed_source, finished_run, recorded_config

# Settings that an extension may change; `runtime` is free.
CHANGEABLE = ("train.schedule", "train.lr", "train.decay_period")


@dataclass(frozen=True)
class Parent:
    """A recorded run, and the config of a new run that begins from its record.

    Preflight refuses an environment other than that of the record.
    """

    folder: RunFolder
    config: conf.Config

    @property
    def inexact(self) -> dict[str, Any] | None:
        """Return `extends` of a new run that its config alone does not describe, else None."""
        return None

    def begin(self, folder: RunFolder, data: Mapping[str, Any]) -> None:
        """Write into the locked folder of the new run whatever it takes from the record.

        data: of the new run's task.  Raises ConfigError if the record has other data or weights.
        """
        meta = self.folder.read_meta()
        if changed := changed_source({"data": {}} | meta, data, self.config):
            key, source, was, now = changed
            other = "weights" if key == "model.start" else "data"
            raise ConfigError(
                f"{self.folder.path} was trained on other {other}: sha256 was {was}, is {now} "
                f"({source})"
            )


@dataclass(frozen=True)
class Extension(Parent):
    """A finished run, and the config that trains it further.

    step: the parent's last one.  exact: whether training the config at once gives the same run.
    """

    step: int
    exact: bool

    @property
    def inexact(self) -> dict[str, Any] | None:
        return None if self.exact else self.record

    @property
    def record(self) -> dict[str, Any]:
        """Return `extends` of the new run's meta.json; sha256: of the parent's checksums.json."""
        path, status = self.folder.path.resolve(), self.folder.read_status()
        return {
            "study": path.parent.name,
            "run": path.name,
            "step": self.step,
            "sha256": status.get("checksums"),
            "exact": self.exact,
        }

    def begin(self, folder: RunFolder, data: Mapping[str, Any]) -> None:
        """Write the parent's logs and last checkpoint into the locked folder of the new run.

        Rows that the parent has only because it ended there are left out.
        """
        super().begin(folder, data)
        meta = self.folder.read_meta()
        shutil.rmtree(folder.checkpoint_dir, ignore_errors=True)  # of a killed attempt
        fixed = {"environment": {}} | {k: meta[k] for k in ("environment", "start") if k in meta}
        folder.write_meta({"extends": self.record, **fixed})
        logs = recorded_logs(self.folder)
        for path in (*logs, self.folder.timing_path):
            replace(folder.path / path.name, self._kept_rows(path))
        parts = ckpt.load(self.folder.checkpoint_path(self.step), self.step).parts
        parts["layers"] = self._kept_records(parts["layers"])
        sums = {path.stem: extent(folder.path / path.name, self.step).sha256 for path in logs}
        state = {"run": conf.digest(without_defaults(self.config)), "logs": sums}
        ckpt.save(folder, ckpt.Checkpoint(self.step, parts, state))
        folder.write_config(conf.to_yaml(with_defaults(self.config)))  # makes it a run

    def _kept_rows(self, path: Path) -> bytes:
        """Return a log without a last row that the new run would not have written."""
        header, *rows = (read(path) or b"").splitlines(keepends=True) or [b""]
        remaining = [row for row in rows if self._is_kept(path.stem, int(row.split(b",")[0]))]
        return b"".join([header, *remaining])

    def _kept_records(self, layers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the records of layers/ without a last one that would not have been due."""
        steps = layers["steps"].tolist()
        keep = torch.tensor([self._is_kept("layers", step) for step in steps], dtype=torch.bool)
        return {name: value[keep] for name, value in layers.items()}

    def _is_kept(self, log: str, step: int) -> bool:
        return step < self.step or row_is_due(self.config, log, step)


def parent_of(run: str | Path, steps: int, overrides: Sequence[str] = ()) -> Extension:
    """Return a finished run with the config that trains it `steps` steps further.

    overrides: `train.schedule=…`, which a schedule that depends on the number of steps requires,
    `train.lr=…` and `runtime` settings.  Raises ConfigError for other settings, for a run that has
    not finished or keeps only its weights, DifferenceError for a damaged one.
    """
    folder = finished_run(run, "--extend")
    if steps < 1:
        raise ConfigError(f"--extend: found {steps}; allowed a number of further steps from 1 on")
    keys = [override.partition("=")[0].strip() for override in overrides]
    changed = [key for key in keys if not key.startswith("runtime.")]
    if wrong := [key for key in changed if key not in CHANGEABLE]:
        raise ConfigError(
            f"--extend: found {wrong[0]}; an extension allows {', '.join(CHANGEABLE)} and runtime "
            "settings",
            key=wrong[0],
        )
    old = recorded_config(folder)
    step, schedule = old.train.steps, old.train.schedule
    longer = [*overrides, f"train.steps={step + steps}"]
    replayed = folder.read_meta().get("environment", {}).get("replayed")
    if isinstance(replayed, bool):  # 'auto' depends on the number of steps
        longer.insert(0, f"runtime.replay={str(replayed).lower()}")
    new = conf.load_config(folder.config_path, longer)
    if depends_on_steps(old.train) and "train.schedule" not in changed:
        raise ConfigError(
            f"--extend: train.schedule={schedule} depends on the number of steps; choose for the "
            f"further steps train.schedule={schedule}, that of {step + steps} steps, to which the "
            "rate jumps, or train.schedule=constant train.lr=RATE"
        )
    if not (folder.checkpoint_path(step) / "optimizer.safetensors").exists():
        raise ConfigError(
            f"--extend: {folder.path} keeps only its weights; further steps need the state of its "
            "optimizer, which a run with runtime.keep_optimizer=true keeps"
        )
    if damage := problems(folder):
        raise DifferenceError(f"--extend: {folder.path} is damaged: {damage[0]}")
    return Extension(folder, new, step, exact=not depends_on_steps(old.train) and not changed)


def recorded_logs(folder: RunFolder) -> list[Path]:
    """Return the logs of a run whose rows are the same in every execution."""
    return [path for name in ckpt.RESUMED_LOGS if (path := folder.csv_path(name)).exists()]


def inexact_parent(folder: RunFolder) -> dict[str, Any] | None:
    """Return `extends` of a run that its config alone does not describe, else None."""
    extends = folder.read_meta().get("extends")
    return extends if isinstance(extends, dict) and not extends.get("exact") else None
