"""`deepstack reproduce`: tiers, runs, kept results and the page of all entries."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.claim_parts import FAR
from helpers.command_line import typed
from helpers.plot_runs import make_run

from deepstack.base.errors import PluginError
from deepstack.records import Run
from deepstack.runs import Runs
from deepstack_lab.ledger import measured as measuring
from deepstack_lab.ledger.claim import UnmeasuredError
from deepstack_lab.ledger.claims import CLAIMS, Null, Rule, claim
from deepstack_lab.ledger.run_values import along, best_rate, share_learnt
from deepstack_lab.ledger.sources import LAYER_CAKE

ONE = Rule("mean", 1.0, tolerance=0.2, null=FAR)


def entry(name: str = "C0", **more: Any) -> None:
    """Register an entry whose draws are 0.9, 1.0 and 1.1."""

    @claim(name, LAYER_CAKE, rules=more.pop("rules", (ONE,)), **more)
    def experiment(seed: int) -> dict[str, list[float]]:
        """E[x] = 1.

        Three draws.
        """
        return {"mean": [0.999, 1.0, 1.001 + seed]}


def shown(*words: str) -> dict[str, Any]:
    (result,) = json.loads(typed("reproduce", *words, "--json").stdout)
    return result


def test_a_rule_judges_the_draws_and_the_result_is_kept(tmp_path: Path) -> None:
    entry(place="Table 1", published="1.0", read="read off, ± 10 %")
    one = shown("C0", "--out", str(tmp_path))
    assert (one["verdict"], one["seeds"], one["place"]) == ("agrees", 3, "Table 1")
    assert one["draws"] == {"mean": [0.999, 1.0, 1.001]} and one["note"] == "Three draws."
    low, high = one["parts"][0]["interval"]
    assert low < 0.99 and high > 1.01  # 19.2 standard errors of three draws
    kept = json.loads((tmp_path / "ledger" / "C0.json").read_text())
    assert kept == one
    recorded = "C0", "--recorded", "--out", str(tmp_path)
    assert shown(*recorded) == one
    seed = "--seed", "9"
    assert shown(*recorded, *seed)["verdict"] == "not measured"
    other = shown("C0", "--out", str(tmp_path), *seed)
    assert other["draws"] == {"mean": [0.999, 1.0, 10.001]} and other["verdict"] == "undecided"
    assert shown(*recorded, *seed) == other and shown(*recorded) == one


def test_a_recorded_result_is_judged_by_the_present_rule(tmp_path: Path) -> None:
    entry()
    shown("C0", "--out", str(tmp_path))
    entry(rules=(Rule("mean", 2.0, tolerance=0.2, null=FAR),))
    assert shown("C0", "--recorded", "--out", str(tmp_path))["verdict"] == "disagrees"
    entry(rules=(Rule("another number", 2.0, null=FAR),))
    changed = shown("C0", "--recorded", "--out", str(tmp_path))
    assert changed["verdict"] == "not measured" and "rules have changed" in changed["reason"]
    for text in ("{}", "[" * 100_000):
        (tmp_path / "ledger" / "C0.json").write_text(text)
        result = typed("reproduce", "C0", "--recorded", "--out", tmp_path)
        assert result.exit_code == 5 and "delete the file and measure C0 again" in result.stderr


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tier": "cpu"}, "tier cpu"),
        ({"tier": "gpu"}, "tier gpu"),
        ({"needs": "a telescope"}, "needs a telescope"),
    ],
)
def test_an_entry_above_the_tier_is_not_measured(
    more: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    entry(**more)
    one = shown("C0", "--out", str(tmp_path))
    assert (one["verdict"], one["reason"], one["parts"]) == ("not measured", reason, [])
    assert one["rules"][0]["predicted"] == 1.0
    assert not (tmp_path / "ledger").exists()
    page = typed("reproduce", "C0", "--markdown", "--out", tmp_path).stdout
    assert (
        f"Not measured: {reason}." in page and "| mean | 1 (within 20%) | 100: far away |" in page
    )
    higher = shown("C0", "--tier", "cpu", "--out", str(tmp_path))["verdict"]
    assert higher == ("agrees" if reason == "tier cpu" else "not measured")


def test_no_rate_is_the_best_at_an_end_of_the_grid() -> None:
    rates = [1e-3, 2e-3, 4e-3]
    assert best_rate(rates, torch.tensor([2.0, 1.0, 2.0])) == pytest.approx(2e-3)
    for losses in ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [math.inf, math.nan, 1.0]):
        with pytest.raises(UnmeasuredError, match="at an end of the grid"):
            best_rate(rates, torch.tensor(losses))


def test_a_lost_rate_is_worse_than_all_others() -> None:
    rates = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    for lost in (math.inf, math.nan):
        losses = torch.tensor([lost, 2.0, 1.0, 2.0, lost])
        assert best_rate(rates, losses) == pytest.approx(4e-3)
        beside = torch.tensor([3.0, 2.0, 1.0, lost, lost])
        assert best_rate(rates, beside) == rates[2], "no parabola through a loss without a number"


def test_values_of_runs_are_in_the_order_of_seeds_whatever_the_order_of_runs(
    tmp_path: Path,
) -> None:
    places = [(n, seed) for n in (6, 12) for seed in (3, 1, 2)]
    made = [Run(make_run(tmp_path, depth=n, seed=seed)) for n, seed in places]
    numbers = {run.path: 100 * n + seed for run, (n, seed) in zip(made, places, strict=True)}
    for runs in (made, made[::-1]):
        depths, table = along(Runs(runs), lambda run: numbers[run.path])
        assert depths == [6, 12]
        assert table.tolist() == [[601, 1201], [602, 1202], [603, 1203]]


@pytest.mark.parametrize(("state", "share"), [("done", 0.25), ("diverged", 0.0)])
def test_what_a_run_learnt_is_a_share_of_what_context_gives(
    state: str, share: float, tmp_path: Path
) -> None:
    run = Run(make_run(tmp_path, state=state))
    evals = "step,loss,loss_masked,unigram_loss,optimal_loss\n0,6,6,3,1\n5,2.5,2.5,3,1\n"
    (run.path / "evals.csv").write_text(evals)
    assert share_learnt(Run(run.path)) == pytest.approx(share)


def test_draws_and_rules_name_the_same_numbers() -> None:
    entry(rules=(ONE, Rule("another", 1.0, null=FAR)))
    with pytest.raises(
        PluginError, match="claim C0: its experiment returned draws of mean; its ru"
    ):
        CLAIMS["C0"].measure()


def test_a_rule_that_cannot_fail_is_refused() -> None:
    with pytest.raises(PluginError, match="cannot fail"):
        Rule("x", 1.0, tolerance=0.1, null=Null(1.05, "no effect"))


@pytest.mark.slow
def test_an_entry_with_a_study_trains_the_runs_that_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.yaml").write_text(
        "name: ledger_tiny\n"
        "model: {depth: 1, d_model: 8, n_heads: 1}\n"
        "task: {name: copy, seq_len: 4}\n"
        "train: {steps: 1, batch_size: 2, eval_every: 0, eval_batches: 1}\n"
        "log: {layers_every: 0, probe_sequences: 1}\n"
        "sweep: {grid: {seed: [0, 1, 2]}}\n"
    )
    monkeypatch.setattr(measuring, "STUDIES", tmp_path)

    @claim("C0", LAYER_CAKE, tier="cpu", study="tiny.yaml", rules=(ONE,))
    def experiment(runs: Runs) -> dict[str, list[float]]:
        """Every run makes one step."""
        return {"mean": [len(run.steps) for run in runs]}

    out = str(tmp_path / "results")
    lacking = shown("C0", "--out", out)
    assert lacking["reason"] == "tier cpu: 3 of 3 runs lack"
    one = shown("C0", "--tier", "cpu", "--workers", "1", "--out", out)
    assert one["verdict"] == "agrees" and one["seconds"] > 0
    runs = sorted((tmp_path / "results" / "ledger_tiny").glob("*/steps.csv"))
    changed = [path.stat().st_mtime_ns for path in runs]
    assert len(runs) == 3
    assert shown("C0", "--out", out)["verdict"] == "agrees", "finished runs are read at any tier"
    assert [path.stat().st_mtime_ns for path in runs] == changed
    other = shown("C0", "--out", out, "--seed", "2")
    assert other["reason"] == "tier cpu: 3 of 3 runs lack"
    again = shown("C0", "--tier", "cpu", "--workers", "1", "--out", out, "--seed", "2")
    assert again["verdict"] == "agrees"
    seeds = {
        Run(path.parent).config["seed"] for path in (tmp_path / "results").glob("*/*/steps.csv")
    }
    assert seeds == {0, 1, 2, 2000, 2001, 2002}
