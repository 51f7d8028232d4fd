"""Is my change better?  Exit codes, and how often the decision is wrong on simulated losses.

The losses are normal, and each seed of each command has its own; nothing of the product's
statistics is used to make or to count them.  docs/own_trainer.md has the table, which
`python tests/tools/own_trainer/test_verdicts.py` prints.
"""

import math
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import refusal, typed

from deepstack.runs.outcomes import Result
from deepstack.tools.answer import find
from deepstack.tools.answer.grow import Growth, Point, grow
from deepstack.tools.answer.looks import growing
from deepstack.tools.own_trainer.verdict import BETTER, NOT_BETTER, UNDECIDED, verdict_of

TRAINER = Path(__file__).with_name("trainer.py")
DEVIATION, LOSS = 0.03, 2.5
MOST = 32  # seeds of each command
STUDIES = 1000


def decided(
    difference: float, number: int, shared: float = 0.0, diverged: Collection[str] = ()
) -> tuple[int, Growth]:
    """Exit code and growth of a study whose candidate is so many deviations better.

    shared: part of the variance that a seed has in common for both commands.
    diverged: the commands whose seed 1 diverges.
    """
    rng = np.random.default_rng((number, round(1000 * abs(difference)), round(100 * shared)))
    common = rng.normal(0, DEVIATION * math.sqrt(shared), MOST)
    own = rng.normal(0, DEVIATION * math.sqrt(1 - shared), (2, MOST))
    losses = LOSS + common + own
    losses[1] -= difference * DEVIATION
    names = ["baseline", "candidate"]
    known = [(name, seed) for name in names for seed in range(3)]

    def result(name: str, seed: int) -> Result:
        if name in diverged and seed == 1:
            return Result(name, name, 0, math.nan, seed, "diverged", None, None)
        loss = losses[names.index(name)][seed]
        return Result(name, name, 0, math.nan, seed, "done", loss, None)

    def measure(points: Sequence[Point]) -> list[Result]:
        known.extend((point.setting, point.seed) for point in points)
        return [result(*one) for one in known]

    growth = grow(measure, growing())
    return verdict_of(growth.found, [result(*one) for one in known]).exit_code, growth


def verdicts(difference: float, studies: int, shared: float = 0.0) -> tuple[Counter[int], float]:
    """The number of studies by exit code, and the mean number of runs."""
    ends = [decided(difference, number, shared) for number in range(studies)]
    return Counter(code for code, _ in ends), float(np.mean([one.runs for _, one in ends]))


@pytest.mark.slow
def test_a_change_without_an_effect_is_seldom_called_better() -> None:
    codes, _ = verdicts(0.0, 300)
    assert codes[BETTER] <= 0.05 * 300 and codes[NOT_BETTER] <= 0.05 * 300, codes


@pytest.mark.slow
def test_a_change_of_one_deviation_is_mostly_found() -> None:
    codes, runs = verdicts(1.0, 100)
    assert codes[BETTER] >= 50 and codes[NOT_BETTER] <= 1, codes
    assert 2 * 6 < runs < 2 * MOST


def test_each_decision_has_its_exit_code() -> None:
    assert decided(6.0, 0)[0] == BETTER
    assert decided(-6.0, 0)[0] == NOT_BETTER
    assert {decided(0.0, number)[0] for number in range(4)} == {UNDECIDED}


def test_a_candidate_that_diverges_is_not_better() -> None:
    code, growth = decided(6.0, 0, diverged=["candidate"])
    text = "The losses of these settings cannot be compared: candidate diverges in 1 of 3 seeds."
    assert code == NOT_BETTER and growth.found.sentence == text and not growth.found.decided
    assert decided(6.0, 0, diverged=["baseline"])[0] == UNDECIDED
    assert decided(6.0, 0, diverged=["baseline", "candidate"])[0] == UNDECIDED


STUDY = f"""\
baseline: python -S {TRAINER} good 1e-3 {{seed}}
candidate: python -S {TRAINER} good RATE {{seed}}
metric: 'step (?P<step>\\d+): .*val loss ([0-9.]+)'
sweep: {{grid: {{seed: [0, 1, 2]}}}}
"""


@pytest.mark.slow
def test_a_study_of_a_change_ends_with_its_decision(tmp_path: Path) -> None:
    path = tmp_path / "change.yaml"
    path.write_text(STUDY.replace("RATE", "2e-3"))
    words = ("sweep", path, "--until", "decided", "--workers", 2, "--out", tmp_path / "results")
    done = typed(*words)
    assert done.exit_code == NOT_BETTER, done.output
    *_, sentence, saved, verdict = done.stderr.splitlines()
    assert sentence.startswith("decided after 12 runs: baseline is better than candidate: it ends")
    assert "interval over 6 looks" in sentence and "6 pairs of seeds" in sentence
    assert saved == "saved 52 runs of at most 64"
    assert verdict == "not better: keep the baseline (exit code 10)"
    again = typed(*words)
    assert again.exit_code == NOT_BETTER and "running" not in again.stderr


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("2.5 - float(r)", "each command prints one value for all seeds"),
        ("2.5 + int(s) / 100", "candidate prints the same values as baseline for 3 seeds"),
    ],
)
def test_losses_that_no_seed_can_decide_are_undecided_at_the_first_look(
    printed: str, words: str, tmp_path: Path
) -> None:
    """A script that ignores its seed has no spread, and one that ignores the change no effect."""
    script, path = tmp_path / "own.py", tmp_path / "change.yaml"
    script.write_text(f"import sys\nr, s = sys.argv[2:]\nprint('step 1: val loss', {printed})\n")
    path.write_text(STUDY.replace(str(TRAINER), str(script)).replace("RATE", "2e-3"))
    words_of_sweep = ("sweep", path, "--workers", 2, "--out", tmp_path / "results")
    done = typed(*words_of_sweep, "--until", "decided")
    assert done.exit_code == UNDECIDED, done.output
    assert f"undecided: {words}" in done.stderr and "12 runs" not in done.stderr
    without = typed(*words_of_sweep)
    assert without.exit_code == 0 and words in without.stderr


def test_a_comparison_needs_the_seed_in_both_commands(tmp_path: Path) -> None:
    path = tmp_path / "change.yaml"
    text = STUDY.replace("RATE {seed}", "1e-4 0").replace("sweep: {grid: {seed: [0, 1, 2]}}\n", "")
    path.write_text(text)
    error = refusal(2, "sweep", path, "--until", "decided", "--out", tmp_path)
    assert "--until: found candidate without {seed}; allowed a command that takes" in error


if __name__ == "__main__":
    for shared in (0.0, 0.5, 0.9):
        for difference in (0.0, 0.5, 1.0, 2.0):
            codes, runs = verdicts(
                difference, int(sys.argv[1]) if sys.argv[1:] else STUDIES, shared
            )
            shares = [f"{100 * codes[code] / codes.total():.1f} %" for code in (0, 10, 11)]
            print(
                f"| {shared:g} | {difference:g} | {' | '.join(shares)} | {runs:.1f} |", flush=True
            )


def at_depth(depth: int, name: str, losses: Sequence[float], rate: float = 0.1) -> list[Result]:
    """The seeds of a command at a depth; a loss that is not finite has diverged."""
    return [
        Result(name, name, depth, rate, seed, "done", loss, None)
        if math.isfinite(loss)
        else Result(name, name, depth, rate, seed, "diverged", None, None)
        for seed, loss in enumerate(losses)
    ]


BASE, LOWER, HIGHER = [2.50, 2.52, 2.49], [2.40, 2.41, 2.39], [2.80, 2.83, 2.79]


def exit_code_of(*results: list[Result]) -> int:
    every = [one for several in results for one in several]
    return verdict_of(find(every), every).exit_code


def test_a_candidate_that_is_worse_at_another_depth_is_not_better() -> None:
    deep = [at_depth(8, "baseline", BASE), at_depth(8, "candidate", LOWER)]
    shallow = at_depth(2, "baseline", BASE)
    assert exit_code_of(*deep, shallow, at_depth(2, "candidate", LOWER)) == BETTER
    assert exit_code_of(*deep, shallow, at_depth(2, "candidate", HIGHER)) == NOT_BETTER
    diverged = [2.40, math.inf, 2.39]
    assert exit_code_of(*deep, shallow, at_depth(2, "candidate", diverged)) == NOT_BETTER


def test_a_verdict_of_seeds_that_diverge_counts_them_and_claims_no_difference() -> None:
    every = [*at_depth(0, "baseline", BASE), *at_depth(0, "candidate", [2.1, math.inf, 2.1])]
    assert verdict_of(find(every), every).sentence == (
        "not shown to be better: 1 of 3 seeds of the candidate diverge, 0 of 3 of the baseline; "
        "keep the baseline (exit code 10)"
    )


def test_seeds_that_diverge_at_a_rate_that_is_not_chosen_do_not_count() -> None:
    every = [at_depth(0, "baseline", BASE, rate) for rate in (0.1, 0.2)]
    every += [at_depth(0, "candidate", LOWER, 0.1), at_depth(0, "candidate", [math.inf] * 3, 0.2)]
    assert exit_code_of(*every) != NOT_BETTER
