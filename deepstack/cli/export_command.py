"""The command `deepstack export RUN`."""

import json as jsonlib
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.cli.options import Json, Plugins, RunPath, flag, load_plugins, option
from deepstack.cli.output import emit_facts, log
from deepstack.errors import ConfigError, ResourceError
from deepstack.records import Run, existing_run, find_runs
from deepstack.records.files import replace_all
from deepstack.records.opened import followed


def export_command(
    run: RunPath,
    to: Path | None = option(
        "A new folder, or x.safetensors (with --logs, by default logs/TRACKER).",
        metavar="FILE_OR_DIR",
    ),
    logs: str | None = option(
        "Write the logs of all runs in RUN: for tensorboard, wandb, mlflow or trackio.",
        metavar="TRACKER",
    ),
    fold: bool = flag("Fold gain and bias of norms into the matrices that read them.", "--fold"),
    untie: bool = flag(
        "With --fold: fold the last norm too; a tied head becomes its own matrix.", "--untie"
    ),
    plugin: Plugins = [],
    json: Json = False,
) -> None:
    """Write a trained model as plain tensors with a config, or logs for a tracker.

    --fold folds norms into matrices, and writes nothing if that model computes something else.
    """
    if logs is not None:
        from deepstack.trackers import export_logs

        runs, target = readable_runs(run), to or Path("logs") / logs
        command = export_logs(runs, logs, target)
        emit_facts({"runs": len(runs), "folder": str(target), "to look at it": command}, json)
        return
    import torch
    from safetensors.torch import save

    from deepstack.model.build import build_model
    from deepstack.model.fold import compare
    from deepstack.model.fold import fold as folded
    from deepstack.model.plain import export_paths, fill, to_plain, values_of
    from deepstack.schemes import SCHEMES
    from deepstack.training import load_trained

    if to is None:
        raise ConfigError("--to is missing: give a new folder, or x.safetensors")
    if untie and not fold:
        raise ConfigError("found --untie without --fold; add --fold, which --untie changes")
    load_plugins(plugin)
    folder = existing_run(run)
    paths = export_paths(to)
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists already; give another name with --to")
    trained = load_trained(folder, log)
    config, built, step = trained.config, trained.built, trained.step
    batch = trained.task.validation_batch(0, config.train.batch_size)
    inputs = torch.from_numpy(batch.inputs)
    values = values_of(built.model)
    facts: dict[str, Any] = {
        "run": folder.name,
        "step": step,
        "scheme": config.model.scheme,
        "folded": fold,
        "parameters": sum(built.banks.count().values()),
    }
    if fold:
        config_after, after = folded(config, built, untie=untie)
        difference = compare((config, values), (config_after, after), inputs, step=step)
        facts |= {
            "largest difference (float64)": difference.difference,
            "largest logit": difference.largest,
        }
        if not difference.equal:
            raise ConfigError(
                f"cannot fold {SCHEMES[config.model.scheme].label}: the folded model computes "
                f"something else (logits of up to {difference.largest:.3g} differ by "
                f"{difference.difference:.1e}), because not only linear maps read its norms: in "
                "Post-LN and its relatives the residual does too; leave --fold out"
            )
        small = build_model(config_after, vocab_size=len(after["embedding"]), draw=False)
        fill(small.model, after)
        facts["parameters folded"] = sum(small.banks.count().values())
        config, built, values = config_after, small, values_of(small.model)
    facts["files"] = [str(path) for path in paths]
    files = {
        paths.config.name: conf.to_yaml(config).encode(),
        paths.about.name: (jsonlib.dumps(facts, indent=2) + "\n").encode(),
        # the weights are the last: a kill at any moment leaves none, or a complete export
        paths.weights.name: save(to_plain(built.model, values)),
    }
    replace_all(followed(paths.weights.parent), files.items())
    emit_facts(facts, json)


def readable_runs(path: Path) -> list[Run]:
    """Return the runs below a folder; log a line for each that cannot be read, and leave it out.

    Raises ResourceError if none can be read.
    """
    problems = {run: run.damage(layers=True) for run in find_runs(path)}
    for run, problem in problems.items():
        if problem is not None:
            log(f"run {run.name} is left out: {problem}")
    readable = [run for run, problem in problems.items() if problem is None]
    if not readable:
        raise ResourceError(f"{path}: none of its runs can be read")
    return readable
