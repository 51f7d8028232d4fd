"""Numbers of `conform` by other ways: fitted constants, effects at 96 layers, tests of starts."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.conform_blocks import BLOCKS, Layer, PreLN, ReZero, Stack, block
from helpers.sampling import some
from torch import Tensor, nn

from deepstack.tools.conform import sets
from deepstack.tools.conform.conform import examine
from deepstack.tools.conform.naming import power_of
from deepstack.tools.conform.reference import Reference
from deepstack.tools.conform.report import Difference
from deepstack.tools.conform.start import check_starts

BATCH, SEQ, D, HEADS, D_FF = 2, 7, 24, 3, 40


def stacked(scheme: str, change: Callable[[nn.Module], object]) -> Any:
    """A right block of this scheme whose stack is changed after it is built."""
    right = block(scheme)

    def build(depth: int, *sizes: int) -> nn.Module:
        stack: nn.Module = right.build(depth, *sizes)
        change(stack)
        return stack

    return SimpleNamespace(**{**vars(right), "build": build})


def found(scheme: str, given: Any, *checks: str) -> Difference:
    difference = examine(given, scheme, checks=checks).difference
    assert difference is not None
    return difference


def compare_at(monkeypatch: pytest.MonkeyPatch, *depths: int) -> None:
    """Compare at these depths in place of 2, 7 and 20, which takes a tenth of the time."""
    monkeypatch.setattr(sets, "CheckSet", partial(sets.CheckSet, depths=depths))


# --- fitted constants -----------------------------------------------------------------------------


class Weakened(PreLN):
    """x + c G(LN(x)) with c = 3/N^(1/4) in all layers."""

    def forward(self, x: Tensor) -> Tensor:
        c = 3 / self.N**0.25
        x = x + c * self.A(self.n1(x))
        return x + c * self.F(self.n2(x))


def test_a_constant_is_fitted_at_each_depth_and_named_as_a_power_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare_at(monkeypatch, 2, 3, 5)
    monkeypatch.setitem(BLOCKS, "pre_ln", (Weakened, *BLOCKS["pre_ln"][1:]))
    cause = found("pre_ln", block("pre_ln"), "forward").cause
    assert cause.startswith("the branch is multiplied by ")
    fitted = {int(N): float(c) for c, N in re.findall(r"([\d.]+) at N = (\d+)", cause)}
    assert fitted == {N: pytest.approx(3 / N**0.25, rel=1e-3) for N in (2, 3, 5)}
    assert cause.endswith(", as 3 N^-0.25")


# --- the effect at 96 layers ----------------------------------------------------------------------


class Grown(ReZero):
    """ReZero whose stream grows by 1 % at each sublayer."""

    def forward(self, x: Tensor) -> Tensor:
        x = 1.01 * x + self.a * self.A(x)
        return 1.01 * x + self.a * self.F(x)


def test_the_effect_is_the_blocks_numbers_over_the_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a = 0 all 192 sublayers of 96 layers multiply x_0, and its gradient, by 1.01^192."""
    compare_at(monkeypatch, 2)
    monkeypatch.setitem(BLOCKS, "rezero", (Grown, *BLOCKS["rezero"][1:]))
    effect = found("rezero", block("rezero"), "forward").effect
    times = 1.01**192
    assert effect.startswith(
        f"F differs by {100 * (times - 1):.3g} % of its size; ‖F‖ × {times:.3g}; "
        f"gradient of x_0 × {times:.3g}; ‖ΔF‖ of one SGD step × "
    ), effect


def slope(model: nn.Module) -> float:
    """Return the norm of the gradient of x_0 over ‖W‖, of the loss <W, F>."""
    random = torch.Generator().manual_seed(5)
    x, W = (torch.randn(BATCH, SEQ, D, generator=random, dtype=torch.float64) for _ in range(2))
    (W * model(x.requires_grad_())).sum().backward()
    assert x.grad is not None
    return float(x.grad.norm() / W.norm())


@pytest.mark.slow(turn=15)
def test_the_effect_of_another_start_is_measured_from_that_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference's initial values copied into the block would make every number 1."""
    compare_at(monkeypatch, 2)
    fault = "beta upside down"
    effect = found("deepnorm", block("deepnorm", fault), "start").effect
    [ratio] = re.findall(r"gradient of x_0 × ([\d.e-]+) ± [\d.e-]+;", effect)
    right, wrong = (
        slope(block("deepnorm", each).build(96, D, HEADS, D_FF).double()) for each in ("", fault)
    )
    assert right == pytest.approx(1, rel=0.3) and wrong < 0.03 > float(ratio)
    assert "differs" not in effect


# --- gradients and first step ---------------------------------------------------------------------


class Scaled(Stack):
    """A stack whose output has a trained scale, which begins at 1."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def scaled(stack: nn.Module) -> None:
    stack.__class__ = Scaled
    stack.scale = nn.Parameter(torch.ones(()))


def test_a_trained_parameter_that_the_scheme_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare_at(monkeypatch, 2)
    given = stacked("post_ln", scaled)
    difference = found("post_ln", given, "forward", "gradients")
    assert difference.check == "gradients" and "the block trains scale" in difference.cause


def test_a_final_norm_that_is_not_declared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_at(monkeypatch, 2)
    given = block("pre_ln")
    kept = {name: own for name, own in given.PARAMETERS.items() if "final" not in name}
    given = SimpleNamespace(**{**vars(given), "PARAMETERS": kept})
    difference = found("pre_ln", given, "forward", "gradients")
    words = (
        "which PARAMETERS does not name; the reference's final_norm.gain and final_norm.bias may"
    )
    assert words in difference.cause


def test_the_factor_of_adams_epsilon_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CompleteP divides epsilon by m = N/2 (Dey et al. 2025, Table 1)."""
    compare_at(monkeypatch, 8)
    right = block("complete_p")
    assert examine(right, "complete_p", checks=["update"]).difference is None

    def one_epsilon(module: nn.Module, name: str, lr: float, eps: float) -> Any:
        optimizer = right.optimizer(module, name, lr, eps)
        for group in optimizer.param_groups:
            group["eps"] = eps
        return optimizer

    given = SimpleNamespace(**{**vars(right), "optimizer": one_epsilon})
    difference = found("complete_p", given, "update")
    assert difference.key == "update adam" and "epsilon by 0.25" in difference.cause


# --- the start ------------------------------------------------------------------------------------


def test_a_right_start_fails_any_test_as_rarely_as_the_level_says() -> None:
    """Of 400 starts drawn here, with a level of 20 % over all tests of means and deviations."""
    reference = Reference("post_ln", 2, {})
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "w1": (D_FF, D), "w2": (D, D_FF)}
    failed = 0
    random = torch.Generator().manual_seed(0)
    for _ in range(400):
        drawn = {
            (name, layer): (2 / sum(shape)) ** 0.5  # Xavier: variance 2/(n_in + n_out)
            * torch.randn(1, shape[0] * shape[1], generator=random, dtype=torch.float64)
            for name, shape in shapes.items()
            for layer in (1, 2)
        }  # fmt: skip
        tests = check_starts({2: (reference, drawn)}, level=0.2)
        assert len(tests) == 18  # of each matrix, and of both layers together
        failed += not all(one.holds for one in tests)
    assert 0.1 < failed / 400 < 0.2 + 3 * (0.2 * 0.8 / 400) ** 0.5


@torch.no_grad()
def shift(stack: nn.Module) -> None:
    """Add a third of its deviation to every entry of W_q."""
    for layer in stack.layers:  # type: ignore[union-attr]
        layer.q.weight += layer.q.weight.std() / 3


@pytest.mark.slow(turn=21)
def test_a_mean_other_than_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_at(monkeypatch, 2)
    difference = found("post_ln", stacked("post_ln", shift), "start")
    assert difference.key == "mean q"
    [mean] = re.findall(r"the mean of q is ([\d.]+) of its deviation", difference.cause)
    assert float(mean) == pytest.approx(1 / 3, rel=0.2)


@pytest.mark.slow(turn=17)
def test_roles_with_different_starts_have_their_own_ratios(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in GPT-2: matrices that write into the stream start smaller, by a power of depth."""
    compare_at(monkeypatch, 2, 8)
    right = block("pre_ln")

    def build(depth: int, *sizes: int) -> nn.Module:
        stack: nn.Module = right.build(depth, *sizes)
        for layer in stack.layers:  # type: ignore[union-attr]
            for map in (layer.q, layer.k):
                map.weight.data *= 0.5
            for map in (layer.o, layer.w2):
                map.weight.data *= (2 * depth) ** -0.5
        return stack

    cause = found("pre_ln", SimpleNamespace(**{**vars(right), "build": build}), "start").cause
    for names, wanted in (("q and k", (0.5, 0.5)), ("o and w2", (0.5, 0.25))):
        [ratios] = re.findall(rf"{names} ([\d.]+) at N = 2, ([\d.]+) at N = 8", cause)
        assert tuple(map(float, ratios)) == pytest.approx(wanted, rel=0.05), cause


@pytest.mark.parametrize("seed", some(range(2), 2))
def test_a_start_from_a_fixed_seed_is_one_draw_for_all_tests(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 equal draws, or equal layers, do not make the intervals narrower."""
    compare_at(monkeypatch, 16)
    right = block("post_ln")

    def build(depth: int, *sizes: int) -> nn.Module:
        torch.manual_seed(seed)
        stack = right.build(depth, *sizes)
        for layer in stack.layers[1:]:
            layer.load_state_dict(stack.layers[0].state_dict())
        return stack  # type: ignore[no-any-return]

    given = SimpleNamespace(**{**vars(right), "build": build})
    assert examine(given, "post_ln", checks=["start"]).difference is None


class TwiceAtThree(Layer):
    """DeepNorm whose gain is applied twice at 3 layers, and is missing at 5."""

    def gain(self, name: str) -> float:
        beta = (8 * self.N) ** -0.25
        return 1.0 if name in "qk" else {2: beta, 3: beta**2, 5: 1.0}[self.N]

    def forward(self, x: Tensor) -> Tensor:
        for G, n in ((self.A, self.n1), (self.F, self.n2)):
            x = n((2 * self.N) ** 0.25 * x + G(x))
        return x


def test_a_cause_of_another_start_explains_all_depths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare_at(monkeypatch, 2, 3, 5)
    monkeypatch.setitem(BLOCKS, "deepnorm", (TwiceAtThree, *BLOCKS["deepnorm"][1:]))
    difference = examine(block("deepnorm"), "deepnorm", checks=["start"]).difference
    assert difference is not None and difference.key == "start v, o, w1, w2"
    ratios = dict(re.findall(r"([\d.]+) at N = (\d)", difference.cause))
    assert {int(N): float(ratio) for ratio, N in ratios.items()} == {
        3: pytest.approx(24**-0.25, rel=0.05), 5: pytest.approx(40**0.25, rel=0.05)
    }  # fmt: skip


def test_three_depths_show_a_power_and_two_do_not() -> None:
    assert power_of({2: 1.0, 8: 2.0}) == ""
    assert power_of({2: 1.0, 8: 2.0, 32: 4.0}) == "0.7071 N^0.5"
    assert power_of({2: 1.0, 8: 2.0, 32: 4.1}) == ""
