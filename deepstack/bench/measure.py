"""The measurement: every row in a process of its own, the rows taking turns."""

from __future__ import annotations

import datetime
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepstack import config as conf
from deepstack.bench.peers import PEERS
from deepstack.bench.process import WARM_UP, Worker, WorkerError
from deepstack.bench.rows import LOGGED, OWN, label_of
from deepstack.errors import ConfigError, DeepstackError, ResourceError
from deepstack.model import build_model
from deepstack.tasks import task_of
from deepstack.training import choose_device, choose_threads

# What a peer needs over deepstack's estimate for the same shape (1.06 to 1.21 at 1000 narrow
# layers), and how much of the memory may be planned for; beyond it the rows follow one another.
PEER_FACTOR, PART_OF_MEMORY = 1.25, 0.9


@dataclass(frozen=True)
class Measured:
    """What was measured: the rows, at the configuration's depth and at others, and the facts.

    interleaved: whether the rows took turns round by round, or one followed the other because
    memory does not hold them all.  workers: ended processes with their numbers.
    """

    facts: dict[str, Any]
    rows: list[Worker]
    depths: list[Worker]
    interleaved: bool
    tokens: int


def bench(
    config: conf.Config,
    *,
    steps: int = 10,
    peers: Sequence[str] | None = None,
    depths: Sequence[int] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Measured:
    """Time `steps` training steps of deepstack's stack and of its peers at the same shape.

    peers: names in PEERS; None for all.  What is not installed or cannot have the shape is named to
    `say` and left out.  depths: deepstack's own row once more at each of these depths.
    Raises ConfigError for a name or shape that is not there, ResourceError for what is missing.
    """
    names = PEERS.names() if peers is None else list(dict.fromkeys(peers))
    for name in names:
        PEERS[name]  # an unknown name is refused before anything runs
    parameters = own_parameters(config)
    device = choose_device(config.runtime)
    config = conf.with_overrides(config, {"runtime.device": device.type})
    others = [conf.with_overrides(config, {"model.depth": depth}) for depth in depths]
    there = here(alike(config, names, say), say)
    facts = facts_of(config, device)
    facts["peers"] = {name: version_of(PEERS[name].package) for name in there if name != "torch"}
    rows = [Worker(row, config) for row in (*OWN, *there)]
    interleaved, found = measured_rows(rows, steps, device, say)
    again, deep = measured_rows([Worker(LOGGED, c) for c in others], steps, device, say, False)
    for worker in found:
        if worker.row in OWN:
            worker.parameters = parameters
    tokens = config.train.batch_size * config.task.seq_len
    return Measured(facts, found, deep, interleaved and again, tokens)


def alike(config: conf.Config, names: Sequence[str], say: Callable[[str], None]) -> Sequence[str]:
    """The peers, or none where the stack has what none of them is built with, which is named."""
    model = config.model
    theirs = {
        "model.norm.kind=layer": model.norm.kind == "layer",
        "model.activation=relu or gelu": model.activation in ("relu", "gelu"),
        "model.bias=true": model.bias,
        "model.gated=false": not model.gated,
        "model.qk_norm=false": not model.qk_norm,
        "model.positions=learned or sinusoidal": model.positions != "rotary",
    }
    missing = [key for key, same in theirs.items() if not same]
    if names and missing:
        say(f"left out: all peers, which are compared under {' and '.join(missing)}")
    return () if missing else names


def here(names: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """The peers that are installed; the others are named."""
    found = []
    for name in names:
        if PEERS[name].installed():
            found.append(name)
        else:
            say(
                f"left out: {PEERS[name].label}: {PEERS[name].package} is not installed; "
                "pip install 'deepstack[bench]'"
            )
    return found


def version_of(package: str) -> str | None:
    """The version of an installed package; None for one without, such as a plugin's own."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def measured_rows(
    workers: Sequence[Worker],
    steps: int,
    device: torch.device,
    say: Callable[[str], None],
    products: bool = True,
) -> tuple[bool, list[Worker]]:
    """Whether they took turns, and those rows that could be measured, with their numbers."""
    together = fits_at_once(workers, device)
    if not together:
        say("memory does not hold all rows at once: one follows the other")
    warm_up = WARM_UP[device.type]

    def begin(worker: Worker) -> None:
        worker.begin(warm_up)
        at = f" at depth {worker.config.model.depth}" if worker.row in OWN else ""
        say(f"{label_of(worker.row)}{at}: first step after {worker.start:.1f} s")

    def one_round(worker: Worker) -> None:
        worker.step()
        if products:
            worker.time_products()

    def alone(worker: Worker) -> None:
        begin(worker)
        for _ in range(steps):
            worker.step()
        if products:
            worker.release()
            for _ in range(steps):
                worker.time_products()
        worker.end()

    try:
        if not together:
            return False, [worker for worker in workers if done(alone, worker, say)]
        left = [worker for worker in workers if done(begin, worker, say)]
        for _ in range(steps):
            left = [worker for worker in left if done(one_round, worker, say)]
        return True, left
    finally:
        for worker in workers:
            worker.end()


def done(action: Callable[[Worker], None], worker: Worker, say: Callable[[str], None]) -> bool:
    """Whether a row did what was asked; a peer that cannot is named, deepstack's own row must."""
    try:
        action(worker)
        return True
    except WorkerError as error:
        worker.end()
        message = f"{label_of(worker.row)}: {error}"
        if worker.row not in OWN:
            hint = ""
            if "torchvision" in message:
                hint = "; a torchvision for another build of torch? pip uninstall torchvision"
            say(f"left out: {message}{hint}")
            return False
        if error.exit_code == ResourceError.exit_code:
            raise ResourceError(message) from None
        again = DeepstackError(message)
        again.exit_code = error.exit_code
        raise again from None


def fits_at_once(workers: Sequence[Worker], device: torch.device) -> bool:
    """Whether memory holds all rows, with the weights and gradients of their matrix products."""
    memory: float
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = min(conf.machine_memory(), available_memory())
    needed = 0.0
    for worker in workers:
        factor = 1.0 if worker.row in OWN else PEER_FACTOR
        terms = conf.memory_terms(worker.config)
        needed += factor * sum(terms.values()) + 2 * terms["weights"]
    return needed <= PART_OF_MEMORY * memory


def available_memory() -> float:
    """Bytes that other processes leave, where the system says so; else infinity."""
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return math.inf


def own_parameters(config: conf.Config) -> int:
    """The number of parameters of deepstack's stack, from one without storage.

    Raises ConfigError for a scheme or task that is not there, and for a family of models that the
    peers are not.
    """
    if config.model.family != "encoder":
        raise ConfigError(
            f"model.family: found {config.model.family}; bench compares encoders: allowed encoder",
            key="model.family",
        )
    vocab = task_of(config).vocab_size
    return sum(build_model(config, vocab_size=vocab, device="meta").banks.count().values())


def facts_of(config: conf.Config, device: torch.device) -> dict[str, Any]:
    """Machine, versions and date; import_torch_s: seconds of a fresh process that imports torch."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": choose_threads(config),
        "device": device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "deepstack": metadata.version("deepstack"),
        "date": datetime.date.today().isoformat(),
        "import_torch_s": round(time.perf_counter() - began, 2),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def cpu_model() -> str:
    """The processor's name, as the system has it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
