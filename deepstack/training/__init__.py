"""Training: preflight, run and loop, with checkpoints, optimizers and the external probe."""

from deepstack.training.environment import bf16_support as bf16_support
from deepstack.training.environment import choose_device as choose_device
from deepstack.training.environment import choose_threads as choose_threads
from deepstack.training.environment import device_is_here as device_is_here
from deepstack.training.environment import memory_limit as memory_limit
from deepstack.training.environment import memory_needed as memory_needed
from deepstack.training.environment import torch_settings as torch_settings
from deepstack.training.evaluation import mean_loss as mean_loss
from deepstack.training.evaluation import to_device as to_device
from deepstack.training.extension import Parent as Parent
from deepstack.training.extension import parent_of as parent_of
from deepstack.training.observer import Observer as Observer
from deepstack.training.observer import PlainLines as PlainLines
from deepstack.training.observer import Row as Row
from deepstack.training.observer import Started as Started
from deepstack.training.observer import observer as observer
from deepstack.training.optimizer import make_optimizer as make_optimizer
from deepstack.training.preflight import choose_folder as choose_folder
from deepstack.training.preflight import refuse_cut_settings as refuse_cut_settings
from deepstack.training.preflight import refuse_missing_plugins as refuse_missing_plugins
from deepstack.training.preflight import run_name as run_name
from deepstack.training.resume import Trained as Trained
from deepstack.training.resume import load_trained as load_trained
from deepstack.training.run import train as train
from deepstack.training.timing import temporary_run as temporary_run
from deepstack.training.timing import timed_steps as timed_steps
