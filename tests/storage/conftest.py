"""The harness of all tests of the storage protocol: its undisturbed run is trained once."""

import pytest
from helpers.storage_calls import MISSING
from helpers.storage_harness import Harness


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    if MISSING:
        pytest.skip(MISSING)
    return Harness(tmp_path_factory.mktemp("storage"))
