"""What a run folder says about itself: which folder, meta.json, columns.json, the environment."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from deepstack import config as conf
from deepstack import plugins
from deepstack.diagnostics import COLUMNS, ModelUpdate, describe
from deepstack.errors import ConfigError, PluginError
from deepstack.model import option_defaults, places, without_defaults
from deepstack.model.build import Built
from deepstack.records import RunFolder, removal
from deepstack.schemes import NORMS, SCHEMES
from deepstack.tasks import Task
from deepstack.training.environment import git_state

STEP_COLUMNS = {
    "step": ("t", "steps", "Number of updates made."),
    "loss": ("L", "nats", "Loss of batch t at θ_{t−1}, mean over its predicted positions."),
    "lr": ("η", "", "Learning rate of the schedule at step t, before any factor of a role."),
    "grad_norm": ("‖∇L‖", "", "Norm of the gradient of batch t at θ_{t−1}, before clipping."),
}
EVAL_COLUMNS = {
    "loss_masked": ("L", "nats", "Validation loss over the positions whose token is not shown."),
    "bits_per_token": ("L", "bits", "Validation loss over all predicted positions, in bits."),
    "unigram_loss": ("L", "nats", "Loss of the unigram on the very same positions."),
    "optimal_loss": ("L*", "nats", "Bayes-optimal loss of the very same validation positions."),
}
# The distance from 1 to the next fp32 number.
RESOLUTION = 2.0**-23
TIMING = {
    "step_ms": ("", "ms", "Wall-clock time of a step, logging included."),
    "peak_memory_mb": ("", "MB", "Largest memory held so far: GPU allocations or resident set."),
}


def run_name(config: conf.Config) -> str:
    """The name of a run's folder, the same whether defaults are spelled out or not."""
    return conf.run_name(without_defaults(config))


def refuse_missing_plugins(config: conf.Config, study: Path) -> None:
    """Raise PluginError when this very configuration was trained here with a plugin not loaded."""
    for path in study.glob(f"{run_name(config)}*"):
        folder = RunFolder(path)
        known = folder.read_meta().get("plugins", [])
        if known and folder.exists() and is_same_experiment(folder, config):
            try:
                plugins.require_plugins(known, str(path))
            except PluginError as error:
                raise PluginError(
                    f"{error}, or, to train with the file that is there: {removal(path)}"
                ) from None


def choose_folder(
    config: conf.Config, study: Path, task: Task, taken: Collection[str] = ()
) -> RunFolder:
    """The folder of this very run: where it was trained before, else the first free name.

    taken: the names that other runs will have.
    """
    name = run_name(config)
    for folder in folders_called(study, name):
        if folder.exists():
            if is_same_run(folder, config, task):
                return folder
            refuse_changed_data(folder, config, task)
    return free_folder(study, name, taken)


def folders_called(study: Path, name: str) -> Iterator[RunFolder]:
    """The folder of that name and those of the same name with a number, in their order."""
    yield RunFolder(study / name)
    numbers = (path.name.removeprefix(f"{name}-") for path in study.glob(f"{name}-*"))
    for number in sorted(int(text) for text in numbers if text.isascii() and text.isdigit()):
        yield RunFolder(study / f"{name}-{number}")


def free_folder(study: Path, name: str, taken: Collection[str] = ()) -> RunFolder:
    """The first folder of that name, or of it with a number, which is no run's and not taken."""
    for number in range(1, 1000):
        numbered = name if number == 1 else f"{name}-{number}"
        if numbered not in taken and not (folder := RunFolder(study / numbered)).exists():
            return folder
    raise ConfigError(f"{study}: 999 runs are called {name}; give the config another name")


def refuse_changed_data(folder: RunFolder, config: conf.Config, task: Task) -> None:
    """Raise ConfigError when a run could go on here but for its data, which are not what they were.

    A run that has ended stays what it is, and another is begun beside it.
    """
    ended = folder.read_status().get("state") in ("done", "diverged")
    if ended or not folder.checkpoints() or not is_same_experiment(folder, config):
        return
    was = folder.read_meta().get("data", {}).get("sha256", "")
    raise ConfigError(
        f"{task.data.get('name')} has changed since the checkpoint of {folder.path}: its sha256 "
        f"was {was[:12]}…, is {str(task.data.get('sha256'))[:12]}…; put the old one back, or begin "
        "another run with --study",
        key="task.path",
    )


def changed_data(folder: RunFolder, config: conf.Config) -> str | None:
    """A sentence where a new run is begun beside one of the same configuration on other data."""
    name = run_name(config)
    number = folder.path.name.removeprefix(f"{name}-")
    for before in range(int(number) - 1 if number.isdigit() else 0, 0, -1):
        other = RunFolder(folder.path.with_name(name if before == 1 else f"{name}-{before}"))
        if is_same_experiment(other, config):
            return f"the data have changed since {other.path}: a new run {folder.path.name}"
    return None


def is_same_run(folder: RunFolder, config: conf.Config, task: Task) -> bool:
    """Whether a folder holds this configuration (runtime and names apart) on the same data."""
    data = folder.read_meta().get("data", task.data)
    same_data = data.get("sha256") == task.data.get("sha256")
    return same_data and is_same_experiment(folder, config)


def is_same_experiment(folder: RunFolder, config: conf.Config) -> bool:
    """Whether a folder's config equals this one but for names, runtime, spelled-out defaults."""
    try:
        stored = conf.load_config(folder.config_path)
    except ConfigError:
        return False  # written by another version, whose settings are not ours
    return conf.same_experiment(without_defaults(stored), without_defaults(config))


def refuse_probed(folder: RunFolder) -> None:
    """Raise ConfigError for a run that `deepstack.probe` has made, of a model not deepstack's."""
    if "hidden" in folder.read_meta():
        raise ConfigError(
            f"{folder.path} was measured by deepstack.probe, not trained by deepstack: there is "
            "nothing to train again or to export; `deepstack plot` and `deepstack ls` read it"
        )


def environment_changes(known: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Every difference between two environments, as 'torch was …, is …'.

    CPU and variables explain another fingerprint and are no difference by themselves.  An
    environment that was recorded without a fingerprint is compared without it.
    """
    (before, explaining), (after, more) = flattened(known), flattened(now)
    names = {*before, *after}
    same_numbers = "fingerprint" not in known or known["fingerprint"] == now.get("fingerprint")
    if same_numbers:
        names -= {"fingerprint", *explaining, *more}
    changes = [
        f"{name} was {before.get(name)!r}, is {after.get(name)!r}"
        for name in sorted(names)
        if before.get(name) != after.get(name)
    ]
    if not same_numbers and before.get("cpu_model") == after.get("cpu_model"):
        changes.append(f"cpu_model is {after.get('cpu_model')!r}")
    return changes


def flattened(environment: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """An environment with its variables beside its other keys; which keys explain a fingerprint."""
    variables = environment.get("variables")
    values = dict(variables) if isinstance(variables, dict) else {}
    explaining = {"cpu_model", "instruction_sets", *values}
    return values | {k: v for k, v in environment.items() if k != "variables"}, explaining


def refuse_other_environment(known: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError, naming every difference, unless a run goes on where it was begun."""
    changes = environment_changes(known, now)
    if changes:
        raise ConfigError(
            f"this run was begun in another environment: {'; '.join(changes)}\n"
            "its log could not go on byte for byte; to go on all the same: --allow-env-change"
        )


def continued(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """meta.json of a run that goes on: when and from which commit it was begun stays there."""
    if not before:
        return now
    resumed = {"time": now["created"], "git": now["git"], "environment": now["environment"]}
    meta = now | {key: before[key] for key in ("created", "git") if key in before}
    meta["resumed"] = [*before.get("resumed", []), resumed]
    changes = environment_changes(before.get("environment", {}), now["environment"])
    if "environment_changed" in before or changes:
        meta["environment_changed"] = True
    return meta


def meta_of(
    before: dict[str, Any],
    config: conf.Config,
    task: Task,
    parameters: dict[str, int],
    environment: dict[str, Any],
    command: str,
) -> dict[str, Any]:
    """Return meta.json: command, time, environment, parameters and data of the run.

    before: meta.json of the run before it was resumed, empty for a new run.
    """
    now = {
        "command": command,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment,
        "git": git_state(),
        "seed": config.seed,
        "parameters": parameters | {"total": sum(parameters.values())},
        "data": task.data,
        "references": task.references,
        "plugins": [{"file": f, "sha256": digest} for f, digest in sorted(plugins.LOADED.items())],
    }
    return continued(before, now)


def columns_of(
    config: conf.Config,
    built: Built,
    task: Task,
    update: ModelUpdate,
    attribution: dict[str, tuple[str, str, str]],
) -> dict[str, Any]:
    """columns.json: every column's symbol, unit and sentence, so that charts need no model.

    attribution: those of attribution.csv, empty where the run has none.  defaults: of the options
    of its scheme and task, so that a chart says those that were set.
    below_fp32_resolution: `steps_below_resolution`; absent if no role has such steps.
    """

    def entries(table: dict[str, tuple[str, str, str]]) -> dict[str, dict[str, str]]:
        keys = ("symbol", "unit", "description")
        return {name: dict(zip(keys, row, strict=True)) for name, row in table.items()}

    scheme = SCHEMES[config.model.scheme]
    coarse = steps_below_resolution(config, built)
    return {
        "columns": entries(STEP_COLUMNS | COLUMNS | EVAL_COLUMNS | TIMING),
        "layers": entries(describe()),
        "attribution": entries(attribution),
        "scheme": {
            "name": scheme.name,
            "label": scheme.label,
            "equation": scheme.equation,
            "paper": scheme.paper,
            "final_norm": scheme.final_norm,
            "normalised": scheme.normalised and NORMS[config.model.norm.kind].fixes_scale,
        },
        "defaults": option_defaults(config),
        # layers are numbered on from the one stack to the other
        "stacks": {side: place.depth for side, place in places(config.model).items()},
        **f0_norm(update.initial),
        "references": task.references,
        **({"below_fp32_resolution": coarse} if coarse else {}),
    }


def steps_below_resolution(config: conf.Config, built: Built) -> dict[str, int]:
    """Return for each role how many first steps move a parameter of 1 by less than fp32 resolves.

    Counts roles that start at 1, such as gains of norms, where lr(t) times the role's factor is
    below 2^-23 in the first 1 % of the steps or more.  An Adam step has about that size.  The size
    of an SGD step depends on the gradient: the result is empty.
    """
    train, counts = config.train, {}
    for bank in built.trained if train.optimizer != "sgd" else ():
        role = bank.roles[0]
        rate = train.lr * train.lr_factor(role) * built.optim(role).lr  # reached after the warm-up
        steps = train.steps
        if rate >= RESOLUTION:
            steps = min(steps, math.ceil(max(train.warmup_steps, 1) * RESOLUTION / rate) - 1)
        if rate and {"one", 1.0} & set(bank.starts) and 100 * steps >= train.steps:
            counts[role] = steps
    return counts


def resolution_notice(columns: Mapping[str, Any]) -> str | None:
    """Return one line about updates below the resolution of fp32, or None if there are none."""
    steps = columns.get("below_fp32_resolution")
    if not steps:
        return None
    most = max(steps.values())
    return (
        f"{', '.join(sorted(steps))}: lr(t) times the role's factor is below 2^-23, the resolution "
        f"of fp32 at 1, up to step {most}: a parameter of 1 moves by rounding or not at all"
    )


def f0_norm(initial: Tensor) -> dict[str, float]:
    """Mean over tokens of ‖F_0‖₂, as columns.json has it: nothing where that is not finite."""
    found = float(initial.norm(dim=-1).mean())
    return {"f0_norm": found} if math.isfinite(found) else {}
