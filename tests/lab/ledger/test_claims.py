"""Entries: their published numbers, statistics of their draws, and `deepstack reproduce`.

A wrong prediction would be noticed.
"""

import json
import math
import random
import re
import statistics
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.claim_parts import FAR, part_of
from helpers.command_line import typed
from helpers.sampling import ROTATION
from matplotlib.figure import Figure

from deepstack.base.errors import PluginError
from deepstack.plots.texts import typeset_index
from deepstack_lab.ledger import report as reporting
from deepstack_lab.ledger.claim import standard_errors
from deepstack_lab.ledger.claim_stack import small_stack
from deepstack_lab.ledger.claims import (
    CLAIMS,
    Curves,
    Finding,
    Line,
    Null,
    Part,
    all_claims,
    claim,
    repeats,
)
from deepstack_lab.ledger.claims.folding import fold
from deepstack_lab.ledger.claims.gradients import signal_share
from deepstack_lab.ledger.measured import Measured
from deepstack_lab.ledger.sources import LAYER_CAKE
from deepstack_lab.ledger.statistics import agreement, crossing

PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def published(section: str) -> tuple[str, list[list[str]]]:
    """The verdict of an entry, and the cells of the rows of its table, from its section."""
    (verdict,) = re.findall(r"^`.*`: \*\*(.*)\*\*\.$", section, re.M)
    rows = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return verdict, rows[2:]  # without the head


def without_draws(decision: str) -> str:
    """Return a decision without the draws it needs: near an edge they depend on the processor."""
    return re.sub(r"needs (about|over) [0-9,]+ draws", "needs draws", decision)


SECTIONS = {s.split("\n")[0]: s for s in re.split(r"^## ", PAGE, flags=re.M)[1:]}
PUBLISHED = {name: published(text) for name, text in SECTIONS.items() if name in CLAIMS}
MEASURED = {name: one for name, one in PUBLISHED.items() if one[0] != "not measured"}
SECONDS = [name for name in MEASURED if CLAIMS[name].tier == "seconds"]
# Of entries with rules those that take a second or two, and another one by commit.
SHORT = ["C51", "C52", "C54", "C61", "C62", "C66", "AD-1", "XI-2"]
LONG = [name for name in SECONDS if CLAIMS[name].rules and name not in SHORT]
OTHERS = [*SHORT, LONG[ROTATION % len(LONG)]]
HERE = [name for name in SECONDS if not CLAIMS[name].rules or name in OTHERS]
QUICK = ["C2", "C5", "C12", "C19", "C25", "C38", "C43"]
ONCE = [*QUICK, "C31", "C35", "C40", "C44"]
# Of the others, every fifth is measured a second time; which ones, the commit says.
TWICE = [name for name in HERE if name not in ONCE][ROTATION % 5 :: 5]
# All modules of claims but training.py, whose claims take five seconds or more.
BY_DEFAULT = [*QUICK, "C6", "C37"]


# The slow tests measure an eighth of the others, which one the commit says; the full ones the rest.
NOW = [name for name in HERE if name not in BY_DEFAULT][ROTATION % 8 :: 8]


def tier_of(name: str) -> list[Any]:
    """Return the mark of an entry: none by default, slow or full."""
    return [] if name in BY_DEFAULT else [pytest.mark.slow if name in NOW else pytest.mark.full]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are kept below the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier_of(name)) for name in HERE])
def test_a_claim_is_measured_and_judged(name: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    result = CLAIMS[name].measure(0)
    assert torch.equal(torch.get_rng_state(), before[0]), "it drew from the global generator"
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    verdict, rows = PUBLISHED[name]
    assert Measured(CLAIMS[name], result).verdict == verdict
    assert 20 < len(result.note) < 500
    for part, (what, claimed, null, shown, decision) in zip(result.parts, rows, strict=True):
        assert reporting.escaped(part.what) == what
        assert reporting.escaped(reporting.predicted(part)) == claimed
        assert null.endswith(reporting.escaped(f": {part.null.meaning}"))
        assert not replace(part, measured=part.null.value).agrees, what
        assert math.isfinite(part.measured) and math.isfinite(part.uncertainty)
        if part.stated or not part.what.startswith("time"):
            assert without_draws(reporting.decision_text(part)) == without_draws(decision), what
        if not part.what.startswith("time"):
            number, _, error = shown.partition(" ± ")
            near = pytest.approx(float(number), rel=1e-3, abs=max(1e-6, 4 * float(error or 0)))
            assert part.measured == near, what
        if part.relation == "=" and part.predicted and part.agrees:
            for factor in (1.5, 1 / 1.5, 1 + 3 * part.tolerance + 1e-3 * (not part.tolerance)):
                slack = 2 * standard_errors(part.draws) * part.uncertainty / abs(part.predicted)
                slack = math.copysign(slack, factor - 1)
                wrong = part.predicted * (factor + slack)
                far = Null(100 * wrong, "a null result that is not the wrong prediction")
                moved = replace(part, predicted=wrong, null=far)
                assert not moved.agrees, f"{part.what}: {moved}"
    for line in result.curves.lines if result.curves else ():
        assert len(line.x) == len(line.y) == len(line.error or line.y)
    if name in TWICE:
        for one, other in zip(result.parts, CLAIMS[name].measure(0).parts, strict=True):
            assert one.what.startswith("time") or one == other


def test_no_published_part_agrees_with_its_null_result() -> None:
    """The null result in place of the measurement, with its interval, for every claim."""
    count = 0
    for name, (_, rows) in MEASURED.items():
        for what, claimed, null, shown, _ in rows:
            number, _, meaning = null.partition(": ")
            assert meaning, (name, what)
            sign, bound, percent = re.fullmatch(
                r"([≤≥]?) ?(\S+)(?: \(within (\S+)\))?", claimed
            ).groups()
            tolerance = float((percent or "0").rstrip("%")) / (100 if "%" in (percent or "") else 1)
            relation = {"≤": "<=", "≥": ">=", "": "="}[sign]
            error = float(shown.partition(" ± ")[2] or 0)
            value = Null(float(number), meaning)
            part = Part(what, float(bound), value.value, error, relation, tolerance, null=value)
            assert not part.agrees, (name, what)
            count += 1
    assert count > 250


def test_fold_leaves_no_gain_and_no_bias() -> None:
    stack = small_stack(0, scheme="pre_ln", depth=2)
    with torch.no_grad():
        for scheme in stack.model.schemes:
            for parameter in scheme.parameters():
                parameter += 0.1
        folded, saved = fold(stack.model)
    assert saved == 2 * 2 * 2 * 32
    for scheme in folded.schemes:
        for name, parameter in scheme.named_parameters():
            assert (parameter == (1.0 if name.endswith("gain") else 0.0)).all()


# -- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [2, 5])
def test_the_share_of_signal_is_unbiased_for_few_batches(batches: int) -> None:
    """‖E g‖² is the mean product of gradients of two different batches."""
    g = torch.randn(batches, 3, 4, generator=torch.Generator().manual_seed(0)).double() + 0.5
    drawn = iter(g)
    bank = Mock()
    stack = Mock(layer_banks=[bank])
    stack.backward = lambda t: setattr(bank, "gradients", Mock(return_value=next(drawn)))
    norm, share = signal_share(stack, batches)
    for layer in range(3):
        products = [float(a @ b) for a, b in permutations(g[:, layer], 2)]
        squares = [float(a @ a) for a in g[:, layer]]
        wanted = (sum(products) / len(products)) / (sum(squares) / batches)
        assert float(share[layer]) == pytest.approx(wanted, rel=1e-9)
        assert float(norm[layer]) == pytest.approx(sum(map(math.sqrt, squares)) / batches)


def test_agreement_is_relative_to_the_second_argument() -> None:
    b = torch.tensor([3.0, 4.0])
    assert [agreement(a, b) for a in (b, 3 * b, 0 * b)] == pytest.approx([1.0, -1.0, 0.0])


def measured(*more: str) -> dict[str, Any]:
    (claimed,) = json.loads(typed("reproduce", "C0", "--json", *more).stdout)
    return claimed


def test_thorough_draws_eight_times_as_many_and_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    @claim("C0", LAYER_CAKE)
    def experiment(seed: int) -> Finding:
        """E[x] = 1."""
        draws = 1 + np.tile([-0.5, 0.5], repeats(20))
        beside = Part.mean("wider", 1.0, 4 * draws - 3, stated=False, null=FAR)
        return Finding([Part.mean("mean", 1.0, draws, null=FAR), beside], f"{len(draws)} draws.")

    plain, thorough = measured(), measured("--thorough")
    assert measured() == plain  # the option of one call is not kept for the next
    assert (plain["verdict"], thorough["verdict"]) == ("undecided", "agrees")
    part, decided = plain["parts"][0], thorough["parts"][0]
    assert (part["draws"], part["decision"]) == (40, "undecided")
    assert 40 < part["draws_needed"] <= 320
    assert (decided["draws"], decided["decision"]) == (320, "agrees")
    monkeypatch.setenv("COLUMNS", "200")
    first, second = "about 260", "about 4,200"
    assert [part["draws_needed"] for part in plain["parts"]] == pytest.approx([260, 4200], rel=0.02)
    assert f"undecided (needs {first} draws, has 40)" in typed("reproduce", "C0").stdout
    page = typed("reproduce", "C0", "--markdown").stdout
    assert f"| C0 | mean | 40 | {first} |\n| C0 | beside: wider | 40 | {second} |" in page


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("measured", [True, False])
def test_a_claims_chart_draws_means_and_standard_errors(measured: bool) -> None:
    """Bars at measured points, a band along a line."""
    axes, draws = Figure().add_subplot(), torch.tensor([[1.0, 10.0], [2.0, 30.0], [6.0, 20.0]])
    reporting.lines(axes, Curves("N", "value", [Line.mean("measured", [4, 8], draws, measured)]))
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[4, 3], [8, 20]]
    errors = [statistics.stdev(column) / 3**0.5 for column in draws.T.tolist()]
    ends = np.concatenate([path.vertices for path in axes.collections[0].get_paths()]).round(4)
    assert {tuple(end) for end in ends.tolist()} == {
        (x, round(mean + sign * error, 4))
        for x, mean, error in zip((4, 8), (3, 20), errors, strict=True)
        for sign in (-1, 1)
    }


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [(148.251, 3.21, "148.3 ± 3.2"), (0.5, 1e-6, "0.5 ± 1e-06"), (1.0, 1e-18, "1")],
)
def test_a_number_has_two_digits_of_its_error(value: float, error: float, shown: str) -> None:
    assert reporting.measured(part_of("x", 1.0, value, error)) == shown


def test_indices_are_lowered_as_whole_words() -> None:
    l, head, following = map(typeset_index, ("l", "head", "l+1"))
    assert reporting.lowered("∂θ_l, d_head², x_{l+1}") == f"∂θ{l}, d{head}², x{following}"


def test_the_command_gives_everything_as_json() -> None:
    result = typed("reproduce", "C38", "C22", "--json", "--seed", "3")
    first, second = json.loads(result.stdout)
    assert (first["id"], second["id"]) == ("C38", "C22")
    assert first["source"]["papers"].startswith("arXiv:2203.00555")
    assert first["verdict"] == "agrees in part"
    assert {"what", "predicted", "measured", "uncertainty", "agrees"} <= set(first["parts"][0])
    assert first["parts"][0]["null"] == {"value": 0.1, "meaning": "the size is that of the logits"}
    assert first["curves"]["lines"] and second["curves"] is None
    measured = [part["measured"] for part in second["parts"]]
    assert measured == [part.measured for part in CLAIMS["C22"].measure(3).parts]
    assert measured != [part.measured for part in CLAIMS["C22"].measure(0).parts]


def test_the_command_makes_a_page_with_charts(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    words = "reproduce", "C38", "C22", "--markdown", "--charts", folder
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
            assert line.replace("\\|", "").count("|") in (4, 5, 6), line
    assert any("| exact | seconds | agrees in part |" in line for line in page)


def test_the_page_in_docs_is_of_these_claims() -> None:
    assert "`deepstack reproduce --recorded --markdown --charts docs/claims`" in PAGE
    assert list(PUBLISHED) == [c.id for c in all_claims()]
    for c in all_claims():
        verdict, formula = PUBLISHED[c.id][0], reporting.escaped(f"`{c.formula}`")
        reach = reporting.reach(Measured(c))
        row = f"| [{c.id}](#{c.id.lower()}) | {formula} | {reach} | {c.tier} | {verdict} |"
        assert row in PAGE, c.id
        assert f"\nReach: {reporting.reach_sentence(Measured(c))}\n" in SECTIONS[c.id], c.id
        assert f"`{c.formula}`: **{verdict}**." in PAGE, c.id
    drawn = {path.stem for path in (ROOT / "docs" / "claims").iterdir()}
    assert drawn == {c.id for c in all_claims() if f"(claims/{c.id}.png)" in PAGE}


def test_wrong_options_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for words, message in (
        (["C99"], "unknown claim 'C99'"),
        (["--json", "--markdown"], "allowed one of them"),
        (["--charts", str(file)], "is a file"),
    ):
        result = typed("reproduce", "C4", *words)
        assert result.exit_code == 2 and message in result.stderr
        assert result.stdout == "" and " s " not in result.stderr


def test_a_refuted_claim_exits_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    @claim("C0", LAYER_CAKE)
    def wrong(seed: int) -> Finding:
        """1 = |2| and x*y_i_."""
        bound = part_of("|x|", 1.0, 2.0, 0.1, "<=", stated=False)
        parts = [part_of("x*y* E[z]", 1.0, 2.0, 0.0, null=Null(0.0, "z_i_ = 0")), bound]
        lines = [Line("a line", [1, 2], [0.1, 0.3], False), Line("points", [1, 2], [0, 0.2])]
        return Finding(parts, "It is not.", Curves("x", "y", lines))

    monkeypatch.setenv("COLUMNS", "200")
    result = typed("reproduce", "C0", "C5")
    assert result.exit_code == 0
    for words in ("x*y* E[z]", "disagrees", "E‖z‖² = d (α² + v²w²)", "predicted"):
        assert words in result.stdout
    assert "C5" in result.stderr and " s " in result.stderr
    page = typed("reproduce", "C0", "--markdown").stdout
    assert "| x\\*y\\* E[z] | 1 | 0: z\\_i\\_ = 0 | 2 | disagrees |" in page
    assert "| \\|x\\| | ≤ 1 | 100: far away | 2.00 ± 0.10 | beside: disagrees |" in page


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
        "from deepstack_lab.ledger.claims import Finding, Null, Part, Source, claim\n"
        "@claim('mine', Source('My notes', ''))\n"
        "def mine(seed):\n"
        "    '1 = 1.'\n"
        "    null = Null(0.0, 'nothing')\n"
        "    return Finding([Part('one', 1.0, 1.0, 0.0, null=null)], 'Nothing was done.')\n"
    )
    (found,) = json.loads(typed("reproduce", "mine", "--plugin", file, "--json").stdout)
    assert (found["formula"], found["verdict"]) == ("1 = 1", "agrees")
    assert found["source"] == {"title": "My notes", "address": "", "papers": "", "authors": ""}


def test_claims_are_listed() -> None:
    assert "E[y²] = gain² E[x²]" in typed("list", "claims").stdout
    markdown = typed("list", "claims", "--markdown").stdout
    assert r"E\[y²\] = gain² E\[x²\]" in markdown, "square brackets are no markup"
    listed = json.loads(typed("list", "claims", "--json").stdout)
    assert [row["name"] for row in listed] == [one.id for one in all_claims()]
    assert {f"C{n}" for n in range(1, 49)} <= {row["name"] for row in listed}


def test_a_crossing_lies_between_two_steps_or_after_the_last() -> None:
    assert crossing([0.0, 1.0, 3.0], 2.0) == 1.5
    assert crossing([4.0, 2.0, 1.0], 2.0) == 1.0
    assert crossing([0.0, 1.0], 2.0) == 2.0
