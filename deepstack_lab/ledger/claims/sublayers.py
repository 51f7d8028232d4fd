"""Claims about one residual sublayer at the start: its size, and the size of a step."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack_lab.ledger.claim import (
    Curves,
    Finding,
    Line,
    Null,
    Part,
    at_most,
    beside,
    claim,
)  # fmt: skip
from deepstack_lab.ledger.claim_stack import FLAT
from deepstack_lab.ledger.draws import (
    F64,
    ROUNDING,
    D,
    normals,
    power,
    random,
    repeats,
    rows,
    square,
)
from deepstack_lab.ledger.sources import LAYER_CAKE
from deepstack_lab.ledger.statistics import gather, means, sweep

# alpha, v, w: Post-LN's, DeepNorm's at N = 6 with v = w = beta, and three different numbers
COEFFICIENTS = {
    f"α = {alpha:.3g}, v = {v:.3g}, w = {w:.3g}": (alpha, v, w)
    for alpha, v, w in ((1.0, 1.0, 1.0), (12**0.25, 48**-0.25, 48**-0.25), (1.5, 0.8, 0.4))
}
M = 256  # width of the hidden layer of a feed-forward
NO_BOUND = Null(1.0, "no smaller than the bound")


def no_branch(alpha: float) -> Null:
    """Return the null result of a mean square of αx + G(x): α², of αx alone."""
    return Null(alpha**2, "α², the branch adds nothing")


def sublayer(
    rng: torch.Generator, v: float, w: float, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a normalised x (tokens, D), W (D, M) of variance 2w²/D, V (M, D) of v²/M."""
    x = rows(rng, tokens)
    return x, normals(rng, D, M) * w * math.sqrt(2 / D), normals(rng, M, D) * v / math.sqrt(M)


@claim("C5", LAYER_CAKE)
def residual_sum(seed: int) -> Finding:
    """z = αx + ReLU(xW)V, Var W = 2w²/d, Var V = v²/m: E‖z‖² = d (α² + v²w²), with half of ReLU's
    gates open.

    One feed-forward sublayer, drawn anew each time.
    """
    rng, draws = random(seed), repeats(120)

    def sample(label: str, alpha: float, v: float, w: float) -> list[Part]:
        x, W, V = sublayer(rng, v, w, tokens=8)
        hidden = torch.relu(x @ W)
        square, is_open = alpha**2 + v**2 * w**2, (hidden > 0).double().mean()
        return [
            Part.mean(f"E‖z‖²/d, {label}", square, power(alpha * x + hidden @ V),
                      null=no_branch(alpha)),
            Part.mean("share of open gates of ReLU", 0.5, is_open, null=Null(1.0, "all of them")),
        ]  # fmt: skip

    parts = means(sample(label, *c) for label, c in COEFFICIENTS.items() for _ in range(draws))
    return Finding(parts, f"{draws} draws of W, V and 8 tokens each, d = {D}, m = {M}.")


@claim("C6", LAYER_CAKE)
def step_through_the_residual(seed: int) -> Finding:
    """‖∂z/∂x Δx‖ ≈ √(α² + v²w²) ‖Δx‖.

    z as in C5; Δx a random direction, and, beside it, the one that ∂z/∂x stretches most.
    """
    rng, draws = random(seed), repeats(60)

    def sample(label: str, alpha: float, v: float, w: float) -> list[Part]:
        x, W, V = sublayer(rng, v, w, tokens=1)
        active = (x @ W > 0).double()  # (1, m): ReLU's derivative
        jacobian = alpha * torch.eye(D, dtype=F64) + (W * active) @ V
        step, square = normals(rng, 16, D), alpha**2 + v**2 * w**2
        most, stretched = torch.linalg.matrix_norm(jacobian, 2), "largest ‖∂z/∂x Δx‖/‖Δx‖"
        random_step = power(step @ jacobian) / power(step)
        return [
            Part.mean(f"‖∂z/∂x Δx‖²/‖Δx‖², {label}", square, random_step, null=no_branch(alpha)),
            at_most(f"{stretched}, {label}", math.sqrt(square), most, stated=False,
                    null=Null(math.sqrt(square), "as in a random direction")),
        ]  # fmt: skip

    parts = means(sample(label, *c) for label, c in COEFFICIENTS.items() for _ in range(draws))
    parts.sort(key=lambda part: not part.stated)
    return Finding(
        parts,
        f"{draws} draws of the sublayer, 16 directions each, d = {D}, m = {M}.  It is a mean over "
        "directions, not a bound: in the most stretched one the factor is up to twice as large.",
    )


@claim("C7", LAYER_CAKE)
def step_of_the_weights(seed: int) -> Finding:
    """E‖∂z/∂V ΔV + ∂z/∂W ΔW‖² = w²‖ΔV‖² + (d v²/2m)‖ΔW‖² ≤ (v² + w²)‖Δθ‖².

    z as in C5, v = w = 0.5.  Δθ: independent of x and the weights, as the expectation takes it; and
    the step of gradient descent on Σ_t <g_t, z_t>, g_t random, for which it is used.
    """
    rng, v, w, draws, tokens = random(seed), 0.5, 0.5, repeats(40), (1, 4, 16, 64)

    def ratios(count: int, independent: bool) -> dict[str, Tensor]:
        """Return means over tokens of squared changes of z, over the sizes claimed for them."""
        x, W, V = sublayer(rng, v, w, tokens=count)
        hidden = torch.relu(x @ W)
        if independent:
            dW, dV = normals(rng, D, M), 2 * normals(rng, M, D)
        else:
            g = normals(rng, count, D)
            dV, dW = hidden.t() @ g, x.t() @ ((g @ V.t()) * (hidden > 0))
        by_V = hidden @ dV
        both = D * power(by_V + ((x @ dW) * (hidden > 0)) @ V)
        squares = dV.square().sum(), dW.square().sum()
        return {
            "equal": both / (w**2 * squares[0] + D * v**2 / (2 * M) * squares[1]),
            "bound": both / ((v**2 + w**2) * (squares[0] + squares[1])),
            "by V": D * power(by_V) / (w**2 * squares[0]),
        }

    random_step = gather(ratios(16, independent=True) for _ in range(draws))
    steps = sweep(tokens, draws, partial(ratios, independent=False))
    loose = (random_step["equal"] / random_step["bound"]).mean().item()
    parts = [
        Part.mean("E‖…‖²/(w²‖ΔV‖² + (d v²/2m)‖ΔW‖²), Δθ independent", 1.0, random_step["equal"],
                  null=Null(loose, "(v² + w²)‖Δθ‖², the bound")),
        at_most("E‖…‖²/((v² + w²)‖Δθ‖²), Δθ independent", 1.0, random_step["bound"],
                null=NO_BOUND),
    ]  # fmt: skip
    for count, step in zip(tokens, steps["bound"].t(), strict=True):
        words = f"{count} token{'s' * (count > 1)}"
        parts.append(at_most(f"the same, a gradient step on {words}", 1.0, step, null=NO_BOUND))
    long, as_random = "‖∂z/∂V ΔV‖/(w‖ΔV‖), a gradient step on 1 token", Null(1.0, "Δθ independent")
    by_V = steps["by V"][:, 0].sqrt()
    parts.append(beside(long, math.sqrt(M), by_V, tolerance=0.05, null=as_random))
    lines = [
        Line.mean("first term, over w²‖ΔV‖²", tokens, steps["by V"]),
        Line.mean("both, over (v² + w²)‖Δθ‖²", tokens, steps["bound"]),
        Line("the bound", tokens, [1.0] * len(tokens), False),
    ]
    return Finding(
        parts,
        f"{draws} draws, d = {D}, m = {M}.  The equality needs a Δθ independent of x and weights.  "
        "A gradient step is made of them, ΔV = −η Σ_t h_tᵀ g_t, and ∂z/∂V ΔV is √m times as long "
        "for one token: no bound then, and the sum of C8 is an estimate.",
        Curves("tokens in the batch", "squared norm over its bound", lines, log_x=True, log_y=True),
    )


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
            Part.mean(f"E‖z‖²/d, {words}", equal, power(z), null=no_branch(alpha)),
            Part.mean(f"‖∂z/∂x Δx‖²/‖Δx‖², {words}", equal, power(moved) / power(step),
                      null=no_branch(alpha)),
            at_most(f"E‖∂z/∂θ Δθ‖²/((v² + w²)‖Δθ‖²), {words}", 1.0, power(weights) / sizes,
                    null=NO_BOUND),
        ]  # fmt: skip

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
        moved = [aligned(tokens) for _ in range(draws // 3)]
        parts.append(at_most(quantity, 1.0, moved, null=NO_BOUND))
    ones, quantity = [several(1.0, 1.0, 1.0) for _ in range(draws)], "E‖z‖²/d, α = v = w = 1"
    parts.append(beside(f"{quantity}, 32 independent tokens", 2.0, ones, null=no_branch(1.0)))
    return Finding(
        parts,
        f"{draws} draws of the sublayer and 8 tokens ({draws // 3} of a step), d = {D}.  The heads "
        "change nothing.  A gradient step is aligned with x and the weights and longer, as in C7.  "
        "Attention over independent tokens adds less than x W_V W_O does, since it averages them "
        "(C3).",
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
            Part.mean(quantity.format(f"{gain:.2g}"), 1.0, size[:, at] / size[:, 2], tolerance=FLAT,
                      null=Null(gain, "the size is that of the logits"))
            for at, gain in enumerate(gains)
            if gain != 1
        ]  # fmt: skip
        parts.append(
            Part(f"largest ‖Attn(x)_i‖ over max ‖x_j W_V W_O‖, {label}", 1.0,
                 drawn["bound"].max().item(), 0.0, relation="<=", tolerance=ROUNDING,
                 null=Null(4.0, "weights 1 in place of a softmax: √n, n = 16"))
        )  # fmt: skip
        lines.append(Line.mean(label, gains, size))
    return Finding(
        parts,
        f"{draws} draws of 4 sequences, d = {D}.  A larger gain sharpens the softmax, from a mean "
        "of 16 independent tokens (1/4 of a token's size) towards one of them.  DeepNorm's β in "
        "place of 1 makes the output smaller, by less than a third.  Equal tokens keep the size.",
        Curves("gain of W_Q and W_K", "‖Attn‖/‖x W_V W_O‖", lines, log_x=True),
    )
