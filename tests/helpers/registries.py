"""Names that are registered for the time of a block."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.peers import peers
from deepstack.base import plugins
from deepstack.base.registry import PREFIX, Registry
from deepstack.cli.listing import listings
from deepstack.config import instruments
from deepstack.runs.trackers import known_trackers
from deepstack.training import observer


def all_registries() -> list[Registry[Any]]:
    """Return the registries of deepstack, of its instruments and integrations, and of peers."""
    assert peers and observer  # imported: each holds a registry
    known_trackers()  # imports the trackers of integrations
    for listing in listings().values():
        listing.entries()  # imports the registry
    modules = [module for name, module in sys.modules.items() if name.startswith("deepstack")]
    found = [one for module in (*modules, peers) for one in vars(module).values()]
    return list({id(one): one for one in found if isinstance(one, Registry)}.values())


REGISTRIES = all_registries()


@contextmanager
def restored_names() -> Iterator[None]:
    """Begin without plugins, and forget on exit the names and plugins that the block has added."""
    with ExitStack() as stack:
        registered = (registry._objects for registry in REGISTRIES)
        for names in (*registered, instruments._SPECS):
            stack.enter_context(patch.dict(names))
        stack.enter_context(patch.dict(plugins.LOADED, clear=True))
        for name in [name for name in sys.modules if name.startswith(PREFIX)]:
            del sys.modules[name]
        yield
