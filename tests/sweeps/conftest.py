"""A server of runs that the sweeps of several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepstack.sweeps import local
from deepstack.sweeps.fork_server import ForkServer


class Kept(ForkServer):
    """A server that has imported everything, and stays for the next sweep."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    kept = Kept()
    yield kept
    ForkServer.close(kept)


@pytest.fixture
def warm_server(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps start their runs with the shared server."""
    monkeypatch.setattr(local, "ForkServer", lambda: server)
