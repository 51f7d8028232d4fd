"""Plants small faults in a copy of the source, and runs the tests that should notice them.

    python tests/planted_faults.py                                  all faults
    python tests/planted_faults.py --only dropout_masks_repeat …    these

Exits 1 if a fault passes its tests, or if they fail without a fault (`--trust`: not tried).
Every run of tests is a fork of this process, which imports PyTorch and pytest once, and never
deepstack.
"""

import argparse
import compileall
import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fault_tables import ROWS

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".html", ".h", ".cpp")  # of the files in which faults are planted
# Imported once for all runs of tests: modules that take long and read nothing of the copy.
SHARED = ("torch", "pytest", "numpy", "pandas", "pydantic", "scipy.optimize", "typer")


class Fault(NamedTuple):
    """`old`, which occurs once in the files of deepstack/`folder`, becomes `new`."""

    name: str
    folder: str
    old: str
    new: str
    tests: str  # what pytest is given, relative to tests/, with spaces between


FAULTS = tuple(Fault(*row) for row in ROWS)


def file_of(fault: Fault, root: Path = ROOT) -> Path:
    """Return the file that contains `old` exactly once; LookupError otherwise."""
    folder = root / "deepstack" / fault.folder
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES]
    counts = {path: path.read_text(encoding="utf-8").count(fault.old) for path in files}
    if sum(counts.values()) != 1:
        raise LookupError(
            f"{fault.name}: {fault.old!r} occurs {sum(counts.values())} times in {folder}; "
            "allowed once: update its row in tests/fault_tables/"
        )
    return next(path for path, count in counts.items() if count)


class Copy:
    """A copy of the repository in a folder, in which one fault at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(".*", "results"))
        for package in ("deepstack", "deepstack_lab"):
            compileall.compile_dir(self.root / package, quiet=1)
        self.output = folder / "output"

    def first_failure(self, tests: str, fault: Fault | None = None) -> str | None:
        """Return the first error of the tests, run with a fault, or None if they pass."""
        if fault is None:
            return self._run(tests)
        path = file_of(fault, self.root)
        kept = path.read_text(encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()  # it may have the time and the size of the changed file
        path.write_text(kept.replace(fault.old, fault.new), encoding="utf-8")
        try:
            return self._run(tests)
        finally:
            path.write_text(kept, encoding="utf-8")

    def _run(self, tests: str) -> str | None:
        pid = os.fork()
        if pid == 0:
            self._be_pytest(tests)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output = self.output.read_text(encoding="utf-8", errors="replace")
        if code not in (0, 1):  # pytest did not run the tests
            raise RuntimeError(f"pytest {tests}: exit code {code}\n{output}")
        errors = re.findall(r"^E +(.*)", output, re.M)
        return None if code == 0 else (errors or ["failed"])[0]

    def _be_pytest(self, tests: str) -> None:
        """Run pytest in this forked process, on the copy's source, and end the process."""
        code = 3
        try:
            file = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(self.root / "tests")
            os.environ["PYTHONPATH"] = str(self.root)
            sys.path[:] = [str(self.root), *(p for p in sys.path if Path(p) != ROOT / "tests")]
            sys.dont_write_bytecode = True
            assert "deepstack" not in sys.modules
            pytest = importlib.import_module("pytest")
            # Under CI=true, pytest explains how two long lists differ for minutes.
            words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "", "--assert=plain"]
            code = int(pytest.main([*words, *tests.split()]))
        finally:
            sys.stdout.flush()
            os._exit(code)


def main() -> int:
    """Plant the faults one after the other and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="FAULT", help="these faults")
    parser.add_argument("--trust", action="store_true", help="the tests pass without a fault")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.name in (given.only or names)]
    for module in SHARED:
        importlib.import_module(module)
    missed = 0
    with TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        every = " ".join(dict.fromkeys(" ".join(fault.tests for fault in faults).split()))
        if not given.trust and (error := copy.first_failure(every)):
            print(f"the tests fail without a fault: {error}")
            return 1
        for fault in faults:
            error = copy.first_failure(fault.tests, fault)
            missed += error is None
            print(f"{'noticed' if error else 'NOT NOTICED':12} {fault.name:34} {error or ''}"[:150])
            sys.stdout.flush()
    print(f"{len(faults) - missed} of {len(faults)} faults were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
