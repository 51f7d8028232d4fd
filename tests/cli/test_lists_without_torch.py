"""`deepstack list` reads declarations from the source, and prints the names of the registries."""

import subprocess
import sys

import pytest

from deepstack.cli import list_command as lists
from deepstack.cli.list_command import Kind

REGISTRIES = {
    Kind.schemes: lambda: lists.scheme_rows(lists.DEPTH),
    Kind.diagnostics: lists.diagnostic_rows,
    Kind.analyses: lists.analysis_rows,
    Kind.charts: lists.chart_rows,
    Kind.claims: lists.claim_rows,
}


def test_no_list_imports_torch_or_matplotlib() -> None:
    program = (
        "import sys\n"
        "from deepstack.cli import app\n"
        f"for kind in {[kind.value for kind in Kind]}:\n"
        "    app(['list', kind], standalone_mode=False)\n"
        "    assert not {'torch', 'matplotlib'} & set(sys.modules), kind\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("deepnorm", "grad_norm", "C36", "loss_vs_step"))


@pytest.mark.parametrize("kind", lists.DECLARED)
def test_the_tables_have_the_values_of_the_registries(kind: Kind) -> None:
    short, rows = lists.DECLARED[kind](), REGISTRIES[kind]()
    assert len(short) > 5 and len(short) == len(rows)
    for row, full in zip(short, sorted(rows, key=order(short)), strict=True):
        if "source" in row:
            full["source"] = {"title": full["source"]["title"]}
        assert row == {key: full[key] for key in row}


def order(rows: list[dict[str, str]]) -> object:
    """A key that sorts rows as these are."""
    names = [row["name"] for row in rows]
    return lambda row: names.index(row["name"])
