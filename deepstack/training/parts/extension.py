"""Runs that begin with the record of another run: `deepstack train RUN --extend N`, and `rerun`.

A new run begins with its parent's rows, weights and optimizer.  It has its own folder; meta.json
names the parent under `extends`.  If the learning rate does not depend on the number of steps, the
new run equals one that was trained with all its steps at once, byte for byte.  Else the user
chooses the schedule of the further steps, and the run's first rows are the parent's, under the
parent's schedule (`exact` is false).
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.base.errors import ConfigError, DifferenceError
from deepstack.records import Run, RunFolder, extent, files, problems
from deepstack.records.given_plugins import require_recorded
from deepstack.records.logs import instrument_logs
from deepstack.runs.spikes import SPIKES_LOG, spikes_of
from deepstack.training import checkpoint as ckpt
from deepstack.training.parts.start import KEY, changed_source, finished_run
from deepstack.training.plan import RunPart, RunPlan
from deepstack.training.schedule import depends_on_steps, row_is_due

# Settings that an extension may change; `runtime` is free.
CHANGEABLE = ("train.schedule", "train.lr", "train.decay_period", "train.final_lr_factor")


@dataclass(frozen=True)
class Parent(RunPart):
    """A recorded run, and the config of a new run that begins from its record.

    `train` refuses an environment other than the record's.

    extends: as in meta.json of a new run that goes on where the record ends; else empty.  Its
        `exact` states whether training the config at once gives the same run; its `sha256` is the
        hash of the record's checksums.json.
    """

    folder: RunFolder
    config: conf.Config
    extends: Mapping[str, Any] = field(default_factory=dict)

    @property
    def origin(self) -> RunFolder:
        return self.folder

    def enter(self, plan: RunPlan, folder: RunFolder) -> None:
        """Write into the locked folder of the new run whatever it takes from the record.

        Raises ConfigError if the record has other data or weights.
        """
        meta = self.folder.read_meta()
        if changed := changed_source({"data": {}} | meta, plan):
            known = {"task.path": "trained on other data", KEY: "trained on other weights"}
            how = known.get(changed.key, "validated on other data")
            raise ConfigError(
                f"{self.folder.path} was {how}: {changed.reason()} ({changed.source})"
            )


class Extension(Parent):
    """A finished run, and the config that trains it further."""

    def enter(self, plan: RunPlan, folder: RunFolder) -> None:
        """Write the parent's logs and last checkpoint into the locked folder of the new run.

        Rows and records that the parent has only because it ended there are left out.
        """
        super().enter(plan, folder)
        step = self.extends["step"]

        spikes = {int(row["step"]) for row in spikes_of(Run(self.folder.path))}

        def is_kept(log: str, at: int) -> bool:
            due = log == SPIKES_LOG or (log == "layers" and at in spikes)
            return at < step or due or row_is_due(self.config, log, at)

        meta = self.folder.read_meta()
        shutil.rmtree(folder.checkpoint_dir, ignore_errors=True)  # of a killed attempt
        keys = ("environment", "start", "validation")
        fixed = {"environment": {}} | {key: meta[key] for key in keys if key in meta}
        folder.write_meta({"extends": self.extends, **fixed})
        logs = recorded_logs(self.folder)
        for path in (*logs, self.folder.timing_path):
            header, *rows = (files.read(path) or b"").splitlines(keepends=True) or [b""]
            remaining = [row for row in rows if is_kept(path.stem, int(row.split(b",")[0]))]
            files.replace(folder.path / path.name, b"".join([header, *remaining]))
        parts = ckpt.load(self.folder.checkpoint_path(step), step).parts
        mask = [is_kept("layers", at) for at in parts["layers"]["steps"].tolist()]
        parts["layers"] = {name: values[mask] for name, values in parts["layers"].items()}
        sums = {path.stem: extent(folder.path / path.name, step).sha256 for path in logs}
        state = {"run": plan.digest, "logs": sums}
        ckpt.save(folder, ckpt.Checkpoint(step, parts, state))
        folder.write_config(plan.yaml)  # makes it a run


def draws_another_set(old: conf.Config, new: conf.Config) -> bool:
    """Return whether the longer run, trained at once, would have another validation set."""
    is_open = new.train.eval_batches == "auto"
    return is_open and conf.evaluation_interval(old.train) != conf.evaluation_interval(new.train)


def is_changeable(key: str) -> bool:
    """Return whether the further steps may have another value of a setting."""
    return key in CHANGEABLE or key.startswith("train.schedule_options.")


def parent_of(run: str | Path, steps: int, overrides: Sequence[str] = ()) -> Extension:
    """Return a finished run with the config that trains it `steps` steps further.

    overrides: `train.schedule=…`, which a schedule that depends on the number of steps requires,
        `train.lr=…` and `runtime` settings.

    Raises ConfigError for other settings, for a run that has not finished or keeps only its
    weights, DifferenceError for a damaged one.
    """
    folder = finished_run(run, "--extend")
    if steps < 1:
        raise ConfigError(f"--extend: found {steps}; allowed a number of further steps from 1 on")
    keys = [override.partition("=")[0].strip() for override in overrides]
    changed = [key for key in keys if not key.startswith("runtime.")]
    if wrong := [key for key in changed if not is_changeable(key)]:
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
            f"further steps train.schedule={schedule} over {step + steps} steps, to which the "
            "rate jumps, or train.schedule=constant train.lr=RATE"
        )
    if not (folder.checkpoint_path(step) / "optimizer.safetensors").exists():
        raise ConfigError(
            f"--extend: {folder.path} keeps only its weights; further steps need the state of its "
            "optimizer, which a run with runtime.keep_optimizer=true keeps"
        )
    if damage := problems(folder):
        raise DifferenceError(f"--extend: {folder.path} is damaged: {damage[0]}")
    extends = {
        "study": folder.path.resolve().parent.name,
        "run": folder.name,
        "step": step,
        "sha256": folder.read_status().get("checksums"),
        "exact": not (depends_on_steps(old.train) or changed or draws_another_set(old, new)),
    }
    return Extension(folder, new, extends)


def recorded_config(folder: RunFolder) -> conf.Config:
    """Return the config of a run that deepstack has trained.

    Raises ConfigError for runs of external models and of commands, PluginError for missing plugins.
    """
    require_trained_here(folder)
    require_recorded(folder, folder.read_meta().get("plugins", []))
    return conf.load_config(folder.config_path)


def require_trained_here(folder: RunFolder) -> None:
    """Raise ConfigError for runs of external models and of commands."""
    meta = folder.read_meta()
    if "hidden" in meta:
        raise ConfigError(
            f"{folder.path} was measured by deepstack.probe, not trained by deepstack: it cannot "
            "be trained again, analysed or exported here; `deepstack plot` and `ls` read it"
        )
    if "trainer" in meta:
        raise ConfigError(
            f"{folder.path} is a run of a foreign command, whose weights deepstack does not have: "
            "it cannot be trained again, analysed or exported here; `deepstack plot`, `answer` and "
            "`ls` read it"
        )


def recorded_logs(folder: RunFolder) -> list[Path]:
    """Return the logs of a run whose rows are the same in every execution."""
    names = "steps", "evals", *instrument_logs(folder.path)
    return [path for name in names if (path := folder.csv_path(name)).exists()]


def inexact_extension(extends: Any) -> Mapping[str, Any] | None:
    """Return `extends` of meta.json if the run's config alone does not describe it, else None."""
    is_inexact = isinstance(extends, Mapping) and extends and not extends.get("exact")
    return extends if is_inexact else None
