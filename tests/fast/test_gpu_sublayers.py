"""Fused GPU sublayers on a CPU: the modules' gradients, immediate or deferred."""

from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.config import Config, Init, Model, Train
from deepstack.fast import make_step
from deepstack.fast.fuse import device_attention
from deepstack.fast.fused_sublayers import (
    FUSED_ACTIVATIONS,
    Product,
    by_shape,
    products_of,
    stacked,
)
from deepstack.fast.gpu import available, deferred_gradients, heads
from deepstack.fast.gpu import norm as gpu_norm
from deepstack.fast.gpu import products as gpu_products
from deepstack.fast.gpu import sublayer as gpu_sublayer
from deepstack.fast.gpu.norm import DeviceNorm, FusedLayer, FusedSum
from deepstack.fast.gpu.products import prepared_weights
from deepstack.fast.gpu.sublayer import DeviceSublayer
from deepstack.model import build_model
from deepstack.model.banks import Banks
from deepstack.model.feed_forward import FeedForward
from deepstack.model.sublayers import scaled_linear
from deepstack.schemes import LayerNorm
from deepstack.schemes.norms import RMSNorm

DEPTH, WIDTH, INSIDE = deferred_gradients.LAYERS + 3, 8, 16


class Layer(nn.Module):
    """x <- LN(x + G(x)), by modules or by fused GPU sublayers."""

    def __init__(
        self, bias: bool = True, activation: str = "relu", linear: Any = F.linear,
        gain: bool = True, rms: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes: Any = {"d_model": WIDTH, "d_ff": INSIDE, "activation": activation, "bias": bias}
        start: Any = "ntk" if linear is scaled_linear else "xavier_normal"
        self.inner = FeedForward(Model(**sizes, init=Init(distribution=start)), {}, all)
        kind = RMSNorm if rms else LayerNorm
        self.norm = kind(WIDTH, eps=1e-5, gain=gain, bias=bias)
        self.sublayer_functions: tuple[Any, ...] = ()
        self.forward = lambda x: self.norm(x + self.inner(x))

    def fuse(self, whole: bool) -> None:
        """Fuse the sublayer and the norm, or the layer as a whole."""
        inner = self.inner
        activation, scaled = FUSED_ACTIVATIONS[inner.activation_name], inner.linear is scaled_linear
        first, last = (inner.w1, inner.w1_bias), (inner.w2, inner.w2_bias)
        G = DeviceSublayer(first, activation, last, scaled)
        rms = isinstance(self.norm, RMSNorm)
        norm = DeviceNorm(self.norm.gain, self.norm.bias, WIDTH, self.norm.eps, rms)
        self.sublayer_functions = (G,)
        fused_layer = FusedLayer([FusedSum(G, norm, lambda: 1.0)])
        self.forward = fused_layer if whole else lambda x: norm(x + G(x))


def with_kernels(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these modules of kernels be available, run by Triton's interpreter, and no others."""

    def kernels(module: str) -> Any:
        return import_module(f"deepstack.fast.gpu.{module}") if module in modules else None

    for user in (gpu_products, gpu_sublayer, gpu_norm, heads):
        monkeypatch.setattr(user, "kernels", kernels)


def built(kind: dict[str, Any], fused: bool = True, whole: bool = False) -> nn.ModuleList:
    """Layers on banks, with equal parameters every time; fused in parts, or as a whole."""
    model, model_stack = nn.Module(), nn.Module()
    model.encoder = model_stack
    model_stack.layers = layers = nn.ModuleList(Layer(**kind) for _ in range(DEPTH))
    torch.manual_seed(0)
    for bank in Banks(model, {"encoder": list(layers)}, torch.device("cpu")):
        bank.copy_(0.2 * torch.randn(DEPTH, *bank.shape) + (bank.start == "one"))
    for layer in layers if fused else ():
        layer.fuse(whole)
    return layers


def gradients(layers: nn.ModuleList, half: torch.dtype | None = None) -> list[Tensor]:
    """Of x_0 and of every parameter."""
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = x
    with prepared_weights(layers, 8, half):
        for layer in layers:
            y = layer(y)
    y.square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]


def alike(one: Tensor, other: Tensor) -> bool:
    """Return whether they differ by no more than rounding in the layers between."""
    return bool(0 < one.norm() < 1e6) and bool((one - other).norm() <= 0.05 * one.norm())


KINDS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu"},
    {"linear": scaled_linear},
    {"bias": False, "gain": False},
    {"bias": False, "activation": "tanh", "linear": scaled_linear},
    {"rms": True, "bias": False},
]
SMALL = pytest.mark.parametrize("small", [0, 2**27], ids=["at_once", "together"])


@pytest.mark.parametrize("kernels", [False, True])
@SMALL
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_the_modules(
    kind: dict[str, Any], small: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        pytest.importorskip("triton")
        if small or "gelu" in kind.values():
            pytest.skip("the interpreter takes long: once a kind of operation")
    with_kernels(monkeypatch, *(("small_kernels", "norm_kernels") if kernels else ()))
    monkeypatch.setattr(gpu_products, "SMALL", small)
    both = gradients(built(kind, fused=False)), gradients(built(kind))
    assert all(alike(*pair) for pair in zip(*both, strict=True))
    assert not deferred_gradients._queues


@pytest.mark.parametrize(
    ("small", "lowered", "rms"),
    [(0, False, False), (0, True, False), (2**27, False, False), (2**27, True, False),
     (0, True, True)],
    ids=str,
)  # fmt: skip
def test_a_sublayer_its_sum_and_its_norm_as_one_node(
    small: int, lowered: bool, rms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    with_kernels(monkeypatch, "norm_kernels", "sum_kernels")
    monkeypatch.setattr(gpu_products, "SMALL", small)
    plain, whole = built({"rms": rms}, fused=False), built({"rms": rms}, whole=True)
    half = torch.float32 if lowered else None  # as a GPU's are under autocast
    pairs = zip(gradients(plain), gradients(whole, half), strict=True)
    assert all(alike(*pair) for pair in pairs)
    assert not deferred_gradients._queues
    x = torch.randn(2, 4, WIDTH)
    with torch.inference_mode():
        assert alike(plain[0](x), whole[0](x))


ROTARY: dict[str, Any] = {"positions": "rotary"}
NORMED: dict[str, Any] = {"qk_norm": True}
RMS: dict[str, Any] = {"norm": {"kind": "rms", "bias": False}}


MODERN = NORMED | RMS | ROTARY | {"n_kv_heads": 2, "bias": False}


@pytest.mark.parametrize(
    ("family", "changes", "half"),
    [
        ("encoder", NORMED, False),
        ("decoder", NORMED | RMS, False),
        ("encoder", ROTARY | {"bias": False}, False),
        ("decoder", {"n_kv_heads": 1}, False),
        ("decoder", MODERN, False),
        ("decoder", MODERN, True),
    ],
    ids=str,
)
def test_an_attention_with_operations_on_its_heads_equals_its_module(
    family: str, changes: dict[str, Any], half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    with_kernels(monkeypatch, "norm_kernels", "head_kernels", "small_kernels")
    sizes: Any = {"family": family, "depth": 2, "d_model": 32, "n_heads": 4}
    built = build_model(Config(model=Model(**sizes | changes)), vocab_size=5)
    attention: Any = built.model.layers[1].modules_in_order()[0]
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            if "norm" in name or "bias" in name:
                parameter += torch.rand_like(parameter)
    fused = device_attention(attention)
    assert isinstance(fused, DeviceSublayer) and isinstance(fused.between, heads.PreparedAttention)
    x, dy = torch.randn(2, 3, 7, 32).unbind()
    found, error = [], 5e-3 if half else 1e-5
    for function in (attention, fused):
        if half and function is fused:  # the interpreter knows no products of bf16
            monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
            monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
        built.banks.zero_gradients()
        inputs = x.clone().requires_grad_()
        y = function(inputs)
        assert y.dtype is (torch.float16 if half and function is fused else torch.float32)
        y.backward(dy.to(y.dtype))
        gradients = [p.grad.clone() for p in attention.parameters()]
        found.append([y.detach(), inputs.grad, *gradients])
    assert len(found[0]) >= 4
    for one, two in zip(*found, strict=True):
        # the gradient of a bias of all keys is 0 but for rounding
        assert one.norm() > 0 and (one - two).norm() <= error * one.norm() + 1e-5


def test_the_gradient_of_grouped_queries_is_added_to_a_given_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_kernels(monkeypatch)
    weights = [(nn.Parameter(torch.randn(n, 6)), nn.Parameter(torch.randn(n))) for n in (4, 2)]
    products = gpu_products.DeviceProducts([gpu_products.DeviceProduct(*w) for w in weights])
    monkeypatch.setattr(gpu_products, "running_queue", MagicMock())
    x, dy, start = torch.randn(5, 6), torch.randn(5, 6), torch.randn(5, 6)
    saved: list[Tensor] = []
    whole, bias = (torch.cat([p.detach() for p in parts]) for parts in zip(*weights, strict=True))
    assert torch.allclose(products.forward(x, 5, saved), F.linear(x, whole, bias), atol=1e-5)
    alone = products.backward_with_sums(gpu_products.Gradient(dy), saved[:], True).value
    assert torch.allclose(alone, dy @ whole, atol=1e-5)
    added = products.backward_with_sums(gpu_products.Gradient(dy), saved, True, start.clone()).value
    assert torch.allclose(added, start + dy @ whole, atol=1e-5)
    assert not saved


def test_norms_without_a_kernel_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "kernels", lambda module: object())
    for norm, is_fused in (("layer", True), ("dynamic_tanh", False)):
        given: Any = {"d_model": 16, "n_heads": 2, "qk_norm": True, "norm": {"kind": norm}}
        layer: Any = build_model(Config(model=Model(**given)), vocab_size=5).model.layers[0]
        assert (heads.attention_of(layer.modules_in_order()[0]) is not None) is is_fused


def test_weights_that_lie_evenly_apart_are_no_copy() -> None:
    bank = torch.randn(5, 16)
    rows = [bank[i, :12].view(3, 4) for i in range(5)]
    whole = stacked(rows)
    assert whole.data_ptr() == bank.data_ptr() and torch.equal(whole, torch.stack(rows))
    for apart in ([rows[0], rows[1], rows[4]], rows[::-1], [rows[0], torch.randn(3, 4)], rows[:1]):
        assert torch.equal(stacked(apart), torch.stack(apart))
    turned = [torch.randn(4, 3).t() for _ in range(2)]
    assert torch.equal(stacked(turned), torch.stack(turned))


def test_products_of_two_banks_with_one_shape_are_two_groups() -> None:
    banks = [torch.randn(3, 4, 4) for _ in range(2)]
    of_layers = [Product(nn.Parameter(bank[i]), None) for i in range(3) for bank in banks]
    groups = by_shape(of_layers)
    assert groups == [of_layers[::2], of_layers[1::2]]
    for group, bank in zip(groups, banks, strict=True):
        assert stacked([product.weight for product in group]).data_ptr() == bank.data_ptr()


def test_frozen_parameters_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch)
    plain, other = built({}, fused=False), built({}, fused=False)
    for name, parameter in [*plain.named_parameters(), *other.named_parameters()]:
        parameter.requires_grad_(name.endswith(("inner.w1", "norm.bias")))
    for layer in other:
        layer.fuse(whole=False)
    for one, two in zip(gradients(plain), gradients(other), strict=True):
        assert alike(one, two) or not (one.any() or two.any())


def test_gradients_of_a_failed_pass_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(dy: Tensor) -> None:
        raise RuntimeError("out of memory")

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        inputs.requires_grad_().register_hook(fails)
        return nn.Sequential(*layers)(inputs).sum()

    with_kernels(monkeypatch)
    layers = built({})
    group = {"params": [torch.zeros(1, requires_grad=True)], "factor": 1.0}
    step = make_step(loss, MagicMock(), torch.optim.SGD([group], lr=0.1), Train(clip=None))
    with pytest.raises(RuntimeError, match="out of memory"):
        step(torch.randn(2, 4, WIDTH), torch.zeros(1), 0.1)
    assert not deferred_gradients._queues


def test_which_products_kernels_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(layers: nn.ModuleList, tokens: int) -> list[Any]:
        return [product.small_kernels(tokens) for product in products_of(layers)]

    assert not any(small(built({}, fused=False), 8))  # those are modules
    layers, most = built({}), gpu_products.SMALLER // (WIDTH * INSIDE)
    monkeypatch.setattr(gpu_products, "kernels", lambda module: object())
    assert sum(map(bool, small(layers, most))) == 2 * DEPTH
    assert not any(small(layers, most + 1))
    with_kernels(monkeypatch)
    assert not any(small(layers, 8))


def test_numbers_are_split_on_hopper_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for triton, major in ((True, 9), (True, 8), (False, 9)):
        monkeypatch.setattr(available, "has_triton", lambda triton=triton: triton)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert available.splits_fp32.__wrapped__() is (triton and major == 9)


@pytest.mark.parametrize("kept", [False, True])
def test_a_relu_in_bf16_is_in_its_product_where_nan_stays(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpu_products, "relu_keeps_nan", lambda *size: asked.append(size) or kept)
    with_kernels(monkeypatch)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    weight[1, 2] = float("nan")
    parameters = nn.Parameter(weight), nn.Parameter(torch.randn(5))
    product = gpu_products.DeviceProduct(*parameters, relu=True)
    right = torch.relu(nn.functional.linear(x, weight, product.bias)).bfloat16()
    found = product.forward(x, 3, [])
    assert torch.allclose(found, right, atol=0.1, equal_nan=True) and found.isnan().any()
    assert asked == [(3, 5, 4, torch.bfloat16)]
    assert available.relu_keeps_nan(3, 5, 4, torch.bfloat16, "cpu")
