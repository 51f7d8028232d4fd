"""Small models of every family with perturbed parameters."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepstack.model import build_model
from helpers.configs import config_with
from helpers.scheme_pieces import move

SEQ, VOCAB = 8, 17


config = partial(config_with, {
    "model.depth": 3, "model.d_model": 16, "task.name": "markov", "task.seq_len": SEQ,
    "train.steps": 2, "train.batch_size": 2, "train.eval_every": 0, "train.eval_batches": 1,
    "log.probe_sequences": 1, "runtime.device": "cpu",
})  # fmt: skip


def perturbed(**changes: Any) -> Any:
    """A model whose every parameter is away from where it starts."""
    built = build_model(config(**changes), vocab_size=VOCAB)
    move(built.model)
    built.at_step(7)
    return built


def tokens_for(model: Any, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (2, model.source_len + SEQ), generator=generator)
