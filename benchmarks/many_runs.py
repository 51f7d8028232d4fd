"""Copy one run into a study of many runs and measure a command of deepstack on it.

    python benchmarks/many_runs.py RUN FOLDER --runs 10000
    python benchmarks/many_runs.py RUN FOLDER --runs 2000 --command "plot update_vs_depth"

Every copy differs in seed and depth; checkpoints are left out.
"""

import argparse
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


def copy_run(source: Path, study: Path, number: int) -> None:
    """Copy the run as number `number` of a study, with another seed and depth."""
    target = study / f"deepnorm-d{number % 100 + 1}-s{number // 100}"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoint"))
    config = (source / "config.yaml").read_text()
    config = re.sub(r"(?m)^seed: .*", f"seed: {number // 100}", config)
    config = re.sub(r"(?m)^  depth: .*", f"  depth: {number % 100 + 1}", config)
    (target / "config.yaml").write_text(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--command", default="ls", help="Words in front of the folder.")
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        for number in range(arguments.runs):
            copy_run(arguments.run, arguments.folder / "study", number)
    words = shlex.split(arguments.command)
    command = [sys.executable, "-m", "deepstack", *words, str(arguments.folder)]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{printed.count(bytes([10])):,} lines, {used.ru_utime + used.ru_stime:.1f} s of CPU, "
        f"{used.ru_maxrss / 1024:.0f} MB"
    )


if __name__ == "__main__":
    main()
