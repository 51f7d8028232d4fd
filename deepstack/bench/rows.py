"""The timed steps: those of deepstack and those of a peer, built in the process that times them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from deepstack import config as conf
from deepstack.bench.peers import PEERS, PeerModel, PeerTrainer, Shape, ShapeError
from deepstack.errors import ConfigError
from deepstack.fast.products import use_onednn
from deepstack.registry import unknown
from deepstack.tasks import Task
from deepstack.training import mean_loss, timed_steps, to_device, torch_settings

LOGGED, UNLOGGED = "deepstack", "deepstack_unlogged"
OWN = {LOGGED: "deepstack", UNLOGGED: "deepstack, nothing logged"}
"""deepstack's own rows: with ‖ΔF‖ logged at every step, and the training step alone."""

PRODUCTS_LABEL = "matrix products alone"

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "fp32": ("fp32", {"train.precision": "fp32"}),
    "bf16": ("bf16", {"train.precision": "bf16"}),
    "onednn": ("products by oneDNN", {}),
    "shards": ("two shards on two threads", {"train.shards": 2, "runtime.threads": 2}),
}
"""The variants of a row with label and settings: another precision, torch's products by oneDNN, or
deepstack's step on two threads.

A row is named by its peer and its variants, as in torch+onednn or deepstack+bf16.
"""


def parse_row(row: str) -> tuple[str, list[str]]:
    """Return a row's peer, or deepstack's own row, and its variants.

    Raises ConfigError for an unknown name.
    """
    name, *variants = row.split("+")
    if name not in OWN:
        PEERS[name]
    for variant in variants:
        if variant not in VARIANTS:
            raise ConfigError(f"bench: {unknown('variant', variant, list(VARIANTS))}")
    if "onednn" in variants and (name in OWN or not PEERS[name].torch):
        raise ConfigError(f"bench: found {row}; allowed with onednn: peers that use torch")
    if "shards" in variants and name not in OWN:
        raise ConfigError(f"bench: found {row}; allowed with shards: {', '.join(OWN)}")
    return name, variants


def is_own(row: str) -> bool:
    """Return whether a row is deepstack's."""
    return parse_row(row)[0] in OWN


def label_of(row: str) -> str:
    """Return the label of a row in tables and charts."""
    name, variants = parse_row(row)
    label = OWN[name] if name in OWN else PEERS[name].label
    return ", ".join([label, *(VARIANTS[variant][0] for variant in variants)])


def config_of_row(row: str, config: conf.Config) -> conf.Config:
    """Return the configuration of a row: that of all rows, changed by its variants."""
    for variant in parse_row(row)[1]:
        config = conf.with_overrides(config, VARIANTS[variant][1])
    return config


def deepstack_steps(config: conf.Config, *, logged: bool) -> Iterator[float]:
    """Yield the seconds of successive steps, as in `deepstack train`, until closed."""
    endless = conf.with_overrides(config, {"train.steps": 1_000_000})
    yield from timed_steps(endless, logged=logged)


def build_peer(name: str, shape: Shape, device: torch.device) -> PeerModel | PeerTrainer:
    """Build a peer on the device, in training mode, with exactly the layers of the shape.

    Raises ShapeError when the weight matrices of its layers hold other than
    depth (4 d_model² + 2 d_model d_ff) numbers.
    """
    with device:
        built = PEERS[name].build(shape)
    if isinstance(built, PeerTrainer):
        count = built.in_matrices
    else:
        count = sum(p.numel() for p in built.stack.parameters() if p.ndim > 1)
    if count != shape.in_matrices:
        raise ShapeError(
            f"the matrices of its layers hold {count:,} numbers, and {shape.in_matrices:,} make "
            f"{shape.depth} layers of d_model {shape.d_model} and d_ff {shape.d_ff}"
        )
    if isinstance(built, PeerModel):
        built.model.train()
    return built


def trainer_steps(config: conf.Config, built: PeerTrainer, task: Task) -> Iterator[float]:
    """Yield the seconds of successive steps of a library with its own training step."""
    train_step = built.start(config)
    step = 0
    while True:
        step += 1
        began = time.perf_counter()
        batch = task.train_batch(step, config.train.batch_size)
        train_step(*to_device(batch, torch.device("cpu")))
        yield time.perf_counter() - began


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
    config: conf.Config,
    built: PeerModel,
    task: Task,
    device: torch.device,
    onednn: bool = False,
) -> Iterator[float]:
    """Yield the seconds of successive steps: batch, zero_grad, forward, backward, clip, step.

    The batches are those of deepstack's steps; nothing is logged.  On a GPU a step ends with a
    synchronisation.  onednn: whether torch multiplies fp32 matrices of any size by oneDNN.
    """
    train, model = config.train, built.model
    optimizers = peer_optimizers(train, built)
    bf16 = train.precision == "bf16"
    step = 0
    with torch_settings(conf.with_overrides(config, {"runtime.deterministic": False}), device):
        while True:
            step += 1
            if onednn:
                use_onednn()
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
