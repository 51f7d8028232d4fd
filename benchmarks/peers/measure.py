"""Measures each row in a separate process; the rows take turns."""

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

import deepstack
from benchmarks.peers.peers import PEERS
from benchmarks.peers.rows import LOGGED, UNLOGGED, Row, RowError, RowProcess
from deepstack import config as conf
from deepstack.base import ConfigError
from deepstack.fast import fast_paths_of
from deepstack.model import build_model
from deepstack.schemes import scheme_memory
from deepstack.tasks import task_of
from deepstack.training import choose_device, choose_threads, cpu

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
    rows: list[RowProcess]
    depths: list[RowProcess]
    interleaved: bool


def bench(
    config: conf.Config,
    *,
    steps: int = 10,
    peers: Sequence[str] | None = None,
    depths: Sequence[int] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Measured:
    """Time `steps` training steps of deepstack's stack and of its peers at the same shape.

    peers: rows, as in `Row.parse`; None for all in PEERS and the usual variants of torch's
    encoder.  Those that are not installed or cannot have the shape are left out with a message to
    `say`.  depths: further depths at which deepstack alone is measured.
    Raises ConfigError for an unknown name or an impossible shape, ResourceError for a missing
    device, RowError if deepstack's row fails, with exit code 5 for too little memory.
    """
    device = choose_device(config.runtime)
    config = conf.with_overrides(config, {"runtime.device": device.type})
    rows = [Row.parse(name) for name in (usual_peers(config) if peers is None else peers)]
    parameters = own_parameters(config)
    own_rows = [LOGGED, UNLOGGED, *(row for row in rows if row.is_own)]
    others = available_peers(config, [row for row in rows if not row.is_own], say)
    facts = facts_of(config, device)
    names = dict.fromkeys(row.name for row in others if row.name != "torch")
    facts["peers"] = {name: version_of(PEERS[name].package) for name in names}
    processes = [RowProcess(row, config) for row in dict.fromkeys((*own_rows, *others))]
    deeper = [
        RowProcess(LOGGED, conf.with_overrides(config, {"model.depth": depth})) for depth in depths
    ]
    interleaved, measured = measure_rows(processes, steps, device, say)
    deep_interleaved, deep = measure_rows(deeper, steps, device, say, False)
    for process in measured:
        if process.row.is_own:
            process.parameters = parameters
    return Measured(facts, measured, deep, interleaved and deep_interleaved)


def usual_peers(config: conf.Config) -> list[str]:
    """Return all peers, and torch's encoder by deepstack's library and in both precisions."""
    rows = PEERS.names()
    if config.train.precision == "bf16":
        rows.append("torch+fp32")
    if fast_paths_of(config, choose_device(config.runtime)).products == "onednn":
        rows.append("torch+fp32+onednn" if config.train.precision == "bf16" else "torch+onednn")
    return rows


def available_peers(
    config: conf.Config, rows: Sequence[Row], say: Callable[[str], None]
) -> list[Row]:
    """Return the rows of installed peers; none if the stack has a setting that no peer has.

    A message gives the reason for each that is left out.
    """
    model = config.model
    shared = {
        "model.norm.kind=layer": model.norm.kind == "layer",
        "model.activation=relu or gelu": model.activation in ("relu", "gelu"),
        "model.bias=true": model.bias,
        "model.gated=false": not model.gated,
        "model.qk_norm=false": not model.qk_norm,
        "model.positions=learned or sinusoidal": model.positions != "rotary",
        "model.head=tied or separate": model.head != "bert",
        "train.label_smoothing=0": not config.train.label_smoothing,
        "train.z_loss=0": not config.train.z_loss,
    }
    missing = [key for key, same in shared.items() if not same]
    if rows and missing:
        say(f"left out: all peers, which are compared under {' and '.join(missing)}")
        return []
    for peer in (PEERS[row.name] for row in rows):
        if not peer.installed():
            say(
                f"left out: {peer.label}: {peer.package} is not installed; "
                "pip install '.[bench]' in deepstack's folder installs every peer"
            )
    return [row for row in rows if PEERS[row.name].installed()]


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None for a package without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def measure_rows(
    processes: Sequence[RowProcess],
    steps: int,
    device: torch.device,
    say: Callable[[str], None],
    products: bool = True,
) -> tuple[bool, list[RowProcess]]:
    """Return whether the rows took turns, and the rows that could be measured."""
    at_once = device.type == "cuda"
    if fits_at_once(processes, device):
        return True, take_turns(processes, steps, say, products, at_once)
    say("memory does not hold all rows at once: one follows the other")
    return False, [p for one in processes for p in take_turns([one], steps, say, products, False)]


def take_turns(
    processes: Sequence[RowProcess],
    steps: int,
    say: Callable[[str], None],
    products: bool,
    at_once: bool,
) -> list[RowProcess]:
    """Time one step of each row, `steps` times, and return the rows that did not fail.

    at_once: whether all rows start at the same time, on a GPU's host with many cores.
    """

    def begin(process: RowProcess) -> None:
        process.begin()
        at = f" at depth {process.config.model.depth}" if process.row.is_own else ""
        say(f"{process.row.label}{at}: first step after {process.start:.1f} s")

    def one_round(process: RowProcess) -> None:
        process.step()
        if products:
            process.time_products()

    try:
        with ThreadPoolExecutor(len(processes) if at_once else 1) as starts:
            remaining = without_failed(begin, processes, say, starts)
        for _ in range(steps):
            remaining = without_failed(one_round, remaining, say)
        return remaining
    finally:
        for process in processes:
            process.end()


def without_failed(
    action: Callable[[RowProcess], None],
    processes: Sequence[RowProcess],
    say: Callable[[str], None],
    threads: ThreadPoolExecutor | None = None,
) -> list[RowProcess]:
    """Call the action with each process and return the ones that did not fail.

    A peer that fails is left out with a message.  Raises RowError for a row of deepstack's.

    threads: call the actions in these.
    """
    remaining = []
    calls = [threads.submit(action, process) if threads else None for process in processes]
    for process, call in zip(processes, calls, strict=True):
        try:
            if call is not None:
                call.result()
            else:
                action(process)
            remaining.append(process)
        except RowError as error:
            process.end()
            message = f"{process.row.label}: {error}"
            if process.row.is_own:
                raise RowError(message, error.exit_code) from None
            say(f"left out: {message}")
    return remaining


def fits_at_once(processes: Sequence[RowProcess], device: torch.device) -> bool:
    """Return whether memory holds all rows and the weights and gradients of their products."""
    memory: float
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = conf.available_memory()
    needed = 0.0
    for process in processes:
        factor = 1.0 if process.row.is_own else PEER_FACTOR
        terms = conf.memory_terms(process.config, scheme_memory=scheme_memory(process.config))
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
