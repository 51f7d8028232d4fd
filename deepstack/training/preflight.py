"""Opening a run: its folder held, its model built; and how it ended, whatever ended it."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from deepstack import config as conf
from deepstack.distributed import join, lost
from deepstack.errors import (
    ChangedLogError,
    ConfigError,
    DeepstackError,
    OutOfMemoryError,
    PluginError,
    ResourceError,
)
from deepstack.gc_control import gc_paused
from deepstack.model import build_model, check_scheme, shallow, with_defaults
from deepstack.plugins import bug_in, refuse_while_loading
from deepstack.records import RunFolder, removal
from deepstack.tasks import task_of
from deepstack.training.environment import (
    choose_device,
    environment,
    memory_limit,
    torch_settings,
)
from deepstack.training.job import Job
from deepstack.training.meta import changed_data, refuse_missing_plugins
from deepstack.training.observer import LogFile, Observer, Observers
from deepstack.training.ranks import held_folder

# Upper limit of the ratio of estimated to used memory (benchmarks/memory.py).
OVERESTIMATE = 1.5


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a GPU, the CPU's allocator (a RuntimeError) or Python ran out of memory."""
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    )


def refuse_full_disk(config: conf.Config, folder: RunFolder, vocab_size: int) -> None:
    """Raise ResourceError when the files of the run will not fit on the disk."""
    _, needed = conf.disk_estimate(config, vocab_size)
    there = sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder.path).free
    if needed > free + there:
        raise ResourceError(
            f"{folder.path}: the run needs about {needed / 1e6:,.1f} MB on the disk while it is "
            f"trained, {(free + there) / 1e6:,.1f} MB are free; give another folder with --out"
        )


def refuse_short_memory(
    config: conf.Config, device: torch.device, vocab_size: int, said: Callable[[str], None]
) -> None:
    """Raise ResourceError if the machine's memory cannot suffice; warn if it may not suffice.

    A machine out of memory stalls for all its users; a GPU out of memory only raises an error.
    """
    on_cpu = device.type == "cpu"
    needed, limit = conf.memory_estimate(config, vocab_size), memory_limit(device)
    here = min(limit, conf.machine_memory()) if on_cpu else limit
    if needed <= here:
        return
    short = (
        f"about {needed / 1e6:,.0f} MB of memory are needed and {here / 1e6:,.0f} MB are here; "
        "to need less: a smaller train.batch_size or model.depth, or runtime.recompute_every=10"
    )
    if on_cpu and needed > OVERESTIMATE * conf.machine_memory():
        raise ResourceError(short)
    said(short)


def refuse_other_letters(out: Path) -> None:
    """Raise ConfigError for a path that is not UTF-8: safetensors cannot write to it."""
    try:
        os.fsencode(out).decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"{out}: this path is not UTF-8, as that of weights must be; give another with --out"
        ) from None


@contextmanager
def open_job(
    config: conf.Config,
    study: str | None,
    out: Path,
    observer: Observer,
    allow_env_change: bool,
    command: str,
    *,
    saves: bool = True,
) -> Iterator[Job]:
    """Yield a job on its folder, which this process locks until the end of the block.

    status.json records how a run ended: done, diverged, interrupted, failed or out_of_memory.
    A preflight error or a full disk leaves it unchanged, and the same command resumes the run.
    A PluginError after the first step of this process marks the run as failed.

    saves: whether the job saves checkpoints, which must fit on the disk.
    """
    refuse_while_loading("deepstack.train")
    study_folder = out / conf.checked_study(study or conf.checked_config(config).name or "runs")
    refuse_other_letters(out)
    refuse_missing_plugins(config, study_folder)
    task = task_of(config)
    # Build two layers without storage, so that an invalid model fails before a folder exists.
    build_model(shallow(config), vocab_size=task.vocab_size, device="meta")
    try:
        check_scheme(config)
    except Exception as error:
        if not is_out_of_memory(error):  # else the run itself records the status out_of_memory
            raise
    device = choose_device(config.runtime)
    processes = join(device)
    processes.share(config.train.batch_size)
    with (
        held_folder(config, study_folder, task, processes) as held,
        torch_settings(config, device, processes) as threads,
    ):
        folder, state = held
        tell = observer.said if processes.first else Observer().said
        observer = Observers(observer, LogFile(folder)) if processes.first else Observer()
        job = Job(config, folder, task, device, observer, processes)
        if state in ("done", "diverged"):
            job.finished = True
            again = removal(folder.path)
            tell(f"{state} already, left as it is; to train it anew, first: {again}")
            yield job
            return
        if processes.first and saves:
            refuse_full_disk(config, folder, task.vocab_size)
        if processes.size == 1:
            refuse_short_memory(config, device, task.vocab_size, observer.said)
        where = environment(config, device, threads, processes)
        if not folder.exists():
            if processes.first and (changed := changed_data(folder, config)):
                observer.said(changed)
            folder.write_config(conf.to_yaml(with_defaults(config)))
        begun = float("inf")
        try:
            with gc_paused():
                job.build(where, command, allow_env_change)
            begun = job.last_step
            gc.freeze()  # the model lives until the end: exclude it from collections
            yield job
        except ChangedLogError as error:
            folder.write_status("failed", job.last_step, error=str(error), changed_log=True)
            again = "training it again keeps its logs in aside/ and starts from step 0"
            raise ChangedLogError(f"{error}\nthe run has failed; {again}") from error
        except DeepstackError as error:
            if isinstance(error, PluginError) and job.last_step > begun:
                folder.write_status("failed", job.last_step, error=str(error))
                error.exit_code = DeepstackError.exit_code
            raise
        except Exception as error:
            if processes.size > 1 and (gone := lost(error)):
                raise gone from error
            if is_out_of_memory(error):
                about = {
                    "phase": job.phase,
                    "estimate_mb": round(conf.memory_estimate(config, task.vocab_size) / 1e6),
                    "limit_mb": round(memory_limit(device) / 1e6),
                }
                folder.write_status("out_of_memory", job.last_step, error=str(error), **about)
                raise OutOfMemoryError(
                    f"{folder.path}: out of memory in {job.phase} after step {job.last_step} "
                    f"(estimate {about['estimate_mb']:,} MB, limit {about['limit_mb']:,} MB): "
                    f"{str(error).splitlines()[0]}"
                ) from error
            LogFile(folder).line(traceback.format_exc())
            reason = bug_in(error) or repr(error)
            folder.write_status("failed", job.last_step, error=reason)
            vars(error)["kept_in"] = folder.log_path  # shown with the error, in one line
            raise
        finally:
            job.close()
            gc.unfreeze()
            if device.type == "cuda":  # a step refers to its job: free both before the next job
                job.__dict__.pop("step", None)
                gc.collect()
                torch.cuda.empty_cache()
