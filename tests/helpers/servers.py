"""A server of runs that the sweeps of several tests share."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from deepstack.sweeps import local
from deepstack.sweeps.fork_server import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """A server that has imported everything, and stays for the next sweep."""
    kept = ForkServer()
    with patch.object(kept, "close"):
        yield kept
    kept.close()


@pytest.fixture
def warm_server(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps start their runs with the shared server."""
    monkeypatch.setattr(local, "ForkServer", lambda: server)
