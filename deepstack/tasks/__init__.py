"""Tasks: the data that a stack learns to predict. Each is one function that returns a `Task`."""

from deepstack.base.registry import import_all
from deepstack.tasks.files import MOST_TEXT as MOST_TEXT
from deepstack.tasks.files import find_files as find_files
from deepstack.tasks.files import refusal as refusal
from deepstack.tasks.files import refusing as refusing
from deepstack.tasks.files import sha256_of as sha256_of
from deepstack.tasks.parts import Part as Part
from deepstack.tasks.parts import Tokens as Tokens
from deepstack.tasks.registry import TASKS as TASKS
from deepstack.tasks.registry import build_task as build_task
from deepstack.tasks.registry import task as task
from deepstack.tasks.registry import task_families as task_families
from deepstack.tasks.registry import task_of as task_of
from deepstack.tasks.registry import task_options as task_options
from deepstack.tasks.task import IGNORE as IGNORE
from deepstack.tasks.task import PIECE as PIECE
from deepstack.tasks.task import Batch as Batch
from deepstack.tasks.task import Task as Task
from deepstack.tasks.token_files import Reading as Reading

import_all(__name__, __path__)
