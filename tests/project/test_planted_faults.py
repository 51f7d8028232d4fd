"""The planted faults (`python tests/planted_faults.py`): each has its place, and is noticed."""

import pytest
from helpers import TESTS
from planted_faults import FAULTS, Fault, file_of, passes


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_are_there(fault: Fault) -> None:
    assert file_of(fault).is_file() and fault.old != fault.new
    for test in fault.tests.split():
        name, _, function = test.partition("::")
        text = (TESTS / name).read_text(encoding="utf-8")
        assert f"\ndef {function.split('[')[0] or 'test_'}" in text


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(fault: Fault) -> None:
    """The default run shows that its tests pass without it."""
    assert not passes(fault.tests, fault)
