"""The plugins that this user has given with --plugin, by sha256, and their copies in run folders.

A run folder may come from somebody else, so nothing in it chooses the code that runs.  Its copy of
a plugin runs by itself only if the user has given a file of the same bytes before: the file
`plugins` in the user's own state folder has the sha256 of each.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from deepstack.base import plugins
from deepstack.base.errors import DeepstackError
from deepstack.records import files, lock
from deepstack.records.folder import RunFolder

FOLDER = "plugins"  # in a run folder
LARGEST = 2**24  # bytes of a copy, and of the list
PATIENCE_SECONDS = 10.0


def list_file() -> Path | None:
    """Return the path of this user's list, in $XDG_STATE_HOME or ~/.local/state; None without."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    except RuntimeError:  # no home folder
        return None
    return base / "deepstack" / "plugins"


def given_before() -> frozenset[str]:
    """Return the sha256 of the plugins that this user has given.

    A list that another user could write to counts as empty.
    """
    path = list_file()
    try:
        about = None if path is None else path.lstat()
        if path is None or about is None or about.st_uid != os.geteuid():
            return frozenset()
        if not stat.S_ISREG(about.st_mode) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return frozenset()
        return frozenset((files.read(path, LARGEST) or b"").decode("ascii", "replace").split())
    except (OSError, DeepstackError):
        return frozenset()


def remember(digests: Iterable[str]) -> None:
    """Add to this user's list; does nothing where the list cannot be written."""
    path, new = list_file(), set(digests) - given_before()
    if path is None or not new:
        return
    with contextlib.suppress(OSError, DeepstackError):
        with lock.locked(path.with_name(".plugins.lock"), PATIENCE_SECONDS):
            text = "".join(f"{digest}\n" for digest in sorted(given_before() | new))
            files.replace(path, text.encode())
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)


def keep_copies(folder: RunFolder) -> None:
    """Write the text of every loaded plugin into the folder of a run, whose lock is held."""
    for name, plugin in plugins.LOADED.items():
        path = folder.path / FOLDER / name
        if files.read(path) != plugin.content:
            files.replace(path, plugin.content, folder.path)


def require_recorded(folder: RunFolder, recorded: Iterable[Mapping[str, str]]) -> None:
    """Load the copies of a run's plugins that the user has given before.

    recorded: file and sha256 of each, as in meta.json.

    Raises PluginError unless every one of them is loaded then, unchanged.
    """
    recorded = list(recorded)
    advice = ""
    for plugin in recorded:
        name, digest = str(plugin.get("file")), plugin.get("sha256")
        path = folder.path / FOLDER / name
        if name in plugins.LOADED or PurePosixPath(name).name != name:
            continue
        content = files.read(path, LARGEST)
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            continue
        if digest in given_before():
            plugins.run_plugin(path, content, is_copy=True)
        else:
            advice = f"\nor, if you trust the code in it, the run's own copy: --plugin {path}"
    plugins.require_plugins(recorded, str(folder.path), advice)
