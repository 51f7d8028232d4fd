"""Fast paths: they wrap a finished model and compute the same step as its plain eager layers.

`fast_paths_of` chooses them, `enable_fast_paths` makes a model use them, and `make_step` returns
its training step.
"""

from deepstack.fast.accelerate import PassRecorder as PassRecorder
from deepstack.fast.accelerate import compiled as compiled
from deepstack.fast.accelerate import enable_fast_paths as enable_fast_paths
from deepstack.fast.accelerate import step_recorder as step_recorder
from deepstack.fast.capture import CapturedStep as CapturedStep
from deepstack.fast.capture import on as on
from deepstack.fast.distributed import ALONE as ALONE
from deepstack.fast.gpu.available import triton_version as triton_version
from deepstack.fast.native import Kernels as Kernels
from deepstack.fast.native import find_kernels as find_kernels
from deepstack.fast.products import Library as Library
from deepstack.fast.products import product_functions as product_functions
from deepstack.fast.products import use_onednn as use_onednn
from deepstack.fast.replay import ReplayedPass as ReplayedPass
from deepstack.fast.replay import ReplayedStep as ReplayedStep
from deepstack.fast.rule import FastPaths as FastPaths
from deepstack.fast.rule import choose_fast_paths as choose_fast_paths
from deepstack.fast.rule import executor_notice as executor_notice
from deepstack.fast.rule import fast_paths_of as fast_paths_of
from deepstack.fast.step import BatchSum as BatchSum
from deepstack.fast.step import Measured as Measured
from deepstack.fast.step import Step as Step
from deepstack.fast.step import Update as Update
from deepstack.fast.step import make_step as make_step
