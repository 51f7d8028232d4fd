"""`report --latex`: the tables of a study for a paper."""

from pathlib import Path

from helpers.command_line import refusal, succeed
from helpers.plot_runs import make_runs


def test_a_report_of_latex_has_both_tables(tmp_path: Path) -> None:
    losses = {"deepnorm": (2.5, 2.5), "post_ln": (2.7, 2.7), "pre_ln": (2.4, 2.7)}
    make_runs(
        tmp_path / "a_b", scheme=tuple(losses), depth=(6, 48), seed=(0, 1, 2),
        masked=lambda scheme, depth, seed: losses[scheme][depth == 48] + 0.01 * seed,
    )  # fmt: skip
    study = tmp_path / "a_b"
    path = Path(succeed("report", study, "--latex", "--to", tmp_path))
    assert path == tmp_path / "report.tex"
    text = path.read_text()
    assert text.startswith("% needs \\usepackage{booktabs}\n% a\\_b\n")
    assert text.count(r"\begin{table}") == 2 and text.count(r"\textbf{") == 2
    assert "6 & Pre-LN & 2.410 & DeepNorm & 0.100 & " in text
    assert "--latex leaves out" in refusal(2, "report", study, "--latex", "--at-step", "3")
