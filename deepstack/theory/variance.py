"""Claims about second moments at the start: linear maps, attention, layer norm, one sublayer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepstack.schemes import NORMS
from deepstack.theory.claim import Curves, Finding, Line, Part, claim
from deepstack.theory.claim_stack import Trial
from deepstack.theory.draws import F64, exponents, normals, power, repeats
from deepstack.theory.sources import LAYER_CAKE

# alpha, v, w: Post-LN's, DeepNorm's at N = 6 with v = w = beta, and three different numbers
COEFFICIENTS = ((1.0, 1.0, 1.0), (12**0.25, 48**-0.25, 48**-0.25), (1.5, 0.8, 0.4))


@claim("C1", LAYER_CAKE)
def linear_layer(seed: int) -> Finding:
    """Var W = gain²/n_in: E[y²] = gain² E[x²], ‖y‖/‖x‖ ~ gain √(n_out/n_in); 2 gain²/n_in before
    ReLU.

    x: (tokens, n_in), of mean 0, and, before ReLU, of mean 1: nothing needs a mean of 0.
    """
    rng = torch.Generator().manual_seed(seed)
    n_in, n_out, draws = 64, 192, repeats(200)
    parts = []
    for gain in (1.0, 0.3):
        linear, norms, relu, half = [], [], [], []
        for _ in range(draws):
            x, W = normals(rng, 16, n_in), normals(rng, n_in, n_out) / math.sqrt(n_in)
            linear.append(power(gain * x @ W) / power(x))
            norms.append(linear[-1] * n_out / n_in)
            shifted = x + 1
            relu.append(power(torch.relu(math.sqrt(2) * gain * shifted @ W)) / power(shifted))
            half.append(power(torch.relu(gain * shifted @ W)) / power(shifted))
        parts += [
            Part.mean(f"E[y²]/E[x²], gain {gain}", gain**2, linear),
            Part.mean(f"E‖y‖²/E‖x‖², n_out/n_in = 3, gain {gain}", 3 * gain**2, norms),
            Part.mean(f"E[ReLU(y)²]/E[x²], variance 2 gain²/n_in, gain {gain}", gain**2, relu),
            Part.mean(
                f"the same, variance gain²/n_in, gain {gain}", gain**2 / 2, half, stated=False
            ),
        ]
    chain = [relu_chain(rng, layers=8, width=96) for _ in range(2 * draws)]
    parts.append(Part.mean("E[x_8²]/E[x_0²], 8 such layers with ReLU, gain 1", 1.0, chain))
    return Finding(
        parts,
        f"{draws} draws of W ({n_in}, {n_out}) with 16 inputs each, {2 * draws} of 8 layers of "
        "width 96.  Before ReLU x has mean 1: the second moment stays the same, whatever the mean.",
    )


def relu_chain(rng: torch.Generator, layers: int, width: int) -> float:
    """Return E[x_L²]/E[x_0²] of x ← ReLU(x W), Var W = 2/width, over 8 inputs."""
    x = normals(rng, 8, width)
    start = power(x)
    for _ in range(layers):
        x = torch.relu(x @ normals(rng, width, width) * math.sqrt(2 / width))
    return power(x) / start


@claim("C2", LAYER_CAKE)
def xavier_as_published(seed: int) -> Finding:
    """Var W = 2/(n_in + n_out): E[y²]/E[x²] = 2 n_in/(n_in + n_out); Var W = 1/n_in: it is 1.

    The matrices of deepstack's own Post-LN stacks, started as published and with 'init.fan: in'.
    """
    rng, draws = torch.Generator().manual_seed(seed), repeats(4)
    ratios: dict[tuple[str, str], list[float]] = {}
    for fan in ("in_out", "in"):
        for draw in range(draws):
            changes = {"model.scheme": "post_ln", "model.depth": 6, "model.init.fan": fan}
            weights = Trial(draws * seed + draw, changes).weights()
            for role in ("v", "w1", "w2"):
                for W in weights[role].double():
                    x = normals(rng, 64, W.shape[1])
                    ratios.setdefault((fan, role), []).append(power(x @ W.t()) / power(x))
    shape = {"v": "(d, d)", "w1": "(d, 4d)", "w2": "(4d, d)"}
    published = {"v": 1.0, "w1": 2 / 5, "w2": 8 / 5}
    parts = [
        Part.mean(f"as published, {shape[role]}", published[role], ratios["in_out", role])
        for role in shape
    ]
    parts += [Part.mean(f"1/n_in, {shape[role]}", 1.0, ratios["in", role]) for role in shape]
    return Finding(
        parts,
        f"{6 * draws} matrices each (6 layers, {draws} draws, d = 32), 64 inputs of variance 1.  "
        "As published, the first map of the feed-forward loses 3/5 of the second moment and the "
        "second one gains 3/5.",
    )


@claim("C3", LAYER_CAKE)
def attention_keeps_the_size(seed: int) -> Finding:
    """mean(x_i) = 0 and var(x_i) = 1: ‖x_i‖ = √d, ‖softmax(q)X‖ ≤ √d, and softmax(q)X ≍ x_i.

    x_i: n independent rows of N(0, 1), layer-normalised; q_i ~ N(0, spread²).  The magnitudes are
    the same (≍) if ‖softmax(q)X‖/√d does not fall with n: its exponent in n is 0.
    """
    rng = torch.Generator().manual_seed(seed)
    d, sizes, spreads, draws = 64, (4, 16, 64, 256, 1024), (0.0, 1.0, 3.0), repeats(240)
    ratio = torch.zeros(len(spreads), len(sizes), draws, dtype=F64)
    weight = torch.zeros_like(ratio)
    norm = []
    for j, n in enumerate(sizes):
        for draw in range(draws):
            X = torch.layer_norm(normals(rng, n, d), (d,), eps=0.0)
            norm.append(X.norm(dim=1).mean().item() / math.sqrt(d))
            q = normals(rng, n)
            for i, deviation in enumerate(spreads):
                s = torch.softmax(deviation * q, dim=0)
                ratio[i, j, draw] = (s @ X).norm() / math.sqrt(d)
                weight[i, j, draw] = s.norm()
    slopes = [exponents(sizes, ratio[i].t()) for i in range(len(spreads))]
    parts = [
        Part.mean("‖x_i‖/√d", 1.0, norm, tolerance=1e-9),
        Part(
            "largest ‖softmax(q)X‖/√d of all draws",
            1.0,
            ratio.max().item(),
            0.0,
            relation="<=",
        ),
        *(
            Part.mean(f"exponent of ‖softmax(q)X‖ in n, spread {deviation}", 0.0, slope)
            for deviation, slope in zip(spreads, slopes, strict=True)
        ),
        *(
            Part.mean(
                f"‖softmax(q)X‖/√(d Σs_i²), n = 256, spread {deviation}",
                1.0,
                ratio[i, 3] / weight[i, 3],
                tolerance=0.02,
                stated=False,
            )
            for i, deviation in enumerate(spreads)
        ),
    ]
    lines = []
    for i, deviation in enumerate(spreads):
        label = f"q of spread {deviation:g}"
        lines.append(Line.mean(f"{label}, measured", sizes, ratio[i].t()))
        lines.append(Line(f"{label}, √(Σs_i²)", sizes, weight[i].mean(dim=1).tolist(), False))
    return Finding(
        parts,
        f"{draws} draws for each n in {sizes}, d = {d}.  The bound is Jensen's and holds; equality "
        "of magnitude does not, for independent rows are averaged: the norm is √(d Σs_i²), which "
        "is √(d/n) for flat weights.  It holds where rows are alike or one weight is near 1.",
        Curves("keys n", "‖softmax(q)X‖/√d", lines, log_x=True, log_y=True),
    )


@claim("C4", LAYER_CAKE)
def layer_norm_jacobian(seed: int) -> Finding:
    """‖∂LN(z)/∂z‖₂ ≈ √d/‖z‖₂.

    The largest singular value of the exact Jacobian of deepstack's layer norm (eps 1e-5).
    """
    rng = torch.Generator().manual_seed(seed)
    d, draws = 96, repeats(200)
    norm = NORMS["layer"](d, gain=False, bias=False, eps=1e-5)

    def ratio(z: Tensor) -> float:
        jacobian = torch.autograd.functional.jacobian(norm, z)
        assert isinstance(jacobian, Tensor)
        return (torch.linalg.matrix_norm(jacobian, 2) * z.norm()).item() / math.sqrt(d)

    parts = [
        Part.mean(
            f"‖∂LN/∂z‖₂ ‖z‖/√d, z ~ N(0, {scale:g}²)",
            1.0,
            [ratio(scale * normals(rng, d)) for _ in range(draws // 4)],
            tolerance=0.01,
        )
        for scale in (0.3, 1.0, 5.0)
    ]
    shifted = [ratio(normals(rng, d) + 1) for _ in range(draws)]
    parts.append(
        Part.mean("the same, z ~ N(1, 1)", math.sqrt(2), shifted, tolerance=0.02, stated=False)
    )
    return Finding(
        parts,
        f"{draws // 4} draws each, {draws} of z ~ N(1, 1), d = {d}.  Exactly it is "
        "√d/‖z − mean(z)‖: right as long as the mean is small, as in a sum of a "
        "normalised stream and a branch; 1% is allowed for that.",
    )


def sublayer(
    rng: torch.Generator, d: int, m: int, v: float, w: float, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a normalised x (tokens, d), W (d, m) of variance 2w²/d, V (m, d) of v²/m."""
    x = torch.layer_norm(normals(rng, tokens, d), (d,), eps=0.0)
    return x, normals(rng, d, m) * w * math.sqrt(2 / d), normals(rng, m, d) * v / math.sqrt(m)


def as_text(alpha: float, v: float, w: float) -> str:
    """Return the coefficients as text, for the names of parts."""
    return f"α = {alpha:.3g}, v = {v:.3g}, w = {w:.3g}"


@claim("C5", LAYER_CAKE)
def residual_sum(seed: int) -> Finding:
    """z = αx + ReLU(xW)V, Var W = 2w²/d, Var V = v²/m: E‖z‖² = d (α² + v²w²).

    One feed-forward sublayer, drawn anew each time.
    """
    rng = torch.Generator().manual_seed(seed)
    d, m, draws = 64, 256, repeats(120)
    parts = []
    for alpha, v, w in COEFFICIENTS:
        powers = []
        for _ in range(draws):
            x, W, V = sublayer(rng, d, m, v, w, tokens=8)
            powers.append(power(alpha * x + torch.relu(x @ W) @ V))
        parts.append(Part.mean(f"E‖z‖²/d, {as_text(alpha, v, w)}", alpha**2 + v**2 * w**2, powers))
    return Finding(parts, f"{draws} draws of W, V and 8 tokens each, d = {d}, m = {m}.")


@claim("C6", LAYER_CAKE)
def step_through_the_residual(seed: int) -> Finding:
    """‖∂z/∂x Δx‖ ≈ √(α² + v²w²) ‖Δx‖.

    z as in C5; Δx a random direction, and, beside it, the one that ∂z/∂x stretches most.
    """
    rng = torch.Generator().manual_seed(seed)
    d, m, draws = 64, 256, repeats(60)
    parts, worst = [], []
    for alpha, v, w in COEFFICIENTS:
        predicted = math.sqrt(alpha**2 + v**2 * w**2)
        squares, most = [], []
        for _ in range(draws):
            x, W, V = sublayer(rng, d, m, v, w, tokens=1)
            active = (x @ W > 0).double()  # (1, m): ReLU's derivative
            jacobian = alpha * torch.eye(d, dtype=F64) + (W * active) @ V
            step = normals(rng, 16, d)
            squares.append(power(step @ jacobian) / power(step))
            most.append(torch.linalg.matrix_norm(jacobian, 2).item())
        quantity = f"‖∂z/∂x Δx‖²/‖Δx‖², {as_text(alpha, v, w)}"
        parts.append(Part.mean(quantity, predicted**2, squares))
        worst.append(
            Part.mean(
                f"largest ‖∂z/∂x Δx‖/‖Δx‖, {as_text(alpha, v, w)}",
                predicted,
                most,
                relation="<=",
                stated=False,
            )
        )
    return Finding(
        parts + worst,
        f"{draws} draws of the sublayer, 16 directions each, d = {d}, m = {m}.  It is a mean over "
        "directions, not a bound: in the most stretched one the factor is up to twice as large.",
    )


@claim("C7", LAYER_CAKE)
def step_of_the_weights(seed: int) -> Finding:
    """E‖∂z/∂V ΔV + ∂z/∂W ΔW‖² = w²‖ΔV‖² + (d v²/2m)‖ΔW‖² ≤ (v² + w²)‖Δθ‖².

    z as in C5, v = w = 0.5.  Δθ: independent of x and the weights, as the expectation takes it; and
    the step of gradient descent on Σ_t <g_t, z_t>, g_t random, for which it is used.
    """
    rng = torch.Generator().manual_seed(seed)
    d, m, v, w, draws, tokens = 64, 256, 0.5, 0.5, repeats(40), (1, 4, 16, 64)

    def moved(x: Tensor, W: Tensor, V: Tensor, dW: Tensor, dV: Tensor) -> tuple[float, float]:
        """Return ‖∂z/∂V ΔV‖² and ‖∂z/∂V ΔV + ∂z/∂W ΔW‖², means over tokens."""
        hidden = torch.relu(x @ W)
        first = hidden @ dV
        full = first + ((x @ dW) * (hidden > 0)) @ V
        return d * power(first), d * power(full)

    equal, bound = [], []
    for _ in range(draws):
        x, W, V = sublayer(rng, d, m, v, w, tokens=16)
        dW, dV = normals(rng, d, m), 2 * normals(rng, m, d)
        full = moved(x, W, V, dW, dV)[1]
        expected = w**2 * dV.square().sum() + d * v**2 / (2 * m) * dW.square().sum()
        equal.append(full / expected.item())
        bound.append(full / ((v**2 + w**2) * (dV.square().sum() + dW.square().sum())).item())
    first = torch.zeros(len(tokens), draws, dtype=F64)
    total = torch.zeros_like(first)
    for i, count in enumerate(tokens):
        for draw in range(draws):
            x, W, V = sublayer(rng, d, m, v, w, tokens=count)
            g, hidden = normals(rng, count, d), torch.relu(x @ W)
            dV, dW = hidden.t() @ g, x.t() @ ((g @ V.t()) * (hidden > 0))
            a, full = moved(x, W, V, dW, dV)
            first[i, draw] = a / (w**2 * dV.square().sum())
            total[i, draw] = full / ((v**2 + w**2) * (dV.square().sum() + dW.square().sum()))
    parts = [
        Part.mean("E‖…‖²/(w²‖ΔV‖² + (d v²/2m)‖ΔW‖²), Δθ independent", 1.0, equal),
        Part.mean("E‖…‖²/((v² + w²)‖Δθ‖²), Δθ independent", 1.0, bound, relation="<="),
        *(
            Part.mean(
                f"the same, a gradient step on {count} token{'s' * (count > 1)}",
                1.0,
                total[i],
                relation="<=",
            )
            for i, count in enumerate(tokens)
        ),
        Part.mean(
            "‖∂z/∂V ΔV‖/(w‖ΔV‖), a gradient step on 1 token",
            math.sqrt(m),
            first[0].sqrt(),
            tolerance=0.05,
            stated=False,
        ),
    ]
    lines = [
        Line.mean("first term, over w²‖ΔV‖²", tokens, first.t()),
        Line.mean("both, over (v² + w²)‖Δθ‖²", tokens, total.t()),
        Line("the bound", tokens, [1.0] * len(tokens), False),
    ]
    return Finding(
        parts,
        f"{draws} draws, d = {d}, m = {m}.  The equality needs a Δθ independent of x and weights.  "
        "A gradient step is made of them, ΔV = −η Σ_t h_tᵀ g_t, and ∂z/∂V ΔV is √m times as long "
        "for one token: no bound then, and the sum of C8 is an estimate.",
        Curves("tokens in the batch", "squared norm over its bound", lines, log_x=True, log_y=True),
    )
