"""Plans a run and refuses one that cannot start; nothing is written before `claim`.

Three refusals come later: `claim` finds the folder in use or its data changed, and `prepare` the
machine too small or the environment changed; a checkpoint or log that is damaged shows when it is
read; and a plugin that writes into a buffer shows in its first step (`buffers`).
"""

import os
from dataclasses import replace
from pathlib import Path

from deepstack import config as conf
from deepstack.base import plugins
from deepstack.base.ending import Stop
from deepstack.base.errors import ConfigError
from deepstack.fast.distributed import join_ranks
from deepstack.runs.trackers import live_logs
from deepstack.tasks import task_of
from deepstack.training.environment import choose_device
from deepstack.training.folders import refuse_missing_plugins
from deepstack.training.parts import parts_of
from deepstack.training.parts.ranks import refuse_cut_settings
from deepstack.training.plan import RunPart, RunPlan


def plan_run(
    config: conf.Config,
    study: str | None,
    out: str | Path,
    *,
    parent: RunPart | None = None,
    stop: Stop | None = None,
) -> RunPlan:
    """Return the plan of a run, whose settings are checked.

    study: name of the study's folder in `out`.
    parent: the recorded run from which a new one begins.
    stop: see `train`; it ends the wait for other ranks.

    Raises ConfigError, PluginError, ResourceError and Interrupted.
    """
    plugins.refuse_while_loading("deepstack.train")
    study_folder = Path(out) / conf.checked_study(study or config.name or "runs")
    refuse_non_utf8_path(Path(out).absolute())
    refuse_missing_plugins(config, study_folder)
    stop = stop or (lambda: None)
    plan = RunPlan(config, task_of(config), study_folder, stop=stop)
    plan.check()
    parts = [*([parent] if parent else []), *find_parts(plan)]
    device = choose_device(config.runtime)
    ranks = join_ranks(device, stop)
    ranks.share(config.train.batch_size)
    refuse_cut_settings(config, ranks)
    return replace(plan, device=device, ranks=ranks, parts=parts)


def find_parts(plan: RunPlan) -> list[RunPart]:
    """Return the parts of a run whose trackers and starting point are on this machine.

    Raises ConfigError for a tracker of `log.to` or a run of `model.start` that is not.
    """
    live_logs(plan.config.log.to)
    return list(parts_of(plan))


def refuse_non_utf8_path(out: Path) -> None:
    """Raise ConfigError for a path that is not UTF-8: safetensors cannot write to it."""
    try:
        os.fsencode(out).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{out}: this path is not UTF-8; give another with --out") from None
