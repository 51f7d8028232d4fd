"""Fast paths: they wrap a finished model and compute what its plain eager step computes."""

from deepstack.fast.capture import CapturedFunction, capture
from deepstack.fast.gpu.available import makes_kernels
from deepstack.fast.layers import compiled, enable_fast_paths, in_parts, run_fused
from deepstack.fast.replay import replaying
from deepstack.fast.rule import FEW_STEPS, FastPaths, choose_fast_paths
from deepstack.fast.selection import fast_paths_of, parallel_of, triton_version
from deepstack.fast.step import Made, Measured, Probe, Step, Update, make_step, probed

__all__ = [
    "FEW_STEPS",
    "CapturedFunction",
    "FastPaths",
    "Made",
    "Measured",
    "Probe",
    "Step",
    "Update",
    "capture",
    "choose_fast_paths",
    "compiled",
    "enable_fast_paths",
    "fast_paths_of",
    "in_parts",
    "make_step",
    "makes_kernels",
    "parallel_of",
    "probed",
    "replaying",
    "run_fused",
    "triton_version",
]
