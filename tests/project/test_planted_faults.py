"""The planted faults (`python tests/planted_faults.py`): each has its place, and is noticed."""

import subprocess
import sys
from collections import Counter

import pytest
from helpers import ROOT, TESTS
from helpers.extensions import is_missing
from helpers.sampling import rotating
from planted_faults import FAULTS, Fault, file_of

PARTS, EVERY = 28, 14  # each part imports PyTorch once more; a commit tries two, a dozen faults


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_are_there(fault: Fault) -> None:
    places = [ROOT / "deepstack" / fault.folder / "x.py"]
    places += [TESTS / test.partition("::")[0] for test in fault.tests.split()]
    if any(map(is_missing, places)):
        pytest.skip("its addition is missing")
    assert file_of(fault).is_file() and fault.old != fault.new
    for test in fault.tests.split():
        name, _, function = test.partition("::")
        text = (TESTS / name).read_text(encoding="utf-8")
        assert f"\ndef {function.split('[')[0] or 'test_'}" in text


def test_every_fault_has_a_name() -> None:
    assert set(Counter(fault.name for fault in FAULTS).values()) == {1}


@pytest.mark.parametrize("part", rotating(range(PARTS), EVERY))
def test_the_faults_are_noticed(part: int) -> None:
    """The default run shows that their tests pass without a fault."""
    names = [fault.name for fault in FAULTS[part::PARTS]]
    command = [sys.executable, TESTS / "planted_faults.py", "--trust", "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
