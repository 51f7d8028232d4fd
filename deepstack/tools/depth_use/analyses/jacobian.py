"""The Jacobian of each layer: its distance from the identity and its spectral norm."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepstack.base import ConfigError
from deepstack.records import Analysis, Column
from deepstack.tools.depth_use.analyses.changes import note_arguments
from deepstack.tools.depth_use.layered import Call
from deepstack.tools.depth_use.measure import Request, measure, numbers

CHANGED = "l of `changed`"
COLUMNS = {
    "changed": Column("l", "The layers that are measured.", "layers", "layer"),
    "from_identity": Column("‖J_l − I‖_F/‖I‖_F", "Root mean square over sequences of the distance "
                            "of the layer's Jacobian from the identity, over the norm of the "
                            "identity; estimated by random probes.", CHANGED),
    "from_identity_error": Column("its standard error", "Standard error of the estimate, over "
                                  "probes.", CHANGED),
    "spectral_norm": Column("‖J_l‖₂", "Largest singular value of the layer's Jacobian, mean over "
                            "sequences; by power iteration, which approaches it from below.",
                            CHANGED),
    "spectral_norm_max": Column("max ‖J_l‖₂", "The same, the largest of all sequences.", CHANGED),
    "last_change": Column("relative change", "Largest relative change of the spectral norm by the "
                          "last iteration.", CHANGED),
    "probes": Column("probes", "Number of random probes."),
    "iterations": Column("iterations", "Largest number of power iterations."),
    "mean_from_identity": Column("⟨‖J_l − I‖_F/‖I‖_F⟩", "Mean over the layers."),
}  # fmt: skip
CONVERGED = 1e-4


@measure("jacobian", COLUMNS, uses=["every", "probes"])
def jacobian(request: Request, result: Analysis) -> None:
    """Measure J_l = ∂x_l/∂x_{l−1} of whole sequences, (seq·d, seq·d), by products with it.

    ‖J − I‖_F² is the mean of ‖(J − I)v‖² over probes v of random signs (Hutchinson), by
    forward-mode products.  The spectral norm is a power iteration with JᵀJ, by a forward-mode and a
    reverse-mode product each.  It runs until no sequence changes by more than 1e-4, relatively,
    and so stops 0.2 to 0.8 % below the norm where singular values lie close together.  Products are
    in fp32, whatever the run's precision.  Of a stream of several tensors J_l is ∂z_l/∂z_{l−1}.
    Muhtar et al. 2026, arXiv:2603.15389, average J over tokens first, and so measure the distance
    of a mean Jacobian.  On the probe batch; the cost is about 3 forward passes of the layer a probe
    and 5 an iteration.
    """
    model, chosen = request.model, request.chosen(result)
    model.refuse_state(request.probe)
    note_arguments(request, request.probe, result)
    generator = torch.Generator().manual_seed(request.seed)
    rows: list[Tensor] = []

    def observe(index: int, call: Call, x: Any) -> Any:
        def f(z: Tensor) -> Tensor:
            return model.state(index + 1, call(index, model.with_state(index, x, z)))

        z = model.state(index, x)
        refuse_mixing(f, z, index)
        distance, error = distance_from_identity(f, z, request.probes, generator)
        norms, change = spectral_norms(f, z, request.iterations, generator)
        rows.append(numbers([distance, error, norms.mean(), norms.max(), change]))
        return call(index, x)

    # torch's fused attentions have no forward-mode derivative, and its own forward mode uses a
    # function that it calls deprecated
    quiet = warnings.catch_warnings(action="ignore", category=DeprecationWarning)
    kind = next((p.device.type for p in model.model.parameters()), "cpu")
    full = torch.autocast(kind, enabled=False)
    with quiet, full, sdpa_kernel(SDPBackend.MATH):
        model.run(request.probe, {index: partial(observe, index) for index in chosen})
    result.add("changed", [index + 1 for index in chosen])
    columns = torch.stack(rows, dim=1)
    names = "from_identity", "from_identity_error", "spectral_norm", "spectral_norm_max"
    for name, values in zip((*names, "last_change"), columns, strict=True):
        result.add(name, values)
    result.add("probes", request.probes)
    result.add("iterations", request.iterations)
    result.add("mean_from_identity", columns[0].mean())


def refuse_mixing(f: Callable[[Tensor], Tensor], x: Tensor, index: int) -> None:
    """Raise ConfigError if a sequence, x[0], moves the layer's output for another one."""
    v = torch.zeros_like(x)
    v[0] = torch.randn(v[0].shape, generator=torch.Generator().manual_seed(0)).to(v)
    moved = torch.func.jvp(f, (x,), (v,))[1]
    if moved[1:].any():
        raise ConfigError(
            f"jacobian: layer {index + 1} mixes the rows of the stream's first dimension, "
            f"{len(x)}; allowed independent sequences: (batch, seq, d), batch first"
        )


def distance_from_identity(
    f: Callable[[Tensor], Tensor], x: Tensor, probes: int, generator: torch.Generator
) -> tuple[float, float]:
    """Return the estimate of ‖J − I‖_F/‖I‖_F, root mean square over sequences, and its error."""
    squares = []
    for _ in range(probes):
        signs = torch.randint(0, 2, x.shape, generator=generator)
        v = (2.0 * signs - 1.0).to(x)
        moved = torch.func.jvp(f, (x,), (v,))[1]
        squares.append((moved - v).double().square().mean())  # ‖I‖_F² is the number of coordinates
    values = numbers(squares)
    mean = values.mean().item()
    error = values.std().item() / math.sqrt(probes)
    root = math.sqrt(mean)
    return root, error / (2 * root) if root else 0.0


def spectral_norms(
    f: Callable[[Tensor], Tensor], x: Tensor, iterations: int, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return ‖J‖₂ for each sequence, (batch,), and the largest relative change at the end."""

    def norm(v: Tensor) -> Tensor:
        return v.flatten(1).norm(dim=1).clamp(min=torch.finfo(v.dtype).tiny)

    def unit(v: Tensor) -> Tensor:
        return v / norm(v).view(-1, *[1] * (v.ndim - 1))

    v = unit(torch.randn(x.shape, generator=generator).to(x))
    with torch.enable_grad():
        transposed: Any = torch.func.vjp(f, x)[1]
    sizes, change = norm(v), math.inf
    for _ in range(iterations):
        u = torch.func.jvp(f, (x,), (v,))[1]
        before, sizes = sizes, norm(u)
        change = ((sizes - before).abs() / sizes).max().item()
        if change < CONVERGED:
            break
        (w,) = transposed(u)
        v = unit(w)
    return sizes.double(), change
