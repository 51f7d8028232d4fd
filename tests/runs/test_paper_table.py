"""Tables for a paper: `compare --latex`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import succeed
from helpers.plot_runs import make_runs

from deepstack.base.latex import tabular, tex
from deepstack.runs.paper_table import best_rows, paper_table

LOSSES = {"deepnorm": 2.5, "post_ln": 2.7, "pre_ln": 2.4}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three schemes at two depths with three seeds; Pre-LN is best at 6 layers, DeepNorm at 48."""
    root = tmp_path_factory.mktemp("results") / "a_b"
    make_runs(
        root, scheme=tuple(LOSSES), depth=(6, 48), seed=(0, 1, 2),
        masked=lambda scheme, depth, seed: (
            LOSSES[scheme] + 0.01 * seed + (0.3 if depth == 48 and scheme == "pre_ln" else 0)
        ),
    )  # fmt: skip
    return root


def cells_of(text: str) -> list[list[str]]:
    """The rows of the first tabular, its title first."""
    body = text.partition(r"\begin{tabular}")[2].partition(r"\end{tabular}")[0]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    return [line.removesuffix(r" \\").split(" & ") for line in lines]


def test_a_table_of_latex_has_the_numbers_of_json_and_the_best_in_bold(study: Path) -> None:
    text = succeed("compare", study, "--against", "post_ln", "--latex")
    assert re.findall(r"\\(\w+rule)", text) == ["toprule", "midrule", "bottomrule"]
    titles, *rows = cells_of(text)
    facts = json.loads(succeed("compare", study, "--against", "post_ln", "--json"))
    assert len(rows) == len(facts) == 6
    for cells, fact in zip(rows, facts, strict=True):
        row = dict(zip(titles, cells, strict=True))
        loss = rf"{fact['val_loss']:.3f} $\pm$ {fact['val_sd']:.3f}"
        is_best = (fact["setting"], fact["depth"]) in (("Pre-LN", 6), ("DeepNorm", 48))
        assert row["validation loss"] == (rf"\textbf{{{loss}}}" if is_best else loss)
        assert row[r"95 \% interval"] == f"{fact['val_low']:.3f} to {fact['val_high']:.3f}"
        assert (row["n"], row["N"], row["outcome"]) == ("3", str(fact["depth"]), "3 learnt")
        if fact["setting"] != "Post-LN":
            assert row["difference"] == f"{fact['difference']:.3f}".replace("-", "$-$")
    assert "Bold: lowest mean at each depth" in text and r"from post\_ln" in text


def test_losses_of_several_tasks_have_no_best() -> None:
    rows = [{"depth": "6", "val_loss": loss} for loss in (1.0, 2.0, None, math.nan)]
    assert best_rows(rows) == [0] and best_rows(rows, [""]) == []
    assert best_rows(rows[1:]) == []  # one loss alone


def test_each_study_has_a_best_row_at_each_depth() -> None:
    """Their losses are of other settings, and often of other tasks."""
    losses = {("a", "6"): (2.0, 3.0), ("b", "6"): (4.5, 4.0), ("a", "12"): (2.5, 2.2)}
    rows = [
        {"study": study, "depth": depth, "val_loss": loss, "setting": f"s{i}", "outcome": "done",
         "n": 1, "val_sd": None, "val_low": None, "val_high": None}
        for (study, depth), pair in losses.items()
        for i, loss in enumerate(pair)
    ]  # fmt: skip
    assert [number for number, _ in paper_table(rows).bold] == [0, 3, 5]


def test_texts_of_runs_stay_texts_in_latex() -> None:
    assert tex("50 % of $x_1$ & #\\y{}") == (r"50 \% of \$x\_1\$ \& \#\textbackslash{}y\{\}")
    assert tex("数") == r"\texttt{U+6570}"
    row: dict[str, Any] = {"setting": "a_b & c", "depth": "6", "outcome": "1 stalled", "n": 1}
    row |= {"val_loss": 3.0, "val_sd": None, "val_low": None, "val_high": None}
    paper = paper_table([row])
    assert paper.bold == [] and "Bold" not in paper.caption
    line = tabular(paper.rows).splitlines()[-3]
    assert line == r"a\_b \& c & 6 & 1 at chance & 3.000 & -- & 1 \\"
