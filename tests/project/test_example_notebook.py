"""examples/first_study.ipynb runs from top to bottom and finds what it says."""

from pathlib import Path

import pytest
from helpers import ROOT

NOTEBOOK = ROOT / "examples" / "first_study.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the notebook's own libraries
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    gains = {
        tuple(line.split()[:2]): float(line.split()[3])
        for line in text.splitlines()
        if " nats " in line
    }
    assert len(gains) == 4 and gains["post_ln", "48"] < 0.1 < gains["deepnorm", "48"]
    assert "results/first_study/report.html" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_the_notebook_is_kept_without_outputs() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert '"output_type"' not in text and '"execution_count": 1' not in text
