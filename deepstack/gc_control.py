"""Python's collector of cycles, kept out of what makes many objects and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the collector from walking over what is there while much that stays is made.

    A graph of 1000 layers is many thousand objects and no cycle; walking over them again and again
    costs a tenth of a step, two thirds of building a model, and a tenth of importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
