"""Schemes as a reader writes them: what they say is what is trained, or is refused by name."""

from __future__ import annotations

from functools import partial
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


def built(depth: int = 3, **more: Any) -> Built:
    return build_model(small(model__scheme="own", model__depth=depth, **more), vocab_size=7)


@pytest.mark.parametrize("banks", [True, False])
def test_a_parameter_starts_in_each_layer_where_the_scheme_says(banks: bool) -> None:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + s_l G(x)), s_l started at 1/l."""

        def __init__(self, layer: int, depth: int, parts: Parts) -> None:
            super().__init__(layer, depth, parts)
            self.scale = parameter(1, role="scheme", start=1 / layer)

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x + self.scale * G(x))

    schemes = built(runtime__banks=banks).model.schemes
    starts = [scheme.get_parameter("scale").item() for scheme in schemes]
    assert starts == pytest.approx([1.0, 1 / 2, 1 / 3])


ones = partial(parameter, role="scheme", start="one")
SHARED = ones(1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda layer: {"scale": ones(layer)},
            r"layer 2 has the parameter scale \(2,\), layer 1 .* \(1,\)",
        ),
        (
            lambda layer: {"scale": ones(1)} if layer == 2 else {},
            r"layer 2 has the parameter scale \(1,\), layer 1 no parameter scale",
        ),
        (
            lambda layer: {"map": torch.nn.Linear(16, 3)},
            r"its parameter map.weight is torch's.*schemes.parameter\(3, 16, role=",
        ),
        (
            lambda layer: {"scale": SHARED},
            "scale of layer 2 is the same parameter as scale of layer 1",
        ),
        (
            lambda layer: dict.fromkeys("ab", ones(1)),
            "b of layer 1 is the same parameter as a of layer 1",
        ),
    ],
)
def test_parameters_that_no_bank_can_hold_are_refused(wrong: Any, said: str) -> None:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x))."""

        def __init__(self, layer: int, depth: int, parts: Parts) -> None:
            super().__init__(layer, depth, parts)
            for name, value in wrong(layer).items():
                setattr(self, name, value)

    with pytest.raises(PluginError, match=f"the scheme own: {said}"):
        built()


class Doubled(torch.nn.Module):
    def forward(self, h: Any) -> Any:
        return 2 * h


def with_slot(name: str) -> Any:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)), something of G doubled."""

        def __init__(self, layer: int, depth: int, parts: Parts) -> None:
            super().__init__(layer, depth, parts)
            self.slots[name] = Doubled()

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x + G(x))

    return built().model.encoder.layers[0].attention


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_slot_of_queries_keys_or_values_may_be_filled_alone(name: str) -> None:
    attention = with_slot(name)
    x = torch.randn(2, 5, 16)
    found = dict(zip("qkv", attention.project(x), strict=True))
    attention.slots = {}
    plain = dict(zip("qkv", attention.project(x), strict=True))
    for key in "qkv":
        assert torch.equal(found[key], (2 if key == name else 1) * plain[key])


def test_a_slot_that_no_sublayer_has_is_refused() -> None:
    with pytest.raises(PluginError, match="own: unknown slot 'after_activations'; did you mean"):
        with_slot("after_activations")
    with pytest.raises(PluginError, match="own: unknown slot 'before_cross_out'"):
        with_slot("before_cross_out")  # an encoder has no cross-attention


def test_options_that_a_scheme_inherits_are_validated_as_its_own() -> None:
    class Own(SCHEMES["branch_norm"], name="own", label="Own", paper="none"):  # type: ignore[misc]
        """x <- LN(x + 2 a_t G(x))."""

    assert scheme_options("own") == scheme_options("branch_norm")
    with pytest.raises(ConfigError, match="ramp_steps: found 0; allowed an integer from 1 on"):
        built(model__scheme_options={"ramp_steps": 0})


def test_an_option_without_a_default_or_a_type_is_refused() -> None:
    with pytest.raises(PluginError, match="own: option 'a' needs a type annotation and a default"):

        class Own(Scheme, name="own", label="Own", paper="none"):
            """x <- LN(x + a G(x))."""

            def __init__(self, layer: int, depth: int, parts: Parts, *, a: float) -> None:
                super().__init__(layer, depth, parts)

    assert "own" not in SCHEMES


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
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)); names that stand near those of a scheme are its own."""

        state = 1.0
        names = ("a", "b")

        @staticmethod
        def gain(role: str, layer: int, depth: int, *, qkv: str = "") -> float:
            return {"packed": 0.25, "separate": 0.5}[qkv]

        @classmethod
        def optim(cls, role: str, depth: int, *, place: Place, optimizer: str = "") -> Optim:
            return Optim(lr={"sgd": 2.0, "adamw": 3.0}[optimizer] * place.depth)

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x + G(x))

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


def test_dropout_of_a_scheme_s_own_that_would_never_be_on_is_refused() -> None:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)), half of what W_2 reads dropped."""

        def __init__(self, layer: int, depth: int, parts: Parts) -> None:
            super().__init__(layer, depth, parts)
            self.slots["after_activation"] = torch.nn.Dropout(0.5)

    with pytest.raises(ConfigError, match=r"model.dropout: found 0, .* slots.after_act"):
        built()
    assert built(model__dropout=0.1).model.encoder is not None
