"""Tags and a note on a run, in labels.json of its folder.

labels.json is not a data file: it has no checksum, and `verify` does not read it.
"""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from deepstack.base.allowed import PATTERNS, RUN_NAME
from deepstack.base.errors import ConfigError, ResourceError
from deepstack.base.text import one_line
from deepstack.records import files, lock
from deepstack.records.folder import RunFolder

LABELS = "labels.json"
LONGEST_TAG, LONGEST_NOTE = 64, 2000
LARGEST_LABELS = 2**20  # bytes of labels.json
LOCK = ".labels.lock"  # apart from the run's lock, so that a run in progress can be labelled
PATIENCE_SECONDS = 10.0


class Labels(NamedTuple):
    """The user's words on a run: sorted tags and one note."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_labels(folder: RunFolder) -> Labels:
    """Return tags and note of a run; none if the file is missing or cannot be read."""
    try:
        return _read(folder)
    except (ResourceError, ValueError):
        return Labels()


def _read(folder: RunFolder) -> Labels:
    """Return tags and note; raises ResourceError or ValueError if the file cannot be read."""
    values = files.parse_object(files.read(folder.path / LABELS, LARGEST_LABELS) or b"{}")
    tags, note = values.get("tags"), values.get("note")
    words = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Labels(tuple(words), note[:LONGEST_NOTE] if isinstance(note, str) else "")


def change_labels(
    folder: RunFolder,
    add: Iterable[str] = (),
    remove: Iterable[str] = (),
    note: str | None = None,
) -> Labels:
    """Add and remove tags, replace the note, and return the labels, under a lock.

    note: the new note; an empty one removes it, None keeps it.

    Raises ConfigError for a word that is not a tag, a tag that the run does not have and a note
    that is too long, and ResourceError for a labels.json that is not a file or is too large.
    """
    added, removed = set(add), set(remove)
    for word in sorted(added | removed):
        if not re.fullmatch(RUN_NAME, word) or len(word) > LONGEST_TAG:
            allowed = f"{PATTERNS[RUN_NAME]} (at most {LONGEST_TAG})"
            raise ConfigError(f"tag: found {one_line(word)!r}; allowed {allowed}")
    if note is not None and len(note) > LONGEST_NOTE:
        raise ConfigError(f"note: found {len(note)} characters; allowed {LONGEST_NOTE} at most")
    with lock.locked(folder.path / LOCK, PATIENCE_SECONDS):
        try:
            labels = _read(folder)
        except ValueError:
            labels = Labels()
        if missing := removed - set(labels.tags):
            has = ", ".join(labels.tags) or "none"
            raise ConfigError(f"{folder.path} has no tag {min(missing)!r}; its tags: {has}")
        tags = tuple(sorted(set(labels.tags) - removed | added))
        labels = Labels(tags, labels.note if note is None else note.strip())
        text = json.dumps(labels._asdict(), indent=2) + "\n"
        files.replace(folder.path / LABELS, text.encode())
    return labels
