"""Fast paths: they wrap a finished model and compute the same step as its plain eager layers.

`fast_paths_of` chooses them, `enable_fast_paths` makes a model use them, and `make_step` returns
its training step.
"""

from deepstack.fast.accelerate import (
    PassRecorder,
    compiled,
    enable_fast_paths,
    step_recorder,
)
from deepstack.fast.capture import CapturedStep, on
from deepstack.fast.gpu.available import triton_version
from deepstack.fast.products import Library, product_functions, use_onednn
from deepstack.fast.replay import ReplayedPass, ReplayedStep
from deepstack.fast.rule import (
    FastPaths,
    choose_fast_paths,
    executor_notice,
    fast_paths_of,
)
from deepstack.fast.step import BatchSum, Measured, Step, Update, make_step

__all__ = [
    "BatchSum",
    "CapturedStep",
    "FastPaths",
    "Library",
    "Measured",
    "PassRecorder",
    "ReplayedPass",
    "ReplayedStep",
    "Step",
    "Update",
    "choose_fast_paths",
    "compiled",
    "enable_fast_paths",
    "executor_notice",
    "fast_paths_of",
    "make_step",
    "on",
    "product_functions",
    "step_recorder",
    "triton_version",
    "use_onednn",
]
