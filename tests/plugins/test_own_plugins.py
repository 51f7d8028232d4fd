"""Schemes, diagnostics and tasks as a reader writes them, trained as written or refused by name."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.extensions import needs
from helpers.small_runs import small
from helpers.snapshots import ToyModel

import deepstack
from deepstack.base.errors import ConfigError, PluginError
from deepstack.config import with_overrides
from deepstack.diagnostics.layers import diagnostic
from deepstack.model import build_model
from deepstack.model.build import Built
from deepstack.schemes import SCHEMES, Optim, Parts, Place, Scheme
from deepstack.schemes.role import parameter
from deepstack.tasks import IGNORE, Batch, Task

# --- schemes --------------------------------------------------------------------------------------


PostLN: type[Scheme] = SCHEMES["post_ln"]


def built(**more: Any) -> Built:
    return build_model(small(model__scheme="own", model__depth=3, **more), vocab_size=7)


@pytest.mark.parametrize("banks", [True, False])
def test_a_parameter_starts_in_each_layer_where_the_scheme_says(banks: bool) -> None:
    class Own(PostLN, name="own", label="Own", paper="none"):
        """x <- LN(x + s_l G(x)), s_l started at 1/l."""

        def setup(self, parts: Parts) -> None:
            self.scale = parameter(1, role="scheme", start=1 / self.layer_index)

    schemes = built(runtime__banks=banks).model.schemes
    starts = [scheme.get_parameter("scale").item() for scheme in schemes]
    assert starts == pytest.approx([1.0, 1 / 2, 1 / 3])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_slot_of_queries_keys_or_values_may_be_filled_alone(name: str) -> None:
    class Own(PostLN, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)), something of G negative."""

        def setup(self, parts: Parts) -> None:
            self.slots[name] = torch.nn.Threshold(math.inf, 3.0)

    attention: Any = built().model.layers[0].attention
    x = torch.randn(2, 5, 16)
    found = attention.project(x)
    attention.slots = {}
    for key, own, plain in zip("qkv", found, attention.project(x), strict=True):
        assert torch.equal(own, torch.full_like(plain, 3.0) if key == name else plain)


def test_options_that_a_scheme_inherits_are_validated_as_its_own() -> None:
    class Own(SCHEMES["branch_norm"], name="own", label="Own", paper="none"):  # type: ignore[misc]
        """x <- LN(x + 2 a_t G(x))."""

    options = deepstack.schemes.scheme_options
    assert options("own") == options("branch_norm")
    with pytest.raises(ConfigError, match="ramp_steps: found 0; allowed an integer from 1 on"):
        built(model__scheme_options={"ramp_steps": 0})


@pytest.mark.parametrize(
    ("shape", "start", "said"),
    [
        ((3,), "ones", r"parameter\(3,\): found start='ones'; allowed a number, matrix, .* one"),
        ((3,), torch.zeros(3), r"found start=tensor\(\[0., 0., 0.\]\); allowed a number"),
        ((3,), "matrix", r"parameter\(3,\): found start='matrix'; allowed for two axes"),
    ],
)
def test_a_start_that_is_none_is_refused(shape: Any, start: Any, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        parameter(*shape, role="scheme", start=start)


def test_class_methods_of_earlier_plugins_receive_what_they_name() -> None:
    class Own(PostLN, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)); names similar to a scheme's members are allowed."""

        state = 1.0
        names = ("a", "b")

        @staticmethod
        def gain(role: str, layer: int, depth: int, *, qkv: str = "") -> float:
            return {"packed": 0.25, "separate": 0.5}[qkv]

        @classmethod
        def optim(cls, role: str, depth: int, *, place: Place, optimizer: str = "") -> Optim:
            return Optim(lr={"sgd": 2.0, "adamw": 3.0}[optimizer] * place.depth)

    plain = small(model__scheme="own", train__optimizer="adamw")
    other = with_overrides(plain, {"model.init.qkv": "packed", "train.optimizer": "sgd"})
    for config, gain, lr in ((plain, 0.5, 3.0), (other, 0.25, 2.0)):
        (scheme,) = deepstack.schemes.stack_schemes(config).values()
        assert scheme.gain("q", 1) == gain
        assert scheme.optim("q").lr == lr * scheme.depth


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("replay", [False, True])
def test_a_buffer_that_a_step_writes_into_is_refused(
    dropout: float, replay: bool, tmp_path: Path
) -> None:
    """A running mean, for example: it would begin anew in a resumed run."""

    class Own(Scheme, name="own", label="Own", paper="none", static=True):
        """x <- LN(s x + G(x)), s 1.01 times as large in every pass."""

        s: torch.Tensor

        def setup(self, parts: Parts) -> None:
            self.register_buffer("s", torch.ones(()), persistent=False)

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(self.s.mul_(1.01).clone() * x + G(x))

    config = small(model__scheme="own", model__dropout=dropout, runtime__replay=replay)
    with pytest.raises(PluginError, match="a step writes into the buffer s of Own, which no"):
        deepstack.train(config, out=tmp_path)


def test_a_scheme_may_have_dropout_beside_the_models() -> None:
    class Own(PostLN, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)), half of W_2's input dropped."""

        def setup(self, parts: Parts) -> None:
            self.slots["after_activation"] = torch.nn.Dropout(0.5)

    assert built(model__dropout=0.1).model.schemes


# --- diagnostics: values of each layer, in files that are theirs alone ----------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda s: s.stream.mean(dim=-1), r"found \(4,\) for own; .* \(3,\), .* or \(3, 2\)"),
        (lambda s: s.stream.mean(), r"found \(\) for own"),
        (lambda s: s.param_norm.numpy(), "found ndarray for own"),
        (lambda s: 1.0, "found float for own"),
        (lambda s: {"a": s.stream.mean(dim=-1)}, r"found \(4,\) for own_a"),
        (lambda s: s.entering, r"found \(3, 2, 24\) for own"),
    ],
)
def test_values_that_are_not_one_a_layer_are_refused(given: Any, said: str) -> None:
    @diagnostic("own", "o", parts=())
    def own(snapshot: Any) -> Any:
        """Return the result of a reader."""
        return given(snapshot)

    with pytest.raises(PluginError, match=f"diagnostic 'own': {said}"):
        ToyModel().values()


def test_a_diagnostic_has_values_by_layer_sublayer_or_part() -> None:
    for name, given in (
        ("by_layer", lambda s: s.param_norm),
        ("by_sublayer", lambda s: s.branch.mean(dim=-1)),
        ("by_part", lambda s: {"a": s.param_norm}),
    ):
        diagnostic(name, "o")(given)
    found = ToyModel().values()
    names = ("by_layer", "by_sublayer_attention", "by_sublayer_feed_forward", "by_part_a")
    assert all(found[name].shape == (3,) for name in names)
    assert torch.equal(found["by_layer"], found["param_norm"])


def test_a_file_of_another_diagnostic_is_not_overwritten() -> None:
    with pytest.raises(PluginError, match="its file ln_input_attention is also one of 'ln_input'"):
        diagnostic("ln_input_attention", "o", parts=())(lambda snapshot: snapshot.param_norm)
    with pytest.raises(PluginError, match="its file grad_norm is also one of 'grad_norm'"):
        diagnostic("grad", "o", parts=("norm",))(lambda snapshot: {"norm": snapshot.param_norm})


@needs("bound")
def test_snapshots_are_taken_in_evaluation_mode() -> None:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)), in training x <- LN(x)."""

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x) if self.training else norm(x + G(x))

    toy = ToyModel(model__scheme="own")
    toy.model.train()
    gains = toy.values()["effective_gain_attention"]
    assert torch.isfinite(gains).all() and toy.model.layers[0].scheme.training


# --- tasks ----------------------------------------------------------------------------------------


TOKENS = np.arange(12).reshape(3, 4) % 7
NONE = np.zeros((3, 4), dtype=bool)


def own(given: Any) -> Task:
    return Task(name="own", vocab_size=7, seed=0, draw=lambda random, size, held_out: given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((TOKENS, TOKENS), "draw gave tuple; allowed a Batch"),
        (Batch(TOKENS + 1, TOKENS, NONE), "draw gave inputs with 7; allowed 0 to 6"),
        (Batch(TOKENS, TOKENS - 1, NONE), "draw gave targets with -1; allowed 0 to 6"),
        (Batch(TOKENS / 1, TOKENS, NONE), "inputs of float64; allowed a numpy array of int64"),
        (Batch(TOKENS, TOKENS.astype("int32"), NONE), "targets of int32; allowed .* int64"),
        (Batch(TOKENS, TOKENS, NONE.tolist()), "masked of list; allowed .* bool"),  # type: ignore
        (Batch(TOKENS[:2], TOKENS, NONE), r"inputs \(2, 4\); allowed \(3, length\)"),
        (Batch(TOKENS, TOKENS, NONE[:, :3]), r"masked \(3, 3\); allowed .* \(3, 4\)"),
        (Batch(TOKENS, np.full_like(TOKENS, IGNORE), NONE), "nothing to predict"),
        (Batch(TOKENS, np.where(TOKENS, TOKENS, IGNORE), ~NONE), "masked where the target is IGN"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused(given: Any, said: str) -> None:
    with pytest.raises(PluginError, match=f"task 'own': .*{said}"):
        own(given).train_batch(1, 3)
    batch = Batch(TOKENS, np.where(TOKENS, TOKENS, IGNORE), TOKENS > 3)
    assert all(map(np.array_equal, own(batch).probe_batch(3), batch))


def test_a_batch_may_be_of_reversed_views() -> None:
    batch = Batch(TOKENS[:, ::-1], TOKENS[::-1], NONE[:, ::-1])
    for value, given in zip(own(batch).train_batch(1, 3), batch, strict=True):
        assert np.array_equal(torch.from_numpy(value), given)
