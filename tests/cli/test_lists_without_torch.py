"""`deepstack list` reads declarations from the source, and prints what the registries have."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepstack import plugins
from deepstack.cli import list_command as lists

KINDS = ("schemes", "diagnostics", "claims", "charts", "tasks")


def test_no_list_imports_torch_or_matplotlib() -> None:
    program = (
        "import sys\n"
        "from deepstack.cli import app\n"
        f"for kind in {KINDS}:\n"
        "    app(['list', kind], standalone_mode=False)\n"
        "    assert not {'torch', 'matplotlib'} & set(sys.modules), kind\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("deepnorm", "grad_norm", "C36", "loss_vs_step"))


@pytest.mark.parametrize("rows", ["diagnostic_rows", "chart_rows", "claim_rows"])
def test_lists_equal_the_registries(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "LOADED", {})
    read = getattr(lists, rows)()
    one = plugins.Plugin(Path("mine.py"), "")
    monkeypatch.setattr(plugins, "LOADED", {"mine.py": one})  # the registries, as with a plugin
    assert read == getattr(lists, rows)() and len(read) > 10


@pytest.mark.parametrize("depth", [1, 100])
def test_the_table_of_schemes_has_the_values_of_the_classes(depth: int) -> None:
    table = lists.scheme_table(depth)
    assert table == [{key: row[key] for key in table[0]} for row in lists.scheme_rows(depth)]
