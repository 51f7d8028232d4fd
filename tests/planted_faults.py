"""Plants small faults in a copy of the source, and runs the tests that should notice them.

    python tests/planted_faults.py            all faults
    python tests/planted_faults.py --only dropout_masks_repeat

Exits 1 if a fault passes its tests, or if they fail without a fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """`old`, which occurs once in the files of deepstack/`folder`, becomes `new`."""

    name: str
    folder: str
    old: str
    new: str
    tests: str  # what pytest is given, relative to tests/, with spaces between


FAULTS = (
    Fault(
        "gains_decay", "training",
        'if bank.start in ("matrix", "table") else', 'if bank.start in ("matrix", "table", "one") else',
        "test_decay_ramp_dropout.py::test_matrices_and_tables_decay_and_nothing_else",
    ),
    Fault(
        "ramp_one_step_late", "training",
        "self.built.at_step(step)", "self.built.at_step(step - 1)",
        "test_decay_ramp_dropout.py::test_a_ramp_has_its_value_at_every_step_of_a_run",
    ),
    Fault(
        "dropout_masks_repeat", "training",
        "dropout_seed(self.config.seed, step,", "dropout_seed(self.config.seed, 1,",
        "test_decay_ramp_dropout.py::test_dropout_differs_between_steps",
    ),
    Fault(
        "heat_map_upside_down", "plots",
        "np.ma.masked_array(values, ~drawable)", "np.ma.masked_array(values, ~drawable)[::-1]",
        "test_drawn_arrays.py",
    ),
    Fault(
        "worst_loss_marked_best", "reports",
        'row["val_loss"] == min(same)', 'row["val_loss"] == max(same)',
        "test_report_marks.py",
    ),
)  # fmt: skip


def file_of(fault: Fault, root: Path = ROOT) -> Path:
    """Return the file that contains `old` exactly once; LookupError otherwise."""
    folder = root / "deepstack" / fault.folder
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".html")]
    counts = {path: path.read_text(encoding="utf-8").count(fault.old) for path in files}
    if sum(counts.values()) != 1:
        raise LookupError(
            f"{fault.name}: {fault.old!r} occurs {sum(counts.values())} times in {folder}; "
            "allowed once: update FAULTS in tests/planted_faults.py"
        )
    return next(path for path, count in counts.items() if count)


def passes(tests: str, fault: Fault | None = None) -> bool:
    """Return whether the tests pass in a copy of the repository, with the fault planted in it."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "__pycache__"))
        if fault is not None:
            path = file_of(fault, copy)
            text = path.read_text(encoding="utf-8").replace(fault.old, fault.new)
            path.write_text(text, encoding="utf-8")
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *tests.split()]
        found = subprocess.run(
            words, cwd=copy / "tests", env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if found.returncode > 1:  # pytest did not run the tests
        raise RuntimeError(f"{' '.join(words)}: exit code {found.returncode}\n{found.stdout}")
    return found.returncode == 0


def main() -> int:
    """Plant the faults one after the other and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[fault.name for fault in FAULTS], help="one fault")
    only = parser.parse_args().only
    faults = [fault for fault in FAULTS if only in (None, fault.name)]
    if not passes(" ".join(fault.tests for fault in faults)):
        print("the tests fail without a fault")
        return 1
    missed = 0
    for fault in faults:
        passed = passes(fault.tests, fault)
        missed += passed
        print(f"{'NOT NOTICED' if passed else 'noticed':12} {fault.name}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
