"""Tags and a note on a run, in labels.json of its folder.

labels.json is not a data file: it has no checksum, and `verify` does not read it.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from deepstack.base.allowed import PATTERNS, RUN_NAME
from deepstack.base.errors import ConfigError, ResourceError
from deepstack.base.text import one_line
from deepstack.records import files
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


def change_tags(folder: RunFolder, words: Iterable[str], *, remove: bool = False) -> Labels:
    """Add tags to a run, or remove them, and return its labels.

    Raises ConfigError for a word that is not a tag, or that the run does not have.
    """
    words = set(words)
    for word in sorted(words):
        if not re.fullmatch(RUN_NAME, word) or len(word) > LONGEST_TAG:
            allowed = f"{PATTERNS[RUN_NAME]} (at most {LONGEST_TAG})"
            raise ConfigError(f"tag: found {one_line(word)!r}; allowed {allowed}")

    def change(labels: Labels) -> Labels:
        if remove and (missing := words - set(labels.tags)):
            has = ", ".join(labels.tags) or "none"
            raise ConfigError(f"{folder.path} has no tag {min(missing)!r}; its tags: {has}")
        tags = set(labels.tags) - words if remove else set(labels.tags) | words
        return labels._replace(tags=tuple(sorted(tags)))

    return _change(folder, change)


def change_note(folder: RunFolder, text: str) -> Labels:
    """Replace the note on a run, an empty one removes it, and return its labels."""
    if len(text) > LONGEST_NOTE:
        raise ConfigError(f"note: found {len(text)} characters; allowed {LONGEST_NOTE} at most")
    return _change(folder, lambda labels: labels._replace(note=text.strip()))


def _change(folder: RunFolder, change: Callable[[Labels], Labels]) -> Labels:
    """Read, change and write the labels under a lock; no other process writes in between.

    Raises ResourceError for a labels.json that is not a file or is too large.
    """
    with files.locked(folder.path / LOCK, PATIENCE_SECONDS):
        try:
            labels = _read(folder)
        except ValueError:
            labels = Labels()
        labels = change(labels)
        text = json.dumps(labels._asdict(), indent=2) + "\n"
        files.replace(folder.path / LABELS, text.encode())
    return labels
