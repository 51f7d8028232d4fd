"""The identity of the data that a run was trained and validated on."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def data_identity(data: Mapping[str, Any]) -> str | None:
    """Return a hash of a text and of the part of it that is held out; None without a text.

    data: as in meta.json.  A run of an earlier version, which held the end of its text out, has the
        sha256 of its text.
    """
    sha256, held_out = data.get("sha256"), data.get("held_out")
    if not sha256 or not held_out:
        return str(sha256) if sha256 else None
    return hashlib.sha256(json.dumps([sha256, held_out], sort_keys=True).encode()).hexdigest()
