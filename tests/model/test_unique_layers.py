"""Looped stacks: repeated layers share parameters, whose gradients are summed."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import scheme_literals as literals
from helpers.command_line import typed
from helpers.sampling import some
from helpers.scheme_pieces import TOKENS, perturbed, pieces
from helpers.small_runs import data_of, small, weights_of
from torch.func import functional_call

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.model import build_model
from deepstack.training import mean_loss, temporary_run

LOOPED = {
    "model__scheme": "looped", "model__depth": 6, "model__unique_layers": 2, "train__steps": 4,
    "task__name": "markov", "task__seq_len": 8, "task__states": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("around", "sources"),
    [((0, 0), [0, 1, 0, 1, 0, 1]), ((1, 1), [0, 1, 2, 1, 2, 5]), ((2, 0), [0, 1, 2, 3, 2, 3])],
)
def test_a_looped_stack_takes_the_steps_of_shared_parameters(
    around: tuple[int, int], sources: list[int]
) -> None:
    """Plain SGD: the gradients of the layers that repeat one are added."""
    parts = dict(zip(("model__prelude_layers", "model__coda_layers"), around, strict=True))
    sgd = {"train__optimizer": "sgd", "train__clip": None, "runtime__fused": False}
    config = small(**LOOPED | parts | sgd)
    with temporary_run(config) as run:
        model, (inputs, targets) = run.state.built.model, run.batch(1)
        start = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        mean_loss(functional_call(model, start, (inputs,)), targets).backward()
        measured = run.step(inputs, targets, 0.3)

    def source(name: str) -> str:
        """The parameter that this one repeats."""
        return re.sub(r"(?<=layers\.)\d+", lambda layer: str(sources[int(layer[0])]), name)

    total: dict[str, Any] = defaultdict(int)
    for name, p in start.items():
        total[source(name)] += p.grad
    norm = torch.stack([gradient.norm() for gradient in total.values()]).norm()
    torch.testing.assert_close(measured.grad_norm, norm, rtol=1e-4, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, start[name] - 0.3 * total[source(name)], msg=name)


@pytest.mark.parametrize(
    "settings",
    some(
        [
            {"train__steps": 55, "runtime__replay": "python"},
            {"train__optimizer": "muon", "runtime__banks": False},
            {"model__scheme": "admin", "runtime__fused": False},
        ],
        3,
        1,
    ),
    ids=str,
)
def test_copies_stay_equal_and_every_path_computes_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    run = deepstack.train(small(**LOOPED | settings), out=tmp_path / "one")
    other = {"runtime__banks": settings.get("runtime__banks") is False, "runtime__replay": False}
    plain = deepstack.train(small(**LOOPED | settings | other), out=tmp_path / "two")
    assert data_of(run) == data_of(plain)
    for name, values in weights_of(run).items():
        if ".layers." in name:
            assert torch.equal(values[:2].repeat(3, *[1] * (values.ndim - 1)), values), name
    assert run.meta["parameters"]["q"] == 2 * 16 * 16
    _, norms = run.layers("param_update_norm")
    assert norms.shape[1] == 6 and (norms[-1][:2] == norms[-1][2:4]).all() and norms[-1].all()
    _, gradients = run.layers("grad_norm")  # of each use of the parameters
    assert len(set(gradients[-1].tolist())) == 6


def test_a_plan_of_looped_stacks_counts_each_parameter_once_and_times_other_depths() -> None:
    grid = "model.depth=6,12", "model.unique_layers=3"
    plan = json.loads(typed("sweep", "quick", *grid, "--dry-run", "--json").stdout)
    once, whole = (row["parameters"] for row in plan[:2])
    assert once == whole < 60_000


def test_prelude_and_coda_count_and_are_not_repeated(tmp_path: Path) -> None:
    parts = {"model__prelude_layers": 1, "model__coda_layers": 1}
    run = deepstack.train(small(**LOOPED | parts), out=tmp_path)
    assert run.meta["parameters"]["q"] == 4 * 16 * 16
    for name, values in weights_of(run).items():
        if ".layers." in name:
            assert torch.equal(values[1:3], values[3:5]), name
            if name.endswith("w1"):
                assert len(torch.unique(values.flatten(1), dim=0)) == 4
    factor = build_model(small(**LOOPED | parts), vocab_size=6).model.schemes[0].factor
    assert factor == pytest.approx(1 / (2 * 2**0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__unique_layers": None, "model__coda_layers": 1}, "found null; allowed the number"),
        ({"model__prelude_layers": 1}, "a divisor of the 5 layers between prelude and coda, model"),
        ({"model__prelude_layers": 5}, "found 2; allowed a divisor of the 1 layers"),
    ],
    ids=str,
)
def test_a_loop_needs_layers_that_repeat(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"model.unique_layers: .*{message}"):
        small(**LOOPED | changes)


def test_the_looped_scheme_scales_by_repetitions_and_layers() -> None:
    for unique, factor in ((2, 1 / (3 * 2**0.5)), (1, 1 / 6), (None, 6**-0.5)):
        scheme = build_model(small(**LOOPED | {"model__unique_layers": unique}), vocab_size=6)
        assert scheme.model.schemes[5].factor == pytest.approx(factor)


def test_the_preludes_output_enters_every_loop() -> None:
    keys = {"prelude_layers": 1, "coda_layers": 1, "depth": 6, "unique_layers": 2}
    model = perturbed("parcae", 6, **{f"model__{key}": value for key, value in keys.items()})
    stream = model.last.enter(model.embed(TOKENS))
    for l, layer in enumerate(model.layers, start=1):
        expected = literals.parcae(pieces(layer, l, 6), stream, l in (2, 4), first=l == 2)
        stream = layer(stream)
        torch.testing.assert_close(stream, expected, rtol=1e-5, atol=2e-5)
    assert all(scheme.loops(6) == 2 for scheme in (type(s) for s in model.schemes))


def test_repeated_layers_exclude_a_spectral_penalty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it excludes"):
        deepstack.train(small(**LOOPED, train__spectral_penalty=0.1), out=tmp_path)
