"""Sharpness: the largest eigenvalue of the loss's Hessian, plain and as the optimizer sees it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepstack.diagnostics import Instrument, Row, RunState, measuring
from deepstack.model import Built, Transformer, mean_loss

# Relative residual at which the iteration ends, and the most Hessian-vector products until then.
TOLERANCE, MOST_PRODUCTS = 1e-3, 100


class Sharpness(Instrument, name="sharpness"):
    """The sharpness at the parameters after a step, without the step."""

    def measure(self, state: RunState) -> Row:
        # Training imports this module, so it cannot be imported above.
        from deepstack.instruments.sharpness.optimizer import (
            preconditioner_scales,
            stability_threshold,
        )

        train = state.config.train
        loss = partial(
            mean_loss, targets=state.targets, smoothing=train.label_smoothing, z_loss=train.z_loss
        )
        scales = preconditioner_scales(state.optimizer, state.built.trained)
        plain, preconditioned = sharpness(state.built, state.inputs, loss, scales)
        is_known = scales is not None
        threshold = stability_threshold(train, max(state.step, 1))
        return {
            "sharpness": plain.value,
            "sharpness_residual": plain.residual,
            "preconditioned_sharpness": preconditioned.value if is_known else None,
            "preconditioned_residual": preconditioned.residual if is_known else None,
            "stability_threshold": threshold if is_known else None,
            "hessian_products": plain.products + preconditioned.products,
        }


class Eigenvalue(NamedTuple):
    """An eigenvalue, the norm ‖Hv − λv‖ of its residual for a unit vector v, and the products."""

    value: float
    residual: float
    products: int


class Hessian:
    """The Hessian of a loss at the present parameters, as products with vectors.

    tied: each trained parameter as the tensors that hold it, several for the repeated layers of a
        looped stack; a vector has the entries of one of them each, (entries,) in double precision.

    The products are second backward passes through one graph, which this object holds.
    """

    def __init__(self, loss: Tensor, tied: Sequence[Sequence[Tensor]]) -> None:
        self.tied, self.tensors = tied, [tensor for copies in tied for tensor in copies]
        self.gradients = torch.autograd.grad(
            loss, self.tensors, create_graph=True, materialize_grads=True
        )
        self.entries = sum(copies[0].numel() for copies in tied)
        self.device = loss.device

    def __call__(self, vector: Tensor) -> Tensor:
        """Return H v in double precision; v: (entries,)."""
        parts = vector.split([copies[0].numel() for copies in self.tied])
        directions = [
            part.view_as(tensor).to(tensor.dtype)
            for part, copies in zip(parts, self.tied, strict=True)
            for tensor in copies
        ]
        pairs = zip(self.gradients, directions, strict=True)
        # The gradient of a parameter that the loss reads linearly is constant.
        varying = [tensors for tensors in pairs if tensors[0].requires_grad]
        gradients, along = zip(*varying, strict=True)
        products = torch.autograd.grad(
            gradients, self.tensors, along, retain_graph=True, materialize_grads=True
        )
        return self.flat(products)

    def flat(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return one vector (entries,) of a tensor for each of `tensors`: copies are added."""
        remaining = iter(tensors)
        sums = [torch.stack([next(remaining) for _ in copies]).sum(dim=0) for copies in self.tied]
        return torch.cat([part.flatten().double() for part in sums])


def largest_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> Eigenvalue:
    """Return the largest eigenvalue of a symmetric matrix, from below, by Lanczos' iteration.

    product: v -> H v.
    start: a vector that is not orthogonal to the eigenvector.  Ends when the residual is below
        TOLERANCE times the value.  It keeps three vectors and no basis: rounding then repeats
        eigenvalues that have converged, and leaves the largest as it is.
    """
    from scipy.linalg import eigh_tridiagonal

    v, before, beta = start / start.norm(), torch.zeros_like(start), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    value = residual = math.nan
    for _ in range(min(MOST_PRODUCTS, len(start))):
        w = product(v).sub_(before, alpha=beta)
        diagonal.append(float(w @ v))
        w.sub_(v, alpha=diagonal[-1])
        beta = float(w.norm())
        if not math.isfinite(beta):
            return Eigenvalue(math.nan, math.nan, len(diagonal))
        values, vectors = eigh_tridiagonal(diagonal, beside)
        value, residual = float(values[-1]), beta * abs(float(vectors[-1, -1]))
        if residual <= TOLERANCE * abs(value):
            break
        beside.append(beta)
        v, before = w / beta, v
    return Eigenvalue(value, residual, len(diagonal))


def tied_parameters(built: Built) -> list[list[Tensor]]:
    """Return each trained parameter as the tensors of the model that hold it."""
    loop = built.banks.loop
    tied: list[list[Tensor]] = []
    for bank in built.trained:
        tensors = [built.model.get_parameter(name) for name in bank.names]
        if loop is None or not bank.in_layers:
            tied += [[tensor] for tensor in tensors]
            continue
        end = len(tensors) - loop.after
        looped = tensors[loop.before : end]
        tied += [[tensor] for tensor in tensors[: loop.before]]
        tied += [list(looped[first :: loop.length]) for first in range(loop.length)]
        tied += [[tensor] for tensor in tensors[end:]]
    return tied


@contextmanager
def twice_differentiable(model: Transformer) -> Iterator[None]:
    """Run the plain layers in evaluation mode inside the block, with kernels that allow H v."""
    # Of the kernels of attention, only the math one has a second derivative.
    with measuring(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


def sharpness(
    built: Built,
    tokens: Tensor,
    loss: Callable[[Tensor], Tensor],
    scales: Sequence[Tensor] | None,
) -> tuple[Eigenvalue, Eigenvalue]:
    """Return the largest eigenvalues of H and of S H S, S = P^{−1/2} diagonal.

    loss: logits -> the loss of the tokens.
    scales: the diagonal of S, of each trained bank (depth, …); None: the second one is NaN.  If all
        are 1, it is the first one.

    A product costs about as much as four forward passes of the plain layers; fused ones have no
    second derivative.  The iteration starts from one fixed random vector.
    """
    with twice_differentiable(built.model):
        H = Hessian(loss(built.model(tokens)), tied_parameters(built))
        random = torch.Generator().manual_seed(0)
        start = torch.randn(H.entries, generator=random).to(H.device).double()
        plain = largest_eigenvalue(H, start)
        if scales is None:
            return plain, Eigenvalue(math.nan, math.nan, 0)
        loop = built.banks.loop
        rows = (loop.once(scale) if loop and bank.in_layers else scale
                for bank, scale in zip(built.trained, scales, strict=True))  # fmt: skip
        S = torch.cat([row.flatten().double() for row in rows])
        if bool((S == 1).all()):
            return plain, plain._replace(products=0)
        return plain, largest_eigenvalue(lambda v: S * H(S * v), start)
