"""The sentence of an answer says what is known: studies with known truth, and each kind."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from deepstack.base.errors import NothingMatchedError
from deepstack.runs.outcomes import Result
from deepstack.tools.answer.power import MOST_SEEDS, power_of, seeds_needed
from deepstack.tools.answer.sentence import find

CHANCE = 3.25
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)


def end(
    setting: str = "A", depth: int = 6, seed: int = 0, loss: float = 2.8, rate: float = 1e-3
) -> Result:
    state = "diverged" if math.isinf(loss) else "done"
    return Result(
        setting, setting, depth, rate, seed, state, None if state != "done" else loss, CHANCE
    )


def study(
    rng: np.random.Generator,
    settings: Sequence[str] = "AB",
    depths: Sequence[int] = (6,),
    seeds: int = 3,
    rates: Sequence[float] = (1e-3,),
    *,
    effect: float = 0.0,
    power: float = 0.0,
    noise: float = 0.03,
) -> list[Result]:
    """Results with known truth: `effect` nats between settings, best rate proportional to N^power.

    A seed shares a part of its noise over all settings, depths and rates.
    """
    results = []
    for seed in range(seeds):
        shared = rng.normal(0, noise)
        for i, setting in enumerate(settings):
            for depth in depths:
                for rate in rates:
                    away = math.log(rate / 4e-3) - power * math.log(depth / depths[0])
                    bowl = 0.1 * away**2 if len(rates) > 1 else 0.0
                    loss = 2.8 + i * effect + bowl + shared + rng.normal(0, noise)
                    results.append(end(setting, depth, seed, loss, rate))
    return results


# Each kind of study without an effect, and how many of 200 are simulated.
WITHOUT_EFFECT = [
    {"settings": "AB"},
    {"settings": "AB", "seeds": 5},
    {"settings": "ABCDE", "seeds": 4},
    {"settings": "AB", "depths": (6, 48)},
    {"settings": "A", "depths": (6, 48), "seeds": 4},
    {"settings": "AB", "rates": RATES},
    {"settings": "A", "depths": (6, 24), "rates": RATES},
    {"settings": "AB", "depths": (6, 24), "rates": RATES, "seeds": 4},
]


@pytest.mark.slow
def test_a_study_without_an_effect_shows_none_in_95_percent() -> None:
    """200 studies of all kinds; for each kind alone the rate of false claims is 5 % or less."""
    rng = np.random.default_rng(0)
    claims = [find(study(rng, **WITHOUT_EFFECT[i % 8])).decided for i in range(200)]  # type: ignore[arg-type]
    assert sum(claims) <= 0.05 * len(claims)
    for kind in WITHOUT_EFFECT[:4]:  # 3 standard errors of 300 studies above 5 %
        wrong = [find(study(rng, **kind)).decided for _ in range(300)]  # type: ignore[arg-type]
        assert np.mean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300), kind


@pytest.mark.slow
def test_a_clear_effect_is_named_with_its_sign() -> None:
    rng = np.random.default_rng(1)
    better, falls = [], []
    for _ in range(30):
        found = find(study(rng, "BA", seeds=5, effect=0.2))
        better.append(found.decided and found.sentence.startswith("B is better than A: it ends 0."))
        found = find(study(rng, "A", (6, 24, 96), 4, RATES, power=-0.25, noise=0.005))
        falls.append(found.decided and "rate of A falls with depth" in found.sentence)
    assert np.mean(better) >= 0.95 and np.mean(falls) >= 0.95


@pytest.mark.slow
def test_the_further_seeds_show_the_effect_as_often_as_promised() -> None:
    rng = np.random.default_rng(2)
    effect, deviation = 0.03, 0.03 * math.sqrt(2)
    seeds = seeds_needed(effect, deviation)
    assert seeds is not None
    shown = [
        (found := find(study(rng, "AB", seeds=seeds, effect=effect))).decided
        and found.sentence.startswith("A is better")
        for _ in range(400)
    ]
    assert abs(np.mean(shown) - 0.8) < 3 * math.sqrt(0.8 * 0.2 / 400) + 0.03


def test_the_number_of_seeds_is_the_tables() -> None:
    """Cohen's tables of the paired t test, 5 % two-sided, power 80 %."""
    assert seeds_needed(1.0, 1.0) == 10 and seeds_needed(0.5, 1.0) == 34
    assert seeds_needed(0.01, 1.0) is None and seeds_needed(9.0, 1.0) == 3
    assert power_of(5, 1.0, 1.0) == pytest.approx(0.4013, abs=1e-4)
    assert power_of(MOST_SEEDS, 0.0, 1.0) == pytest.approx(0.025, abs=1e-4)


def seeds_of(*losses: float, **others: float) -> list[Result]:
    """Results of one setting, a seed for each loss."""
    return [end(seed=i, loss=loss)._replace(**others) for i, loss in enumerate(losses)]


def test_one_run_says_what_it_learned_and_decides_nothing() -> None:
    one = find([end()])
    assert one.sentence == (
        "A with 6 layers learns in 1 of 1 seed: it ends 0.45 nats below a predictor without "
        "context (1 seed, no interval below 3; loss 2.80)."
    )
    assert not one.decided and one.more is not None and one.more.seeds == 2
    gone = find([end(loss=math.inf), end(seed=1)])
    assert gone.sentence == "A with 6 layers diverges in 1 of 2 seeds and learns in 1."
    with pytest.raises(NothingMatchedError, match="no finished run has a validation loss"):
        find([end()._replace(state="interrupted")])


# Losses of three seeds beside 3.25 without context, whether their interval decides anything, and
# the words for it.  Intervals: Student's t of 2 degrees, 4.303 standard errors.
VERDICTS = [
    ((2.8, 2.9, 2.7), True, "learns from context: it ends 0.45 nats below"),
    ((3.1599, 3.1592, 3.1606), True, "learns less than the 0.1 nats that count as learning: it"),
    ((3.16, 3.155, 3.10), True, "below a predictor without context (95 % interval 0.029 to 0.194"),
    ((3.4, 3.19, 3.1), False, "Undecided: the interval of A with 6 layers includes 0: it ends 0.0"),
    ((3.25, 3.90, 2.57), False, "0.01 nats below a predictor without context (95 % interval −1.6"),
    ((3.25, 3.26, 3.24), True, "learned nothing from context: it ends level, within 0.1 nats"),
    ((3.25, 3.33, 3.17), False, "Undecided"),  # the interval is wider than 0.1
    ((3.5, 3.52, 3.49), True, "does not learn from context: it ends 0.253 nats above"),
]


@pytest.mark.parametrize(("losses", "decided", "words"), VERDICTS)
def test_the_sentence_on_one_setting_follows_its_interval(
    losses: tuple[float, ...], decided: bool, words: str
) -> None:
    found = find(seeds_of(*losses))
    assert words in found.sentence and found.decided is decided, found.sentence
    if "level" in words:
        half = 4.303 * np.std(losses, ddof=1) / math.sqrt(3)
        assert abs(np.mean(losses) - CHANCE) + half < 0.1


def test_the_sentence_names_seeds_that_end_otherwise() -> None:
    found = find(seeds_of(3.16, 3.155, 3.10))
    assert found.sentence.endswith("; it learns in 1 of 3 seeds.")


def test_a_known_optimum_gives_the_share_of_what_can_be_learnt() -> None:
    losses = seeds_of(2.9, 2.91, 2.89, optimum=CHANCE - 0.7)
    assert "50 % of what can be learnt" in find(losses).sentence
    others = [one._replace(setting="B", loss=CHANCE - 0.07) for one in losses]
    shares = find([*losses, *others]).details
    assert "At N = 6 the settings have learnt of what can be learnt: A 50 %, B 10 %." in shares
    assert "what can be learnt" not in find(seeds_of(2.9, 2.91, 2.89)).sentence


def test_an_untrained_stack_has_not_learnt_however_low_it_begins() -> None:
    """A tied head over a residual stream gives the token that is shown a high logit."""
    found = find(seeds_of(2.8, 2.81, 2.79, start=2.8))
    assert "has learned nothing" in found.sentence and "its untrained stack" in found.sentence
    lower = find(seeds_of(2.3, 2.31, 2.29, start=2.8))
    assert "learns from context: it ends 0.500 nats below its untrained stack" in lower.sentence


def test_settings_that_learn_at_the_same_depths_share_a_clause() -> None:
    results = []
    for seed in range(3):
        for depth in (6, 48, 200):
            for setting in ("DeepNorm", "Pre-LN", "Post-LN"):
                fails = setting == "Post-LN" and (depth == 200 or (depth == 48 and seed))
                results.append(end(setting, depth, seed, 3.3 if fails else 2.8 + seed / 100))
    found = find(results)
    assert found.sentence.startswith(
        "DeepNorm and Pre-LN learn at every depth; Post-LN learns at N = 6, in 1 of 3 seeds at "
        "N = 48 and not at N = 200 (N = 6, 48 and 200, 3 seeds each); at N = 200 it is undecided"
    )
    assert (
        "Where 3 of 3 seeds learned, with 95 % confidence more than 36 % of all seeds would."
        in " ".join(found.sure)
    )


def test_an_open_question_names_the_runs_that_decide_it() -> None:
    losses = {"A": (2.80, 2.81, 2.79), "B": (2.83, 2.82, 2.86)}
    found = find([end(k, 6, s, loss) for k, each in losses.items() for s, loss in enumerate(each)])
    assert not found.decided and "undecided which of A and B is better" in found.sentence
    assert found.more is not None and found.more.seeds >= 1
    assert found.more.runs == 2 * found.more.seeds
    two = find(
        [end(k, 6, s, loss) for k, each in losses.items() for s, loss in enumerate(each[:2])]
    )
    assert two.more is not None and two.more.seeds == 1  # three give an interval
    assert "2 pairs of seeds, no interval below 3" in two.sentence


def test_a_difference_that_no_affordable_study_shows_is_bounded() -> None:
    noise = (0.02, -0.02, 0.01, -0.0099)
    found = find(
        [end(k, 6, s, 2.8 + (k == "B") * one) for s, one in enumerate(noise) for k in "AB"]
    )
    assert not found.decided and found.more is None
    assert "A difference above 0.029 nats is ruled out (95 %)" in found.details[0]


def test_a_best_rate_at_the_edge_has_no_exponent_and_asks_for_rates() -> None:
    rng = np.random.default_rng(3)
    results = study(rng, "A", (6, 48), 3, RATES[:3], noise=0.001)  # all at or below the best
    found = find(results)
    assert not found.decided and "has no exponent in N" in found.sentence
    assert found.more is not None and tuple(found.more.rates) == (8e-3, 16e-3)
    assert found.more.runs == 2 * 3


def test_at_one_depth_the_best_rate_is_named() -> None:
    results = [end("A", 6, s, 2.8 if r == 4e-3 else 3.2, r) for s in range(2) for r in RATES[:4]]
    assert "at its best rate (0.004), learns in 2 of 2 seeds" in find(results).sentence
    both = results + [one._replace(setting="B", loss=3.3) for one in results]
    assert "A at its best rate (0.004) learns (2 of 2 seeds)" in find(both).sentence


def test_optimizers_at_one_rate_carry_a_caveat_and_schemes_have_one_beside() -> None:
    def ends(**of_b: object) -> list[Result]:
        every = [end(k, 6, s, 2.8 + (k == "B") / 2 + s / 100) for k in "AB" for s in range(3)]
        return [
            one._replace(
                **{"optimizer": "adamw", "scheme": "A"} | (of_b if one.setting == "B" else {})
            )
            for one in every
        ]

    found = find(ends(optimizer="muon"))
    caveat = "compared at the rate 0.001 alone, and an optimizer's best rate may differ: add "
    assert found.sentence.endswith(f"; {caveat}the rates 0.0005, 0.001, 0.002.")
    other = find(ends(optimizer="muon", rate=0.02)).sentence
    assert "compared at the rate 0.001 of A and 0.02 of B alone" in other
    rates = [one._replace(rate=r, loss=one.loss) for one in ends(optimizer="muon") for r in RATES]
    for plain in (ends(), ends(scheme="B"), rates):
        assert "may differ" not in find(plain).sentence
    assert "a scheme's best rate may differ" in " ".join(find(ends(scheme="B")).sure)
    assert "may differ" not in " ".join(find(ends()).sure)


def test_depths_between_the_compared_ones_are_named() -> None:
    every = [end("A", n, s, 2.8 + s / 100) for n in (2, 6, 12, 24) for s in range(3)]
    assert find(every).sentence.endswith("; N = 6 and 12 between them are not compared.")
    assert (
        "between" in find(every[:9]).sentence
        and "6 between them is not" in find(every[:9]).sentence
    )
    assert "between them" not in find(every[:6]).sentence


def test_losses_of_two_tasks_are_not_compared() -> None:
    ends = [end(k, 6, s, 2.8 + s / 10) for k in "AB" for s in range(3)]
    found = find([one._replace(task=(("task.name", one.setting),)) for one in ends])
    assert found.sentence == "A and B learn (3 of 3 seeds each)."
    assert "Losses are not compared: task.name differs." in found.details


def test_seeds_that_did_not_learn_are_not_said_to_have_learned() -> None:
    learn = [one._replace(setting="A", scheme="A") for one in seeds_of(2.5, 2.51, 2.52)]
    losses = [3.25, 3.26, 3.27, 3.28, 3.29]
    fail = [one._replace(setting="B", scheme="B") for one in seeds_of(*losses)]
    both = " ".join(find([*learn, *fail]).sure)
    assert "Where 3 of 3 seeds learned, with 95 % confidence more than 36 % of all" in both
    assert "Where 5 of 5 seeds did not learn, with 95 % confidence more than 54 % of all" in both
    others = [one._replace(setting="C", scheme="C") for one in fail]
    assert "seeds learned" not in " ".join(find([*fail, *others]).sure)


def test_equal_losses_of_all_seeds_have_no_interval() -> None:
    text = find(seeds_of(2.5, 2.5, 2.5)).sentence
    assert "equal losses in all seeds" in text and "which change nothing, so no interval" in text
