"""Grids of runs: a plan, one process a run, nothing done twice."""

from deepstack.sweeps.fork_server import ForkedProcess as ForkedProcess
from deepstack.sweeps.fork_server import ForkServer as ForkServer
from deepstack.sweeps.local import Local as Local
from deepstack.sweeps.local import default_workers as default_workers
from deepstack.sweeps.local import memory_budget as memory_budget
from deepstack.sweeps.local import refuse_missing as refuse_missing
from deepstack.sweeps.local import visible_gpus as visible_gpus
from deepstack.sweeps.plan import RUN_AGAIN as RUN_AGAIN
from deepstack.sweeps.plan import Cell as Cell
from deepstack.sweeps.plan import Job as Job
from deepstack.sweeps.plan import Requirements as Requirements
from deepstack.sweeps.plan import as_study as as_study
from deepstack.sweeps.plan import expand as expand
from deepstack.sweeps.plan import is_wanted as is_wanted
from deepstack.sweeps.plan import plan as plan
from deepstack.sweeps.plan import retry_states as retry_states
from deepstack.sweeps.plan import train_arguments as train_arguments
from deepstack.sweeps.pool import CellProgress as CellProgress
from deepstack.sweeps.pool import Launcher as Launcher
from deepstack.sweeps.pool import Pool as Pool
from deepstack.sweeps.run import MEASURE_ONLY as MEASURE_ONLY
from deepstack.sweeps.run import sweep as sweep
from deepstack.sweeps.timing import seconds_per_run as seconds_per_run
