"""The content of config.yaml, meta.json and columns.json of an external probe's folder."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepstack.base import ConfigError
from deepstack.config import nested
from deepstack.diagnostics import describe
from deepstack.records import STEPS_COLUMNS, TIMING_COLUMNS
from deepstack.runs import SPIKES_COLUMNS
from deepstack.tools.probe.model import ExternalModel
from deepstack.tools.probe.order import inner_optimizer
from deepstack.training import column_entries, f0_norm, utc_now, versions

LAYERS = ("stream_norm", "grad_norm", "param_norm", "param_update_norm")
OWN_COLUMNS = {
    "loss": ("L", "", "What probe.step was given at step t."),
    "lr": ("η", "", "Learning rate of the optimizer's first group at probe.step."),
    "grad_norm": ("‖∇L‖", "", "Norm of the gradients that the model has at probe.step."),
}


def config_of(
    subject: ExternalModel,
    optimizer: torch.optim.Optimizer,
    name: str,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of config.yaml: the known settings of the run, nested by section.

    more: further settings by dotted key, which go before the known ones.
    """
    group = optimizer.param_groups[0]
    known: dict[str, Any] = {
        "seed": 0,
        "model.scheme": re.sub(r"\W+", "_", name),
        "model.depth": len(subject.layers),
        "model.d_model": subject.width or subject.f_width,
        "task.name": "unnamed",
        "train.optimizer": type(inner_optimizer(optimizer)).__name__.lower(),
        "train.lr": float(group["lr"]),
        "train.weight_decay": float(group.get("weight_decay", 0.0)),
    }
    known |= more
    for key, value in known.items():
        try:
            known[key] = json.loads(json.dumps(value))  # lists for tuples
        except TypeError as error:
            raise ConfigError(f"config: {key}: {error}; allowed Python's own values") from error
    return nested(known)


def environment_of(subject: ExternalModel) -> dict[str, Any]:
    """Return versions and number of threads for meta.json."""
    return versions(subject.initial.device) | {"threads": torch.get_num_threads()}


def meta_of(
    subject: ExternalModel, model: nn.Module, groups: Mapping[str, Sequence[str]], seed: int
) -> dict[str, Any]:
    """Return the content of meta.json: command, time, environment and measured modules."""
    return {
        "command": " ".join(sys.argv),
        "created": utc_now(),
        "environment": environment_of(subject),
        "seed": seed,
        "parameters": {
            "trained": sum(p.numel() for p in subject.parameters.values() if p.requires_grad),
            "total": sum(p.numel() for p in model.parameters()),
        },
        "model": f"{type(subject.model).__module__}.{type(subject.model).__qualname__}",
        "hidden": subject.f_name,
        "layers": subject.layers_name,
        "groups": groups,
    }


def columns_of(
    subject: ExternalModel, groups: Iterable[str], scheme: str, label: str, *, spikes: bool
) -> dict[str, Any]:
    """Return the content of columns.json, which describes every column for the charts.

    scheme, label: the model's name in config.yaml and in charts.
    spikes: whether the run has a log of spikes.
    """
    known, logged = describe(), STEPS_COLUMNS | OWN_COLUMNS | TIMING_COLUMNS
    layers = {key: known[key] for key in LAYERS}
    gradient = "Norm of the training batch's gradient with respect to the parameters of each layer."
    layers["grad_norm"] = (known["grad_norm"][0], "", gradient)
    shares = {
        name: (f"‖ΔF‖ of {name}", "", f"Mean over tokens of ‖F(θ_0 + Δθ of {name}) − F_0‖₂.")
        for name in groups
    }
    shares["whole"] = ("‖ΔF‖", "", "Mean over tokens of ‖F_t − F_0‖₂.")
    shares["unexplained"] = ("", "", "Mean over tokens of ‖ΔF − sum of what the groups do‖₂.")
    return {
        "columns": column_entries((SPIKES_COLUMNS if spikes else {}) | logged),
        "layers": column_entries(layers),
        "attribution": column_entries(shares),
        "scheme": {"name": scheme, "label": label, "normalised": subject.normalised},
        **f0_norm(subject.initial),
        "references": {},
    }
