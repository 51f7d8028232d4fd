"""`deepstack list` reads declarations from the source, and prints the names of the registries."""

import subprocess
import sys

import pytest

from deepstack.cli import list_command as lists


def test_no_list_imports_torch_or_matplotlib() -> None:
    program = (
        "import sys\n"
        "from deepstack.cli import app\n"
        f"for kind in {list(lists.KINDS)}:\n"
        "    app(['list', kind], standalone_mode=False)\n"
        "    assert not {'torch', 'matplotlib'} & set(sys.modules), kind\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("deepnorm", "grad_norm", "C36", "loss_vs_step"))


@pytest.mark.parametrize("kind", lists.DECLARED)
def test_the_tables_have_the_values_of_the_registries(kind: str) -> None:
    short, rows = lists.DECLARED[kind](), lists.KINDS[kind]()
    assert len(short) > 5 and len(short) == len(rows)
    full = {row["name"]: row for row in rows}
    for row in short:
        if "source" in row:
            full[row["name"]]["source"] = {"title": full[row["name"]]["source"]["title"]}
        assert row == {key: full[row["name"]][key] for key in row}
