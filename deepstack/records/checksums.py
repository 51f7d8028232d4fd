"""sha256 of every data file of a run, and of every file of a checkpoint."""

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
# Not log.txt, .lock and status.json: the first two say what people and processes did, and the
# third keeps the sha256 of checksums.json itself, which has one of all else that it says.
DATA = ("config.yaml", "meta.json", "columns.json", "*.csv", "layers/*.npy", "checkpoint/*/*")


def sha256(path: Path) -> str:
    """sha256 of a file, in hexadecimal.  Raises OSError for one that is larger than its content."""
    with open(path, "rb") as file:
        refuse_sparse(path, file.fileno())
        if path.suffix == ".safetensors":
            refuse_surplus(path, file)
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_surplus(path: Path, file: BinaryIO) -> None:
    """Raise OSError for a large safetensors file that is longer than its header and its tensors."""
    size = os.fstat(file.fileno()).st_size
    header = int.from_bytes(file.read(8), "little")
    if size > LARGE >= header:
        ends = re.findall(rb'"data_offsets" *: *\[ *\d+ *, *(\d{1,18}) *\]', file.read(header))
        wanted = 8 + header + max(map(int, ends), default=0)
        if size > wanted:
            raise OSError(f"{path.name} has {size:,} bytes, of {wanted:,} by its header")
    file.seek(0)


def plain_file(path: Path, largest: int | None = None) -> Path:
    """The path, if that is a file of its own and not absurdly large; else an OSError that says."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(f"{path.name} is no file")
    if largest is not None and about.st_size > largest:
        raise OSError(f"{path.name} has {about.st_size:,} bytes, of {largest:,} at most")
    return path


def damage(path: Path, largest: int | None = None) -> str | None:
    """What is wrong with a checkpoint folder, in words, or None: every file against its sha256.

    largest: bytes above which a file is not even read.
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

    For a run that has ended, before status.json says so: status.json then keeps what this returns
    as `checksums`.  checkpoints=False leaves them out, where the run will not keep them.  Raises
    ResourceError when the disk refuses.
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
    """Say in status.json how a run has ended, after the checksums of all that it has written.

    checkpoints, logs: as in `write_checksums`; about: what else status.json says.
    """
    said = {"state": state, "step": step, "error": None, **about}
    digest = write_checksums(folder, checkpoints=checkpoints, status=said, logs=logs)
    folder.write_status(state, step, checksums=digest, **about)


def status_sum(status: Mapping[str, Any]) -> str:
    """sha256 of what status.json says, but for the sha256 of checksums.json."""
    said = {key: value for key, value in status.items() if key != "checksums"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def data_files(folder: RunFolder) -> dict[str, Path]:
    """{relative path: path} of what a run's data are in, sorted; nothing hidden."""
    found = {}
    for pattern in DATA:
        for path in folder.path.glob(pattern):
            name = path.relative_to(folder.path).as_posix()
            if is_data(name):
                found[name] = path
    return dict(sorted(found.items()))


def is_data(name: str) -> bool:
    """Whether a path that a file names is one of a run's own: no way out of the folder."""
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
