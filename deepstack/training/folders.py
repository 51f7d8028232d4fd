"""Finds the folder of a run in a study, and locks it."""

import errno
import itertools
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from deepstack import config as conf
from deepstack.base.errors import ConfigError, PluginError, ResourceError
from deepstack.model import without_defaults
from deepstack.records import ENDED, RunFolder, suggest_removal
from deepstack.records.given_plugins import require_recorded
from deepstack.records.opened import followed
from deepstack.training.parts.extension import inexact_extension
from deepstack.training.parts.start import changed_source
from deepstack.training.plan import RunPlan, run_name

# System errors of a disk that cannot be written to.
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)


@contextmanager
def locked_folder(plan: RunPlan) -> Iterator[tuple[Path, RunFolder, str | None]]:
    """Yield the path of the run, the folder to write to, and the state of the run.

    Rank 0 locks the run's folder until the end of the block.  Other ranks need not even see its
    disk: they write to a temporary folder, which nobody reads.
    """
    study, ranks = plan.study, plan.ranks
    with ExitStack() as stack:

        def lock() -> list[str | None]:
            refuse_foreign_link(study)
            folder = choose_folder(plan)
            try:
                stack.enter_context(folder.lock())
            except ResourceError as error:
                cause = error.__cause__
                if not isinstance(cause, OSError) or cause.errno not in READ_ONLY:
                    raise
                with suppress(ResourceError):
                    if (state := folder.read_state()) in ENDED:  # nothing to write
                        return [str(folder.path), state]
                what = str(error)
                if not study.is_dir():
                    what = f"{study}: no folder can be made ({cause.strerror})"
                raise ResourceError(f"{what}; give another folder with --out") from error
            try:
                return [str(folder.path), folder.read_state()]
            except ResourceError as error:
                how = f"to train it anew, first: {suggest_removal(folder.path)}"
                raise ResourceError(f"{error}; {how}") from error

        path, state = ranks.from_rank0(lock)
        folder = path
        if not ranks.is_rank0:
            folder = stack.enter_context(TemporaryDirectory(prefix="deepstack-"))
        yield Path(path), RunFolder(folder), state


def refuse_foreign_link(study: Path) -> None:
    """Raise ResourceError if a study's folder is a link, but for the user's own one to a folder."""
    if study.is_symlink() and followed(study) == study:
        why = "a link that leads nowhere, or a link that another user made"
        raise ResourceError(f"{study} is {why}; nothing is written there")


def refuse_missing_plugins(config: conf.Config, study: Path) -> None:
    """Raise PluginError if this configuration was trained here with a plugin that is not loaded."""
    for folder in same_runs(study, config):
        try:
            require_recorded(folder, folder.read_meta().get("plugins", []))
        except PluginError as error:
            how = f"or, to train with the file that is there: {suggest_removal(folder.path)}"
            raise PluginError(f"{error}, {how}") from None


def choose_folder(plan: RunPlan, taken: Collection[str] = ()) -> RunFolder:
    """Return the folder where this run was trained before, else the first free one.

    taken: names reserved for other runs.

    Raises ConfigError if the run could resume, but its data have changed; a run that has ended
    stays, and a new one starts beside it.
    """
    for folder in same_runs(plan.study, plan.config):
        meta = folder.read_meta()
        if inexact_extension(meta.get("extends")) != inexact_extension(plan.extends):
            continue
        if not (changed := changed_source(meta, plan)):
            return folder
        if folder.checkpoints() and folder.read_status().get("state") not in ENDED:
            is_kept_elsewhere = changed.key in ("task.path", "model.start")
            cure = "put the old one back, or begin" if is_kept_elsewhere else "begin"
            raise ConfigError(
                f"{changed.source} has changed since the checkpoint of {folder.path}: "
                f"{changed.reason(12)}; {cure} another run with --study",
                key=changed.key,
            )
    return free_folder(plan.study, plan.name, taken)


def same_runs(study: Path, config: conf.Config) -> Iterator[RunFolder]:
    """Yield a study's runs of this config, except for names, runtime and defaults."""
    for path in sorted(study.glob(f"{run_name(config)}*")):
        folder = RunFolder(path)
        try:
            stored = conf.load_config(folder.config_path) if folder.exists() else None
        except ConfigError:
            continue  # written by another version, whose settings are not ours
        if stored and conf.same_experiment(without_defaults(stored), without_defaults(config)):
            yield folder


def free_folder(study: Path, name: str, taken: Collection[str]) -> RunFolder:
    """Return the first folder of that name, or with a number, that no run has or reserves."""
    numbered = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folders = (RunFolder(study / one) for one in numbered if one not in taken)
    return next(folder for folder in folders if not folder.exists())
