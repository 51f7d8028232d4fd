"""Training: preflight, run and loop, with checkpoints, optimizers and the external probe."""

from deepstack.training.environment import (
    choose_device,
    choose_threads,
    cores,
    device_is_here,
    memory_limit,
    torch_settings,
)
from deepstack.training.evaluation import mean_loss, to_device
from deepstack.training.fingerprint import bf16_support
from deepstack.training.loop import train
from deepstack.training.observer import Observer, Observers, PlainLines, Row, Started
from deepstack.training.optimizer import make_optimizer
from deepstack.training.preflight import (
    choose_folder,
    free_folder,
    refuse_missing_plugins,
    refuse_probed,
    run_name,
)
from deepstack.training.timing import temporary_run, timed_steps

__all__ = [
    "Observer",
    "Observers",
    "PlainLines",
    "Row",
    "Started",
    "bf16_support",
    "choose_device",
    "choose_folder",
    "choose_threads",
    "cores",
    "device_is_here",
    "free_folder",
    "make_optimizer",
    "mean_loss",
    "memory_limit",
    "refuse_missing_plugins",
    "refuse_probed",
    "run_name",
    "temporary_run",
    "timed_steps",
    "to_device",
    "torch_settings",
    "train",
]
