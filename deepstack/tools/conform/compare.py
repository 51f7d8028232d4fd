"""Comparison of numbers: values moved from their start, forward pass, gradients, first update."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepstack.base import ConfigError
from deepstack.model import guarded
from deepstack.tools.conform.block import Block
from deepstack.tools.conform.reference import Reference, draw_input
from deepstack.tools.conform.weights import Key, Weights
from deepstack.training import avoid_compiler_import

LR, EPS = 1e-3, 1e-8


def distance(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖; infinite if a number is not finite."""
    if not torch.isfinite(found).all():
        return float("inf")
    size = float(expected.detach().norm())
    return float((found - expected).detach().norm()) / (size if size > 0 else 1.0)


@torch.no_grad()
def move(reference: Reference, keys: Iterable[Key]) -> None:
    """Move parameters of the reference away from their start, of 0 and 1 above all."""
    rng = torch.Generator().manual_seed(1)
    for key in sorted(keys):
        value = reference.value(key)
        is_matrix = reference.entries[key].start == "matrix"
        noise = torch.randn(value.shape, generator=rng, dtype=value.dtype)
        reference.assign(key, value + (0.1 if is_matrix else 0.2) * noise)


def copy(reference: Reference, block: Weights) -> None:
    """Give the block the values of the reference's parameters."""
    for key in block.pieces:
        block.assign(key, reference.value(key))


def pair(block: Block, scheme: str, depth: int, settings: Any) -> tuple[Reference, Weights]:
    """Return a reference with moved parameters and the block with the same values."""
    reference = Reference(scheme, depth, settings)
    own = block.weights(reference)
    move(reference, own.pieces)
    copy(reference, own)
    return reference, own


def direction(F: Tensor) -> Tensor:
    """Return the tensor W of the loss <W, F>, of unit size per coordinate."""
    rng = torch.Generator().manual_seed(2)
    return torch.randn(F.shape, generator=rng, dtype=F.dtype)


def gradients(weights: Weights, x: Tensor, scale: float = 1.0) -> dict[Key, Tensor | None]:
    """Return the gradients of scale <W, F> by parameter, and of x_0 as ('x_0', 0).

    None: the parameter is not trained, or F does not depend on it.
    """
    weights.clear()
    start = x.clone().requires_grad_()
    F = weights.run(start)
    try:
        (scale * direction(F) * F).sum().backward()
    except RuntimeError as error:  # of autograd, as after a change in place
        raise ConfigError(f"the backward pass fails: {' '.join(str(error).split())}") from error
    found: dict[Key, Tensor | None] = {("x_0", 0): start.grad}
    return found | {key: weights.gradient(key) for key in weights.pieces}


def compare_gradients(reference: Reference, block: Weights, tolerance: float) -> dict[Key, float]:
    """Return the distance of each gradient, x_0 first and then layer by layer."""
    x = draw_input(reference.config)
    return gradient_distances(gradients(block, x), gradients(reference, x), tolerance)


def least_size(sizes: Sequence[float], tolerance: float) -> float:
    """Return the size below which rounding decides: 1000 tolerances of the largest one, or 1 %.

    Some gradients are 0 but for rounding, as of the keys' biases.
    """
    return min(1e3 * tolerance, 1e-2) * max(sizes, default=1.0)


def gradient_distances(
    found: Mapping[Key, Tensor | None], expected: Mapping[Key, Tensor | None], tolerance: float
) -> dict[Key, float]:
    """Return ‖found − expected‖ over the expected size, or over `least_size` if it is larger.

    A missing gradient is 0.
    """
    sizes = [float(g.norm()) for key, g in expected.items() if g is not None and key[1]]
    least = least_size(sizes, tolerance)
    distances = {}
    for key in sorted(found, key=lambda key: (key[0] != "x_0", key[1])):
        own, other = found[key], expected[key]
        if own is None and other is None:
            continue
        other = torch.zeros_like(own) if other is None else other  # type: ignore[arg-type]
        own = torch.zeros_like(other) if own is None else own.reshape(other.shape)
        distances[key] = float((own - other).norm()) / max(float(other.norm()), least)
    return distances


def updates(reference: Reference, kind: str, scale: float) -> dict[Key, Tensor]:
    """Return the change of every parameter by the reference's first step of SGD or Adam.

    At the first step of Adam both moments, corrected, are the gradient and its square.
    """
    grads = gradients(reference, draw_input(reference.config), scale)
    changes = {}
    for key, entry in reference.entries.items():
        g, factors = grads[key], reference.optim(entry.role)
        if g is None:
            continue
        unit = g if kind == "sgd" else g / (g.abs() + EPS * factors.eps)
        changes[key] = -LR * factors.lr * unit
    return changes


def compare_updates(
    reference: Reference, own: Weights, block: Block, kind: str, tolerance: float
) -> dict[Key, float]:
    """Return the distance of each parameter's change by the first step.

    The loss is scaled so that a typical gradient is ten times Adam's epsilon: its factor counts.
    """
    x = draw_input(reference.config)
    plain = [g for key, g in gradients(reference, x).items() if g is not None and key[1]]
    typical = torch.stack([g.abs().median() for g in plain]).median()
    scale = 10 * EPS / float(typical) if kind == "adam" else 1.0
    expected = updates(reference, kind, scale)
    before = {key: own.value(key) for key in own.pieces}
    gradients(own, x, scale)
    avoid_compiler_import()
    if block.optimizer is not None:
        with guarded(f"{block.name}: optimizer"):
            optimizer = block.optimizer(own.module, kind, LR, EPS)
    else:
        kinds: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        more = {"eps": EPS} if kind == "adam" else {}
        optimizer = kinds[kind](own.module.parameters(), lr=LR, **more)
    optimizer.step()
    least = least_size([float(change.norm()) for change in expected.values()], tolerance)
    distances = {}
    for key, old in before.items():
        if (change := expected.get(key)) is not None:
            found = own.value(key) - old
            distances[key] = float((found - change).norm() / max(float(change.norm()), least))
    return distances


def has_factors(reference: Reference) -> bool:
    """Return whether the scheme has factors on learning rates or epsilon."""
    roles = {entry.role for entry in reference.entries.values()}
    return any(reference.optim(role)[::2] != (1.0, 1.0) for role in roles)
