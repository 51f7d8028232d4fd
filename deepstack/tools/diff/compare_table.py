"""Adds `deepstack compare RUN RUN --diff`."""

from collections.abc import Sequence
from typing import Any

from deepstack.base import ConfigError
from deepstack.cli import CompareTable, flag, log
from deepstack.records import Run, existing_run


class DiffTable(CompareTable):
    """The settings, environment, results and first rows of logs in which two runs differ."""

    place = 3

    diff: bool = flag(
        "Of two runs, print how they differ: settings, environment, results, and the first other "
        "row of each log. Equal parts are named below.",
        "--diff",
    )

    def rows(
        self, directories: Sequence[str], where: Sequence[str], last: int | None
    ) -> Sequence[dict[str, Any]]:
        from deepstack.tools.diff.diff import differences

        if len(directories) != 2 or where or last:
            raise ConfigError("--diff: allowed two runs alone: deepstack compare RUN RUN --diff")
        first, second = (Run(existing_run(path).path) for path in directories)
        rows, equal = differences(first, second)
        for line in equal:
            log(line)
        return rows
