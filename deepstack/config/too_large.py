"""Refuse runs that cannot fit into this machine's memory, and name the size to reduce."""

from __future__ import annotations

from operator import attrgetter

from deepstack.config.estimate import SchemeMemory, memory_estimate, no_more, on_gpu
from deepstack.config.machine import machine_memory
from deepstack.config.schema import Config
from deepstack.errors import ConfigError

# far more than the machine has is refused; a little more is for the run itself to find out
ABSURD = 4
GPU_BYTES = 192 * 2**30


def refuse_absurd(config: Config, scheme_memory: SchemeMemory = no_more) -> None:
    """Raise ConfigError, with the estimate, for a run that cannot fit into this machine.

    The error's key is the size that is furthest above its default.  A run a little too large is let
    through: a GPU may have more memory than the machine.
    """
    memory = max(machine_memory(), GPU_BYTES if on_gpu(config) else 0)
    needed = memory_estimate(config, scheme_memory=scheme_memory)
    if needed <= ABSURD * memory:
        return
    key = _largest(config)
    raise ConfigError(
        f"{key}: found {_get(config, key)}, a run of about {format_bytes(needed)}; "
        f"allowed what fits into {format_bytes(memory)}",
        key=key,
    )


def format_bytes(size: float) -> str:
    """Return a size in bytes as text: '3.2 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.0f} PiB"


SIZES = (
    "model.depth", "model.d_model", "model.d_ff", "model.n_heads", "task.seq_len",
    "train.batch_size", "log.probe_sequences", "model.decoder_depth", "train.eval_batches",
)  # fmt: skip


def _get(config: Config, key: str) -> int:
    return int(attrgetter(key)(config) or 0)  # None: the value follows another key


def _largest(config: Config) -> str:
    usual = Config()
    sizes = [key for key in SIZES if key != "model.d_ff" or "d_ff" in config.model.model_fields_set]
    return max(sizes, key=lambda key: _get(config, key) / (_get(usual, key) or usual.model.depth))
