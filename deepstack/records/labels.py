"""Tags and a note on a run, in labels.json of its folder.

labels.json is no data file: it has no checksum, and `verify` does not read it.
"""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from deepstack.allowed import PATTERNS, RUN_NAME
from deepstack.errors import ConfigError, ResourceError
from deepstack.records import files
from deepstack.records.cells import one_line
from deepstack.records.folder import RunFolder

LABELS = "labels.json"
LONGEST_TAG, LONGEST_NOTE = 64, 2000


class Labels(NamedTuple):
    """The user's words on a run: sorted tags and one note."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_labels(folder: RunFolder) -> Labels:
    """Return tags and note of a run; none if the file is missing or cannot be read."""
    try:
        values = files.parse_object(files.read(folder.path / LABELS) or b"{}")
    except (ResourceError, ValueError):
        return Labels()
    tags, note = values.get("tags"), values.get("note")
    words = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Labels(tuple(words), note[:LONGEST_NOTE] if isinstance(note, str) else "")


def change_tags(folder: RunFolder, words: Iterable[str], *, remove: bool = False) -> Labels:
    """Add tags to a run, or remove them, and return its labels.

    Raises ConfigError for a word that is no tag, or that the run does not have.
    """
    labels, words = read_labels(folder), set(words)
    for word in sorted(words):
        if not re.fullmatch(RUN_NAME, word) or len(word) > LONGEST_TAG:
            allowed = f"{PATTERNS[RUN_NAME]} (at most {LONGEST_TAG})"
            raise ConfigError(f"tag: found {one_line(word)!r}; allowed {allowed}")
    if remove and (missing := words - set(labels.tags)):
        has = ", ".join(labels.tags) or "none"
        raise ConfigError(f"{folder.path} has no tag {min(missing)!r}; its tags: {has}")
    tags = set(labels.tags) - words if remove else set(labels.tags) | words
    return _write(folder, labels._replace(tags=tuple(sorted(tags))))


def change_note(folder: RunFolder, text: str) -> Labels:
    """Replace the note on a run, an empty one removes it, and return its labels."""
    if len(text) > LONGEST_NOTE:
        raise ConfigError(f"note: found {len(text)} characters; allowed {LONGEST_NOTE} at most")
    return _write(folder, read_labels(folder)._replace(note=text.strip()))


def _write(folder: RunFolder, labels: Labels) -> Labels:
    text = json.dumps(labels._asdict(), indent=2) + "\n"
    files.replace(folder.path / LABELS, text.encode())
    return labels
