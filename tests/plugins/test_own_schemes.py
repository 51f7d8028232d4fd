"""Schemes as a reader writes them: what they say is what is trained, or is refused by name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_runs import small

import deepstack
from deepstack.config import with_overrides
from deepstack.errors import ConfigError, PluginError
from deepstack.model import build_model
from deepstack.model.build import Built
from deepstack.schemes import (
    SCHEMES,
    Optim,
    Parts,
    Place,
    Scheme,
    parameter,
    scheme_options,
    stack_schemes,
)

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

    assert scheme_options("own") == scheme_options("branch_norm")
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
        """x <- LN(x + G(x)); names that stand near those of a scheme are its own."""

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
        (scheme,) = stack_schemes(config).values()
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


def test_dropout_of_a_scheme_s_own_may_be_on_with_the_model_s() -> None:
    class Own(PostLN, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)), half of what W_2 reads dropped."""

        def setup(self, parts: Parts) -> None:
            self.slots["after_activation"] = torch.nn.Dropout(0.5)

    assert built(model__dropout=0.1).model.schemes
