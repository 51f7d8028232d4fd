"""The content of meta.json and columns.json, which describe a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from torch import Tensor

from deepstack.base import plugins
from deepstack.config.instruments import specs
from deepstack.diagnostics import describe, token_distance
from deepstack.model import option_defaults
from deepstack.model.build import Built
from deepstack.records import STEPS_COLUMNS, TIMING_COLUMNS
from deepstack.records.given_plugins import keep_copies
from deepstack.runs.spikes import SPIKES_LOG
from deepstack.schemes import NORMS, SCHEMES, stack_positions
from deepstack.training.claim import Prepared
from deepstack.training.environment import environment_changes, git_state
from deepstack.training.evaluation import Evaluation
from deepstack.training.optimizers import OPTIMIZERS
from deepstack.training.plan import RunPlan

Columns = Mapping[str, tuple[str, str, str]]
"""Name of a column -> its symbol, unit and description."""

VALIDATION_COLUMNS = {
    "loss_masked": ("L", "nats", "Validation loss over the positions whose token is not shown."),
    "bits_per_token": ("L", "bits", "Validation loss over all predicted positions, in bits."),
    "bits_per_byte": ("L", "bits", "bits_per_token over the held-out bytes of a token."),
    "unigram_loss": ("L", "nats", "Loss without context (the unigram) on the same positions."),
    "loss_se": ("SE", "nats", "Standard error of loss over the blocks of the validation set."),
    "loss_masked_se": ("SE", "nats", "Standard error of loss_masked over these blocks."),
    "margin_se": ("SE", "nats", "Standard error of loss_masked - unigram_loss over these blocks."),
    "optimal_loss": ("L*", "nats", "Bayes-optimal loss of the very same validation positions."),
}
# Of a task whose query narrows the answer down.
GUESS_COLUMN = {
    "unigram_loss": ("L", "nats", "Least loss without the data, on the very same positions."),
}
COMPUTE = {
    "flops": ("C", "FLOPs", "Forward and backward passes of the training batches up to this step."),
}
# Keys of meta.json that stay when a run resumes.
OF_THE_FIRST_START = ("created", "git", "extends", "differing_logs")
# The distance from 1 to the next fp32 number.
RESOLUTION = 2.0**-23


def write_description(
    prepared: Prepared,
    built: Built,
    initial: Tensor,
    evaluation: Evaluation,
    *,
    logs: Mapping[str, Columns],
) -> dict[str, Any]:
    """Write meta.json, which is returned, and columns.json of a run.

    initial: F_0, (batch, seq, d_model).
    logs: name -> columns of each log besides steps.csv, evals.csv and timing.csv.
    """
    folder = prepared.folder
    before = folder.read_meta()
    meta = meta_of(prepared, built, before, evaluation)
    keep_copies(folder)
    folder.write_meta(meta)
    columns = columns_of(prepared, built, initial, evaluation, logs)
    folder.write_columns(columns)
    if not before and (notice := resolution_notice(columns)):
        prepared.observer.notify(notice)
    return meta


def meta_of(
    prepared: Prepared, built: Built, before: dict[str, Any], evaluation: Evaluation
) -> dict[str, Any]:
    """Return meta.json: command, time, environment, parameters, FLOPs of a step and data.

    before: meta.json of the run before it was resumed, whose time and commit stay; empty for a new
        run; of a run that extends another one, `extends` and the environment of that.
    """
    plan, parameters = prepared.plan, built.banks.count()
    task, flops, times = plan.task, plan.flops, plan.times_read
    now = {
        "command": prepared.command,
        "created": utc_now(),
        "environment": prepared.environment,
        "git": git_state(),
        "seed": plan.config.seed,
        "parameters": parameters | {"total": sum(parameters.values())},
        "flops": {"step": flops.step, "with_probe": flops.total, **flops._asdict()},
        "data": task.data | ({} if times is None else {"times_read": times}),
        "validation": evaluation.record,
        **{key: value for part in plan.parts for key, value in part.facts().items()},
        "references": evaluation.references,
        "plugins": [{"file": f, "sha256": p.sha256} for f, p in sorted(plugins.LOADED.items())],
    }
    if not before:
        return now
    resumed = {"time": now["created"], "git": now["git"], "environment": prepared.environment}
    meta = now | {key: before[key] for key in OF_THE_FIRST_START if key in before}
    if "created" in before:  # else the run extends another one, and begins now
        meta["resumed"] = [*before.get("resumed", []), resumed]
    if "environment_changed" in before or environment_changes(
        before.get("environment", {}), prepared.environment
    ):
        meta["environment_changed"] = True
    return meta


def utc_now() -> str:
    """Return the time in UTC as meta.json has it, with microseconds, so that runs have an order."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def column_entries(table: Columns) -> dict[str, dict[str, str]]:
    """Return the entries of columns.json for name -> (symbol, unit, description)."""
    keys = ("symbol", "unit", "description")
    return {name: dict(zip(keys, row, strict=True)) for name, row in table.items()}


def columns_of(
    prepared: Prepared,
    built: Built,
    initial: Tensor,
    evaluation: Evaluation,
    logs: Mapping[str, Columns],
) -> dict[str, Any]:
    """Return columns.json: the meaning of every column and more, so that charts need no model.

    The result has the default options of scheme and task, so that a chart names those that were
    set, and under below_fp32_resolution `steps_below_resolution`, unless no role has such steps.
    """
    config, task = prepared.plan.config, prepared.plan.task
    validation = VALIDATION_COLUMNS | (GUESS_COLUMN if task.guess else {})
    scheme = SCHEMES[config.model.scheme]
    described: dict[str, dict[str, tuple[str, str, str]]] = {"columns": {}}
    for name, spec in specs().items():
        if spec.section:
            described.setdefault(spec.section, {}).update(logs.get(name, {}))
    others = described.pop("columns")
    others |= logs.get(SPIKES_LOG, {})
    evals = {**validation, **evaluation.answer_columns}
    coarse = steps_below_resolution(prepared.plan, built)
    return {
        "columns": column_entries(
            {**STEPS_COLUMNS, **evals, **TIMING_COLUMNS, **COMPUTE, **others}
        ),
        "layers": column_entries(describe()),
        **{section: column_entries(columns) for section, columns in described.items()},
        "scheme": {
            "name": scheme.name,
            "label": scheme.label,
            "equation": scheme.equation,
            "paper": scheme.paper,
            "final_norm": scheme.final_norm,
            "normalised": scheme.normalised and NORMS[config.model.norm.kind].fixes_scale,
        },
        "defaults": option_defaults(config),
        # layer numbers continue from one stack to the next
        "stacks": {
            side: position.depth for side, position in stack_positions(config.model).items()
        },
        **f0_norm(initial),
        "references": evaluation.references,
        **({"below_fp32_resolution": coarse} if coarse else {}),
    }


def steps_below_resolution(plan: RunPlan, built: Built) -> dict[str, int]:
    """Return for each role how many first steps move a parameter of 1 by less than fp32 resolves.

    Counts roles that start at 1, such as gains of norms, where lr(t) times the role's factor is
    below 2^-23 in the first 1 % of the steps or more.  A step of an adaptive optimizer, such as
    Adam, has about that size.  The size of an SGD step depends on the gradient: the result is
    empty.
    """
    train, counts = plan.config.train, {}
    for bank in built.trained if OPTIMIZERS.of(plan.config).adaptive else ():
        role = bank.roles[0]
        rate = train.lr * train.lr_factor(role) * built.optim(role).lr  # reached after the warm-up
        steps = train.steps
        if rate >= RESOLUTION:
            steps = min(steps, math.ceil(max(train.warmup_steps, 1) * RESOLUTION / rate) - 1)
        if train.steps and rate and {"one", 1.0} & set(bank.starts) and 100 * steps >= train.steps:
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
    """Return the mean over tokens of ‖F_0‖₂ for columns.json, or nothing if it is not finite."""
    size = float(token_distance(initial))
    return {"f0_norm": size} if math.isfinite(size) else {}
