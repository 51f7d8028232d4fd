"""The page of an answer: its forms, its commands, its sources."""

import json
import math
import re
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers import QUICK, ROOT
from helpers.command_line import TINY, refusal, succeed
from helpers.plot_runs import make_run
from helpers.small_runs import small

import deepstack
from deepstack.config import with_overrides
from deepstack.records import Run, RunFolder
from deepstack.schemes import SCHEMES
from deepstack.tools.answer.citations import entry_of, known_entries

HOSTILE = "<b>50 % of $x_1$ & #y</b> {z}"


SETTINGS = {
    "model.family": "encoder", "model.n_heads": 2, "model.activation": "relu", "task.seq_len": 16,
    "train.optimizer": "adamw", "train.batch_size": 4, "train.schedule": "linear",
    "train.warmup_steps": 1,
}  # fmt: skip


def schemes_study(root: Path) -> Path:
    """Two schemes at two depths, three seeds; Post-LN stays at chance at 48 layers."""
    for scheme, depth, loss in (
        ("deepnorm", 6, 2.5), ("deepnorm", 48, 2.6), ("post_ln", 6, 2.55), ("post_ln", 48, 3.25)
    ):  # fmt: skip
        step = 0.02 if scheme == "deepnorm" else 0.01
        for seed in range(3):
            ends: Any = {"seed": seed, "masked": loss + step * (seed % 2), "config": SETTINGS}
            make_run(root / "s", scheme=scheme, depth=depth, **ends)
    return root / "s"


def test_runs_without_a_result_are_named_and_give_no_exponent(tmp_path: Path) -> None:
    study = schemes_study(tmp_path)
    for seed in range(3):
        failed: Any = {"seed": seed, "state": "failed", "config": SETTINGS}
        make_run(study, scheme="deepnorm", depth=200, **failed)
    answer = deepstack.answer(study)
    assert answer.left_out == (f"3 runs left out: failed (deepstack ls {study})",)
    assert not [line for line in answer.found.details if "200" in line]
    assert any("N = 6 to 48" in line or "6 and 48" in line for line in answer.found.details)


@pytest.mark.parametrize("other", ["done", "diverged"])
def test_a_trainer_without_a_loss_to_compare_with_has_learned_nothing_and_failed_nothing(
    other: str, tmp_path: Path
) -> None:
    for seed, state in enumerate((other, "diverged", other)):
        ends: Any = {"seed": seed, "state": state, "references": {}, "config": SETTINGS}
        make_run(tmp_path / "s", **ends)
    answer = deepstack.answer(tmp_path / "s")
    assert f"diverges in {3 if other == 'diverged' else 1} of 3 seeds" in answer.sentence
    assert not [line for line in answer.found.sure if "learn" in line]


def test_seeds_that_change_nothing_show_no_difference(tmp_path: Path) -> None:
    """Three seeds of a trainer that ignores them are one observation."""
    for scheme, loss in (("deepnorm", 2.5), ("post_ln", 2.6)):
        for seed in range(3):
            ends: Any = {"seed": seed, "masked": loss, "config": SETTINGS}
            make_run(tmp_path / "s", scheme=scheme, depth=6, **ends)
    answer = deepstack.answer(tmp_path / "s")
    assert answer.sentence == (
        "It is undecided which of DeepNorm and Post-LN is better: DeepNorm ends 0.10 nats lower (3 "
        "pairs of seeds, which change nothing, so no interval); DeepNorm and Post-LN learn (3 of 3 "
        "seeds each)."
    )
    page = answer.page("markdown")
    assert "let the training use its seed" in page and "more runs would" not in page
    rows = deepstack.compare(tmp_path / "s", against="post_ln")
    (row,) = rows[rows["setting"] == "DeepNorm"].to_dict("records")
    assert row["difference"] == pytest.approx(-0.1) and math.isnan(row["diff_low"])


def test_the_page_has_the_sentence_in_every_form(tmp_path: Path) -> None:
    answer = deepstack.answer(schemes_study(tmp_path), HOSTILE)
    assert answer.sentence == (
        "DeepNorm learns at every depth; Post-LN learns at N = 6 and not at N = 48 (N = 6 and 48, "
        "3 seeds each); at N = 48 DeepNorm is better than Post-LN: it ends 0.647 nats below "
        "Post-LN (95 % interval 0.632 to 0.661, 3 pairs of seeds)."
    )
    assert answer.chart_name == "final_loss_vs_depth" and answer.figure is not None
    page = answer.page("html")
    assert "&lt;b&gt;50 % of $x_1$" in page and "<b>50" not in page
    assert answer.sentence in page and "data:image/svg+xml;base64," in page
    assert "default-src 'none'" in page and "<script" not in page
    assert answer.sentence in answer._repr_html_()
    text = answer.page("latex")
    assert r"\textbf{DeepNorm learns at every depth" in text and r"(95 \% interval" in text
    assert r"$x_1$" not in re.sub(r"(?s)\\begin.verbatim.*?\\end.verbatim.", "", text)
    assert r"50 \% of \$x\_1\$ \& \#y" in text
    assert r"~\cite{wang2022deepnet}" in text and r"\bibliography{answer}" in text
    text = answer.page("markdown")
    assert f"**{answer.sentence}**" in text and "[@wang2022deepnet]" in text
    assert "| Post-LN | 48 | 3 at chance | 3.253 ± 0.006 |" in text
    text = str(answer)
    assert " ".join(text.split()).count(answer.sentence) == 1 and "arXiv:2203.00555" in text
    assert max(map(len, text.partition("To repeat it")[0].splitlines())) <= 80


@pytest.mark.slow
def test_the_command_writes_page_and_figure(tmp_path: Path) -> None:
    study = schemes_study(tmp_path)
    path = Path(succeed("answer", study, "--format", "latex"))
    assert path == study / "answer" / "answer.tex" and path.with_suffix(".pdf").is_file()
    # TeX writes answer.pdf, and must not read it as the figure.
    assert "{answer_figure}" in path.read_text() and (study / "answer/answer_figure.pdf").is_file()
    assert "@misc{wang2022deepnet," in path.with_suffix(".bib").read_text()
    shown = succeed("answer", study, "--to", tmp_path / "x", "--question", "Who?")
    assert shown.startswith("Who?\n\nDeepNorm learns") and (tmp_path / "x/answer.svg").is_file()
    facts = json.loads(succeed("answer", study, "--json"))
    assert facts["decided"] and facts["kind"] == "depths" and len(facts["rows"]) == 4
    assert "allowed" in refusal(2, "answer", study, "--format", "pdf")
    assert "no run has state=running" in refusal(7, "answer", study, "--where", "state=running")


def test_an_empty_study_is_refused_in_one_line(tmp_path: Path) -> None:
    make_run(tmp_path / "s", state="interrupted")
    assert len(refusal(7, "answer", tmp_path).splitlines()) == 1


@pytest.mark.slow
def test_the_commands_train_the_same_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid with a rate for each depth: every run is done already, and further seeds are new."""
    monkeypatch.chdir(tmp_path)
    for depth, rate in ((2, 1e-3), (3, 5e-4)):
        config = deepstack.load_config(QUICK, [*TINY, f"model.depth={depth}", f"train.lr={rate}"])
        for scheme, seed in product(("post_ln", "deepnorm"), (0, 1)):
            one = with_overrides(config, {"model.scheme": scheme, "seed": seed})
            deepstack.train(one, study="s")
    answer = deepstack.answer("results")
    lines = [line for line in answer.repeat if " sweep " in line]
    states = []
    for line in lines:
        plan = json.loads(succeed(*shlex.split(line)[1:], "--dry-run", "--json"))
        states += [row["state"] for row in plan]
    assert states == ["done"] * 8 and len(lines) == 2
    text, commands = answer.next_runs
    assert re.match(
        r"2 more runs, about \d+ seconds? of steps one after another, would give an", text
    )
    (plan,) = (json.loads(succeed(*shlex.split(c)[1:], "--dry-run", "--json")) for c in commands)
    assert ["-s2-" in row["run"] for row in plan] == [True] * 2
    assert {row["state"] for row in plan} == {"new"}
    assert {row["model.scheme"] for row in plan} == {"post_ln", "deepnorm"}
    assert f"deepstack [@deepstack] {deepstack.__version__}" in answer.methods
    assert "N = 2 and 3 layers (d_model = 8" in answer.methods


def test_every_scheme_with_a_source_has_an_entry() -> None:
    keys = [key for key, _ in known_entries().values()]
    assert len(keys) == len(set(keys)) > 20
    numbers = set()
    for scheme in SCHEMES.values():
        entry = entry_of(scheme.label, scheme.paper)
        assert (entry is None) == scheme.paper.startswith("none"), scheme.name
        if entry is not None:
            assert re.match(rf"@misc{{{entry[0]},\n  \w+ = {{", entry[1]) and entry[1].endswith("}")
            numbers |= set(re.findall(r"eprint = \{(.*?)\}", entry[1]))
    assert set(known_entries()) <= numbers  # no entry is left over


def test_runs_of_a_plugin_scheme_have_a_page(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "s"))
    columns = run.folder.read_columns()
    columns["scheme"] |= {"label": "My_{own}", "paper": "arXiv:2601.99999"}
    run.folder.write_columns(columns)
    answer = deepstack.answer(run.path)
    assert "title = {{Source of the scheme My\\_ own}}" in answer.bibtex
    assert answer.page("latex").count(r"My\_\{own\}") >= 1


@pytest.mark.slow
def test_the_example_of_the_guide_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    guide = (ROOT / "docs/answer.md").read_text(encoding="utf-8")
    line, *blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", guide, re.MULTILINE)
    shown = succeed(*shlex.split(line)[1:], "--to", tmp_path)
    printed = " ".join(shown.split())
    assert len(blocks) >= 3
    for block in blocks[:3]:
        assert " ".join(block.split()) in printed, block


def test_runs_of_a_loop_of_the_user_have_no_command_and_no_methods(tmp_path: Path) -> None:
    """They have a config, and a command that is the user's script."""
    for scheme, seed in product(("deepnorm", "post_ln"), range(3)):
        ends: Any = {"seed": seed, "masked": 2.5 + 0.1 * seed * (scheme == "post_ln")}
        path = make_run(tmp_path / "s", scheme=scheme, **ends)
        RunFolder(path).write_meta({"command": "mine.py", "flops": {"step": 10}})
    answer = deepstack.answer(tmp_path / "s")
    assert answer.methods == "" and not any(" sweep " in line for line in answer.repeat)
    assert "more runs" in answer.next_runs[0] and answer.next_runs[1] == []


def test_a_diverged_run_lies_neither_below_nor_above_chance(tmp_path: Path) -> None:
    study = schemes_study(tmp_path)
    for seed in range(3):
        make_run(study, scheme="pre_ln", seed=seed, state="diverged", config=SETTINGS)
    rows = {(row["setting"], row["N"]): row["below"] for row in deepstack.answer(study).rows}
    assert rows["Pre-LN", 6] is None and rows["DeepNorm", 6] == pytest.approx(0.753, abs=0.01)


@pytest.mark.parametrize(("task", "words"), [("markov", ", the data and"), ("copy", "weights and")])
def test_the_methods_say_whether_a_seed_sets_the_data(
    task: str, words: str, tmp_path: Path
) -> None:
    deepstack.sweep(
        small(task__name=task, train__steps=1),
        {"seed": [0, 1], "train.optimizer": ["sgd", "adamw"]},
        study="s", out=tmp_path, workers=1,
    )  # fmt: skip
    text = deepstack.answer(tmp_path / "s").methods
    assert words in text and ("held-out set for each seed" in text) == (task == "markov")
    assert "steps of adamw or sgd" in text or "steps of sgd or adamw" in text
    assert "differed in optimizer" not in text
