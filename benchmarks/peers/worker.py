"""Runs one row of a benchmark, step by step: python -m benchmarks.peers.worker

Requests and answers pass through stdin, a connection.  The first request is (row, config, files of
plugins).  'step' runs one step, 'products' times the matrix products; each has one answer.  The end
of the connection ends the process.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.peers import (
    PEERS,
    PeerModel,
    PeerTrainer,
    Shape,
    ShapeError,
    TrainStep,
    import_library,
    shape_of,
)
from benchmarks.peers.products import Products
from benchmarks.peers.rows import LOGGED, VARIANTS, Row
from deepstack import config as conf
from deepstack.base import DeepstackError, plugins
from deepstack.fast import fast_paths_of, use_onednn
from deepstack.tasks import Task, task_of
from deepstack.training import (
    choose_device,
    is_out_of_memory,
    mean_loss,
    peak_memory_mb,
    timed_steps,
    to_device,
    torch_settings,
)


def answers(row: Row, config: conf.Config, requests: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the memory before the model is built, and then the answer to each request.

    The first step comes before the products: it sets the threads of the run.
    """
    for variant in row.variants:
        config = conf.with_overrides(config, VARIANTS[variant][1])
    device, task = choose_device(config.runtime), task_of(config)
    shape = shape_of(config, task.vocab_size)
    if not row.is_own and PEERS[row.name].torch:
        # so that the library's memory counts for the process, not for the model
        import_library(PEERS[row.name].package)
    yield {"start_memory_mb": memory_mb("VmRSS", device)}
    parameters = None
    if row.is_own:
        endless = conf.with_overrides(config, {"train.steps": 1_000_000})
        steps: Iterator[float] = timed_steps(endless, logged=row.name == LOGGED.name)
    else:
        built = build_peer(row.name, shape, device)
        parameters = built.parameters
        steps = peer_steps(config, built, task, device, "onednn" in row.variants)
    products = None
    for request in requests:
        if request == "step":
            seconds, memory = next(steps), memory_mb("VmHWM", device)
            yield {"seconds": seconds, "peak_memory_mb": memory, "parameters": parameters}
        else:
            products = products or products_of(config, shape, device)
            yield {"seconds": products.seconds(), "flops": products.flops()}


def products_of(config: conf.Config, shape: Shape, device: torch.device) -> Products:
    """Return the matrix products of a step on the whole batch, run once."""
    unsharded = conf.with_overrides(config, {"train.shards": 1})
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    library = fast_paths_of(unsharded, device).products
    products = Products(shape, config.train.batch_size, device, dtype, library)
    products.seconds()  # touches the fresh memory
    return products


def build_peer(name: str, shape: Shape, device: torch.device) -> PeerModel | PeerTrainer:
    """Build a peer on the device, in training mode, with exactly the layers of the shape.

    Raises ShapeError when the weight matrices of its layers hold other than
    depth (4 d_model² + 2 d_model d_ff) numbers.
    """
    with device:
        built = PEERS[name].build(shape)
    if built.in_matrices != shape.in_matrices:
        raise ShapeError(
            f"the matrices of its layers hold {built.in_matrices:,} numbers, and "
            f"{shape.in_matrices:,} make {shape.depth} layers of d_model {shape.d_model} "
            f"and d_ff {shape.d_ff}"
        )
    if isinstance(built, PeerModel):
        built.model.train()
    return built


def peer_optimizers(train: conf.Train, built: PeerModel) -> list[torch.optim.Optimizer]:
    """Build torch's optimizer as users of another library do, with torch's default settings.

    One group holds all parameters.  Muon takes the matrices of the layers, AdamW all others.
    """
    rate: dict[str, Any] = {"lr": train.lr, "weight_decay": train.weight_decay}
    parameters = list(built.model.parameters())
    if train.optimizer == "sgd":
        return [torch.optim.SGD(parameters, momentum=train.momentum, **rate)]
    optimizers: list[torch.optim.Optimizer] = []
    if train.optimizer == "muon":
        muon = train.muon
        matrices = dict.fromkeys(p for p in built.stack.parameters() if p.ndim == 2)
        settings: Any = {"ns_steps": muon.ns_steps, "adjust_lr_fn": muon.adjust_lr}
        optimizers += [torch.optim.Muon(matrices, momentum=muon.momentum, **settings, **rate)]
        parameters = [p for p in parameters if p not in matrices]
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    return [*optimizers, kind(parameters, betas=train.betas, eps=train.eps, **rate)]


def torch_step(train: conf.Train, built: PeerModel, device: torch.device) -> TrainStep:
    """Return the training step of a model: zero_grad, forward, backward, clip, optimizer."""
    model, optimizers = built.model, peer_optimizers(train, built)

    def train_step(inputs: Tensor, targets: Tensor) -> float:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
            logits = model(inputs)
        loss = mean_loss(logits, targets)
        loss.backward()
        if train.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()  # waits for the device

    return train_step


def peer_steps(
    config: conf.Config,
    built: PeerModel | PeerTrainer,
    task: Task,
    device: torch.device,
    onednn: bool = False,
) -> Iterator[float]:
    """Yield the seconds of successive steps, each with its batch.

    The batches equal deepstack's; nothing is logged.  onednn: whether torch multiplies
    fp32 matrices of any size by oneDNN.
    """
    if isinstance(built, PeerTrainer):  # it moves its batches itself
        device, train_step = torch.device("cpu"), built.start(config)
    else:
        train_step = torch_step(config.train, built, device)
    with torch_settings(conf.with_overrides(config, {"runtime.deterministic": False}), device):
        for step in count(1):
            if onednn:  # products by another library reset it
                use_onednn()
            began = time.perf_counter()
            train_step(*to_device(task.train_batch(step, config.train.batch_size), device))
            yield time.perf_counter() - began


def memory_mb(line: str, device: torch.device) -> float:
    """Return a line of /proc/self/status in MB: VmRSS is the present memory, VmHWM its peak.

    On a GPU it is the peak of the allocated memory.  The peak of getrusage, which macOS has
    instead, also counts the parent's memory at the fork.
    """
    status = Path("/proc/self/status")
    if device.type == "cuda" or not status.exists():
        return peak_memory_mb(device)
    return int(status.read_text().partition(f"{line}:")[2].split()[0]) * 1024 / 1e6


def main() -> None:
    """Answer requests until the connection ends; an error is the last answer."""
    parent = Connection(0)
    try:
        row, config, files = parent.recv()
        plugins.load_plugins(files)
        with suppress(EOFError, ConnectionError):
            for answer in answers(row, config, iter(parent.recv, None)):
                parent.send(answer)
    except DeepstackError as error:
        parent.send({"error": str(error), "exit_code": error.exit_code})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        parent.send({"error": reason, "exit_code": 5 if is_out_of_memory(error) else 1})


if __name__ == "__main__":
    main()
