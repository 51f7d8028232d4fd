"""The command `deepstack theory`: table, JSON, page, charts and claims of plugins."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.claim_verdicts import PAGE, PUBLISHED
from helpers.command_line import typed
from matplotlib.figure import Figure

from deepstack.errors import PluginError
from deepstack.theory import CLAIMS, Curves, Finding, Line, Part, all_claims
from deepstack.theory import report as reporting
from deepstack.theory.claim import claim
from deepstack.theory.sources import LAYER_CAKE

DRAWS = torch.tensor([[1.0, 10.0], [2.0, 30.0], [6.0, 20.0]])
MEANS = [3.0, 20.0]
ERRORS = [statistics.stdev(column) / 3**0.5 for column in DRAWS.T.tolist()]


@pytest.mark.parametrize("measured", [True, False])
def test_a_claims_chart_draws_means_and_standard_errors(measured: bool) -> None:
    """Bars at measured points, a band along a line."""
    axes = Figure().add_subplot()
    reporting.lines(axes, Curves("N", "value", [Line.mean("measured", [4, 8], DRAWS, measured)]))
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[4, MEANS[0]], [8, MEANS[1]]]
    ends = np.concatenate([path.vertices for path in axes.collections[0].get_paths()]).round(4)
    assert {tuple(end) for end in ends.tolist()} == {
        (x, round(mean + sign * error, 4))
        for x, mean, error in zip((4, 8), MEANS, ERRORS, strict=True)
        for sign in (-1, 1)
    }


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [(148.251, 3.21, "148.3 ± 3.2"), (0.5, 1e-6, "0.5 ± 1e-06"), (1.0, 1e-18, "1")],
)
def test_a_number_has_two_digits_of_its_error(value: float, error: float, shown: str) -> None:
    assert reporting.measured(Part("x", 1.0, value, error)) == shown


def test_indices_are_lowered_as_whole_words() -> None:
    assert reporting.lowered("∂θ_l, d_head², x_{l+1}") == "∂θ$_{l}$, d$_{head}$², x$_{l+1}$"


def test_the_command_gives_everything_as_json() -> None:
    result = typed("theory", "--claim", "C38", "--claim", "C22", "--json", "--seed", "3")
    first, second = json.loads(result.stdout)
    assert (first["id"], second["id"]) == ("C38", "C22")
    assert first["source"]["papers"].startswith("arXiv:2203.00555")
    assert first["verdict"] == "holds in part"
    assert {"what", "predicted", "measured", "uncertainty", "agrees"} <= set(first["parts"][0])
    assert first["curves"]["lines"] and second["curves"] is None
    measured = [part["measured"] for part in second["parts"]]
    assert measured == [part.measured for part in CLAIMS["C22"].measure(3).parts]
    assert measured != [part.measured for part in CLAIMS["C22"].measure(0).parts]


def test_the_command_makes_a_page_with_charts(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    words = "theory", "--claim", "C38", "--claim", "C22", "--markdown", "--charts", folder
    page = typed(*words).stdout.splitlines()
    assert page[0].startswith("# ") and "made by `deepstack" in page[2]
    assert any(line.startswith("| [C38](#c38) | `The gain of W_Q") for line in page)
    assert "## C38" in page and "## C22" in page and "No part is undecided." in page
    assert [line.partition("](")[2] for line in page if ".png" in line] == ["claims/C38.png)"]
    assert any("[arXiv:2203.00555](https://arxiv.org/abs/2203.00555)" in line for line in page)
    assert [path.name for path in folder.iterdir()] == ["C38.png"]
    drawn = (folder / "C38.png").read_bytes()
    assert 5_000 < len(drawn) < 100_000
    reporting.draw(CLAIMS["C38"], CLAIMS["C38"].measure(), folder)
    assert (folder / "C38.png").read_bytes() == drawn, "the same finding gives the same bytes"
    for line in page:
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (4, 5), line


def test_the_page_in_docs_is_of_these_claims() -> None:
    assert "`deepstack theory --markdown --charts docs/claims`" in PAGE
    assert list(PUBLISHED) == [c.id for c in all_claims()]
    for c in all_claims():
        verdict, formula = PUBLISHED[c.id][0], reporting.escaped(f"`{c.formula}`")
        assert f"| [{c.id}](#{c.id.lower()}) | {formula} | {verdict} |" in PAGE, c.id
        assert f"`{c.formula}`: **{verdict}**." in PAGE, c.id
    drawn = {path.stem for path in (ROOT / "docs" / "claims").iterdir()}
    assert drawn == {c.id for c in all_claims() if f"(claims/{c.id}.png)" in PAGE}


def test_wrong_options_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for words, message in (
        (["--claim", "C99"], "unknown claim 'C99'"),
        (["--json", "--markdown"], "allowed one of them"),
        (["--charts", str(file)], "is a file"),
    ):
        result = typed("theory", "--claim", "C4", *words)
        assert result.exit_code == 2 and message in result.stderr
        assert result.stdout == "" and " s " not in result.stderr


def test_what_does_not_hold_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @claim("C0", LAYER_CAKE)
    def wrong(seed: int) -> Finding:
        """1 = |2| and x*y_i_."""
        parts = [Part("x*y* E[z]", 1.0, 2.0, 0.0), Part("|x|", 1.0, 2.0, 0.1, "<=", stated=False)]
        lines = [Line("a line", [1, 2], [0.1, 0.3], False), Line("points", [1, 2], [0, 0.2])]
        return Finding(parts, "It is not.", Curves("x", "y", lines))

    monkeypatch.setenv("COLUMNS", "200")
    result = typed("theory", "--claim", "C0", "--claim", "C5")
    assert result.exit_code == 0
    for words in ("x*y* E[z]", "does not hold", "E‖z‖² = d (α² + v²w²)", "predicted"):
        assert words in result.stdout
    assert "C5" in result.stderr and " s " in result.stderr
    page = typed("theory", "--claim", "C0", "--markdown").stdout
    assert "| x\\*y\\* E[z] | 1 | 2 | disagrees |" in page
    assert "| \\|x\\| | ≤ 1 | 2.00 ± 0.10 | beside: disagrees |" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "its experiment returned NoneType, no Finding"),
        (Finding([], "Nothing."), "its Finding has no part that the claim states"),
    ],
)
def test_an_experiment_that_finds_nothing_has_no_verdict(given: Any, message: str) -> None:
    claim("C0", LAYER_CAKE)(lambda seed: given)
    with pytest.raises(PluginError, match=f"claim C0: {message}"):
        CLAIMS["C0"].measure()


def test_a_plugin_can_add_a_claim(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from deepstack.theory import Finding, Part, Source, claim\n"
        "@claim('mine', Source('My notes', ''))\n"
        "def mine(seed):\n"
        "    '1 = 1.'\n"
        "    return Finding([Part('one', 1.0, 1.0, 0.0)], 'Nothing was done.')\n"
    )
    (found,) = json.loads(typed("theory", "--plugin", file, "--claim", "mine", "--json").stdout)
    assert (found["formula"], found["verdict"]) == ("1 = 1", "holds")
    assert found["source"] == {"title": "My notes", "address": "", "papers": ""}


def test_claims_are_listed() -> None:
    for words in ([], ["--markdown"]):
        shown = typed("list", "claims", *words).stdout
        assert "E[y²] = gain² E[x²]" in shown, "square brackets are no markup"
    listed = json.loads(typed("list", "claims", "--json").stdout)
    assert [row["name"] for row in listed] == [f"C{n}" for n in range(1, 49)]
