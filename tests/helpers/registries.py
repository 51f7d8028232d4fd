"""Names that are registered for the time of a block."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.peers.peers import PEERS
from deepstack.base import plugins
from deepstack.base.registry import Registry
from deepstack.diagnostics import DIAGNOSTICS
from deepstack.instruments.depth_use.analyses import MEASURES
from deepstack.instruments.ledger.claims import CLAIMS
from deepstack.plots import CHARTS
from deepstack.schemes import SCHEMES
from deepstack.tasks import TASKS
from deepstack.training.observer import OBSERVERS

REGISTRIES: tuple[Registry[Any], ...] = (
    CHARTS, CLAIMS, DIAGNOSTICS, MEASURES, OBSERVERS, PEERS, SCHEMES, TASKS
)  # fmt: skip


@contextmanager
def restored_names() -> Iterator[None]:
    """Forget on exit the names and plugins that the block has added, as a new process would."""
    with ExitStack() as stack:
        for names in (*(registry._objects for registry in REGISTRIES), plugins.LOADED):
            stack.enter_context(patch.dict(names))
        yield
