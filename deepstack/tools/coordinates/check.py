"""`deepstack.coordinates`: the coordinate check of any PyTorch model; its assertion for tests."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepstack.base import ConfigError, unknown
from deepstack.runs import LEAST_SEEDS
from deepstack.tools.coordinates.cells import Cell, plain_layers, train_cell
from deepstack.tools.coordinates.exponent_fits import (
    exponents,
    finite_part,
    starts_equal,
    values_table,
)
from deepstack.tools.coordinates.kinds import modules_of, repeated_names
from deepstack.tools.coordinates.result import CoordinateCheck
from deepstack.tools.coordinates.rules import RULES, TOLERANCE
from deepstack.tools.coordinates.source import Batch, Loss, MakeOptimizer, load_source
from deepstack.tools.coordinates.stacks import find_stacks, outline_of

WIDTHS = (32, 64, 128)
DEPTHS = (4, 16, 64)
STEPS = (1, 3, 10)
SEEDS = 5


def coordinates(
    source: Any,
    batch: Batch | None = None,
    *,
    widths: int | Sequence[int] = WIDTHS,
    depths: int | Sequence[int] = DEPTHS,
    rule: str = "completep",
    seeds: int | Sequence[int] = SEEDS,
    steps: int | Sequence[int] = STEPS,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    tolerance: float = TOLERANCE,
    show: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> CoordinateCheck:
    """Check how the outputs of a model's modules, and their changes, depend on width and depth.

    Models of every width at the least depth, and of every depth at the least width, are trained
    for a few steps on one batch.

    source: a Python file or a module with `build`, `batch` and, if wanted, `loss` and `optimizer`,
        or the function build(width, depth, seed), which returns a torch.nn.Module.
    batch: seed -> a batch.
    widths, depths: sizes to compare; one value alone leaves its axis out.
    rule: mup, completep or depth-mup.
    seeds: the seeds, or how many, from 0 on; three at least.
    steps: of training, after which changes are measured.
    loss: (model, batch) -> the loss; by default the one that the batch tells (docs/coordinates.md).
    optimizer: (model, width, depth) -> an optimizer; by default Adam with one rate.
    tolerance: distance from the allowed exponents, outside of which a whole interval must lie.
    show: is called with a text, the number of models that are done, and of all.

    Returns the exponents and the modules that break the rule.  Raises ConfigError for functions
    that cannot be used, and if nothing is decided.
    """
    began = time.perf_counter()
    every = list(range(seeds)) if isinstance(seeds, int) else list(dict.fromkeys(seeds))
    wide, deep, at = (
        [numbers] if isinstance(numbers, int) else sorted(set(numbers))
        for numbers in (widths, depths, steps)
    )
    refuse(rule, tolerance, every, wide, deep, at)
    user = load_source(source, batch=batch, loss=loss, optimizer=optimizer)
    sizes = list(dict.fromkeys([*((w, deep[0]) for w in wide), *((wide[0], d) for d in deep)]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for small matrices, and the same numbers everywhere
    try:
        with torch.random.fork_rng(devices=[]):
            by_width = {w: outline_of(user.model(w, deep[0], every[0])) for w in wide}
            by_depth = {d: outline_of(user.model(wide[0], d, every[0])) for d in deep}
            stacks = find_stacks(by_depth) if len(deep) > 1 else {}
            cells: list[Cell] = []
            for width, depth in sizes:
                for seed in every:
                    show(f"width {width}, depth {depth}", len(cells), len(sizes) * len(every))
                    cells.append(train_cell(user, width, depth, seed, at, stacks))
    finally:
        torch.set_num_threads(threads)
    about_plain = without_plain(user.name, cells, plain_layers(cells))
    modules = modules_of(cells, by_width)
    table, note = finite_part(values_table(cells, repeated_names(cells)))
    if at[0] not in set(table["step"]):
        advice = "" if table.empty else "; lower the learning rate"
        raise ConfigError(f"{user.name}: {note}{advice}")
    for axis, outlines in (("width", by_width), ("depth", by_depth)):
        numbers, shapes = list(outlines), [outline.shapes for outline in outlines.values()]
        if shapes[1:] and shapes[1:] == shapes[:-1] and starts_equal(table, axis):
            raise ConfigError(
                f"{user.name}: build(width, depth, seed) ignores {axis}: the models of {axis} "
                f"{numbers[0]} and {numbers[-1]} are equal; allowed models that differ"
            )
    result = CoordinateCheck(
        name=user.name,
        rule=rule,
        tolerance=tolerance,
        widths=wide,
        depths=deep,
        steps=at,
        seeds=every,
        modules=modules,
        rows=exponents(table, modules, rule, tolerance),
        values=table,
        notes=[*filter(None, [note, note_on(deep), about_plain]), *user.notes],
    )
    if not result.counts["holds"] and result.holds:
        raise ConfigError(
            f"{user.name}: no interval is narrow enough for a verdict; give more seeds than "
            f"{len(every)}, or sizes that lie further apart"
        )
    result.seconds = time.perf_counter() - began
    return result


def note_on(depths: Sequence[int]) -> str:
    """Return a note on a stack of one layer among several depths, or ''."""
    is_one = len(depths) > 1 and depths[0] == 1
    return "depth 1 lies below most base depths: if a rule breaks, leave it out" if is_one else ""


def without_plain(name: str, cells: Sequence[Cell], plain: Sequence[str]) -> str:
    """Leave out the branches of layers that do not add to their input; return a note, or ''.

    Raises ConfigError if several depths are compared and no layer does: rules in depth are for
    layers that do.
    """
    for cell in cells:
        cell.values = [v for v in cell.values if v.quantity != "branch" or v.name not in plain]
    if not plain:
        return ""
    if len({cell.depth for cell in cells}) > 1 and set(plain) == set().union(
        *(cell.shares for cell in cells)
    ):
        raise ConfigError(
            f"{name}: no layer adds to its input, and the rules in depth are for residual layers; "
            "allowed one depth, as in --depths 4, with several widths"
        )
    more = f" and {len(plain) - 3} more" if len(plain) > 3 else ""
    names = f"{', '.join(plain[:3])}{more}"
    return f"not judged as residual layers, which add to their input: {names}"


def refuse(
    rule: str,
    tolerance: float,
    seeds: Sequence[int],
    widths: list[int],
    depths: list[int],
    steps: list[int],
) -> None:
    """Raise ConfigError for an unknown rule, or numbers that give no exponent or no verdict."""
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigError(f"tolerance: found {tolerance:g}; allowed a finite number from 0 on")
    if rule not in RULES:
        raise ConfigError(f"rule: {unknown('rule', rule, RULES)}")
    if len(seeds) < LEAST_SEEDS:
        raise ConfigError(
            f"seeds: found {len(seeds)}; allowed {LEAST_SEEDS} or more, as in 0,1,2: an exponent "
            "without an interval breaks no rule"
        )
    for name, numbers in (("widths", widths), ("depths", depths), ("steps", steps)):
        if not numbers or numbers[0] < 1:
            raise ConfigError(f"{name}: found {numbers}; allowed whole numbers from 1 on")
    if len(widths) < 2 and (len(depths) < 2 or rule == "mup"):
        more = "µP is a rule for width alone" if rule == "mup" else "one width and one depth"
        raise ConfigError(
            f"widths: found {widths}, depths: found {depths}: {more}; allowed two widths or more, "
            "as in 32,64,128" + (", or two depths" if rule != "mup" else "")
        )


def assert_coordinates(source: Any, batch: Batch | None = None, **options: Any) -> CoordinateCheck:
    """Assert in a test that a model keeps the rule; return the check.

    Arguments as in `deepstack.coordinates`.  Raises AssertionError with the first module that
    breaks it and the usual cause.
    """
    check = coordinates(source, batch, **options)
    assert check.holds, check.text
    return check
