"""Claims about activations that keep the second moment, and about scaled products."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.model import scaled_linear
from deepstack_lab.ledger.claim import Finding, Null, Part, beside, claim
from deepstack_lab.ledger.draws import F64, ROUNDING, normals, power, random, repeats
from deepstack_lab.ledger.sources import READING_NOTES
from deepstack_lab.ledger.statistics import means


def through(rng: torch.Generator, activation: Callable[[Tensor], Tensor]) -> list[float]:
    """Return E[x²] after each of 12 layers x <- activation(W x), Var W = 1/width, from E[x²] = 1.

    The laws hold for large widths: a finite one moves E[x²] by about layers/width.
    """
    width = 256
    x, moments = normals(rng, width, 64), []
    for _ in range(12):
        x = activation(normals(rng, width, width) @ x / math.sqrt(width))
        moments.append(power(x))
    return moments


def expectation(f: Callable[[Tensor], Tensor]) -> float:
    """Return E[f(x)], x ~ N(0, 1), by the trapezoid rule on [−12, 12]."""
    x = torch.linspace(-12, 12, 240_001, dtype=F64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    return torch.trapezoid(f(x) * density, x).item()


def activation_parts(
    rng: torch.Generator,
    name: str,
    activation: Callable[[Tensor], Tensor],
    square: float,
    draws: int,
    tolerance: float,
    null: Null,
    unscaled: Null,
) -> list[Part]:
    """Return the parts that E[activation(x)²] = square, and that layers over √square keep E[x²].

    null, unscaled: null results of the first and of the second.
    """
    root = math.sqrt(square)
    drawn = [power(activation(normals(rng, 100_000))) for _ in range(draws)]
    exact = expectation(lambda x: activation(x) ** 2)
    deep = [through(rng, lambda x: activation(x) / root) for _ in range(draws)]
    return [
        Part.mean(f"E[{name}(x)²]", square, drawn, null=null),
        Part("the same by quadrature", square, exact, 0.0, tolerance=tolerance, null=null),
        Part.mean("E[x²] after 1 layer", 1.0, [d[0] for d in deep], null=unscaled),
        Part.mean("after 12 layers", 1.0, [d[-1] for d in deep], tolerance=0.02, null=unscaled),
    ]


LAYERS_NOTE = "{} draws of 100 000 numbers, and of layers of width 256 with 64 tokens; 2% is "
LAYERS_NOTE += "allowed over 12 layers of finite width."


@claim("C20", READING_NOTES, identity=True)
def scaled_sigmoid(seed: int) -> Finding:
    """E[sigmoid(x)²] = 0.2933790, x ~ N(0, 1): sigmoid/√0.2933790 preserves second moments.

    By random numbers, by quadrature, and through layers of Var W = 1/n_in.
    """
    rng, draws, square = random(seed), repeats(96), 0.2933790
    nulls = Null(0.25, "sigmoid(0)²"), Null(square, "one layer without the root")
    parts = activation_parts(rng, "sigmoid", torch.sigmoid, square, draws, 5e-8 / 0.29, *nulls)
    plain = [through(rng, torch.sigmoid)[-1] for _ in range(repeats(4))]
    parts.append(beside("without the root", 1.0, plain, null=nulls[1]))
    return Finding(parts, LAYERS_NOTE.format(draws))


@claim("C21", READING_NOTES)
def selu(seed: int) -> Finding:
    """SELU = λ ELU_a, λ = 1.0507, a = 1.6733: E[SELU(x)²] = 1 for x ~ N(0, 1).

    By random numbers, by quadrature, and through layers of Var W = 1/n_in, with torch's constants.
    Any a has a λ that does this; with SELU's pair the mean is kept at 0 as well.
    """
    rng, draws = random(seed), repeats(64)
    square = expectation(lambda x: F.elu(x) ** 2)
    plain, other = Null(square, "λ = a = 1"), 1 / math.sqrt(square)
    parts = activation_parts(rng, "SELU", F.selu, 1.0, draws, 1e-6, plain, plain)
    means = [F.selu(normals(rng, 100_000)).mean().item() for _ in range(draws)]
    also = [power(other * F.elu(normals(rng, 100_000))) for _ in range(draws)]
    parts.append(beside("E[SELU(x)]", 0.0, means, null=Null(expectation(F.elu), "λ = a = 1")))
    parts.append(beside(f"E[(λ ELU(x))²], a = 1, λ = {other:.4f}", 1.0, also, null=plain))
    return Finding(parts, LAYERS_NOTE.format(draws))


@claim("C48", READING_NOTES)
def tanh(seed: int) -> Finding:
    """tanh x ≈ x for small x, so Xavier fits tanh as it is: E[x²] stays; tanh/√E[tanh(x)²],
    x ~ N(0, 1), preserves second moments: E[tanh(x)²] = 0.3942945.

    By random numbers, by quadrature, and through layers of Var W = 1/n_in.  Xavier fits if layers
    keep E[x²] within 5%, from E[x²] = 1, which the document takes, and from a small one.
    """
    rng, draws, square = random(seed), repeats(64), 0.3942945
    identity, shrunk = Null(1.0, "tanh x = x"), Null(square, "one layer of tanh, E[x²] = 1")
    parts = activation_parts(rng, "tanh", torch.tanh, square, draws, 1e-7, identity, shrunk)
    plain = [through(rng, torch.tanh) for _ in range(draws)]
    fits = "E[x²] over that before, tanh as it is, "
    for layers, null in ((1, shrunk), (12, Null(1 / 24, "1/(2l)"))):
        values = [moments[layers - 1] for moments in plain]
        quantity = f"{fits}E[x²] = 1, layers: {layers}"
        parts.append(Part.mean(quantity, 1.0, values, tolerance=0.05, null=null))
    for size in (0.1, 0.3):
        small = [power(torch.tanh(size * normals(rng, 100_000))) / size**2 for _ in range(draws)]
        quantity = f"E[tanh(x)²]/E[x²], x ~ N(0, {size}²)"
        stated = size == 0.1
        parts.append(Part.mean(quantity, 1.0, small, tolerance=0.05, stated=stated, null=shrunk))
    slow, kept = [24 * moments[-1] for moments in plain], Null(24.0, "tanh x = x")
    parts.append(beside("2l E[x_l²] after l = 12 layers", 1.0, slow, tolerance=0.05, null=kept))
    return Finding(
        parts,
        f"{draws} draws.  For x of a tenth tanh is the identity to 2% and Xavier keeps E[x²]; from "
        "E[x²] = 1 one layer leaves 0.39 of it and 12 layers a twentieth, as 1/(2l): x gets small, "
        "and then the claim is true.  Divided by the root of its constant tanh keeps E[x²].",
    )


@claim("C22", READING_NOTES)
def ntk(seed: int) -> Finding:
    """y = Wx/√m + b, Var W = 1: E[y²] = E[x²].

    deepstack's own product under `ntk`, beside the standard one with the very same function, whose
    gradient and step of SGD are others.
    """
    rng, m = random(seed), 128

    def sample() -> list[Part]:
        x, target = normals(rng, 64, m), normals(rng, 64, m)
        W = normals(rng, m, m).requires_grad_()
        y = scaled_linear(x, W)
        (scaled,) = torch.autograd.grad((y * target).sum(), W)
        V = (W.detach() / math.sqrt(m)).requires_grad_()
        (standard,) = torch.autograd.grad((F.linear(x, V) * target).sum(), V)
        gradient, moment = scaled.norm() / standard.norm(), power(y.detach()) / power(x)
        moved = scaled_linear(x, scaled).norm() / F.linear(x, standard).norm()
        step, same = "change of y by a step of SGD", Null(1.0, "the same training")
        exact: dict[str, Any] = {"tolerance": ROUNDING, "null": same}
        return [
            Part.mean(f"E[y²]/E[x²], m = {m}", 1.0, moment, null=Null(m, "y = Wx")),
            beside("‖∂L/∂W‖ over the standard one's, 1/√m", m**-0.5, gradient, **exact),
            beside(f"{step}, over the standard one's, 1/m", 1 / m, moved, **exact),
        ]

    parts = means(sample() for _ in range(repeats(32)))
    note = f"{parts[0].draws} draws. The same function at the start, but not the same training."
    return Finding(parts, note)
