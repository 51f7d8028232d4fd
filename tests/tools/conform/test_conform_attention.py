"""Attention in `conform`: rotary positions, grouped queries, and faults that have a name."""

import sys
from typing import Any

import pytest
import torch
from helpers.attention_blocks import DECODER, ROTARY, Layer, block
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.tools.conform.conform import examine

RIGHT: dict[str, dict[str, Any]] = {
    "rotary in pairs": ROTARY,
    "rotary in halves": ROTARY | {"layout": "halves"},
    "two heads of keys for six": {"model.n_kv_heads": 2},
    "grouped rotary decoder": ROTARY | DECODER | {"model.n_kv_heads": 2, "layout": "halves"},
    "window": {"model.attention_options.window": 3},
    "gated gelu": {"model.gated": True, "model.activation": "gelu"},
}
LAYOUTS = {
    "rotary in pairs": "(2i, 2i + 1)",
    "rotary in halves": "(i, i + d_head/2)",
    "grouped rotary decoder": "(i, i + d_head/2)",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow(turn=at)] * (at > 1))
        for at, n in enumerate(RIGHT)
    ],
)  # fmt: skip
def test_right_attention_agrees_and_its_rotary_layout_is_named(name: str) -> None:
    checks = ["forward", "gradients", "update"]
    report = deepstack.conform(block(**RIGHT[name]), "pre_ln", checks=checks)
    kinds = {"forward", "gradients", "sgd step", "adam step"}
    assert {row["check"] for row in report.rows} == kinds
    layout = f"with rotary positions in the pairs {LAYOUTS[name]}" if name in LAYOUTS else ""
    assert report.text.endswith(layout) and bool(report.layout) == bool(layout)


# fault, settings, words of the cause
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("activation gelu by tanh", {"model.activation": "gelu"}, "the activation is gelu by tanh"),
    ("mask off by one, ahead", DECODER, "off by one: a position also reads the next one"),
    ("in place", {}, "changes its input in place; write x = x + y"),
    ("rotary positions, halves", {}, "(i, i + d_head/2) of queries and keys; the reference does"),
    ("axes", {}, "takes x as (seq, batch, d_model)"),
    ("mask off by one, before", DECODER, "off by one: a position does not read itself"),
    ("mask of later positions", DECODER, "reads later ones, not earlier ones"),
    ("rotary positions, pairs", {}, "(2i, 2i + 1) of queries and keys; the reference does so with"),
    ("no rotary positions", ROTARY, "queries and keys have no rotary positions"),
    ("rotary base", ROTARY, "base of rotary positions is 500000"),
    ("rotary backwards", ROTARY | {"layout": "halves"}, "by the opposite angle"),
    ("window wider", {"model.attention_options.window": 3}, "is one position wider"),
    ("window narrower", {"model.attention_options.window": 3}, "is one position narrower"),
    ("heads joined", {}, "joined without exchanging the axes"),
    ("heads split", {}, "split without exchanging the axes"),
    ("heads interleaved", {}, "belongs to head i mod n_heads"),
    ("key heads in turn", {"model.n_kv_heads": 2}, "reads key head h mod n_kv_heads"),
    ("exchanged", {}, "the block uses v as k, k as v"),
    ("packed by head", {}, "packed head by head, (n_heads, 3, d_head) rows"),
    ("transposed", {}, "uses the transposed matrix of o"),
    ("gate", {"model.gated": True}, "applied to the product with w3"),
]


@pytest.mark.parametrize(
    ("fault", "settings", "words"),
    [
        pytest.param(*one, id=one[0], marks=[pytest.mark.slow(turn=at)] * (at > 1))
        for at, one in enumerate(FAULTS)
    ],
)
def test_a_fault_of_attention_is_named(fault: str, settings: dict[str, Any], words: str) -> None:
    found = examine(block(fault, **settings), "pre_ln", checks=["forward"]).difference
    assert found is not None and found.check == "forward"
    assert found.key.startswith(fault) and words in found.cause, found
    assert found.line.startswith("deepstack/")


@pytest.mark.slow
def test_a_mask_that_is_added_to_the_logits_is_named_too() -> None:
    found = examine(block("added", **DECODER), "pre_ln", checks=["forward"]).difference
    assert found is not None and found.key == "mask off by one, before"


def test_a_residual_that_writes_into_its_input_is_told_so() -> None:
    def residual(x: Tensor, G: Any, norm: Any) -> Tensor:
        x += G(norm(x.clone()))
        return x

    found = examine(residual, "pre_ln", checks=["forward"]).difference
    assert found is not None and found.key == "in place"


def test_errors_in_functions_of_the_user_are_refused_with_their_line() -> None:
    def residual(x: Tensor, G: Any) -> Tensor:
        return 1 / 0  # type: ignore[return-value]

    def ends(x: Tensor, G: Any) -> Tensor:
        sys.exit(3)

    def in_place(x: Tensor, G: Any, norm: Any) -> Tensor:
        y = norm(x)
        z = x + G(y)
        y.mul_(2)
        return z

    for function, message in (
        (residual, r"residual\(x, G\): .*test_conform_attention.py:\d+: ZeroDivisionError"),
        (ends, r"test_conform_attention.py:\d+: sys.exit\(3\) ends Python"),
        (in_place, "the backward pass fails: one of the variables needed for gradient"),
    ):
        with pytest.raises(ConfigError, match=message):
            deepstack.conform(function, "pre_ln", checks=["gradients"])
    given = block()
    given.optimizer = lambda module, name, lr, eps: sys.exit(0)
    with pytest.raises(ConfigError, match=r"optimizer: .*sys.exit\(0\) ends Python"):
        deepstack.conform(given, "pre_ln", checks=["update"])


# -- blocks in single precision --------------------------------------------------------------------


class Single(Layer):
    """Computes its products in single precision."""

    def forward(self, x: Tensor) -> Tensor:
        own = {name: p for name, p in self.named_parameters()}
        single = {name: p.float() for name, p in own.items()}
        call: Any = torch.func.functional_call(_Plain(self), single, (x.float(),))
        return call.double()  # type: ignore[no-any-return]


class _Plain(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        for name, module in layer.named_children():
            self.add_module(name, module)
        self.layer = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return Layer.forward(self.layer[0], x)


@pytest.mark.slow(turn=43)
def test_the_tolerance_reaches_every_comparison() -> None:
    given = block()

    def build(depth: int, d: int, heads: int, d_ff: int) -> nn.Module:
        stack = given.build(depth, d, heads, d_ff)
        stack.layers = nn.ModuleList(Single(d, heads, d_ff, "", {}) for _ in range(depth))
        return stack  # type: ignore[no-any-return]

    report = deepstack.conform(
        build, "pre_ln", parameters=given.PARAMETERS, checks=["gradients", "update"], tolerance=1e-4
    )
    allowed = {row["check"]: row["allowed"] for row in report.rows}
    assert allowed == dict.fromkeys(("gradients", "sgd step", "adam step"), 1e-4)
    strict = examine(build, "pre_ln", parameters=given.PARAMETERS, checks=["update"])
    assert strict.difference is not None and strict.difference.key == "update sgd"


# -- declarations ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (nn.utils.parametrizations.weight_norm, "parametrizations.weight.original0 and "),
        (nn.utils.weight_norm, "weight_g and weight_v"),
    ],
)
def test_a_normed_weight_is_refused_by_the_names_of_its_parts(wrap: Any, names: str) -> None:
    given = block()

    def build(*sizes: int) -> nn.Module:
        stack = given.build(*sizes)
        for layer in stack.layers:
            wrap(layer.w2)
        return stack  # type: ignore[no-any-return]

    for own in ("layers.{l}.w2", "layers.{l}.w2.weight"):
        declared = given.PARAMETERS | {"w2": own}
        with pytest.raises(ConfigError) as error:
            deepstack.conform(build, "pre_ln", parameters=declared)
        assert f"w2.weight is computed from {names}" in str(error.value)
        assert "without weight norm" in str(error.value) and "did you" not in str(error.value)
