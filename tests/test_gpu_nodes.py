"""The nodes of a GPU's sublayers, on a CPU: the modules' gradients, at once or together later."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from deepstack.model.sublayers import NTK, STANDARD, FeedForward, Parameterisation
from deepstack.schemes import LayerNorm
from deepstack.speed import (
    Banks,
    Chain,
    gpu_nodes,
    in_turn,
    make_step,
    product_on,
    small_products,
)
from deepstack.speed.gpu_nodes import DeviceNorm, weights_turned

CUDA = torch.device("cuda")
DEPTH, WIDTH, INSIDE = gpu_nodes.LAYERS + 3, 8, 16


class Layer(nn.Module):
    """x <- LN(x + G(x)), by modules or by a GPU's nodes."""

    def __init__(self, bias: bool, activation: str, kind: Parameterisation, gain: bool) -> None:
        super().__init__()
        self.inner = FeedForward(WIDTH, INSIDE, activation, 0.0, bias=bias, parameterisation=kind)
        self.norm = LayerNorm(WIDTH, eps=1e-5, gain=gain, bias=bias)
        self.running: tuple[Any, ...] = (self.inner,)
        self.norms: tuple[Any, ...] = (self.norm,)

    def fuse(self) -> None:
        """Take the nodes."""
        G = self.inner
        product = product_on(CUDA, G.product)
        assert G.operation is not None
        chain = in_turn(product(G.w1, G.w1_bias), G.operation, product(G.w2, G.w2_bias))
        self.running = (Chain(chain),)
        self.norms = (DeviceNorm(self.norm.gain, self.norm.bias, WIDTH, self.norm.eps),)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norms[0](x + self.running[0](x))
        return found


def built(layer: Any) -> nn.ModuleList:
    """Layers on banks, with equal parameters every time."""
    model, model_stack = nn.Module(), nn.Module()
    model.encoder = model_stack
    model_stack.layers = layers = nn.ModuleList(layer() for _ in range(DEPTH))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for bank in Banks(model, {"encoder": list(layers)}, torch.device("cpu")):
            bank.copy_(0.2 * torch.randn(DEPTH, *bank.shape) + (bank.start == "one"))
    return layers


def gradients(layers: nn.ModuleList) -> list[Tensor]:
    """Of x_0 and of every parameter."""
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = x
    with weights_turned(layers, 8):
        for layer in layers:
            y = layer(y)
    y.square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether they differ by what the layers between make of rounding."""
    return bool(0 < one.norm() < 1e6) and bool((one - other).norm() <= 0.05 * one.norm())


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("small", [0, 2**27], ids=["at_once", "together"])
@pytest.mark.parametrize(
    ("bias", "activation", "kind", "gain"),
    [
        (True, "relu", STANDARD, True),
        (True, "gelu", STANDARD, True),
        (True, "relu", NTK, True),
        (False, "relu", STANDARD, False),
        (False, "tanh", NTK, True),
    ],
)
def test_gradients_are_those_of_the_modules(
    bias: bool,
    activation: str,
    kind: Parameterisation,
    gain: bool,
    small: int,
    kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def layer() -> Layer:
        return Layer(bias, activation, kind, gain)

    if kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(gpu_nodes, "has_triton", lambda: True)
        monkeypatch.setattr(gpu_nodes, "small_kernels", gpu_nodes.small_kernels.__wrapped__)
        if small or activation == "gelu":
            pytest.skip("the interpreter takes long: once a kind of operation")
    else:
        monkeypatch.setattr(gpu_nodes, "small_kernels", lambda: None)
    monkeypatch.setattr(gpu_nodes, "SMALL", small)
    monkeypatch.setattr(gpu_nodes, "SMALL_NORM", small)
    plain, fused = built(layer), built(layer)
    for each in fused:
        assert isinstance(each, Layer)
        each.fuse()
    for one, other in zip(gradients(plain), gradients(fused), strict=True):
        assert alike(one, other)
    assert not gpu_nodes._waiting


def test_what_is_not_trained_gets_no_gradient() -> None:
    def layer() -> Layer:
        return Layer(True, "relu", STANDARD, True)

    plain, fused = built(layer), built(layer)
    for name, parameter in [*plain.named_parameters(), *fused.named_parameters()]:
        parameter.requires_grad_(name.endswith(("inner.w1", "norm.bias")))
    for each in fused:
        assert isinstance(each, Layer)
        each.fuse()
    for one, other in zip(gradients(plain), gradients(fused), strict=True):
        assert alike(one, other) or not (one.any() or other.any())


def test_what_a_failed_pass_has_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_nodes, "small_kernels", lambda: None)
    layers = built(lambda: Layer(True, "relu", STANDARD, True))
    for each in layers:
        assert isinstance(each, Layer)
        each.fuse()

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        x = Fails.apply(inputs.requires_grad_())
        for layer in layers:
            x = layer(x)
        return x.sum()

    class Nothing:
        def zero_gradients(self) -> None: ...

    group = {"params": [torch.zeros(1, requires_grad=True)], "factor": 1.0}
    optimizer = torch.optim.SGD([group], lr=0.1)
    step = make_step(
        loss, cast(Any, Nothing()), [], optimizer, clip=None, max_loss=1.0, alive=torch.ones(())
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        step(torch.randn(2, 4, WIDTH), torch.zeros(1), 0.1)
    assert not gpu_nodes._waiting


def test_which_products_kernels_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = built(lambda: Layer(True, "relu", STANDARD, True))
    assert not small_products(layers, 8)  # those are modules
    for each in layers:
        assert isinstance(each, Layer)
        each.fuse()
    monkeypatch.setattr(gpu_nodes, "small_kernels", object)
    most = gpu_nodes.SMALLER // (WIDTH * INSIDE)
    assert len(small_products(layers, most)) == 2 * DEPTH
    assert not small_products(layers, most + 1)
    monkeypatch.setattr(gpu_nodes, "small_kernels", lambda: None)
    assert not small_products(layers, 8)
