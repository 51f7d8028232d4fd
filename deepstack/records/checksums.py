"""The sha256 of every data file of a run, and of every file of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from deepstack.records.files import LARGEST_TEXT, open_file, parse_object, trouble
from deepstack.records.folder import RunFolder

CHECKSUMS = "checksums.json"
STATUS = "status.json"
STATE = "state.json"
# log.txt and .lock record what people and processes did; they are no results.  status.json holds
# the sha256 of checksums.json, which in turn holds one of the rest of status.json.
DATA = (
    "config.yaml", "meta.json", "columns.json", "[!.]*.csv", "layers/[!.]*.npy",
    "checkpoint/[0-9]*/[!.]*",
)  # fmt: skip


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_file(path: Path, largest: int | None = None) -> Path:
    """Return the path of a regular file of at most `largest` bytes; raises OSError otherwise."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(f"{path.name} is no file")
    if largest is not None and about.st_size > largest:
        raise OSError(f"{path.name} has {about.st_size:,} bytes, of {largest:,} at most")
    return path


def damage(path: Path, largest: int | None = None) -> str | None:
    """Describe the first file of a checkpoint that differs from its sha256; None if none does.

    largest: files of more bytes are reported without being read.
    """
    try:
        try:
            sums = mapping(path / CHECKSUMS)
        except ValueError as error:
            return f"{CHECKSUMS} {error}"
        if STATE not in sums or not all(PurePosixPath(name).name == name for name in sums):
            return f"{CHECKSUMS} is not a list of its files"
        for name, wanted in sums.items():
            if sha256(plain_file(path / name, largest)) != wanted:
                return f"{name} is not what was written (sha256 differs)"
        extra = {file.name for file in path.glob("*.safetensors")} - set(sums)
        if extra:
            return f"{min(extra)} is not one of its files"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def write_end(
    folder: RunFolder,
    state: str,
    step: int,
    *,
    checkpoints: bool = True,
    logs: Mapping[str, str] | None = None,
    **about: Any,
) -> None:
    """Write checksums.json and then status.json, which states how the run has ended.

    checksums.json has {relative path: sha256} of all data of the run.  checkpoints: False leaves
    out those that the run will remove.  logs: the sha256 of logs, where known.  about: further
    values for status.json.  Raises ResourceError when the disk refuses.
    """
    path = folder.path / CHECKSUMS
    with trouble(folder.path):
        sums = dict(logs or {})
        for name, file in data_files(folder).items():
            if name not in sums and (checkpoints or not name.startswith("checkpoint/")):
                sums[name] = sha256(file)
        sums[STATUS] = status_sum({"state": state, "step": step, "error": None, **about})
        folder.write_json(path, sums)
        folder.write_status(state, step, checksums=sha256(path), **about)


def status_sum(status: Mapping[str, Any]) -> str:
    """Return the sha256 of status.json's values without that of checksums.json.

    Required by test_a_change_of_a_finished_run_is_named.
    """
    values = {key: value for key, value in status.items() if key != "checksums"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def data_files(folder: RunFolder) -> dict[str, Path]:
    """Return {relative path: path} of a run's data files, sorted, without hidden ones."""
    paths = (path for pattern in DATA for path in folder.path.glob(pattern))
    return dict(sorted((path.relative_to(folder.path).as_posix(), path) for path in paths))


def mapping(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises OSError if it is not a regular file or is too large, ValueError if it is not an object.
    """
    return parse_object(plain_file(path, LARGEST_TEXT).read_bytes())
