"""Help, errors and lists need no torch: `deepstack list` reads declarations from the source."""

import subprocess
import sys

import pytest

from deepstack.cli import list_command as lists
from deepstack.cli.declarations import declarations
from deepstack.tasks import TASKS

PROGRAM = """
import sys
from deepstack.cli import app

def run(words, heavy):
    try:
        app(words)
    except SystemExit:
        pass
    assert not set(heavy.split()) & set(sys.modules), words

for words in (["--help"], ["train", "--help"], ["check", "nothing.yaml"]):
    run(words, "torch pandas matplotlib numpy scipy")
for kind in sys.argv[1:]:
    run(["list", kind], "torch matplotlib")
"""


def test_help_errors_and_lists_import_no_torch() -> None:
    command = [sys.executable, "-c", PROGRAM, *lists.KINDS]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "nothing.yaml: no such file" in result.stderr
    assert all(word in result.stdout for word in ("deepnorm", "grad_norm", "C36", "loss_vs_step"))


def test_every_task_is_declared_for_completion() -> None:
    assert list(declarations("tasks", "task")) == TASKS.names()


@pytest.mark.parametrize("kind", lists.DECLARED)
def test_the_tables_have_the_values_of_the_registries(kind: str) -> None:
    short, rows = lists.DECLARED[kind](), lists.KINDS[kind]()
    assert len(short) > 5 and len(short) == len(rows)
    full = {row["name"]: row for row in rows}
    for row in short:
        if "source" in row:
            full[row["name"]]["source"] = {"title": full[row["name"]]["source"]["title"]}
        assert row == {key: full[row["name"]][key] for key in row}
        assert row.get("description") or row.get("equation") or row.get("source"), row
