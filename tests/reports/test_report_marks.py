"""A report marks the best loss of each depth."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.plot_runs import make_run

from deepstack.reports import report

LOSSES = {
    ("deepnorm", 1): 2.0, ("post_ln", 1): 2.5, ("pre_ln", 1): 2.2,
    ("deepnorm", 2): 2.6, ("post_ln", 2): 2.1, ("pre_ln", 2): 2.2,
    ("deepnorm", 3): 2.4,
}  # fmt: skip


def test_a_report_marks_the_lowest_loss_of_each_depth(tmp_path: Path) -> None:
    """A single loss of a depth has no mark, and neither has a run that diverged."""
    for (scheme, depth), loss in LOSSES.items():
        make_run(tmp_path / "study", scheme=scheme, depth=depth, masked=loss)
    make_run(tmp_path / "study", scheme="rezero", depth=1, masked=1.0, state="diverged")
    page = report(tmp_path / "study").read_text(encoding="utf-8")
    marked = []
    for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL):
        cells = re.findall(r"<td([^>]*)>(.*?)</td>", row, re.DOTALL)
        marked += [(cells[0][1], cells[1][1], text) for where, text in cells if "best" in where]
    assert marked == [("DeepNorm", "1", "2.000"), ("Post-LN", "2", "2.100")]
    assert re.search(r"\.best \{ font-weight: 700; \}", page) and "Bold: the least of" in page
