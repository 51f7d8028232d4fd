"""Runs that begin from another run: with its weights (`model.start`), or from its whole record.

`model.start`: the other run may have another task, vocabulary, sequence length or head and, with
`model.grow`, fewer layers.  Parameters that do not fit because of these are drawn anew; the
optimizer starts anew too.  ‖ΔF‖ is measured from the model that starts so.

`--extend`: the new run begins with the parent's rows, weights and optimizer.  It has its own
folder; meta.json names the parent under `extends`.  If the learning rate does not depend on the
number of steps, the new run equals one that was trained with all its steps at once, byte for byte.
Else the user chooses the schedule of the further steps, and the run's first rows are those of the
parent under its own schedule (`exact` is false).
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.errors import ConfigError, DifferenceError
from deepstack.model import build_model, with_defaults, without_defaults
from deepstack.model.build import Built
from deepstack.plugins import require_plugins
from deepstack.records import (
    CHECKSUMS,
    Run,
    RunFolder,
    existing_run,
    extent,
    files,
    mapping,
    problems,
)
from deepstack.training import checkpoint as ckpt
from deepstack.training.schedule import depends_on_steps, row_is_due

KEY = "model.start"
OUTSIDE = {"embedding", "position", "head"}  # roles whose shape may differ
FREE = {"start", "grow", "head", "init", "dropout"}  # settings of `model` that may differ
DEPTHS = {"depth", "decoder_depth"}
OUTPUTS = {"o", "w2", "cross_o"}  # roles whose products are added to the stream


def grown_rows(grow: str, before: int, after: int) -> list[int]:
    """Return the layer of the shallow stack, from 0, that each layer of the deep one copies.

    | grow       | layers 1 2 3 4 become | source                                                  |
    |------------|-----------------------|---------------------------------------------------------|
    | stack      | 1 2 3 4 1 2 3 4       | G_stack, Du et al. 2024, arXiv:2405.15319               |
    | interleave | 1 1 2 2 3 3 4 4       | each layer beside its copy                              |
    | middle     | 1 2 3 2 3 4           | copies the middle block, as Kapl et al. 2026,           |
    |            |                       | arXiv:2602.16490, describe depth growing                |
    | identity   | 1 2 3 4 + new ones    | new layers add 0: Gesmundo & Maile 2023,                |
    |            |                       | arXiv:2308.06103; the result has the `before` rows only |
    """
    if grow == "identity":
        return list(range(before))
    if grow == "middle":
        first, last = (2 * before - after) // 2, (2 * before - after) // 2 + after - before
        return [*range(last), *range(first, before)]
    if grow == "interleave":
        return [layer * before // after for layer in range(after)]
    return [layer % before for layer in range(after)]


@dataclass(frozen=True)
class Start:
    """The run whose weights another one begins with.

    path: as in `model.start`.  sha256: of its weights.  fresh: a line for each parameter
    that starts anew.
    """

    path: str
    config: conf.Config
    sha256: str
    weights: Mapping[str, Tensor]
    fresh: Sequence[str] = ()

    def check(self, config: conf.Config, built: Built) -> list[str]:
        """Return a line for each parameter that starts anew.

        Raises ConfigError, naming both values, for another difference of the two runs.
        """
        here, there = (with_defaults(c).model.model_dump() for c in (config, self.config))
        grow = config.model.grow
        for key, value in here.items():
            recorded, more = there[key], ""
            if key in DEPTHS and recorded:
                most = 2 * recorded if grow == "middle" else math.inf
                if grow and recorded <= value <= most:
                    continue
                more = ", or more with model.grow (middle: up to twice as many)"
            if key not in FREE and value != recorded:
                raise ConfigError(
                    f"model.{key}: found {value}, and {self.path} has {recorded}; allowed under "
                    f"{KEY}: {recorded}{more}",
                    key=f"model.{key}",
                )
        lines = []
        for bank in built.banks:
            weights = self.weights.get(bank.key)
            shape = None if weights is None else tuple(weights.shape[1:])
            if shape == tuple(bank.shape):
                continue
            text = f"{KEY}: {bank.key} {tuple(bank.shape)} starts anew; {self.path} has {shape}"
            if not set(bank.roles) <= OUTSIDE:
                raise ConfigError(f"{text}; they must be equal", key=KEY)
            lines.append(text)
        return lines

    def load_into(self, built: Built, grow: str | None) -> None:
        """Overwrite the parameters that fit, after `check`; the others keep their values."""
        for bank in built.banks:
            there, values = self.weights.get(bank.key), bank.values().clone()
            if there is None or there.shape[1:] != values.shape[1:]:
                continue
            if bank.in_layers and grow:
                there = there[grown_rows(grow, len(there), len(values))]
            if len(there) < len(values) and OUTPUTS & set(bank.roles):
                values.zero_()
            values[: len(there)] = there
            bank.copy_(values)
        built.banks.tie()
        if not grow and any(name.startswith("running.") for name in self.weights):
            built.model.load_averages(dict(self.weights))

    def record(self) -> dict[str, Any]:
        """Return `start` of meta.json."""
        return {"run": self.path, "step": self.config.train.steps, "sha256": self.sha256}


def start_of(config: conf.Config, vocab_size: int) -> Start | None:
    """Return the starting point of a run, or None.  Raises ConfigError for one that does not fit.

    vocab_size: of the run's task.
    """
    if config.model.start is None:
        return None
    folder = finished_run(config.model.start, KEY)
    there = conf.load_config(folder.config_path)
    step = there.train.steps
    try:
        weights = ckpt.load(folder.checkpoint_path(step), step).parts["weights"]
    except (KeyError, ValueError) as error:
        text = f"{KEY}: {folder.path}: its weights cannot be read: {error}"
        raise ConfigError(text, key=KEY) from error
    start = Start(config.model.start, there, start_sha256(config) or "", weights)
    built = build_model(config, vocab_size=vocab_size, device="meta")
    return replace(start, fresh=start.check(config, built))


def start_sha256(config: conf.Config) -> str | None:
    """Return the sha256 of the weights that a run begins with; None without a starting point."""
    if config.model.start is None:
        return None
    folder = finished_run(config.model.start, KEY)
    step = folder.checkpoints()[-1:]
    try:
        return str(mapping(folder.checkpoint_path(*step) / CHECKSUMS)["weights.safetensors"])
    except (KeyError, OSError, TypeError, ValueError):
        raise ConfigError(f"{KEY}: {folder.path} has no weights to begin with", key=KEY) from None


def finished_run(path: str | Path, name: str) -> RunFolder:
    """Return the folder of a finished run, given by its path or that of its config.yaml.

    name: of the setting or option, for errors.  Raises ConfigError for anything else.
    """
    key = KEY if name == KEY else None
    is_config = Path(path).name == "config.yaml"
    try:
        folder = existing_run(Path(path).parent if is_config else path)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", key=key) from None
    if (state := Run(folder.path).state) != "done":
        raise ConfigError(f"{name}: {folder.path} is {state}; allowed a finished run", key=key)
    return folder


def recorded_config(folder: RunFolder) -> conf.Config:
    """Return the config of a run that deepstack has trained.

    Raises ConfigError for a run of an external model, PluginError for a missing plugin.
    """
    meta = folder.read_meta()
    if "hidden" in meta:
        raise ConfigError(
            f"{folder.path} was measured by deepstack.probe, not trained by deepstack: there is "
            "nothing to train again or to export; `deepstack plot` and `deepstack ls` read it"
        )
    require_plugins(meta.get("plugins", []), str(folder.path))
    return conf.load_config(folder.config_path)


def changed_source(
    meta: Mapping[str, Any], data: Mapping[str, Any], config: conf.Config
) -> tuple[str, str, str, str] | None:
    """Return key, name, old and new sha256 of data or starting point that differ from a run's.

    meta: of the run.  data: of the task now.  None if both are as they were.
    """
    recorded = meta.get("start", {}).get("sha256")
    sources = (
        ("task.path", data.get("name"), meta.get("data", data).get("sha256"), data.get("sha256")),
        (KEY, config.model.start, recorded, start_sha256(config) if meta else recorded),
    )
    for key, name, was, now in sources:
        if was != now:
            return key, str(name), str(was), str(now)
    return None


# Settings that an extension may change; `runtime` is free.
CHANGEABLE = ("train.schedule", "train.lr", "train.decay_period")


@dataclass(frozen=True)
class Parent:
    """A recorded run, and the config of a new run that begins from its record.

    Preflight refuses an environment other than that of the record.

    extends: as in meta.json of a new run that goes on where the record ends; else empty.  Its
    `exact` states whether training the config at once gives the same run, its `sha256` is that of
    the record's checksums.json.
    """

    folder: RunFolder
    config: conf.Config
    extends: Mapping[str, Any] = field(default_factory=dict)

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


class Extension(Parent):
    """A finished run, and the config that trains it further."""

    def begin(self, folder: RunFolder, data: Mapping[str, Any]) -> None:
        """Write the parent's logs and last checkpoint into the locked folder of the new run.

        Rows and records that the parent has only because it ended there are left out.
        """
        super().begin(folder, data)
        step = self.extends["step"]

        def is_kept(log: str, at: int) -> bool:
            return at < step or row_is_due(self.config, log, at)

        meta = self.folder.read_meta()
        shutil.rmtree(folder.checkpoint_dir, ignore_errors=True)  # of a killed attempt
        fixed = {"environment": {}} | {k: meta[k] for k in ("environment", "start") if k in meta}
        folder.write_meta({"extends": self.extends, **fixed})
        logs = recorded_logs(self.folder)
        for path in (*logs, self.folder.timing_path):
            header, *rows = (files.read(path) or b"").splitlines(keepends=True) or [b""]
            remaining = [row for row in rows if is_kept(path.stem, int(row.split(b",")[0]))]
            files.replace(folder.path / path.name, b"".join([header, *remaining]))
        parts = ckpt.load(self.folder.checkpoint_path(step), step).parts
        kept_records = [is_kept("layers", at) for at in parts["layers"]["steps"].tolist()]
        mask = torch.tensor(kept_records, dtype=torch.bool)
        parts["layers"] = {name: values[mask] for name, values in parts["layers"].items()}
        sums = {path.stem: extent(folder.path / path.name, step).sha256 for path in logs}
        state = {"run": conf.digest(without_defaults(self.config)), "logs": sums}
        ckpt.save(folder, ckpt.Checkpoint(step, parts, state))
        folder.write_config(conf.to_yaml(with_defaults(self.config)))  # makes it a run


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
    extends = {
        "study": folder.path.resolve().parent.name,
        "run": folder.name,
        "step": step,
        "sha256": folder.read_status().get("checksums"),
        "exact": not depends_on_steps(old.train) and not changed,
    }
    return Extension(folder, new, extends)


def recorded_logs(folder: RunFolder) -> list[Path]:
    """Return the logs of a run whose rows are the same in every execution."""
    return [path for name in ckpt.RESUMED_LOGS if (path := folder.csv_path(name)).exists()]


def inexact(extends: Any) -> Mapping[str, Any] | None:
    """Return `extends` of meta.json if the run's config alone does not describe it, else None."""
    is_inexact = isinstance(extends, Mapping) and extends and not extends.get("exact")
    return extends if is_inexact else None
