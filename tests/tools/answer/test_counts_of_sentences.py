"""Counts in the sentences of `answer`: seeds, settings and their limits."""

import statistics

import pytest

from deepstack.runs import Best, Cell, Result, mean_of
from deepstack.runs.intervals import UNKNOWN
from deepstack.tools.answer.looks import Looks
from deepstack.tools.answer.margins import gap_of
from deepstack.tools.answer.power import MOST_SEEDS
from deepstack.tools.answer.rates import spread_of
from deepstack.tools.answer.sentence import find, nothing_more, shares
from deepstack.tools.transfer import Transfer
from deepstack.tools.transfer.table import BestRate


def results(label: str, losses: list[float], floor: float = 3.0) -> list[Result]:
    return [
        Result(label, label, 6, 0.1, seed, "done", loss, floor) for seed, loss in enumerate(losses)
    ]


def best(label: str, losses: list[float]) -> Best:
    ends = {one.seed: one for one in results(label, losses)}
    return Best(Cell(label, 6, {0.1: ends}, {}), 0.1, "")


def test_the_share_of_seeds_is_that_of_the_cell_with_most() -> None:
    cells = [best("A", [2.0, 2.1, 2.2]), best("B", [2.0, 2.1, 2.2, 2.1, 2.0])]
    assert shares(cells) == [
        "Where 5 of 5 seeds learned, with 95 % confidence more than 54 % of all seeds would."
    ]
    none = [best("C", [3.1] * 4), best("D", [3.1, 3.1])]
    assert shares(none)[0].startswith("Where 4 of 4 seeds did not learn, with 95 % confidence")


def test_the_best_of_three_is_compared_with_two() -> None:
    every = [*results("A", [2.0, 2.1, 2.2]), *results("B", [2.5, 2.6, 2.8])]
    words = "settings is compared with each of the others."
    assert not any(words in text for text in find(every).sure)
    every += results("C", [2.7, 2.8, 2.9])
    assert f"The best of 3 {words}" in find(every).sure


@pytest.mark.parametrize(("looks", "most"), [(Looks(), MOST_SEEDS), (Looks(6), 32)])
def test_what_is_ruled_out_names_the_most_seeds_of_its_study(looks: Looks, most: int) -> None:
    gap = gap_of([best("A", [2.0, 2.1, 2.2, 2.0, 2.1, 2.2]), best("B", [2.1, 2.0, 2.2] * 2)], looks)
    assert gap is not None
    assert nothing_more(gap).endswith(f"would take more than {most} seeds.")


def test_what_is_ruled_out_has_the_digits_of_the_interval() -> None:
    losses = [2.0, 2.00002, 2.00001]
    gap = gap_of([best("A", losses), best("B", [2.00001, 2.0, 2.00002])], Looks())
    assert gap is not None and "above 0.00004 nats is ruled out" in nothing_more(gap)


def test_the_spread_of_an_exponent_is_the_deviation_of_its_seeds() -> None:
    values = [0.1, 0.2, 0.3, 0.4]
    mean = mean_of(values)
    rate = UNKNOWN._replace(value=1e-3)
    rates = [BestRate(depth, rate, 2.0, "", 4) for depth in (6, 24)]
    exponent = UNKNOWN._replace(value=mean.value, low=mean.low, high=mean.high)
    assert spread_of(Transfer(rates, exponent, {})) == (4, pytest.approx(statistics.stdev(values)))


@pytest.mark.parametrize(("third", "warns"), [("adamw", False), ("sgd", True)])
def test_one_rate_of_any_compared_optimizer_is_named(third: str, warns: bool) -> None:
    """The nearest rival has the leader's optimizer; a third setting may have another."""
    every = [
        one._replace(optimizer="adamw")
        for name, losses in (("A", [2.0, 2.1, 2.2]), ("B", [2.3, 2.4, 2.5]))
        for one in results(name, losses)
    ]
    every += [one._replace(optimizer=third) for one in results("C", [2.8, 2.9, 3.0])]
    assert ("an optimizer's best rate may differ" in find(every).sentence) == warns
