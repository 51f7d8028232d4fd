"""The timed steps: those of deepstack and those of a peer, built in the process that times them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from deepstack import config as conf
from deepstack.bench.peers import PEERS, PeerModel, Shape
from deepstack.errors import DeepstackError
from deepstack.tasks import Task
from deepstack.training import mean_loss, timed_steps, to_device, torch_settings

LOGGED, UNLOGGED = "deepstack", "deepstack_unlogged"
OWN = {LOGGED: "deepstack", UNLOGGED: "deepstack, nothing logged"}
"""deepstack's own rows: with ‖ΔF‖ logged at every step, and the training step alone."""

PRODUCTS_LABEL = "matrix products alone"


def label_of(row: str) -> str:
    """Return the label of a row in tables and charts."""
    return OWN[row] if row in OWN else PEERS[row].label


class ShapeError(DeepstackError):
    """A peer cannot have the requested shape."""


def deepstack_steps(config: conf.Config, *, logged: bool) -> Iterator[float]:
    """Yield the seconds of successive steps, as in `deepstack train`, until closed."""
    endless = conf.with_overrides(config, {"train.steps": 1_000_000})
    yield from timed_steps(endless, logged=logged)


def build_peer(name: str, shape: Shape, device: torch.device) -> PeerModel:
    """Build a peer on the device, in training mode, with exactly the layers of the shape.

    Raises ShapeError when the weight matrices of its layers hold other than
    depth (4 d_model² + 2 d_model d_ff) numbers.
    """
    with device:
        built = PEERS[name].build(shape)
    count = sum(p.numel() for p in built.stack.parameters() if p.ndim > 1)
    if count != shape.in_matrices:
        raise ShapeError(
            f"the matrices of its layers hold {count:,} numbers, and {shape.in_matrices:,} make "
            f"{shape.depth} layers of d_model {shape.d_model} and d_ff {shape.d_ff}"
        )
    built.model.train()
    return built


def peer_optimizers(train: conf.Train, built: PeerModel) -> list[torch.optim.Optimizer]:
    """Build torch's optimizer as users of another library do, with torch's default settings.

    One group holds all parameters.  Muon takes the matrices of the layers, AdamW all others.
    """
    parameters = list(built.model.parameters())
    if train.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=train.lr, momentum=train.momentum)]
    optimizers: list[torch.optim.Optimizer] = []
    if train.optimizer == "muon":
        matrices = [p for p in built.stack.parameters() if p.ndim == 2]
        parameters = [p for p in parameters if all(p is not matrix for matrix in matrices)]
        optimizers += [
            torch.optim.Muon(
                matrices,
                lr=train.lr,
                weight_decay=train.weight_decay,
                momentum=train.muon.momentum,
                ns_steps=train.muon.ns_steps,
                adjust_lr_fn=train.muon.adjust_lr,
            )
        ]
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    main = kind(
        parameters,
        lr=train.lr,
        betas=(train.betas[0], train.betas[1]),
        eps=train.eps,
        weight_decay=train.weight_decay,
    )
    return [*optimizers, main]


def peer_steps(
    config: conf.Config, built: PeerModel, task: Task, device: torch.device
) -> Iterator[float]:
    """Yield the seconds of successive steps: batch, zero_grad, forward, backward, clip, step.

    The batches are those of deepstack's steps; nothing is logged.  On a GPU a step ends with a
    synchronisation.
    """
    train, model = config.train, built.model
    optimizers = peer_optimizers(train, built)
    bf16 = train.precision == "bf16"
    step = 0
    with torch_settings(conf.with_overrides(config, {"runtime.deterministic": False}), device):
        while True:
            step += 1
            began = time.perf_counter()
            inputs, targets = to_device(task.train_batch(step, train.batch_size), device)
            model.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                logits = model(inputs)
            mean_loss(logits, targets).backward()
            if train.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            for optimizer in optimizers:
                optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            yield time.perf_counter() - began
