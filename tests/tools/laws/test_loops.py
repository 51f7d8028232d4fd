"""The law of looped stacks: its exponent, its interval, and studies that do not determine it."""

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import refusal, typed
from helpers.plot_runs import make_run

from deepstack.base.errors import NothingMatchedError
from deepstack.records import Run
from deepstack.tools.laws.loops import Size, fit_loops, size_of

PHI, POWER = 0.46, 0.35
TIMES, WIDTHS, STEPS = (1, 2, 4, 8), (48, 64, 96), (200, 400, 800)


def truth(width: int, times: int, steps: int, phi: float = PHI) -> float:
    """The loss of a prelude, a coda and eight layers, of which 8/times have own parameters."""
    layer = 12 * width**2
    return 1.1 + 9 / steps**0.5 + 40 * (2 * layer + times**phi * (8 // times) * layer) ** -POWER


def made(random: np.random.Generator, noise: float, seeds: int = 3) -> dict[Size, dict[int, float]]:
    """A study of these stacks, whose seeds differ in level and whose losses are noisy."""
    levels = 2 * noise * random.normal(size=seeds)
    return {
        Size(24 * d * d, 12 * d * d * (8 // r), r, t): {
            s: truth(d, r, t) + levels[s] + noise * random.normal() for s in range(seeds)
        }
        for d, r, t in product(WIDTHS, TIMES, STEPS)
    }


def test_losses_without_noise_have_the_exponent() -> None:
    law = fit_loops(made(np.random.default_rng(0), 1e-10), draws=3)
    assert (law.phi.value, law.a) == pytest.approx((PHI, POWER), rel=1e-3)
    assert law.residual < 1e-8 and (law.n, law.seeds) == (36, 3)


@pytest.mark.slow
def test_the_interval_holds_the_truth_in_95_of_100_studies() -> None:
    """Of 300 simulated studies; chance alone leaves 0.92 to 0.98 about once in 50."""
    inside, widths = [], []
    for study in range(300):
        phi = fit_loops(made(np.random.default_rng(study), 0.01), draws=200).phi
        inside.append(phi.low <= PHI <= phi.high)
        widths.append(phi.high - phi.low)
    share = sum(inside) / len(inside)
    assert 0.92 <= share <= 0.98, (share, float(np.median(widths)))


def test_two_seeds_have_no_interval() -> None:
    phi = fit_loops(made(np.random.default_rng(1), 1e-3, seeds=2)).phi
    assert abs(phi.value - PHI) < 0.2 and math.isnan(phi.low) and math.isnan(phi.high)


def test_studies_that_do_not_determine_it_are_refused() -> None:
    study = made(np.random.default_rng(2), 1e-3)
    for kept, message in (
        ({s: v for s, v in study.items() if s.times == 1}, "two numbers of loops"),
        ({s: v for s, v in study.items() if s.once == 24 * 48**2}, "two sizes or more"),
        (dict(list(study.items())[::7]), "found 6"),
        ({s: {k: -x for k, x in v.items()} for s, v in study.items()}, "not|limit|determined"),
        ({s: {k: float(i % 5 + k) for k in v} for i, (s, v) in enumerate(study.items())}, "."),
    ):
        with pytest.raises(NothingMatchedError, match=message):
            fit_loops(kept, draws=20)


def stacks() -> Iterator[tuple[int, int, int, int]]:
    yield from product((16, 32, 64), (1, 2, 4), (10, 20), range(3))


def test_the_command_reads_loops_from_runs(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for width, times, steps, seed in stacks():
        unique = 8 // times
        loop = {"unique_layers": unique, "prelude_layers": 1, "coda_layers": 1}
        model = {"d_model": width, "n_heads": 2, **(loop if times > 1 else {})}
        make_run(
            tmp_path / "s", depth=10, seed=seed, steps=steps, d_ff=4 * width,
            lr=1e-3 / width + 1e-6 * steps + 1e-7 * times,
            masked=truth(width, times, steps) + 1e-4 * noise.normal(),
            config={f"model.{key}": value for key, value in model.items()},
        )  # fmt: skip
    done = typed("fit", tmp_path / "s", "--law", "loops", "--json")
    assert not done.stderr, done.stderr
    (row,) = json.loads(done.stdout)
    # without a loop all ten layers are run once, and times 1 makes no difference
    assert row["phi_low"] < PHI < row["phi_high"] and row["phi_high"] - row["phi_low"] < 0.1
    assert (row["n"], row["seeds"]) == (18, 3) and row["residual"] < 1e-3
    assert "two numbers of loops" in refusal(
        7, "fit", tmp_path / "s", "--law", "loops", "--where", "unique_layers=4"
    )
    assert "no chart" in refusal(2, "fit", tmp_path / "s", "--law", "loops", "--to", tmp_path / "c")


def test_a_layer_counts_once_however_often_it_is_run(tmp_path: Path) -> None:
    loop = {"unique_layers": 2, "prelude_layers": 1, "coda_layers": 2, "d_model": 16, "n_heads": 2}
    path = make_run(
        tmp_path, depth=11, d_ff=40, config={f"model.{key}": value for key, value in loop.items()}
    )
    layer = 4 * 16**2 + 2 * 16 * 40
    assert size_of(Run(path)) == (3 * layer, 2 * layer, 4, 5)
    loop["unique_layers"] = 8
    for seed, settings in enumerate((loop, {"d_model": 16, "n_heads": 2})):
        config = {f"model.{key}": value for key, value in settings.items()}
        path = make_run(tmp_path, depth=11, d_ff=40, seed=seed, config=config)
        assert size_of(Run(path)) == (0, 11 * layer, 1, 5)
