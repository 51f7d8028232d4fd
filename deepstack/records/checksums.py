"""The sha256 of every data file of a run, and of every file of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from deepstack.records.files import LARGE, parse_object, refuse_sparse, trouble
from deepstack.records.folder import RunFolder

CHECKSUMS = "checksums.json"
STATUS = "status.json"
STATE = "state.json"
# log.txt and .lock record what people and processes did; they are no results.  status.json holds
# the sha256 of checksums.json, which in turn holds one of the rest of status.json.
DATA = ("config.yaml", "meta.json", "columns.json", "*.csv", "layers/*.npy", "checkpoint/*/*")


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal.  Raises OSError for a sparse or padded one."""
    with open(path, "rb") as file:
        refuse_sparse(path, file.fileno())
        if path.suffix == ".safetensors":
            refuse_surplus(path, file)
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_surplus(path: Path, file: BinaryIO) -> None:
    """Raise OSError for a large safetensors file that is longer than its header and tensors.

    Required by test_bytes_behind_the_tensors_are_not_hashed.
    """
    size = os.fstat(file.fileno()).st_size
    header = int.from_bytes(file.read(8), "little")
    if size > LARGE >= header:
        ends = re.findall(rb'"data_offsets" *: *\[ *\d+ *, *(\d{1,18}) *\]', file.read(header))
        wanted = 8 + header + max(map(int, ends), default=0)
        if size > wanted:
            raise OSError(f"{path.name} has {size:,} bytes, of {wanted:,} by its header")
    file.seek(0)


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


def write_checksums(
    folder: RunFolder,
    *,
    checkpoints: bool = True,
    status: Mapping[str, Any] | None = None,
    logs: Mapping[str, str] | None = None,
) -> str:
    """Write checksums.json, {relative path: sha256} of all data of a run; return its own sha256.

    Call it for a run that has ended, before `write_status`, which stores the returned value as
    `checksums`.  checkpoints: False leaves out those that the run will remove.  logs: the sha256 of
    logs, where known.  status: all that status.json will hold.  Raises ResourceError when the disk
    refuses.
    """
    with trouble(folder.path):
        sums = dict(logs or {})
        for name, path in data_files(folder).items():
            if name not in sums and (checkpoints or not name.startswith("checkpoint/")):
                sums[name] = sha256(path)
        if status is not None:
            sums[STATUS] = status_sum(status)
        folder.write_json(folder.path / CHECKSUMS, sums)
        return sha256(folder.path / CHECKSUMS)


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

    checkpoints, logs: as in `write_checksums`; about: further values for status.json.
    """
    status = {"state": state, "step": step, "error": None, **about}
    digest = write_checksums(folder, checkpoints=checkpoints, status=status, logs=logs)
    folder.write_status(state, step, checksums=digest, **about)


def status_sum(status: Mapping[str, Any]) -> str:
    """Return the sha256 of status.json's values without that of checksums.json.

    Required by test_a_flipped_bit_of_how_a_run_diverged_is_noticed.
    """
    values = {key: value for key, value in status.items() if key != "checksums"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def data_files(folder: RunFolder) -> dict[str, Path]:
    """Return {relative path: path} of a run's data files, sorted, without hidden ones."""
    paths = (path for pattern in DATA for path in folder.path.glob(pattern))
    named = {path.relative_to(folder.path).as_posix(): path for path in paths}
    return {name: named[name] for name in sorted(named) if is_data(name)}


def is_data(name: str) -> bool:
    """Return whether a relative path is that of a data file of a run, inside its folder."""
    path = PurePosixPath(name)
    if path.as_posix() != name or any(part.startswith(".") for part in path.parts):
        return False
    if path.parts[0] == "checkpoint" and not (path.parts[1:2] or ("",))[0].isdigit():
        return False
    return any(len(path.parts) == p.count("/") + 1 and path.match(p) for p in DATA)


def mapping(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises OSError if it is not a regular file or is too large, ValueError if it is not an object.
    """
    return parse_object(plain_file(path, LARGE).read_bytes())
