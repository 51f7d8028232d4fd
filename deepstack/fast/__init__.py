"""Fast paths: they wrap a finished model and compute what its plain eager step computes.

`accelerate` is the entry for training; `fast_paths_of` returns the choice beforehand.
"""

from deepstack.fast.accelerate import Accelerated, accelerate
from deepstack.fast.capture import CapturedFunction, capture
from deepstack.fast.layers import compiled, enable_fast_paths, run_fused
from deepstack.fast.replay import replaying
from deepstack.fast.rule import FastPaths, choose_fast_paths
from deepstack.fast.selection import fast_paths_of, triton_version
from deepstack.fast.step import Measured, Step, Update, make_step

__all__ = [
    "Accelerated",
    "CapturedFunction",
    "FastPaths",
    "Measured",
    "Step",
    "Update",
    "accelerate",
    "capture",
    "choose_fast_paths",
    "compiled",
    "enable_fast_paths",
    "fast_paths_of",
    "make_step",
    "replaying",
    "run_fused",
    "triton_version",
]
