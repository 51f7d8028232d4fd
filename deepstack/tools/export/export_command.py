"""The command `deepstack export RUN`."""

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.base import ConfigError, ResourceError
from deepstack.cli import (
    Json,
    Plugins,
    RunPath,
    Where,
    command,
    emit_facts,
    load_plugins,
    log,
    option,
)
from deepstack.records import Run, RunFolder, existing_run, followed, replace_all
from deepstack.runs import Runs

OTHER_FORMATS = (".pt", ".pth", ".bin", ".ckpt", ".onnx", ".npz", ".h5", ".gguf")


@command("Tools", "deepstack export results/quick/RUN --to model.safetensors")
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
    where: Where = [],
    step: int | None = option(
        "Weights of a step that train.keep_weights kept (default: the newest).", min=0
    ),
    plugin: Plugins = [],
    json: Json = False,
) -> None:
    """Write a trained model as plain tensors with a config, or logs for a tracker."""
    if logs is not None and step is not None:
        raise ConfigError("--step: found --logs; allowed with --to alone")
    if where and logs is None:
        raise ConfigError("--where: found without --logs; it chooses the runs of --logs")
    if logs is not None:
        from deepstack.tools.export.logs import export_logs

        runs, target = readable_runs(run, where), to or Path("logs") / logs
        look = export_logs(runs, logs, target)
        emit_facts({"runs": len(runs), "folder": str(target), "to look at it": look}, json)
        return
    from safetensors.torch import save

    from deepstack.model import export_paths, to_plain, values_of
    from deepstack.training import load_trained

    if to is None:
        raise ConfigError("--to is missing: give a new folder, or x.safetensors")
    if to.suffix in OTHER_FORMATS:
        raise ConfigError(f"--to: found {to.name}; allowed {to.stem}.safetensors, or a folder")
    load_plugins(plugin)
    folder = existing_run(run)
    paths = export_paths(to)
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists already; give another name with --to")
    target = paths.weights.parent.resolve()
    if inside := next(filter(has_run, (target, *target.parents)), None):
        raise ConfigError(
            f"--to {to}: found the run {inside.name}, whose files stay as they are; "
            "give a new folder elsewhere"
        )
    trained = load_trained(folder, log, step)
    config, built = trained.config, trained.built
    facts: dict[str, Any] = {
        "run": folder.name,
        "step": trained.step,
        "scheme": config.model.scheme,
        "parameters": sum(built.banks.count().values()),
        "files": [str(path) for path in paths],
    }
    files = {
        paths.config.name: conf.to_yaml(config).encode(),
        paths.about.name: (jsonlib.dumps(facts, indent=2) + "\n").encode(),
        # the weights are the last: a kill at any moment leaves none, or a complete export
        paths.weights.name: save(to_plain(built.model, values_of(built.model))),
    }
    replace_all(followed(paths.weights.parent), files.items())
    emit_facts(facts, json)


def has_run(folder: Path) -> bool:
    """Return whether a folder holds a run, not a configuration alone."""
    run = RunFolder(folder)
    return run.exists() and run.status_path.exists()


def readable_runs(path: Path, where: Sequence[str] = ()) -> list[Run]:
    """Return the chosen runs below a folder; log a line for each one that cannot be read.

    Raises ResourceError if none can be read.
    """
    problems = {run: run.damage(layers=True) for run in Runs.below(path).select(where)}
    for run, problem in problems.items():
        if problem is not None:
            log(f"run {run.name} is left out: {problem}")
    readable = [run for run, problem in problems.items() if problem is None]
    if not readable:
        raise ResourceError(f"{path}: none of its runs can be read")
    return readable
