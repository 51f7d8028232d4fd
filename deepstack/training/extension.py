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
from deepstack.config.identity import values
from deepstack.config.schema import LENGTHS
from deepstack.errors import ConfigError, DifferenceError
from deepstack.model import with_defaults, without_defaults
from deepstack.plugins import require_plugins
from deepstack.records import Run, RunFolder, existing_run, extent, problems
from deepstack.records.files import read, replace
from deepstack.training import checkpoint as ckpt
from deepstack.training.schedule import depends_on_steps, learning_rate, row_is_due
from deepstack.training.start import changed_source

# Settings that an extension may change; `runtime` is free.
CHANGEABLE = ("train.steps", "train.schedule", "train.lr", "train.decay_period")


@dataclass(frozen=True)
class Parent:
    """A finished run, and the config of the run that extends it.

    step: the parent's last one.  exact: whether training the config at once gives the same run.
    """

    folder: RunFolder
    config: conf.Config
    step: int
    exact: bool

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

        Rows that the parent has only because it ended there are left out.  data: of the new run's
        task.  Raises ConfigError if the parent read other data, PluginError for a missing plugin.
        """
        meta = self.folder.read_meta()
        require_plugins(meta.get("plugins", []), str(self.folder.path))
        if changed := changed_source({"data": {}} | meta, data, self.config):
            _, source, was, now = changed
            raise ConfigError(
                f"{self.folder.path} was trained on other data or weights: sha256 was {was}, is "
                f"{now} ({source})"
            )
        shutil.rmtree(folder.checkpoint_dir, ignore_errors=True)  # of a killed attempt
        fixed = {"environment": {}} | {k: meta[k] for k in ("environment", "start") if k in meta}
        folder.write_meta({"extends": self.record, **fixed})
        for path in (*self._logs(), self.folder.timing_path):
            replace(folder.path / path.name, self._kept_rows(path))
        parts = ckpt.load(self.folder.checkpoint_path(self.step), self.step).parts
        parts["layers"] = self._kept_records(parts["layers"])
        logs = {
            path.stem: extent(folder.csv_path(path.stem), self.step).sha256 for path in self._logs()
        }
        state = {"run": conf.digest(without_defaults(self.config)), "logs": logs}
        ckpt.save(folder, ckpt.Checkpoint(self.step, parts, state))
        folder.write_config(conf.to_yaml(with_defaults(self.config)))  # makes it a run

    def _logs(self) -> list[Path]:
        paths = [self.folder.path / f"{name}.csv" for name in ckpt.RESUMED_LOGS]
        return [path for path in paths if path.exists()]

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


def parent_of(run: str | Path, steps: int, overrides: Sequence[str] = ()) -> Parent:
    """Return a finished run with the config that trains it `steps` steps further.

    overrides: `train.schedule=…`, which a schedule that depends on the number of steps requires,
    `train.lr=…` and `runtime` settings.  Raises ConfigError for other settings, for a run that has
    not finished or keeps only its weights, DifferenceError for a damaged one.
    """
    path = Path(run)
    folder = existing_run(path.parent if path.name == "config.yaml" else path)
    if steps < 1:
        raise ConfigError(f"--extend: found {steps}; allowed a number of further steps from 1 on")
    state = Run(folder.path).state
    if state != "done":
        why = {"diverged": "a diverged run has no weights to go on from"}.get(
            state, "the same command without --extend completes it first"
        )
        raise ConfigError(f"--extend: {folder.path} is {state}, not done; {why}")
    overridden = {override.partition("=")[0].strip() for override in overrides}
    if lengths := sorted(overridden & {f"train.{length}" for length in LENGTHS}):
        raise ConfigError(
            f"--extend: found {lengths[0]}, a second length beside the {steps} further steps; "
            "leave it out, or give another number: --extend N",
            key=lengths[0],
        )
    old = conf.load_config(folder.config_path)
    step = old.train.steps
    longer = [*overrides, f"train.steps={step + steps}"]
    replayed = folder.read_meta().get("environment", {}).get("replayed")
    if isinstance(replayed, bool):  # 'auto' depends on the number of steps
        longer.insert(0, f"runtime.replay={str(replayed).lower()}")
    new = conf.load_config(folder.config_path, longer)
    before, after = values(old), values(new)
    changed = [k for k in after if after[k] != before.get(k) and not k.startswith("runtime.")]
    if wrong := [key for key in changed if key not in CHANGEABLE]:
        raise ConfigError(
            f"--extend: found {wrong[0]}={after[wrong[0]]}; an extension allows "
            f"{', '.join(CHANGEABLE[1:])} and runtime settings"
        )
    if depends_on_steps(old.train) and "train.schedule" not in overridden:
        raise ConfigError(schedule_choice(old, new))
    if not (folder.checkpoint_path(step) / "optimizer.safetensors").exists():
        command = f"deepstack train {folder.config_path} runtime.keep_optimizer=true --study NAME"
        raise ConfigError(
            f"--extend: {folder.path} keeps only its weights, and further steps need the state of "
            f"its optimizer; train a run that keeps it: {command}"
        )
    if damage := problems(folder):
        raise DifferenceError(f"--extend: {folder.path} is damaged: {damage[0]}")
    exact = not depends_on_steps(old.train) and changed == ["train.steps"]
    return Parent(folder, new, step, exact)


def schedule_choice(old: conf.Config, new: conf.Config) -> str:
    """Return the message that asks for the schedule of the further steps."""
    step, name = old.train.steps, old.train.schedule
    last, following = learning_rate(old.train, step), learning_rate(new.train, step + 1)
    return (
        f"--extend: train.schedule={name} depends on the number of steps; choose for the further "
        f"steps:\n  train.schedule={name}: that of {new.train.steps} steps, so the rate jumps from "
        f"{last:.3g} to {following:.3g}\n  train.schedule=constant train.lr=RATE: a constant rate"
    )


def inexact_parent(folder: RunFolder) -> dict[str, Any] | None:
    """Return `extends` of a run that its config alone does not describe, else None."""
    extends = folder.read_meta().get("extends")
    return extends if isinstance(extends, dict) and not extends.get("exact") else None
