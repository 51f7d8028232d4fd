"""Analyses of the trained weights of a run, written to its folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepstack import config as conf
from deepstack.base import ConfigError, unknown
from deepstack.records import Analysis, existing_run, sha256, write_analysis
from deepstack.tasks import IGNORE, Batch, Task
from deepstack.tools.depth_use.analyses import MEASURES, Request, measure_all
from deepstack.tools.depth_use.layered import Sample, StackLayers
from deepstack.training import (
    Trained,
    choose_device,
    device_is_here,
    load_trained,
    torch_settings,
    usual_torch_modes,
)

HELD_OUT: int = 4
"""Held-out batches of `train.batch_size` sequences by default."""
TRAINING: int = 16
"""Training batches by default, for linear maps."""


@usual_torch_modes()
def analyze_run(
    run: str | Path,
    what: Sequence[str] = ("lens",),
    *,
    batches: int = HELD_OUT,
    training_batches: int = TRAINING,
    side: str | None = None,
    other: str | Path | None = None,
    step: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> dict[str, Analysis]:
    """Analyze the trained weights of a run; write analysis/<name>/ and return name -> result.

    It computes on the run's device, in the precision of its training.

    what: names of analyses.
    batches: held-out ones, the first of those that evaluate the run.
    side: 'encoder' or 'decoder' of a model with both; by default the last.
    step: whose weights `train.keep_weights` kept; by default the newest.  Analyses of another step
        than the last are written to analysis/<name>_at_<step>/.
    other: a run whose streams `similarity` compares with this one's, for the same inputs.
    say: receives a line for each checkpoint that is not used.
    settings: of `Request`.

    Losses count the positions whose token the inputs do not show, as `loss_masked` does.
    Raises ConfigError for an unknown analysis and for one that the scheme does not allow, which
    writes nothing; NothingMatchedError for a run without weights; LockedError while it trains.
    """
    for name in what:
        MEASURES[name]
    folder = existing_run(run)
    trained = load_trained(folder, say, step)
    ending = f"_at_{trained.step}" if trained.path.parent == folder.kept_dir else ""
    config, note = trained.config, ""
    if not device_is_here(config.runtime):
        note = f"runtime.device: {config.runtime.device} is not here; computed on the CPU"
        config = conf.with_overrides(config, {"runtime.device": "cpu"})
    device = choose_device(config.runtime)
    with folder.lock(), torch_settings(config, device):
        model = stack_layers(trained, side, device)
        size = trained.config.train.batch_size
        held_out, training = draw(trained.task, size, batches, training_batches)
        probe = trained.task.probe_batch(trained.config.log.probe_sequences)
        about: dict[str, Any] = {
            "step": trained.step,
            "weights_sha256": weights_sha256(trained),
            "side": model.side,
            "depth": model.depth,
            "device": device.type,
            "precision": config.train.precision,
            "stream": "one tensor" if model.one_tensor else "several tensors",
        }
        if other is not None:
            second = load_trained(existing_run(other), say)
            refuse_other_inputs(trained.config, second)
            settings["other"] = stack_layers(second, model.side if side else None, device)
            about["with"] = {"run": str(other), "weights_sha256": weights_sha256(second)}
        request = Request(
            model=model,
            held_out=sample_of(held_out, device),
            probe=sample_of([probe], device),
            training=sample_of(training, device),
            seed=trained.config.seed,
            **settings,
        )
        about |= {
            "held_out_sequences": batches * size,
            "predicted_positions": request.held_out.predicted(),
            "training_sequences": training_batches * size,
            "probe_sequences": len(probe.inputs),
            "every": request.step,
        }
        results = measure_all(what, request)
        for name, result in results.items():
            result.about = about
            if note:
                result.notes.append(note)
            if result.columns:  # else it was not measured
                write_analysis(folder, name + ending, result)
    return results


def stack_layers(trained: Trained, side: str | None, device: torch.device) -> StackLayers:
    """Return the layers of a side of a trained model on a device, by default of the last stack."""
    sides = list(trained.built.model.stacks)
    if side is not None and side not in sides:
        raise ConfigError(unknown("side", side, sides))
    bf16 = trained.config.train.precision == "bf16"
    return StackLayers(trained.built.model.to(device), side or sides[-1], bf16=bf16)


def draw(task: Task, size: int, held_out: int, training: int) -> tuple[list[Batch], list[Batch]]:
    """Return so many held-out and training batches; raise ConfigError for less than one."""
    if min(held_out, training) < 1:
        raise ConfigError(f"batches: found {min(held_out, training)}; allowed 1 or more")
    return (
        [task.validation_batch(i, size) for i in range(held_out)],
        [task.train_batch(i, size) for i in range(1, training + 1)],
    )


def sample_of(batches: Sequence[Batch], device: torch.device) -> Sample:
    """Return joined batches; predicted are the positions whose token the inputs do not show.

    If there is no such position, all predicted ones count.
    """
    inputs, targets, masked = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    if masked.any():
        targets = np.where(masked, targets, IGNORE)
    return Sample(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))


def weights_sha256(trained: Trained) -> str:
    """Return the sha256 of the file of the analyzed weights."""
    return sha256(trained.path / "weights.safetensors")


def refuse_other_inputs(config: conf.Config, second: Trained) -> None:
    """Raise ConfigError unless a second run reads the same inputs: task and family."""
    one, two = conf.values(config), conf.values(second.config)
    for key in sorted({*one, *two}):
        is_input = key.startswith("task.") or key == "model.family"
        if is_input and one.get(key) != two.get(key):
            raise ConfigError(
                f"--with: {second.folder.path} has another {key}: found {two.get(key)}, "
                f"allowed {one.get(key)}"
            )
