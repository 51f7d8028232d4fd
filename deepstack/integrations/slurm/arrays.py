"""Writes a sweep as a job array of Slurm: a script that the user can read, change and submit."""

import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from deepstack.base import ConfigError, ResourceError, torchrun
from deepstack.records import files
from deepstack.sweeps import Cell, Requirements

# Slurm signals the script this many seconds before its time is up, so that the run can save.
SAVE_SECONDS = 60
STARTS_AT_MOST = 5
# The number of tasks of an array where Slurm's configuration cannot be read: Slurm's own default.
MAX_ARRAY_SIZE = 1001
FILE = '"$here/$run.yaml"'  # of a run, with variables of the script
# Output in UTF-8, whatever the locale.
AS_TEXT: Any = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
# Options of sbatch for the same resource: Slurm refuses some pairs of them, and adds up others.
COMPILER_BYTES = 512 * 2**20
"""The memory of a compilation of the C++ kernels beside its run: 366 MB with GCC 12."""
MEMORY_OPTIONS = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
GPU_OPTIONS = ("-G", "--gres", "--gpus", "--gpus-per-node", "--gpus-per-socket", "--gpus-per-task")

SCRIPT = Template("""\
#!/bin/bash
# $count runs of the study $study, written by `deepstack sweep --slurm`.
# sbatch $script
$directives

runs=(
$runs
)
here=$folder
cd -- $cwd || exit 1
# Each run trains alone, also if a group of ranks submitted this array.
unset $variables "$${!$prefix@}"
# Other runs may have the other cores of the node.
export OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}"

status() {  # status KEY: this value of the run's status.json
  sed -n "s/^ *\\"$$1\\": *\\"*\\([0-9a-z_]*\\).*/\\1/p" "$$here/../$$run/status.json" 2>/dev/null |
    head -n 1
}

child= asked= woken= ended=
# The time is nearly up: save, then come back.
trap 'asked=yes woken=yes; [ -z "$$child" ] || kill -TERM "$$child"' USR1
# Preempted or cancelled: no further run starts. While a run trains, Slurm sends SIGTERM to it as
# well, which saves, and here it is ignored: bash's wait is at times wrong about a child that ends
# while a trap runs.
trap ended=yes TERM

train() {  # run "$$run" and set its exit code, `code`
  # A run that takes its node along each time, or never gets to save, must not start for ever.
  local starts=$$here/$$SLURM_ARRAY_JOB_ID-$$run.starts now
  echo "step $$(status step)" >> "$$starts"
  if [ "$$(uniq -c "$$starts" | tail -n 1 | awk '{print $$1}')" -gt $most ]; then
    echo "$$run: $most starts without a step that was saved; given up" >&2
    code=1
    return
  fi
  code=127
  trap '' TERM
  (trap - TERM; exec $command) &
  child=$$!
  [ -z "$$asked" ] || kill -TERM "$$child"
  while :; do
    woken=
    wait "$$child"
    now=$$?
    [ "$$now" = 127 ] || code=$$now
    [ -n "$$woken" ] || break
  done
  child=
  trap ended=yes TERM
  [ "$$code" != 0 ] || rm -f -- "$$starts"
}

# The runs of this task, one after the other.
failed=0
for run in "$${runs[@]:$$((SLURM_ARRAY_TASK_ID * $together)):$together}"; do
  case $$(status state) in done|diverged) continue;; esac
  code=143  # no time for another run
  [ -n "$$asked$$ended" ] || train
  case $$code in
    0) ;;
    143)  # it saved because it was asked to: the others wait for the next start
      if [ -n "$$asked" ]; then
        # Not SLURM_JOB_ID: of one task it is the number of the whole array.
        scontrol requeue "$${SLURM_ARRAY_JOB_ID}_$$SLURM_ARRAY_TASK_ID"
      fi
      exit "$$code";;
    *) failed=$$code;;
  esac
done
exit "$$failed"
""")


def write_arrays(
    cells: Sequence[Cell], study: str, out: Path, *, together: int = 1, **options: Any
) -> list[Path]:
    """Write as many job arrays as Slurm's MaxArraySize demands; return the paths of the scripts.

    together, options: see `write_array`.
    """
    size, options = max_array_size() * together, options | {"together": together}
    parts = [cells[start : start + size] for start in range(0, len(cells), size)]
    return [write_array(part, study, out, **options) for part in parts]


def max_array_size() -> int:
    """Return the largest number of tasks of an array, from `scontrol show config` if it answers."""
    try:
        command = ["scontrol", "show", "config"]
        shown = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        shown = ""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown, re.M)
    return max(1, int(match[1])) if match else MAX_ARRAY_SIZE


def write_array(
    cells: Sequence[Cell],
    study: str,
    out: Path,
    *,
    together: int = 1,
    workers: int | None = None,
    hours: float | None = None,
    directives: Sequence[str] = (),
) -> Path:
    """Write <out>/<study>/slurm/: the cells' configurations and a script, whose path it returns.

    A task of the array has the cores, memory and GPU of the largest run; `workers` tasks run at a
    time.

    together: number of runs of a task, one after the other.
    hours: time limit of one start of a task; a run that needs longer saves, and its task is
        requeued, which skips the runs that are done.
    directives: more options of sbatch, as '--partition=x'; one that asks for memory or GPUs
        replaces the computed one.

    Raises ConfigError for an invalid option, and for a folder that sbatch could not name.
    """
    for line in directives:
        if not line.startswith("-") or not line.isprintable():
            raise ConfigError(f"--sbatch: found {line!r}; allowed an option, as '--partition=x'")
    folder = (out / study / "slurm").absolute()
    if not str(folder).isprintable() or '"' in str(folder):
        raise ConfigError(f"--out: Slurm cannot write its log to {str(folder)!r}")
    required = requirements(cells)
    jobs = [
        cell.job(study, out, FILE, needed.cores)
        for cell, needed in zip(cells, required, strict=True)
    ]
    for cell, job in zip(cells, jobs, strict=True):
        cell.claim()
        files.replace(folder / f"{cell.folder.name}.yaml", job.text.encode())
    # An earlier array may still be queued.
    names = (folder / f"array-{number}.sh" for number in itertools.count(1))
    script = next(path for path in names if not path.exists())
    log = str(folder).replace("%", "%%") + "/%A_%a.log"
    lines = [
        f"--job-name={study}",
        f"--array=0-{math.ceil(len(cells) / together) - 1}" + (f"%{workers}" if workers else ""),
        f'--output="{log}"',
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SAVE_SECONDS}",
        *resources(required, directives),
        *([] if hours is None else [f"--time={max(1, math.ceil(60 * hours))}"]),
        *directives,
    ]
    text = SCRIPT.substitute(
        count=len(cells),
        study=study,
        script=shlex.quote(str(script)),
        directives="\n".join(f"#SBATCH {line}" for line in lines),
        runs="\n".join(f"  {shlex.quote(cell.folder.name)}" for cell in cells),
        folder=shlex.quote(str(folder)),
        cwd=shlex.quote(os.getcwd()),
        most=STARTS_AT_MOST,
        together=together,
        variables=" ".join(torchrun.VARIABLES),
        prefix=torchrun.PREFIX,
        command=jobs[0].command,
    )
    files.replace(script, text.encode(errors="surrogateescape"))
    return script


def requirements(cells: Sequence[Cell]) -> list[Requirements]:
    """Return the requirements of the cells; 'auto' takes a GPU if this machine has one.

    Nothing is known of the nodes.  The first run on a node may compile the C++ kernels.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    required = []
    for cell in cells:
        one = cell.requirements(has_gpu=has_gpu)
        may_compile = not one.gpu_memory and cell.config.runtime.replay not in (False, "python")
        memory = one.memory and one.memory + COMPILER_BYTES * may_compile
        required.append(replace(one, memory=memory))
    return required


def resources(required: Sequence[Requirements], directives: Sequence[str] = ()) -> list[str]:
    """Return sbatch options for the cores, memory (MiB) and GPU of the largest cell.

    directives: the user's options; the resources that they name, and unknown ones, are left out.
    """
    asked = {re.split(r"[= ]", line)[0] for line in directives}
    options = [f"--cpus-per-task={max(run.cores for run in required)}"]
    memory = max(run.memory for run in required)
    if memory and asked.isdisjoint(MEMORY_OPTIONS):
        options.append(f"--mem={math.ceil(memory / 2**20)}M")
    if asked.isdisjoint(GPU_OPTIONS) and any(run.gpu_memory for run in required):
        options.append("--gres=gpu:1")
    return options


def submit(script: Path, after: str | None = None) -> str:
    """Submit the script with sbatch and return the job's number; ResourceError if that fails.

    after: the number of a job that must end first.
    """
    words = [] if after is None else [f"--dependency=afterany:{after}"]
    command = shlex.join(["sbatch", *words, str(script)])
    if shutil.which("sbatch") is None:
        raise ResourceError(f"there is no sbatch here; on a machine of the cluster: {command}")
    result = subprocess.run(
        ["sbatch", "--parsable", *words, str(script)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if result.returncode:
        error = result.stderr.strip() or f"exit code {result.returncode}"
        raise ResourceError(f"{command}: {error}")
    return result.stdout.strip().split(";")[0]
