"""Norms, activations, initial distributions and biases that a configuration may choose."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.configs import config_with
from helpers.gradients import assert_same_gradients

import deepstack
from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.config import with_overrides
from deepstack.fast.fuse import fuse, norm_function
from deepstack.model import build_model
from deepstack.model.activations import ACTIVATIONS
from deepstack.model.build import Built
from deepstack.model.initialise import DISTRIBUTIONS
from deepstack.records import Run
from deepstack.schemes import NORMS, BatchNorm
from deepstack.schemes.norms import StackNorm

KINDS = list(NORMS)
small = partial(config_with, {
    "model.depth": 3, "model.d_model": 12, "model.n_heads": 3, "task.name": "markov",
    "task.seq_len": 8, "train.batch_size": 4, "train.steps": 3, "train.eval_every": 0,
    "train.eval_batches": 1, "runtime.device": "cpu", "runtime.threads": 1,
})  # fmt: skip


def built(**changes: Any) -> Built:
    return build_model(small(**changes), vocab_size=17)


def a_norm(kind: str, d: int = 5, *, gain: bool = True, bias: bool = True) -> StackNorm:
    torch.manual_seed(0)
    norm = NORMS[kind](d, eps=0.1, gain=gain, bias=bias, start=0.7)
    scalars = {"scale": torch.full((1,), 0.7), "shift": torch.full((1,), 0.2)}
    for name in dict(norm.named_parameters()):
        setattr(norm, name, torch.nn.Parameter(scalars.get(name, torch.randn(d))))
    return norm


def batch(z: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(z, dim=(0, 1), correction=0)
    return (z - mean) / (variance + 0.1).sqrt()


FORMULAS = {
    "layer": lambda z: F.layer_norm(z, z.shape[-1:], eps=0.1),
    "rms": lambda z: F.rms_norm(z, z.shape[-1:], eps=0.1),
    "batch": batch,
    "dynamic_tanh": lambda z: torch.tanh(0.7 * z),
    "dynamic_erf": lambda z: torch.erf(0.7 * z + 0.2),
    "bounded_tanh": lambda z: torch.tanh(
        0.7 * z / (10 * z.square().mean(-1, True).add(0.1).sqrt())
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_norms_are_their_formulas(kind: str, gain: bool, bias: bool) -> None:
    norm = a_norm(kind, gain=gain, bias=bias)
    assert (norm.gain is not None, norm.bias is not None) == (gain, bias)
    z = 2 * torch.randn(3, 4, 5) + 1
    wanted = FORMULAS[kind](z)
    wanted = wanted * norm.gain if norm.gain is not None else wanted
    wanted = wanted + norm.bias if norm.bias is not None else wanted
    for function in (norm, norm_function(norm)):
        torch.testing.assert_close(function(z), wanted, rtol=1e-5, atol=1e-5)
    half = z.bfloat16()  # as a product under autocast leaves it
    for function in (norm, norm_function(norm)):  # in fp32, and so is the result
        torch.testing.assert_close(function(half), norm(half.float()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer", "rms", "dynamic_tanh"])
def test_a_subclass_of_a_norm_with_a_fast_form_runs_as_its_own_module(kind: str) -> None:
    class Doubled(NORMS[kind], name="doubled"):  # type: ignore[misc]
        """2 norm(z)."""

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(z)

    def hidden(name: str, fused: bool) -> torch.Tensor:
        more = {"model__norm__kind": name, "model__qk_norm": True, "model__scheme": "pre_ln"}
        model = built(**more).model
        if fused:
            fuse(model.layers)
        return model.hidden(torch.arange(16).view(2, 8))

    norm = a_norm("doubled")
    assert norm_function(norm) is norm
    plain, fused = hidden("doubled", False), hidden("doubled", True)
    torch.testing.assert_close(fused, plain)
    assert not torch.allclose(plain, hidden(kind, False))


def test_steps_of_a_norm_that_promises_nothing_are_not_recorded(tmp_path: Path) -> None:
    class Plain(NORMS["layer"], name="plain"):  # type: ignore[misc]
        """LN(z); the promise of LayerNorm is not inherited."""

    assert NORMS["layer"].static and not NORMS["plain"].static
    given = small(model__norm__kind="plain", runtime__replay=True)
    with pytest.raises(ConfigError, match="needs a norm that declares static=True"):
        deepstack.train(given, out=tmp_path)
    run = deepstack.train(small(model__norm__kind="plain", train__steps=60), out=tmp_path)
    assert run.meta["environment"]["replayed"] is False


@pytest.mark.parametrize(("gain", "bias"), [(True, True), (True, False), (False, True)])
def test_an_rms_norm_is_one_node_on_a_cpu(gain: bool, bias: bool) -> None:
    """And the same as the module, there and back, rows of a batch or of more than one axis."""
    norm = a_norm("rms", gain=gain, bias=bias)
    for shape in [(2, 7, 5), (3, 2, 7, 5)]:
        assert_same_gradients(norm, norm, lambda: norm_function(norm), torch.randn(shape))
    y = norm_function(norm)(torch.randn(2, 7, 5, requires_grad=True))
    assert y.grad_fn is not None and y.grad_fn.name() == "_NodeBackward"


def test_running_averages_follow_training_batches_and_nothing_else() -> None:
    norm = a_norm("batch")
    assert isinstance(norm, BatchNorm)
    seen = [3 * torch.randn(4, 6, 5) + i for i in range(12)]
    norm.statistics = "followed"
    torch.testing.assert_close(norm(seen[0]), batch(seen[0]) * norm.gain + norm.bias)
    assert norm.batches.item() == 0
    mean, variance = torch.zeros(5), torch.zeros(5)
    for count, z in enumerate(seen, start=1):
        norm.statistics = "own_and_followed"
        norm(z)
        norm.statistics = "own"
        norm(z + 100)  # a probe: leaves no trace
        share, flat = max(1 / count, 0.1), z.flatten(0, 1)
        mean = (1 - share) * mean + share * flat.mean(0)
        variance = (1 - share) * variance + share * flat.var(0)
    norm.statistics = "followed"
    z = torch.randn(2, 3, 5)
    wanted = (z - mean) / (variance + 0.1).sqrt() * norm.gain + norm.bias
    torch.testing.assert_close(norm(z), wanted, rtol=1e-4, atol=1e-4)


BOTH = {"model.family": "encoder_decoder", "model.decoder_depth": 5}
LOOPED = {
    "model.depth": 9,
    "model.unique_layers": 2,
    "model.prelude_layers": 1,
    "model.coda_layers": 2,
}
COUNTED: list[dict[str, Any]] = [
    *({"model.norm.kind": kind} for kind in KINDS),
    *({"model.norm.kind": kind, "model.norm.bias": False} for kind in KINDS),
    {"model.norm.kind": "dynamic_tanh", "model.norm.gain": False, "model.norm.start": 0.8},
    *({"model.activation": name} for name in ACTIVATIONS),
    *({"model.activation": name, "model.gated": True} for name in ("relu", "silu", "gelu")),
    {"model.gated": True, "model.activation": "relu2", "train.lr_factors": {"w3": 0.5}},
    {"model.gated": True, "train.optimizer": "muon", "model.bias": False},
    *({"model.init.distribution": name} for name in DISTRIBUTIONS),
    {"model.bias": False},
    {"model.bias": False, "model.activation": "tanh", "train.lr_factors": {"q": 0.5}},
    {"model.norm.gain": False},
    {"model.norm.gain": False, "model.norm.bias": False},
    {"model.head": "bert", "model.positions": "sinusoidal"},
    {"model.family": "decoder"},
    LOOPED,
    LOOPED | {"model.family": "encoder_decoder"},
    BOTH | LOOPED,
    BOTH,
    *(BOTH | {"model.decoder_attention": kind} for kind in ("merged", "average")),
    BOTH | {"model.gated": True},
    *({"model.qk_norm": True, "model.positions": "rotary", "model.norm.kind": k} for k in KINDS),
    BOTH | {"model.qk_norm": True, "model.positions": "rotary", "model.norm.kind": "dynamic_tanh"},
]


@pytest.mark.parametrize("choice", COUNTED, ids=str)
def test_parameter_counts_equal_the_models(choice: dict[str, Any]) -> None:
    given = with_overrides(small(model__scheme="pre_ln"), choice)
    found = build_model(given, vocab_size=17, device="meta").banks.count()
    assert conf.parameter_count(given, 17) == {k: n for k, n in found.items() if k != "final_norm"}
    assert ("bias" in found) is given.model.bias
    assert found.get("w3", 0) == given.model.gated * found["w1"]


def test_training_steps_are_followed_and_validation_uses_what_they_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a step, also in layers that run twice."""
    calls: list[int] = []
    runs: list[Run] = []
    for known in (0, 1):  # averages that are not there, and averages of 0

        def follow(self: BatchNorm, flat: torch.Tensor, known: int = known) -> None:
            calls.append(len(flat))
            self.batches.fill_(known)

        monkeypatch.setattr(BatchNorm, "follow", follow)
        given = small(model__norm__kind="batch", train__eval_every=1)
        twice = with_overrides(given, {"runtime.recompute_every": 2 * known})
        runs.append(deepstack.train(twice, out=tmp_path / str(known)))
    assert calls == [4 * 8] * (2 * 3 * 2 * 3)  # runs, steps, norms of a layer, layers
    assert runs[0].steps["loss"].tolist() == runs[1].steps["loss"].tolist()
    assert (runs[0].evals["loss"] != runs[1].evals["loss"]).tolist() == [False, True, True, True]


@pytest.mark.parametrize("distribution", list(DISTRIBUTIONS))
def test_a_matrix_has_the_same_draws_at_every_depth(distribution: str) -> None:
    init = {"model__init__distribution": distribution}
    shallow = built(model__depth=2, model__scheme="post_ln", **init).banks.state()
    deep = built(model__depth=5, model__scheme="deepnorm", **init).banks.state()
    for name in ("feed_forward.w1", "feed_forward.w2", "attention.o"):
        key = f"encoder.layers.{name}"
        torch.testing.assert_close(deep[key][:2], shallow[key] * (8 * 5) ** -0.25)
    qkv = "encoder.layers.attention.qkv"
    assert torch.equal(deep[qkv][:2, :24], shallow[qkv][:, :24])
    assert torch.equal(*shallow["encoder.layers.attention.o"]) is (distribution == "zero_identity")


def test_dynamic_tanh_fixes_no_scale(tmp_path: Path) -> None:
    for kind, fixed in (("rms", True), ("dynamic_tanh", False), ("dynamic_erf", False)):
        run = deepstack.train(small(model__norm__kind=kind), out=tmp_path / kind)
        assert run.columns["scheme"]["normalised"] is fixed
    started = built(model__norm__kind="dynamic_tanh", model__norm__start=0.8).banks.state()
    assert (started["encoder.layers.scheme.attention_norms.0.scale"] == torch.tensor(0.8)).all()
