"""Measures each row in a separate process; the rows take turns."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

import deepstack
from deepstack import config as conf
from deepstack.bench.peers import PEERS
from deepstack.bench.rows import LOGGED, OWN, Worker, WorkerError, is_own, label_of, parse_row
from deepstack.errors import ConfigError, ResourceError
from deepstack.fast import fast_paths_of
from deepstack.model import build_model
from deepstack.schemes import scheme_memory
from deepstack.tasks import task_of
from deepstack.training import choose_device, choose_threads
from deepstack.training.environment import cpu

# The memory of a peer over deepstack's estimate for the same shape (1.06 to 1.21 at 1000 narrow
# layers), and the share of the memory that all rows may use to be measured in turns.
PEER_FACTOR, PART_OF_MEMORY = 1.25, 0.9


@dataclass(frozen=True)
class Measured:
    """A measurement: rows at the configuration's depth and at other depths, and the machine.

    rows, depths: ended processes with their numbers.  interleaved: True if the rows took turns
    round by round, False if memory did not hold them all at once.
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

    peers: rows, as in `rows.parse_row`; None for all in PEERS and the usual variants of torch's
    encoder.  Those that are not installed or cannot have the shape are left out with a message to
    `say`.  depths: further depths at which deepstack alone is measured.
    Raises ConfigError for an unknown name or an impossible shape, ResourceError for a missing
    device or too little memory.
    """
    for row in peers or ():
        parse_row(row)  # an unknown name is refused before anything runs
    parameters = own_parameters(config)
    device = choose_device(config.runtime)
    config = conf.with_overrides(config, {"runtime.device": device.type})
    names = usual_peers(config) if peers is None else list(peers)
    deeper = [conf.with_overrides(config, {"model.depth": depth}) for depth in depths]
    others = [Worker(LOGGED, one) for one in deeper]
    own = [name for name in names if is_own(name)]
    names = [name for name in names if not is_own(name)]
    installed = installed_peers(comparable_peers(config, names, say), say)
    facts = facts_of(config, device)
    facts["peers"] = {
        name: version_of(PEERS[name].package)
        for name in dict.fromkeys(parse_row(row)[0] for row in installed)
        if name != "torch"
    }
    rows = [Worker(row, config) for row in dict.fromkeys((*OWN, *own, *installed))]
    interleaved, measured = measure_rows(rows, steps, device, say)
    deep_interleaved, deep = measure_rows(others, steps, device, say, False)
    for worker in measured:
        if is_own(worker.row):
            worker.parameters = parameters
    tokens = config.train.batch_size * config.task.seq_len
    return Measured(facts, measured, deep, interleaved and deep_interleaved, tokens)


def usual_peers(config: conf.Config) -> list[str]:
    """Return all peers, and torch's encoder by deepstack's library and in both precisions."""
    rows = PEERS.names()
    if config.train.precision == "bf16":
        rows.append("torch+fp32")
    if fast_paths_of(config, choose_device(config.runtime)).products == "onednn":
        rows.append("torch+fp32+onednn" if config.train.precision == "bf16" else "torch+onednn")
    return rows


def comparable_peers(
    config: conf.Config, names: Sequence[str], say: Callable[[str], None]
) -> Sequence[str]:
    """Return the peers, or none, with a message, if the stack has a setting that no peer has."""
    model = config.model
    shared = {
        "model.norm.kind=layer": model.norm.kind == "layer",
        "model.activation=relu or gelu": model.activation in ("relu", "gelu"),
        "model.bias=true": model.bias,
        "model.gated=false": not model.gated,
        "model.qk_norm=false": not model.qk_norm,
        "model.positions=learned or sinusoidal": model.positions != "rotary",
    }
    missing = [key for key, same in shared.items() if not same]
    if names and missing:
        say(f"left out: all peers, which are compared under {' and '.join(missing)}")
    return () if missing else names


def installed_peers(names: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Return the peers that are installed, with a message about each other one."""
    installed = []
    for row in names:
        known = PEERS[parse_row(row)[0]]
        if known.installed():
            installed.append(row)
        else:
            say(
                f"left out: {known.label}: {known.package} is not installed; "
                "pip install '.[bench]' in deepstack's folder installs every peer"
            )
    return installed


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None for a package without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def measure_rows(
    workers: Sequence[Worker],
    steps: int,
    device: torch.device,
    say: Callable[[str], None],
    products: bool = True,
) -> tuple[bool, list[Worker]]:
    """Return whether the rows took turns, and the rows that could be measured."""
    if fits_at_once(workers, device):
        return True, take_turns(workers, steps, say, products)
    say("memory does not hold all rows at once: one follows the other")
    return False, [w for one in workers for w in take_turns([one], steps, say, products)]


def take_turns(
    workers: Sequence[Worker], steps: int, say: Callable[[str], None], products: bool
) -> list[Worker]:
    """Time one step of each row, `steps` times, and return the rows that did not fail."""

    def begin(worker: Worker) -> None:
        worker.begin()
        at = f" at depth {worker.config.model.depth}" if is_own(worker.row) else ""
        say(f"{label_of(worker.row)}{at}: first step after {worker.start:.1f} s")

    def one_round(worker: Worker) -> None:
        worker.step()
        if products:
            worker.time_products()

    try:
        remaining = [worker for worker in workers if succeeds(begin, worker, say)]
        for _ in range(steps):
            remaining = [worker for worker in remaining if succeeds(one_round, worker, say)]
        return remaining
    finally:
        for worker in workers:
            worker.end()


def succeeds(action: Callable[[Worker], None], worker: Worker, say: Callable[[str], None]) -> bool:
    """Call the action; False and a message if it fails for a peer; raise for deepstack's rows."""
    try:
        action(worker)
        return True
    except WorkerError as error:
        worker.end()
        message = f"{label_of(worker.row)}: {error}"
        if not is_own(worker.row):
            say(f"left out: {message}")
            return False
        if error.exit_code == ResourceError.exit_code:
            raise ResourceError(message) from None
        raise WorkerError(message, error.exit_code) from None


def fits_at_once(workers: Sequence[Worker], device: torch.device) -> bool:
    """Return whether memory holds all rows and the weights and gradients of their products."""
    memory: float
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = conf.available_memory()
    needed = 0.0
    for worker in workers:
        factor = 1.0 if is_own(worker.row) else PEER_FACTOR
        terms = conf.memory_terms(worker.config, scheme_memory=scheme_memory(worker.config))
        needed += factor * sum(terms.values()) + 2 * terms["weights"]
    return needed <= PART_OF_MEMORY * memory


def own_parameters(config: conf.Config) -> int:
    """Return the number of parameters of deepstack's stack, built without storage.

    Raises ConfigError for an unknown scheme or task, and for a family other than encoder.
    """
    if config.model.family != "encoder":
        raise ConfigError(
            f"model.family: found {config.model.family}; bench compares encoders: allowed encoder",
            key="model.family",
        )
    vocab = task_of(config).vocab_size
    return sum(build_model(config, vocab_size=vocab, device="meta").banks.count().values())


def facts_of(config: conf.Config, device: torch.device) -> dict[str, Any]:
    """Return machine, versions, date and import_torch_s, the seconds of `import torch`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    facts: dict[str, Any] = {
        "cpu": cpu()["cpu_model"],
        "cores": os.cpu_count(),
        "threads": choose_threads(config),
        "device": device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "deepstack": deepstack.__version__,
        "date": datetime.date.today().isoformat(),
        "import_torch_s": round(time.perf_counter() - began, 2),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts
