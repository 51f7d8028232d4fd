"""Takes the values of an external probe, whose folder a command has written, into the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.base import ResourceError
from deepstack.config import flatten, nested
from deepstack.records import ENDED, Run, RunFolder, visible_folders
from deepstack.records import files as on_disk

OWN = ("evals.csv", "config.yaml")  # which the command's metric and settings write


def adopt_probe(folder: RunFolder, files: Path) -> str:
    """Copy the logs and layers of a probe in {run} to the run; return why that cannot be, or ''.

    A run without a probe stays as it is.  The probe's folder keeps its files.
    """
    probes = [path for path in visible_folders(files) if RunFolder(path).exists()]
    if not probes:
        return ""
    if len(probes) > 1:
        names = ", ".join(sorted(path.name for path in probes))
        return f"found {len(probes)} probes in {{run}} ({names}); allowed one"
    probe = Run(probes[0])
    try:
        if problem := probe.damage(layers=True):
            return f"the probe's folder cannot be read: {problem}"
        if probe.state not in ENDED:
            return f"the probe in {{run}}/{probe.name} is {probe.state}; end it before the command"
        copy(probe, folder)
    except ResourceError as error:
        return str(error)
    return ""


def copy(probe: Run, folder: RunFolder) -> None:
    """Copy logs, layers, and the settings that the run does not have."""
    paths = [path for path in probe.path.glob("[!.]*.csv") if path.name not in OWN]
    paths += sorted(probe.path.glob("layers/[!.]*.npy"))
    for path in paths:
        place = folder.path / path.relative_to(probe.path)
        on_disk.replace(place, on_disk.read(path) or b"", folder.path)
    own, columns = Run(folder.path), probe.columns
    settings = dict(flatten(own.config))
    known = dict(flatten(probe.config))
    if not settings.get("model.depth"):
        settings.pop("model.depth", None)
    if settings.get("task.name") == "unnamed":
        settings.pop("task.name")
    known.pop("seed", None)
    folder.write_config(conf.yaml_of(nested(known | settings)))
    mine = own.columns
    table: dict[str, Any] = {**columns, **{k: v for k, v in mine.items() if k == "references"}}
    table["columns"] = columns.get("columns", {}) | {}
    table["scheme"] = columns.get("scheme", {}) | mine["scheme"]
    folder.write_columns(table)
    meta = own.meta
    folder.write_meta(meta | {k: probe.meta[k] for k in ("parameters", "hidden", "layers", "groups")
                              if k in probe.meta})  # fmt: skip
