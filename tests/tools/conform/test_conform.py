"""`deepstack.conform`: right blocks pass, and planted faults are found and named."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.conform_blocks import BLOCKS, block
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError, DifferenceError
from deepstack.tools.conform.conform import examine
from deepstack.tools.conform.start import spread
from deepstack.tools.conform.template import template_of

# scheme, fault, the check that finds it, and the beginning of its name
FAULTS = [
    ("deepnorm", "alpha 1", "forward", "alpha: 1"),
    ("layer_scale", "not trained", "gradients", "not trained"),
]  # fmt: skip
MORE_FAULTS = [
    ("deepnorm", "alpha of 32 layers", "forward", "alpha: alpha of depth 32 at every depth"),
    (
        "deepnorm", "decoder's constants", "forward",
        "alpha: alpha of the decoder of an encoder-decoder",
    ),
    ("deepnorm", "beta at run time", "forward", "branch input"),
    ("deepnorm", "beta upside down", "start", "gain v, o, w1, w2: the gain is upside down"),
    ("pre_ln", "attention twice", "forward", "branch of the attention"),
    ("post_ln", "detached stream", "gradients", "detached stream"),
    ("deepnorm", "N in sublayers", "forward", "alpha: alpha of N counted in sublayers (2N)"),
    ("deepnorm", "alpha for Adam", "forward", "alpha: its square"),
    ("deepnorm", "beta on q and k", "start", "gain q, k: they start with beta"),
    ("deepnorm", "no beta on v", "start", "gain v: the gain is missing"),
    ("deepnorm", "alpha outside", "forward", "equation x <- alpha x + LN(G(x))"),
    ("deepnorm", "alpha on the branch", "forward", "equation x <- LN(x + alpha G(x))"),
    ("deepnorm", "alpha in the last layer only", "forward", "skip of all layers but the last"),
    ("deepnorm", "nn.Linear's start", "start", "gain q, k, v, q.bias"),
    ("post_ln", "logits", "forward", "logits"),
    ("ds_init", "exponent of the code", "start", "gain q, k, v, o, w1, w2: the square root"),
    ("pre_ln", "no final norm", "forward", "no final_norm"),
    ("pre_ln", "norm after the sum", "forward", "equation x <- LN(x + G(x))"),
    ("pre_ln", "normed stream", "forward", "equation x <- LN(x) + G(LN(x))"),
    ("pre_ln", "no norm of the feed-forward", "forward", "no feed_forward_norm"),
    ("pre_ln", "eps outside", "forward", "eps outside the root of the norms of sublayers"),
    (
        "pre_ln_scaled", "gain of the last layer only", "start",
        "gain o, w2 of all layers but the last: the gain is missing",
    ),
    ("peri_ln", "no entry norm", "forward", "no entry_norm"),
    ("peri_ln", "no output norm", "forward", "no feed_forward_norm_2"),
    ("res_post_norm", "norm before", "forward", "equation x <- x + G(LN(x))"),
    ("ln_scaling", "scaled before the norm", "forward", "equation x <- x + G(LN(1/sqrt(l) x))"),
    ("ln_scaling", "scaled after", "forward", "equation x <- x + 1/sqrt(l) G(LN(x))"),
    ("ln_scaling", "l from 2", "forward", "depth the layer counts from 2"),
    ("complete_p", "power 1/2", "forward", "branch"),
    ("complete_p", "bias not scaled", "forward", "bias of o and w2"),
    ("complete_p", "one rate", "update", "update sgd"),
    ("depth_mup", "one rate", "update", "update adam"),
    ("layer_scale", "one start", "start", "start attention_scale"),
    ("rezero", "starts at 1", "start", "start scale"),
    ("keel", "alpha in the first layer", "forward", "skip of the first layer"),
    ("b2t", "no lower connection", "forward", "equation x <- LN(x + G(x))"),
    ("sub_ln", "no inner norm", "forward", "no after_activation"),
    ("gpas", "no stop-gradient", "gradients", "no stop-gradient"),
    ("hyper_connections", "transposed mixing", "forward", "transposed mixing"),
]  # fmt: skip


def assert_named(scheme: str, fault: str, check: str, key: str) -> None:
    found = examine(block(scheme, fault), scheme).difference
    assert found is not None
    assert found.check == check and found.key.startswith(key), found
    assert found.line.startswith("deepstack/") and found.equation and found.size
    assert "F" in found.effect and "not measured" not in found.effect


@pytest.mark.parametrize(("scheme", "fault", "check", "key"), FAULTS)
def test_a_planted_fault_is_named(scheme: str, fault: str, check: str, key: str) -> None:
    assert_named(scheme, fault, check, key)


@pytest.mark.parametrize(
    ("scheme", "fault", "check", "key"),
    [pytest.param(*fault, marks=pytest.mark.slow(turn=at)) for at, fault in enumerate(MORE_FAULTS)],
)
def test_each_further_fault_is_named(scheme: str, fault: str, check: str, key: str) -> None:
    assert_named(scheme, fault, check, key)


@pytest.mark.parametrize("scheme", ["deepnorm"])
def test_a_right_block_agrees(scheme: str) -> None:
    report = deepstack.conform(block(scheme), scheme)
    assert {row["check"] for row in report.rows} == {
        "forward", "gradients", "start", "sgd step", "adam step",
    }  # fmt: skip
    assert report.notes == []


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, marks=pytest.mark.slow(turn=at))
        for at, scheme in enumerate(BLOCKS)
        if scheme != "deepnorm"
    ],
)
def test_each_other_right_block_agrees(scheme: str) -> None:
    deepstack.conform(block(scheme), scheme)


# --- residual(x, G) in place of a module ----------------------------------------------------------


@pytest.mark.slow
def test_a_function_of_x_and_g_is_a_block() -> None:
    def deepnorm(x: Tensor, G: Any, norm: Any, depth: int) -> Tensor:
        return norm((2 * depth) ** 0.25 * x + G(x))

    report = deepstack.conform(deepnorm, "deepnorm")
    assert any("the start" in note for note in report.notes)

    def wrong(x: Tensor, G: Any, norm: Any) -> Tensor:
        return norm(x + G(x))

    with pytest.raises(DifferenceError, match=r"alpha is 1\.0000 where the reference has 1\.4142"):
        deepstack.conform(wrong, "deepnorm", checks=["forward"])


def test_a_function_receives_the_schemes_own_parameters() -> None:
    def scaled(x: Tensor, G: Any, norm: Any, scale: Tensor) -> Tensor:
        return x + scale * G(norm(x))

    deepstack.conform(scaled, "layer_scale", checks=["forward", "gradients"])

    def unknown(x: Tensor, G: Any, gamma: Tensor) -> Tensor:
        return x

    with pytest.raises(ConfigError, match="unknown argument 'gamma'"):
        deepstack.conform(unknown, "layer_scale", checks=["forward"])


# --- the declaration ------------------------------------------------------------------------------


class Packed(nn.Module):
    """Post-LN without biases, q, k and v in one matrix, W_1 transposed, one table of norms."""

    def __init__(self, N: int, d: int, h: int, d_ff: int) -> None:
        super().__init__()
        self.h = h
        self.qkv = nn.ParameterList(torch.randn(3 * d, d) for _ in range(N))
        self.o = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(2 * N))  # every second
        self.w1 = nn.ParameterList(torch.randn(d, d_ff) for _ in range(N))
        self.w2 = nn.ModuleList(nn.Linear(d_ff, d, bias=False) for _ in range(N))
        self.g = nn.Parameter(torch.zeros(2 * N, d))  # gain - 1

    def forward(self, x: Tensor) -> Tensor:
        for l, qkv in enumerate(self.qkv):
            q, k, v = (
                y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in (x @ qkv.T).chunk(3, -1)
            )
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = F.layer_norm(x + self.o[2 * l + 1](y), x.shape[-1:], 1 + self.g[2 * l])
            y = self.w2[l](torch.relu(x @ self.w1[l]))
            x = F.layer_norm(x + y, x.shape[-1:], 1 + self.g[2 * l + 1])
        return x


PACKED = {
    "q": "qkv.{l}[0/3]", "k": "qkv.{l}[1/3]", "v": "qkv.{l}[2/3]", "o": "o.{2l+1}",
    "w1": "w1.{l}.T", "w2": "w2.{l}", "attention_norm": "g[{2l}] + 1",
    "feed_forward_norm": "g[{2l+1}] + 1",
}  # fmt: skip


def test_parts_rows_and_transposed_matrices_can_be_declared() -> None:
    checks = ["forward", "gradients", "update"]
    report = deepstack.conform(Packed, "post_ln", parameters=PACKED, checks=checks)
    assert len({row["of"] for row in report.rows if row["check"] == "gradients"}) == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w5": "w2.{l}"}, "unknown parameter 'w5'"),
        ({"w2": "w9.{l}"}, "unknown parameter 'w9.0'"),
        ({"w1": "w1.{l}"}, r"found 24 x 40; the reference has 40 x 24; append .T"),
        ({"w1": "w1 {l}"}, "allowed a parameter's name"),
        ({"w2": "o.{l}"}, "found 24 x 24; the reference has 24 x 40"),
    ],
)
def test_a_wrong_declaration_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepstack.conform(Packed, "post_ln", parameters=PACKED | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "allowed one of build"),
        ("def build(*sizes): pass", "PARAMETERS is missing"),
        ("def build(*sizes): pass\nPARAMETERS = {'q': 'q'}", "build returned NoneType"),
        ("def build(*sizes): 1 / 0\nPARAMETERS = {'q': 'q'}", "block.py:1: ZeroDivisionError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
    ],
)
def test_a_file_without_a_block_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        deepstack.conform(tmp_path / "block.py", "post_ln")


def test_the_template_names_every_parameter() -> None:
    text = template_of("sub_ln", {})
    assert '"after_activation": "{l}.after_activation",  # 40, starts at 1' in text
    assert '"q": "{l}.q",  # 24 x 24' in text and '"final_norm": "final_norm"' in text
    assert "q.bias" not in text  # a module has both
    assert '"attention_connections.bias"' in template_of("mhc", {})


# --- intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "uniform", "truncated", "two widths"])
def test_intervals_of_the_start_hold_their_coverage(kind: str) -> None:
    level, draws, rng = 0.05, 2000, torch.Generator().manual_seed(0)
    missed = 0
    for _ in range(draws):
        x = torch.randn(600, generator=rng, dtype=torch.float64)
        sigma = 1.0
        if kind == "uniform":
            x, sigma = torch.rand(600, generator=rng, dtype=torch.float64) - 0.5, 12**-0.5
        if kind == "truncated":
            x, sigma = x.clamp(-2, 2), 0.959556  # deviation of a clamped normal
        if kind == "two widths":  # about half of the entries are three times as wide
            x, sigma = x * (1 + 2 * torch.bernoulli(torch.full_like(x, 0.5), generator=rng)), 5**0.5
        _, low, high, most = spread(x, 1.8 if kind == "uniform" else 3.0, level)
        missed += not low <= sigma <= high
        missed += abs(float(x.mean())) > most * float(x.std())
    assert missed / (2 * draws) < level + 3 * (level / (2 * draws)) ** 0.5
    if kind != "truncated":  # its kurtosis counts as a normal's at least
        assert missed / (2 * draws) > level - 3 * (level / (2 * draws)) ** 0.5
