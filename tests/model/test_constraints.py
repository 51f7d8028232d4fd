"""Matrices that a scheme keeps somewhere: put back at the start and after each step, in any way."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.sampling import some
from helpers.small_runs import data_of, small, step_of, weights_of
from torch import Tensor

import deepstack
from deepstack.base.errors import PluginError
from deepstack.model import build_model
from deepstack.schemes import Parts, Scheme
from deepstack.schemes.role import parameter

SHAPES = {
    "q": (16, 16), "k": (16, 16), "v": (16, 16), "o": (16, 16), "w1": (64, 16), "w2": (16, 64),
    "scheme": (16, 16),
}  # fmt: skip
MATRICES = ("qkv", ".q", ".k", ".v", ".o", "w1", "w2", "w3", "w13", "mix")


@pytest.fixture
def own() -> Any:
    """A scheme whose matrices have rows of norm 1/2, in layer 1 of norm `first`."""

    class Own(Scheme, name="own", label="Own", paper="none", static=True):
        """x <- LN(x + M G(x)), rows of matrices of norm 1/2, or `first` in layer 1."""

        families = "encoder", "decoder", "encoder_decoder"
        asked: ClassVar[list[Any]] = []

        def __init__(self, layer: int, depth: int, parts: Parts, *, first: float = 1.0) -> None:
            super().__init__(layer, depth, parts)
            self.mix = parameter(parts.d_model, parts.d_model, role="scheme", start="matrix")

        @classmethod
        def project(cls, role: str, matrices: Any, *, first: float = 1.0) -> None:
            cls.asked.append((role, tuple(matrices.shape), cls.place.side))
            assert not torch.is_grad_enabled()
            matrices.div_(2 * matrices.norm(dim=2, keepdim=True))
            matrices[0].mul_(2 * first)

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x + G(x) @ self.mix.t())

    return Own


def config(**more: Any) -> Any:
    usual = {"model__scheme": "own", "model__depth": 3, "runtime__device": "cpu"}
    return small(**(usual | {"train__steps": 4, "train__lr": 0.01} | more))


def assert_kept(state: dict[str, Tensor], first: float = 1.0) -> None:
    """Every matrix in the layers has rows of norm 1/2, in the first layer of norm `first`."""
    matrices = {k: v for k, v in state.items() if k.endswith(MATRICES) and ".layers." in k}
    assert len(matrices) >= 4
    for key, values in matrices.items():
        norms = values.norm(dim=2)  # (layers, n_out)
        norms[0] *= 0.5 / first
        torch.testing.assert_close(norms, torch.full_like(norms, 0.5), msg=key)


@pytest.mark.parametrize("banks", [True, False])
@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_a_scheme_is_given_all_layers_of_a_role_at_once(own: Any, banks: bool, family: str) -> None:
    sides = {"model__family": family, "model__decoder_depth": 2 if "decoder" in family else None}
    built = build_model(config(runtime__banks=banks, **sides), vocab_size=257)
    wanted = [(role, (3, *shape), "encoder") for role, shape in SHAPES.items()]
    if "decoder" in family:
        crossing = {f"cross_{role}": (16, 16) for role in "qkvo"}
        wanted += [(role, (2, *shape), "decoder") for role, shape in (SHAPES | crossing).items()]
    assert sorted(own.asked) == sorted(wanted)
    assert_kept(built.banks.state())


WAYS: list[dict[str, Any]] = [
    {},
    {"runtime__banks": False},
    {"runtime__replay": "python"},
    {"runtime__replay": "python", "runtime__banks": False},
    {"runtime__fused": False},
    {"runtime__recompute_every": 2},
]


@pytest.mark.parametrize(
    "more",
    some(
        [
            {},
            {"train__optimizer": "muon"},
            {"model__d_model": 15, "model__n_heads": 3, "model__d_ff": 7, "model__gated": True},
            {"train__optimizer": "sgd", "train__lr": 0.1},
            {"train__lr_factors": {"q": 0.5}},  # a separate matrix
            {"model__scheme_options": {"first": 2.0}, "train__clip": 0.01},
        ],
        3,
    ),
    ids=str,
)
def test_every_way_of_training_keeps_them_there(
    own: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    """A resumed run has the same bytes; ‖ΔF‖, F_0 and snapshots use the constrained weights."""
    first = None
    for index, way in enumerate(WAYS):
        if "train__lr_factors" in more and way.get("runtime__fused") is False:
            continue  # another order of sums
        run = deepstack.train(config(**more, **way), out=tmp_path / str(index))
        assert run.state == "done"
        if way.get("runtime__fused") is not False:
            first = first or data_of(run)
            assert data_of(run) == first, way
        assert_kept(weights_of(run), more.get("model__scheme_options", {}).get("first", 1.0))


def test_frozen_parameters_keep_their_start(own: Any, tmp_path: Path) -> None:
    given = config(train__trainable=["q", "w2", "bias"], train__steps=3)
    before = build_model(given, vocab_size=257).banks.state()
    own.asked.clear()
    after = weights_of(deepstack.train(given, out=tmp_path))
    assert_kept(after)
    for key in before:
        moved = key.endswith((".q", ".w2", "bias")) and ".layers." in key and "norm" not in key
        assert torch.equal(before[key], after[key]) is not moved, key
    drawn, later = own.asked[: len(SHAPES)], own.asked[len(SHAPES) :]
    assert {role for role, *_ in drawn} == set(SHAPES)
    assert {role for role, shape, _ in later if shape[0] == 3} >= {"q", "w2"}


def test_a_step_is_the_update_and_then_the_projection(own: Any) -> None:
    """By plain SGD, written out: W <- P(W - lr g)."""
    given = config(train__optimizer="sgd", train__momentum=0.0, train__clip=None)
    built = build_model(given, vocab_size=257)
    tokens = torch.arange(32).view(2, 16)

    before = {key: value.clone() for key, value in built.banks.state().items()}
    step_of(built, given)(tokens, tokens, 0.1)
    for bank in built.banks:
        expected = before[bank.key] - 0.1 * bank.gradients()
        if bank.in_layers and bank.start == "matrix":
            expected /= 2 * expected.norm(dim=2, keepdim=True)
            expected[0] *= 2
        torch.testing.assert_close(bank.values(), expected, msg=bank.key)


def test_a_constraint_that_returns_a_tensor_must_write_in_place() -> None:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)), rows of norm 1, or so it was meant."""

        @classmethod
        def project(cls, role: str, matrices: Any) -> Any:
            return matrices / matrices.norm(dim=2, keepdim=True)

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x + G(x))

    with pytest.raises(
        PluginError, match=r"own: .*test_constraints\.py:\d+: project gave .* place"
    ):
        build_model(config(), vocab_size=7)
