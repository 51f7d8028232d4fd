"""The files of a run folder: their names, how each is written and read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack.records import files, lock, shapes
from deepstack.records.append_log import AppendLog
from deepstack.records.file_values import (
    damage_error,
    last_rows,
    load_json,
    load_yaml,
    npy_bytes,
    read_npy,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

# column -> symbol, unit, one sentence
MODEL_UPDATE_COLUMNS = {
    "model_update": (
        "‖ΔF‖",
        "",
        "Mean over probe tokens of ‖F_t − F_0‖₂, F the last hidden state after the last norm.",
    ),
    "model_update_step": (
        "‖F_t − F_{t−1}‖",
        "",
        "Mean over probe tokens of ‖F_t − F_{t−1}‖₂: the change by one step.",
    ),
    "model_update_fro": ("‖ΔF‖_F", "", "Frobenius norm of F_t − F_0 over the whole probe batch."),
    "model_update_rel": ("‖ΔF‖_F/‖F_0‖_F", "", "Frobenius norm of F_t − F_0 over that of F_0."),
}
STEPS_COLUMNS = {
    "step": ("t", "steps", "Number of updates made."),
    "loss": ("L", "nats", "Loss of batch t at θ_{t−1}, mean over its predicted positions."),
    "lr": ("η", "", "Learning rate of the schedule at step t, before any factor of a role."),
    "grad_norm": ("‖∇L‖", "", "Norm of the gradient of batch t at θ_{t−1}, before clipping."),
    **MODEL_UPDATE_COLUMNS,
}
TIMING_COLUMNS = {
    "step": STEPS_COLUMNS["step"],
    "step_ms": ("", "ms", "Wall-clock time of a step, logging included."),
    "peak_memory_mb": ("", "MB", "Largest memory held so far: GPU allocations or resident set."),
}
EVALS_COLUMNS = ("step", "loss", "loss_masked", "bits_per_token")

# Keys that identify a run in any study, with the types of their values.
IDENTITY = {"model.scheme": str, "model.depth": int, "seed": int, "task.name": str}

# The file in the folder of a study that grew, with the error that its looks share.
GROWN = "until.json"

# The hidden name of a run or study that is being deleted begins so.
REMOVED = ".removed-"

# Folders of a run in which files are replaced.
WRITTEN_BELOW = ("layers", "aside", "analysis", "plugins")


ENDED = ("done", "diverged")
STATES = ("running", "done", "diverged", "failed", "out_of_memory", "interrupted")


class RunFolder:
    """The folder of one run, with the paths of its files.

    Writing creates the folder when needed. CSV files only grow, all others are replaced atomically.
    Writers hold `lock()`; readers need no lock.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.meta_path = self.path / "meta.json"
        self.status_path = self.path / "status.json"
        self.columns_path = self.path / "columns.json"
        self.steps_path = self.path / "steps.csv"
        self.timing_path = self.path / "timing.csv"
        self.evals_path = self.path / "evals.csv"
        self.log_path = self.path / "log.txt"
        self.layers_dir = self.path / "layers"
        self.checkpoint_dir = self.path / "checkpoint"
        self.kept_dir = self.path / "weights"
        self.analysis_dir = self.path / "analysis"
        self.lock_path = self.path / ".lock"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    def exists(self) -> bool:
        """Return whether this folder holds a run: config.yaml is the first file written."""
        return self.config_path.is_file()

    def was_run(self) -> bool:
        """Return whether this folder holds a run, also one that has lost its config.yaml."""
        return self.exists() or (self.status_path.is_file() and self.meta_path.is_file())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock this folder while the context is open; the lock ends with the process.

        Removes what killed processes left: drafts here, and beside it folders that were being
        deleted.  Raises LockedError, naming process and host, if another process has it, and
        ResourceError if writing would follow a link out of it.
        """
        files.refuse_links(self.path, WRITTEN_BELOW)
        with lock.locked(self.lock_path):
            files.remove_hidden_folders(self.path.parent, REMOVED + "*")
            files.remove_drafts([self.path, *(self.path / name for name in WRITTEN_BELOW)])
            yield

    def holder(self) -> dict[str, object] | None:
        """Return the holder of the lock, {pid, host, since}; None if it is free."""
        return lock.holder(self.lock_path)

    def write_json(self, path: Path, value: object) -> None:
        """Replace one JSON file atomically; NaN and infinities are refused (ValueError)."""
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        # A path need not be UTF-8; write the surrogates that Python has for such bytes as escapes.
        files.replace(path, text.encode("utf-8", "backslashreplace") + b"\n", self.path)

    def write_config(self, text: str) -> None:
        """Write the fully resolved config, as YAML."""
        files.replace(self.config_path, text.encode("utf-8"))

    def write_meta(self, meta: dict[str, Any]) -> None:
        """Write the machine, time and versions with which the run was made."""
        self.write_json(self.meta_path, meta)

    def write_columns(self, columns: dict[str, Any]) -> None:
        """Write the meaning of each column, so that charts need no model."""
        self.write_json(self.columns_path, columns)

    def write_status(
        self, state: str, step: int, *, error: str | None = None, **extra: object
    ) -> None:
        """Replace status.json: state (one of STATES), last step, error, further values."""
        if state not in STATES:
            raise ValueError(f"{state!r} is none of {', '.join(STATES)}")
        self.write_json(self.status_path, {"state": state, "step": step, "error": error, **extra})

    def read_config(self) -> dict[str, Any]:
        """Return the resolved config as a nested dict.

        Raises ResourceError if it cannot be read or a value of IDENTITY has another type.
        """
        config = load_yaml(self.config_path)
        for key, kind in IDENTITY.items():
            section, _, name = key.rpartition(".")
            parent = config.get(section, {}) if section else config
            value = parent.get(name, kind()) if isinstance(parent, dict) else parent
            if type(value) is not kind:
                words = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
                raise damage_error(self.config_path, f"found {words} as {key}")
        return config

    def read_meta(self) -> dict[str, Any]:
        return load_json(self.meta_path, shapes.META)

    def read_status(self) -> dict[str, Any]:
        return load_json(self.status_path, shapes.STATUS)

    def read_columns(self) -> dict[str, Any]:
        return load_json(self.columns_path, shapes.COLUMNS)

    def read_state(self) -> str | None:
        """Return the state in status.json; None if there is none yet.

        Raises ResourceError if it cannot be read, if steps.csv does not reach its step, if
        evals.csv is missing that checksums.json names, or if config.yaml is another one, which
        would give other settings to the numbers.
        """
        status = self.read_status()
        state, step = status.get("state"), status.get("step")
        if state not in (None, *STATES):
            raise damage_error(self.status_path, f"found state {state!r}")
        if state in ENDED and not self.ends_at(step):
            last = self.last_row().get("step", "0")
            why = f"goes to step {last}, but status.json says {state} at step {step}"
            raise damage_error(self.steps_path, why)
        if state in ENDED:
            self._compare_with_checksums()
        return state

    def _compare_with_checksums(self) -> None:
        """Raise ResourceError for missing evaluations, and for a config.yaml that was changed."""
        sums = load_json(self.path / files.CHECKSUMS, {})
        if self.evals_path.name in sums and not self.evals_path.exists():
            raise damage_error(self.evals_path, f"is missing; {files.CHECKSUMS} names it")
        listed = sums.get(self.config_path.name)
        if listed and self.config_path.is_file() and files.sha256(self.config_path) != listed:
            raise damage_error(self.config_path, "was changed after the run ended")

    def present_state(self) -> str:
        """Return the state now: `read_state`, or `interrupted` for a run that nobody trains.

        A run that says `running` but is not locked was killed.
        """
        state = self.read_state() or "interrupted"
        return "interrupted" if state == "running" and self.holder() is None else state

    def ends_at(self, step: object) -> bool:
        """Return whether steps.csv ends at a run's last step; an external probe may skip steps."""
        last = int(self.last_row().get("step", "0"))
        if last == step:
            return True
        log = self.read_config().get("log")
        every = log.get("every") if isinstance(log, dict) else None
        return isinstance(step, int) and isinstance(every, int) and 0 < step - last < every

    def last_row(self) -> dict[str, str]:
        """Return the cells of the last whole row of steps.csv; empty without rows.

        Reads only both ends of the file.
        """
        names, rows = last_rows(self.steps_path)
        if not rows or not rows[-1][0].isdecimal():
            return {}
        return dict(zip(names, rows[-1], strict=False))

    def csv_path(self, name: str) -> Path:
        """Return the path of the log `name`, such as `evals`."""
        return self.path / f"{name}.csv"

    def log(
        self, name: str, columns: Iterable[str], replay_from: int = -1, *, tolerance: float = 0.0
    ) -> AppendLog:
        """Open the log `name`; its rows after `replay_from` have to be written again.

        timing.csv is never compared on resume: it differs from one execution to the next.
        """
        is_compared = name != "timing"
        path = self.csv_path(name)
        return AppendLog(path, columns, replay_from, compared=is_compared, tolerance=tolerance)

    def set_aside(self, name: str) -> Path:
        """Copy a file of this folder to aside/<number>-<name>, and return that path."""
        number = 1
        while (copy := self.path / "aside" / f"{number}-{name}").exists():
            number += 1
        files.replace(copy, files.read(self.path / name) or b"", self.path)
        return copy

    def write_layers(
        self, values: Mapping[str, ArrayLike], steps: ArrayLike, *, sync: bool = True
    ) -> None:
        """Replace layers/<name>.npy, float32 (records, depth), and steps.npy, int64 (records,).

        Writes the steps last, so that readers find every record that these name.

        sync: see `files.replace_all`.
        """
        import numpy as np

        arrays = {name: np.ascontiguousarray(v, dtype=np.float32) for name, v in values.items()}
        contents = ((f"{name}.npy", npy_bytes(array)) for name, array in arrays.items())
        files.replace_all(self.layers_dir, contents, self.path, sync=sync)
        names = [("steps.npy", npy_bytes(np.asarray(steps, dtype=np.int64)))]
        files.replace_all(self.layers_dir, names, self.path, sync=sync)

    def read_layers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps (records,), values (records, depth)) of one diagnostic.

        Raises KeyError if the run has no diagnostic of that name.
        """
        # Steps first: a write in between only adds records after them.
        steps = self._read_array("steps")
        values = self._read_array(name)
        records = min(len(steps), len(values))
        return steps[:records], values[:records]

    def _read_array(self, name: str) -> np.ndarray:
        """Read layers/<name>.npy.  Raises KeyError if there is none, ResourceError."""
        path = self.layers_dir / f"{name}.npy"
        array = read_npy(path)
        if array.ndim != (1 if name == "steps" else 2):
            raise damage_error(path, "is not an array as a run has it")
        return array

    def layer_names(self) -> list[str]:
        """Return the names of the per-layer diagnostics; none before steps.npy is written."""
        names = {path.stem for path in self.layers_dir.glob("[!.]*.npy")}
        return sorted(names - {"steps"}) if "steps" in names else []

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoint_dir / str(step)

    def checkpoints(self) -> list[int]:
        """Return the steps with a checkpoint folder, ascending; drafts have other names."""
        return numbered_folders(self.checkpoint_dir)

    def kept_path(self, step: int) -> Path:
        return self.kept_dir / str(step)

    def kept_steps(self) -> list[int]:
        """Return the steps before the last whose weights are kept, ascending."""
        return numbered_folders(self.kept_dir)


def numbered_folders(parent: Path) -> list[int]:
    """Return the numbers that name folders in a folder, ascending."""
    paths = parent.iterdir() if parent.is_dir() else ()
    names = (path.name for path in paths if path.is_dir() and not path.is_symlink())
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def absolute(path: Path) -> Path:
    """Return an absolute path without `..`; links keep their names."""
    return Path(os.path.abspath(path))
