"""Claims that the derivation of DeepNorm takes for granted: attention's size, ∂L/∂F, ∂f/∂θ."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.theory.claim import Curves, Finding, Line, Part, at_most, beside, claim
from deepstack.theory.claim_stack import FLAT, Trial, flat_part
from deepstack.theory.draws import F64, ROUNDING, normals, power, random, repeats, seeds
from deepstack.theory.sources import LAYER_CAKE
from deepstack.theory.statistics import exponents, gather, means, sweep
from deepstack.theory.variance import COEFFICIENTS

D = 64
DEEPNORM = (12**0.25, 48**-0.25)  # alpha and beta at N = 6


def attend(
    x: Tensor, W_V: Tensor, W_O: Tensor, heads: int, W_Q: Tensor | None = None,
    W_K: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return concat_h softmax(q_h k_hᵀ/√d_head) v_h W_O; x: (batch, tokens, D).

    Without W_Q and W_K: q and k are x.
    """
    q, k, v = (
        (x if W is None else x @ W).unflatten(-1, (heads, -1)).transpose(1, 2)
        for W in (W_Q, W_K, W_V)
    )
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ W_O


def rows(rng: torch.Generator, *shape: int) -> Tensor:
    """Return normalised rows of width D."""
    return torch.layer_norm(normals(rng, *shape, D), (D,), eps=0.0)


def square(rng: torch.Generator, gain: float) -> Tensor:
    """Return a matrix (D, D) of variance gain²/D."""
    return gain * normals(rng, D, D) / math.sqrt(D)


@claim("C37", LAYER_CAKE)
def attention_like_feed_forward(seed: int) -> Finding:
    """Attn(x) = x W_V W_O, Var W_V = w²/d, Var W_O = v²/d: E‖αx + Attn(x)‖² = d (α² + v²w²),
    ‖∂z/∂x Δx‖ ≈ √(α² + v²w²) ‖Δx‖, ‖∂z/∂θ Δθ‖ ≤ √(v² + w²) ‖Δθ‖, for any number of heads.

    Softmax attention of one token, which is x W_V W_O exactly; Δθ of W_V and W_O as in C7:
    independent, and a step of gradient descent.  Beside it 32 independent tokens.
    """
    rng, draws, counts = random(seed), repeats(120), (1, 4, 16)

    def sample(label: str, alpha: float, v: float, w: float, heads: int) -> list[Part]:
        x, W_V, W_O = rows(rng, 8, 1), square(rng, w), square(rng, v)
        z, step = alpha * x + attend(x, W_V, W_O, heads), normals(rng, 8, 1, D)
        moved = alpha * (x + step) + attend(x + step, W_V, W_O, heads) - z
        dV, dO = normals(rng, D, D), normals(rng, D, D)
        sizes = (v**2 + w**2) * (power(dV) + power(dO)) * D
        weights = attend(x, dV, W_O, heads) + attend(x, W_V, dO, heads)
        equal, words = alpha**2 + v**2 * w**2, f"{label}, heads: {heads}"
        return [
            Part.mean(f"E‖z‖²/d, {words}", equal, power(z)),
            Part.mean(f"‖∂z/∂x Δx‖²/‖Δx‖², {words}", equal, power(moved) / power(step)),
            at_most(f"E‖∂z/∂θ Δθ‖²/((v² + w²)‖Δθ‖²), {words}", 1.0, power(weights) / sizes),
        ]

    def aligned(tokens: int) -> float:
        """Return ‖∂z/∂θ Δθ‖²/((v² + w²)‖Δθ‖²), a mean over tokens, of a gradient step."""
        x, W_V, W_O = rows(rng, tokens, 1), square(rng, 0.5), square(rng, 0.5)
        W_V.requires_grad_(), W_O.requires_grad_()
        loss = (attend(x, W_V, W_O, 4) * normals(rng, tokens, 1, D)).sum()
        dV, dO = torch.autograd.grad(loss, (W_V, W_O))
        with torch.no_grad():
            moved = attend(x, dV, W_O, 4) + attend(x, W_V, dO, 4)
        return power(moved) / (0.5 * (power(dV) + power(dO)) * D)

    def several(alpha: float, v: float, w: float) -> float:
        x = rows(rng, 1, 32)
        return power(alpha * x + attend(x, square(rng, w), square(rng, v), 4))

    parts = means(
        sample(label, *coefficients, heads)
        for heads, (label, coefficients) in zip(counts, COEFFICIENTS.items(), strict=True)
        for _ in range(draws)
    )
    for tokens in (1, 64):
        quantity = f"the last, v = w = 0.5, a gradient step on {tokens} token{'s' * (tokens > 1)}"
        parts.append(at_most(quantity, 1.0, [aligned(tokens) for _ in range(draws // 3)]))
    ones = [several(1.0, 1.0, 1.0) for _ in range(draws)]
    parts.append(beside("E‖z‖²/d, α = v = w = 1, 32 independent tokens", 2.0, ones))
    return Finding(
        parts,
        f"{draws} draws of the sublayer and 8 tokens, d = {D}.  The heads change nothing.  A "
        "gradient step is aligned with x and the weights and longer, as in C7.  Attention over "
        "independent tokens adds less than x W_V W_O does, since it averages them (C3).",
    )


@claim("C38", LAYER_CAKE)
def gain_of_queries(seed: int) -> Finding:
    """The gain of W_Q and W_K does not change the size of attention's output: ‖Attn‖ ≍ ‖x W_V W_O‖.

    One head of Xavier's matrices, W_Q and W_K times a gain, on 16 normalised tokens: independent
    ones, and ones that share nine tenths of their variance.  The size is the same if the root mean
    square changes by less than 20%.  Jensen's bound: ‖softmax(q)V‖ ≤ max ‖v_j‖.
    """
    rng, draws, gains = random(seed), repeats(60), (0.1, 48**-0.25, 1.0, 2.0, 4.0)

    def sample(shared: float) -> dict[str, Tensor]:
        common = normals(rng, 4, 1, D)
        x = math.sqrt(shared) * common + math.sqrt(1 - shared) * normals(rng, 4, 16, D)
        x = torch.layer_norm(x, (D,), eps=0.0)
        W_V, W_O, Q, K = (square(rng, 1.0) for _ in range(4))
        outputs = [attend(x, W_V, W_O, 1, gain * Q, gain * K) for gain in gains]
        linear = x @ W_V @ W_O
        greatest_norm = linear.norm(dim=-1).amax(dim=1, keepdim=True)
        return {
            "size": torch.tensor([math.sqrt(power(y) / power(linear)) for y in outputs]),
            "bound": torch.stack([(y.norm(dim=-1) / greatest_norm).max() for y in outputs]),
        }

    parts, lines = [], []
    for shared, label in ((0.0, "independent tokens"), (0.9, "alike tokens")):
        drawn = gather(sample(shared) for _ in range(draws))
        size = drawn["size"]
        quantity = "‖Attn‖ at gain {} over that at gain 1, " + label
        parts += [
            Part.mean(quantity.format(f"{gain:.2g}"), 1.0, size[:, at] / size[:, 2], tolerance=FLAT)
            for at, gain in enumerate(gains)
            if gain != 1
        ]
        parts.append(
            Part(f"largest ‖Attn(x)_i‖ over max ‖x_j W_V W_O‖, {label}", 1.0,
                 drawn["bound"].max().item(), 0.0, relation="<=", tolerance=ROUNDING)
        )  # fmt: skip
        lines.append(Line.mean(label, gains, size))
    return Finding(
        parts,
        f"{draws} draws of 4 sequences, d = {D}.  A larger gain sharpens the softmax, from a mean "
        "of 16 independent tokens (1/4 of a token's size) towards one of them.  DeepNorm's β in "
        "place of 1 makes the output smaller, by less than a third.  Equal tokens keep the size.",
        Curves("gain of W_Q and W_K", "‖Attn‖/‖x W_V W_O‖", lines, log_x=True),
    )


@claim("C39", LAYER_CAKE)
def sizes_of_gradients(seed: int) -> Finding:
    """‖∂L/∂F‖ = O(1) for every N, and ‖∂f/∂θ‖ ≈ √(v² + w²)/α in size.

    L is the mean loss of a batch, at the start.  f is the scalar model, x (α ± vw)/√(α² + v²w²),
    and then LN(αx + ReLU(xW)V) of one token with DeepNorm's α, β at N = 6, m = 4d.  The size is
    right if it does not depend on d.  Measured for a random Δθ, ‖∂f/∂θ Δθ‖/‖Δθ‖, and as the
    spectral norm ‖∂f/∂θ‖₂, which ‖∂L/∂θ‖ ≤ ‖∂L/∂F‖ ‖∂f/∂θ‖ needs.
    """
    depths, repetitions = (6, 54), seeds(seed, 12)
    parts = []
    for name, label in (("deepnorm", "DeepNorm"), ("post_ln", "Post-LN"), ("pre_ln", "Pre-LN")):
        by_seed = [[output_gradient(s, name, N) for N in depths] for s in repetitions]
        parts.append(flat_part(f"{label}: ‖∂L/∂F‖ at N = 54 over N = 6", torch.tensor(by_seed)))
    rng, draws, widths = random(seed), repeats(48), (32, 96, 288)
    alpha, beta = DEEPNORM
    claimed = math.sqrt(2) * beta / alpha
    for words, a, b in (("DeepNorm, N = 6", alpha, beta), ("α = v = w = 1", 1.0, 1.0)):
        ratio = scalar_gradients(rng, a, b, repeats(40_000)) / (2 * b**2 / a**2)
        quantity, within = f"scalar f, E‖∂f/∂θ‖² over (v² + w²)/α², {words}", 0.05
        parts.append(Part.mean(quantity, 1.0, ratio, tolerance=within, stated=b < 1))
    drawn = sweep(widths, draws, lambda d: parameter_gradients(rng, d, alpha, beta))
    over = "over √(v² + w²)/α, exponent in d"
    random_step, largest = drawn["random"] / claimed, drawn["largest"] / claimed
    parts += [
        Part.mean(f"‖∂f/∂θ Δθ‖/‖Δθ‖ {over}", 0.0, exponents(widths, random_step), tolerance=0.05),
        Part.mean(f"‖∂f/∂θ‖₂ {over}", 0.0, exponents(widths, largest), tolerance=0.05),
        at_most("‖∂f/∂θ Δθ‖/‖Δθ‖ over √(v² + w²)/α, d = 96", 1.0, random_step[:, 1], stated=False),
        at_most("‖∂f/∂θ‖₂ over √(v² + w²)/α, d = 96", 1.0, largest[:, 1], stated=False),
    ]
    lines = [
        Line.mean("random Δθ", widths, random_step),
        Line.mean("spectral norm", widths, largest),
        Line("claimed", widths, [1.0] * len(widths), measured=False),
    ]
    return Finding(
        parts,
        f"{len(repetitions)} seeds at depth, {draws} draws of f.  ‖∂L/∂F‖ is the head's and does "
        "not see N.  The scalar model drops v²w²/α², which is small for DeepNorm.  The spectral "
        "norm grows as √d, for a step along the data is √m times as long (C7): flat in N "
        "all the same, but not of the size that is claimed.",
        Curves("width d", "size over √(v² + w²)/α", lines, log_x=True, log_y=True),
    )


def output_gradient(seed: int, scheme: str, depth: int) -> float:
    """Return ‖∂L/∂F‖ of the first batch at the start."""
    trial = Trial(seed, scheme=scheme, depth=depth)
    inputs, targets = trial.batch(1)
    hidden = trial.model.hidden(inputs).detach().requires_grad_()
    logits = trial.model.head(hidden, trial.model.embedding)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return torch.autograd.grad(loss, hidden)[0].norm().item()


def scalar_gradients(rng: torch.Generator, alpha: float, beta: float, draws: int) -> Tensor:
    """Return ‖∂f/∂(v, w)‖² of the scalar model with v = w = beta, (draws,)."""
    v, w = (torch.full((draws,), beta, dtype=F64, requires_grad=True) for _ in range(2))
    sign = 2.0 * torch.randint(2, (draws,), generator=rng, dtype=F64) - 1
    f = normals(rng, draws) * (alpha + sign * v * w) / (alpha**2 + (v * w) ** 2).sqrt()
    gradients = torch.autograd.grad(f.sum(), (v, w))
    return torch.stack(gradients).square().sum(dim=0)


def parameter_gradients(
    rng: torch.Generator, d: int, alpha: float, beta: float
) -> dict[str, Tensor]:
    """Return the root mean square of ‖∂f/∂θ Δθ‖/‖Δθ‖ over Δθ and its largest value, one token."""
    m = 4 * d
    x = torch.layer_norm(normals(rng, d), (d,), eps=0.0)
    W, V = normals(rng, d, m) * beta * math.sqrt(2 / d), normals(rng, m, d) * beta / math.sqrt(m)
    hidden = torch.relu(x @ W)
    active = V[hidden > 0]
    gram = hidden.square().sum() * torch.eye(d, dtype=F64) + d * active.t() @ active
    z = alpha * x + hidden @ V
    jacobian = torch.autograd.functional.jacobian(lambda y: torch.layer_norm(y, (d,), eps=0.0), z)
    assert isinstance(jacobian, Tensor)
    square = jacobian @ gram @ jacobian.t()
    return {
        "random": (square.trace() / (2 * d * m)).sqrt(),
        "largest": torch.linalg.matrix_norm(square, 2).sqrt(),
    }
