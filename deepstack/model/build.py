"""From a configuration to a model with storage, initialised."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepstack import config as conf
from deepstack.errors import ConfigError
from deepstack.model.initialise import initialise
from deepstack.model.stack import Encoder
from deepstack.speed import Bank, Banks


@dataclass(frozen=True)
class Built:
    """A model, its parameters by role, and those of them that are trained."""

    model: Encoder
    banks: Banks
    trained: list[Bank]


def build_model(
    config: conf.Config, *, vocab_size: int, device: torch.device | str = "cpu"
) -> Built:
    """The initialised encoder of this configuration on a device ('meta': shapes only).

    Parameters that `train.trainable` leaves out get requires_grad False.
    """
    device = torch.device(device)
    model = Encoder(
        config.model,
        vocab_size=vocab_size,
        seq_len=config.task.seq_len,
        fused_qkv=one_treatment(config, ("q", "k", "v")),
    )
    banks = Banks(model, list(model.layers), device, stacked=config.runtime.banks)
    if device.type != "meta":
        initialise(banks, config.model, config.seed)
    chosen = config.train.trainable
    trained = [b for b in banks if chosen == "all" or all(role in chosen for role in b.roles)]
    if not trained:
        there = ", ".join(dict.fromkeys(role for bank in banks for role in bank.roles))
        raise ConfigError(
            f"train.trainable: found {list(chosen)}, of which this model has none; it has {there}",
            key="train.trainable",
        )
    keys = {bank.key for bank in trained}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        key = "layers." + ".".join(parts[2:]) if parts[0] == "layers" else name
        parameter.requires_grad_(key in keys)
    return Built(model, banks, trained)


def one_treatment(config: conf.Config, roles: tuple[str, ...]) -> bool:
    """Whether these roles are trained alike: then they may share one tensor."""
    chosen = config.train.trainable
    trained = {chosen == "all" or role in chosen for role in roles}
    return len(trained) == 1 and len({config.train.lr_factor(role) for role in roles}) == 1
