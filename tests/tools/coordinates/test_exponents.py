"""Exponents, intervals, rules and causes of a coordinate check, for made values."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from deepstack.tools.coordinates.causes import RESIDUAL, cause_of, remedy
from deepstack.tools.coordinates.cells import Cell, Value
from deepstack.tools.coordinates.exponent_fits import (
    Exponent,
    breaks,
    exponents,
    finite_part,
    values_table,
)
from deepstack.tools.coordinates.result import CoordinateCheck
from deepstack.tools.coordinates.rules import BRANCH, RULES, Module, allowed, verdict

WIDTHS, DEPTHS, SEEDS = (32, 64, 128), (4, 16), (0, 1, 2, 3)
Powers = dict[tuple[str, str, int], tuple[float, float]]


def cells_of(powers: Powers, noise: float = 0.0) -> list[Cell]:
    """Return cells with values width^p depth^q: (module, quantity, step) -> (p, q).

    noise: deviation of each seed's exponent in width.
    """
    rng = np.random.default_rng(0)
    extra = {(key, seed): noise * rng.normal() for key in powers for seed in SEEDS}
    cells = []
    for width, depth, seed in itertools.product(WIDTHS, DEPTHS, SEEDS):
        values = [
            Value(*key, width ** (p + extra[key, seed]) * depth**q)
            for key, (p, q) in powers.items()
        ]
        cells.append(Cell(width, depth, seed, values))
    return cells


def rows_of(powers: Powers, modules: list[Module], rule: str = "completep") -> list[Exponent]:
    return exponents(values_table(cells_of(powers), ()), modules, rule, 0.25)


def by_key(rows: list[Exponent]) -> dict[tuple[str, str, str, int], Exponent]:
    return {row[:4]: row for row in rows}


def test_exponents_are_those_of_the_values_on_both_axes() -> None:
    powers: Powers = {("a", "size", 0): (0.0, -0.5), ("a", "own", 3): (0.75, 0.25)}
    found = by_key(rows_of(powers, [Module("a", "hidden", inside=True)]))
    expected = {
        ("a", "width", "size", 0): 0.0,
        ("a", "depth", "size", 0): -0.5,
        ("a", "width", "own", 3): 0.75,
        ("a", "depth", "own", 3): 0.25,
        ("a", "width", "relative", 3): 0.75,
        ("a", "depth", "relative", 3): 0.75,
    }
    assert {key: row.exponent for key, row in found.items()} == pytest.approx(expected, abs=1e-9)


def test_an_interval_is_students_over_the_slopes_of_seeds() -> None:
    key = ("a", "size", 0)
    cells = cells_of({key: (0.3, 0.0)}, noise=0.1)
    (row,) = (
        row
        for row in exponents(values_table(cells, ()), [Module("a", "hidden")], "mup", 0.25)
        if row.over == "width"
    )
    slopes = []
    for seed in SEEDS:
        points = [(c.width, c.values[0].value) for c in cells if (c.depth, c.seed) == (4, seed)]
        x, y = np.log(np.array(points)).T
        slopes.append(stats.linregress(x, y).slope)
    low, high = stats.t.interval(0.95, 3, np.mean(slopes), stats.sem(slopes))
    assert (row.exponent, row.low, row.high) == pytest.approx((np.mean(slopes), low, high))


def test_a_step_without_change_and_a_module_of_some_depths_have_no_exponent() -> None:
    cells = cells_of({("a", "change", 1): (0.0, 0.0), ("b", "change", 1): (0.0, 0.0)})
    for cell in cells:
        cell.values[0] = Value("a", "change", 1, 0.0 if cell.width == 64 else 1.0)
        if cell.depth == 4:
            del cell.values[1]
    modules = [Module("a", "hidden"), Module("b", "hidden")]
    found = by_key(exponents(values_table(cells, ()), modules, "completep", 0.25))
    assert set(found) == {("a", "depth", "change", 1)}


def test_steps_from_the_first_value_on_that_is_not_finite_are_left_out() -> None:
    cells = cells_of({("a", "change", step): (0.0, 0.0) for step in (1, 3, 10)})
    cells[5].values[1] = Value("a", "change", 3, math.nan)
    table, note = finite_part(values_table(cells, ()))
    assert set(table["step"]) == {1}
    assert note.startswith("not finite at step 3 (width 32, depth 16, seed 1)")


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.2, 0.2, "holds"), (0.26, 0.9, "grows"), (-0.9, -0.76, "falls"), (-0.7, -0.3, "holds"),
        (0.2, 0.3, "undecided"), (-3.0, 3.0, "undecided"), (math.nan, math.nan, "undecided"),
    ],
)  # fmt: skip
def test_a_module_breaks_a_rule_if_its_whole_interval_lies_outside(
    low: float, high: float, word: str
) -> None:
    assert verdict(low, high, (-0.5, 0.0), 0.25) == word
    assert verdict(low, high, None, 0.25) == ""


def test_one_late_step_alone_does_not_break_a_rule() -> None:
    module = Module("a", "hidden")
    late: Powers = {("a", "own", step): (float(step == 10), 0.0) for step in (1, 3, 10)}
    assert not list(breaks(rows_of(late, [module]), [module]))
    for last in (1, 3):
        early: Powers = {("a", "own", step): (float(step <= last), 0.0) for step in (1, 3, 10)}
        found = next(breaks(rows_of(early, [module]), [module]))
        assert [row.step for row in found] == ([1] if last == 1 else [1, 3])


def test_width_is_flat_in_all_rules_and_depth_follows_the_branch() -> None:
    hidden, norm = Module("a", "hidden", inside=True), Module("n", "norm", inside=True)
    for rule in RULES:
        assert allowed(rule, "width", "size", hidden) == (0.0, 0.0)
        assert allowed(rule, "width", "own", norm) == (0.0, 0.0)
        a = BRANCH[rule]
        expected = {"branch": -a, "relative": a - 1} if a else {"branch": None, "relative": None}
        for quantity, power in expected.items():
            found = allowed(rule, "depth", quantity, hidden)
            assert found == (None if power is None else (power, power))
    assert allowed("completep", "depth", "relative", Module("e", "embedding")) == (0.0, 0.0)
    assert allowed("depth-mup", "depth", "relative", Module("e", "embedding")) == (0.0, 0.0)


def test_attention_logits_fall_at_the_start_if_heads_get_wider() -> None:
    wide, many = Module("s", "softmax", grows=False), Module("s", "softmax", grows=True)
    assert allowed("mup", "width", "size", wide) == (-0.5, -0.5)
    assert allowed("mup", "width", "size", many) == (-0.5, 0.0)


TRAINING: list[tuple[Module, str, tuple[float, float], str]] = [
    (Module("a", "hidden", inside=True), "own", (1, 0), "learning rate of a hidden matrix"),
    (Module("a", "norm", inside=True), "own", (-1, 0), "learning rate of norm gains"),
    (Module("a", "embedding"), "own", (-1, 0), "learning rate of the embedding"),
    (Module("a", "input"), "own", (-1, 0), "learning rate of the input layer"),
    (Module("a", "readout", is_final=True), "own", (1, 0), "output multiplier"),
    (Module("a", "hidden", inside=True), "own", (0, -1), "learning rate of a hidden matrix"),
    (Module("a", "norm", inside=True), "own", (0, -1), "learning rate of norm gains"),
]


@pytest.mark.parametrize(("module", "quantity", "power", "cause"), TRAINING)
def test_the_kind_of_the_module_tells_the_cause(
    module: Module, quantity: str, power: Any, cause: str
) -> None:
    powers: Powers = {("a", "size", 0): (0.0, 0.0)}
    powers |= {("a", quantity, step): power for step in (1, 3)}
    rows = rows_of(powers, [module])
    assert cause_of(next(breaks(rows, [module])), {"a": module}, rows) == cause


@pytest.mark.parametrize(
    ("module", "quantity", "power", "cause"),
    [
        (Module("a", "hidden", inside=True), "size", (0.5, 0), "initial scale"),
        (Module("a", "softmax", grows=False), "size", (0, 0), "attention scale"),
        (Module("first input", "input of a layer"), "size", (0.5, 0), "scale of the embedding"),
        (Module("a", "logits", is_final=True, grows=False), "size", (0.5, 0), "output multiplier"),
        (Module("a", "block", inside=True), "branch", (0, 0), "residual multiplier"),
        (Module("a", "block", inside=True), "branch", (0, -0.5), "residual multiplier"),
    ],
)
def test_the_start_of_a_module_tells_the_cause(
    module: Module, quantity: str, power: Any, cause: str
) -> None:
    rows = rows_of({(module.name, quantity, 0): power}, [module])
    assert cause_of(next(breaks(rows, [module])), {module.name: module}, rows) == cause


@pytest.mark.parametrize(("end", "cause"), [(1, "learning rate of every parameter"), (2, "output")])
def test_steps_that_grow_together_have_one_cause(end: int, cause: str) -> None:
    """Without the output multiplier SGD's steps grow with width, and the output grows twice."""
    modules = [Module(str(i), "hidden") for i in range(5)] + [Module("e", "readout", is_final=True)]
    powers: Powers = {
        (module.name, "own", step): (float(end if module.is_final else 1), 0.0)
        for module in modules
        for step in (1, 3)
    }
    rows = rows_of(powers, modules)
    named = {module.name: module for module in modules}
    assert cause_of(next(breaks(rows, modules)), named, rows).startswith(cause)


def check_of(powers: Powers, modules: list[Module]) -> CoordinateCheck:
    values = values_table(cells_of(powers), ())
    return CoordinateCheck(
        name="build.py",
        rule="completep",
        tolerance=0.25,
        widths=list(WIDTHS),
        depths=list(DEPTHS),
        steps=[1, 3],
        seeds=list(SEEDS),
        modules=modules,
        rows=exponents(values, modules, "completep", 0.25),
        values=values,
    )


def test_the_first_module_is_the_first_of_the_start_and_then_of_training() -> None:
    stream = Module("middle input", "input of a layer", inside=True)
    modules = [Module("first.q", "hidden", inside=True), stream, Module("late", "block")]
    powers: Powers = {("first.q", "own", step): (1.0, 0.0) for step in (1, 3)}
    powers |= {("middle input", "change", step): (0.5, 0.0) for step in (1, 3)}
    trained = check_of(powers, modules)
    assert [one.module for one in trained.broken] == ["first.q", "middle input"]
    assert trained.first is not None
    assert trained.first.cause == "learning rate of a hidden matrix"
    started = check_of(powers | {("late", "branch", 0): (0.0, 0.0)}, modules)
    assert [one.module for one in started.broken] == ["late", "first.q", "middle input"]
    assert "in width      first.q: change by its own parameters after 1 step ∝ width^1.00" in (
        started.text
    )


@pytest.mark.parametrize(("rule", "factor"), [("completep", "1/depth"), ("depth-mup", "1/√depth")])
def test_the_remedy_of_a_branch_is_the_multiplier_of_its_rule(rule: str, factor: str) -> None:
    assert remedy(RESIDUAL, rule, "depth") == f"multiply every branch by {factor}"
