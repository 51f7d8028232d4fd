"""Claims about norms of layers, their place and their successors, and about norms of matrices."""

import math
from typing import Any

import torch
from torch import Tensor

from deepstack.schemes import NORMS, Tap, tapped, with_storage
from deepstack_lab.ledger.claim import (
    Curves,
    Finding,
    Line,
    Null,
    Part,
    at_least,
    at_most,
    beside,
    claim,
)  # fmt: skip
from deepstack_lab.ledger.claim_stack import POST_LN, Trial, small_stack
from deepstack_lab.ledger.claims.initialisation import singular_vectors
from deepstack_lab.ledger.draws import ROUNDING, normals, random, repeats, seeds
from deepstack_lab.ledger.sources import (
    LAYER_CAKE,
    NO_SIZES,
    READING_NOTES,
)  # fmt: skip
from deepstack_lab.ledger.statistics import agreement, gather, means, slopes


@claim("C4", LAYER_CAKE)
def layer_norm_jacobian(seed: int) -> Finding:
    """‖∂LN(z)/∂z‖₂ ≈ √d/‖z‖₂.

    The largest singular value of the exact Jacobian of deepstack's layer norm (eps 1e-5).
    """
    rng, d, draws = random(seed), 96, repeats(200)
    norm = NORMS["layer"](d, gain=False, bias=False, eps=1e-5)

    def ratio(z: Tensor) -> float:
        jacobian = torch.autograd.functional.jacobian(norm, z)
        assert isinstance(jacobian, Tensor)
        return (torch.linalg.matrix_norm(jacobian, 2) * z.norm()).item() / math.sqrt(d)

    parts = []
    for scale in (0.3, 1.0, 5.0):
        ratios = [ratio(scale * normals(rng, d)) for _ in range(draws // 4)]
        quantity = f"‖∂LN/∂z‖₂ ‖z‖/√d, z ~ N(0, {scale:g}²)"
        frobenius = Null(math.sqrt(d - 2), "its Frobenius norm")
        parts.append(Part.mean(quantity, 1.0, ratios, tolerance=0.01, null=frobenius))
    shifted, centred = [ratio(normals(rng, d) + 1) for _ in range(draws)], Null(1.0, "as claimed")
    quantity = "the same, z ~ N(1, 1)"
    parts.append(beside(quantity, math.sqrt(2), shifted, tolerance=0.02, null=centred))
    return Finding(
        parts,
        f"{draws // 4} draws each, {draws} of z ~ N(1, 1), d = {d}.  Exactly it is "
        "√d/‖z − mean(z)‖: right as long as the mean is small, as in a sum of a "
        "normalised stream and a branch; 1% is allowed for that.",
    )


class UnitBranches(Tap):
    """Divides each sublayer's last matrix so that its output has mean square 1."""

    def branch(self, G: Any, y: Tensor) -> Tensor:
        out: Tensor = G(y)
        scale = out.square().mean().sqrt()
        (G.o if hasattr(G, "o") else G.w2).div_(scale)
        return out / scale


def stream_powers(stack: Trial) -> dict[str, Tensor]:
    """Return the mean squares of the stream and of the norm's input at every sublayer, (2N,) each.

    In Post-LN the second is the variance D of the residual sum; x_0: x_l·x_0/‖x_0‖² after layer 2.
    """
    (snapshot,) = stack.snapshots()
    norms = {"stream": snapshot.entering, "sum": snapshot.norm_input}
    d = snapshot.states.shape[-1]
    first, last = snapshot.states[0].flatten(), snapshot.states[:3][-1].flatten()
    powers = {name: x.square().mean(dim=-1).flatten() / d for name, x in norms.items()}
    return powers | {"x_0": last @ first / (first @ first)}


@claim("C24", READING_NOTES)
def unrolled(seed: int) -> Finding:
    """Var G = 1: in Post-LN x_l holds x_0 with weight 2^(−l/2); in Pre-LN Var x_l ≈ l.

    l counts sublayers.  Stacks whose output matrices are scaled so that every branch starts with
    mean square 1.  The weight is the product of 1/√D, D the mean square of a norm's input.
    """
    depth, repetitions = 8, seeds(seed, 200)

    def sample(draw_seed: int, scheme: str, start: str) -> dict[str, Tensor]:
        stack = small_stack(draw_seed, scheme=scheme, depth=depth)
        if start == "unit":
            with torch.no_grad(), tapped(stack.model.schemes, UnitBranches()):
                stack.model(stack.batch(1)[0])
        return stream_powers(stack)

    starts = ("unit", "Xavier")
    post, pre = (
        {start: gather(sample(s, scheme, start) for s in repetitions) for start in starts}
        for scheme in ("post_ln", "pre_ln")
    )
    at = [float(sublayer) for sublayer in range(1, 2 * depth + 1)]
    weights = {start: (-0.5 * post[start]["sum"].log2()).cumsum(dim=1) for start in starts}
    falling = {start: slopes(at, weights[start]) for start in starts}
    rising = {start: slopes(at, pre[start]["stream"]) for start in starts}
    flat: dict[str, Any] = {"null": Null(0.0, "the same in every sublayer")}
    parts = [
        Part.mean("Post-LN: slope of log₂ weight against l", -0.5, falling["unit"], tolerance=0.05,
                  **flat),
        Part.mean("Pre-LN: slope of Var x_l against l", 1.0, rising["unit"], tolerance=0.05,
                  **flat),
        beside("Post-LN: x_l·x_0/‖x_0‖², l = 4", 0.25, post["unit"]["x_0"],
               null=Null(1.0, "x_0 keeps its weight")),
        beside("Post-LN, Xavier: slope of log₂ weight", -0.5, falling["Xavier"], **flat),
        beside("Pre-LN, Xavier: slope of Var x_l", 1.0, rising["Xavier"], **flat),
    ]  # fmt: skip
    lines = [Line.mean(f"Post-LN, {start}", at, weight.exp2()) for start, weight in weights.items()]
    lines.append(Line("2^(−l/2)", at, [2 ** (-sub / 2) for sub in at], measured=False))
    note = (
        f"{depth} layers, d = 32, {len(repetitions)} seeds. With Xavier's start branches are far "
        "below variance 1, and so both laws are slower."
    )
    return Finding(parts, note, Curves("sublayer l", "weight of x_0 in x_l", lines, log_y=True))


@claim("C25", READING_NOTES)
def lipschitz(seed: int) -> Finding:
    """‖Wx‖ ≤ ‖W‖₂‖x‖ ≤ ‖W‖_F‖x‖; ‖W‖₂² is the largest eigenvalue of WᵀW, by power iteration, and
    for a square W ‖W‖₂ is its largest |eigenvalue|.

    Gaussian matrices and vectors; a layer with ReLU has the bound too.
    """
    rng, n = random(seed), 64

    def radius(quantity: str, W: Tensor, **more: Any) -> Part:
        """Return the part that the largest |eigenvalue| is ‖W‖₂."""
        ratio = torch.linalg.eigvals(W).abs().max() / torch.linalg.matrix_norm(W, ord=2)
        ginibre = Null(0.5, "a random W, at large n")
        return Part.mean(quantity, 1.0, ratio, tolerance=ROUNDING, null=ginibre, **more)

    def sample(square: bool) -> list[Part]:
        W = normals(rng, n, n if square else 3 * n) / math.sqrt(n)
        spectral = torch.linalg.matrix_norm(W, ord=2)
        x, y = normals(rng, 2, 200, W.shape[1])
        moved = torch.relu(x @ W.t()) - torch.relu(y @ W.t())
        reached = ((x @ W.t()).norm(dim=1) / (spectral * x.norm(dim=1))).max()
        relu = (moved.norm(dim=1) / (spectral * (x - y).norm(dim=1))).max()
        u, v = singular_vectors(W)
        iterated = u @ W @ v / torch.linalg.eigvalsh(W.t() @ W)[-1].sqrt()
        power_iteration, bound = "σ of 500 power iterations over √λ_max(WᵀW)", Null(1.0, "as large")
        parts = [
            at_most("largest ‖Wx‖/(‖W‖₂‖x‖) of 200", 1.0, reached, null=bound),
            at_most("largest ‖ΔReLU(Wx)‖/(‖W‖₂‖Δx‖) of 200", 1.0, relu, null=bound),
            at_most("‖W‖₂/‖W‖_F", 1.0, spectral / W.norm(), null=bound),
            Part.mean(power_iteration, 1.0, iterated, tolerance=1e-3,
                      null=Null(0.5, "one random vector")),
        ]  # fmt: skip
        if square:
            parts.append(radius("largest |eigenvalue| over ‖W‖₂, square", W))
            parts.append(radius("the same, symmetric", W + W.t(), stated=False))
        return parts

    parts = means(sample(square=bool(i % 2)) for i in range(repeats(24)))
    return Finding(
        parts,
        f"{parts[0].draws} matrices of {n} × {n} and {n} × {3 * n}. The eigenvalues of a square "
        "matrix give its norm only where it is normal; those of a random one reach half of it.",
    )


@torch.no_grad()
def sensitivity(stack: Trial, rng: torch.Generator) -> float:
    """Return ‖F(x_0 + δ) − F(x_0)‖/‖δ‖ of an encoder for a random δ of 1/100 of x_0's scale."""
    encoder, x = stack.model.last, stack.model.embed(stack.batch(1)[0])
    change = 0.01 * torch.randn(x.shape, generator=rng)
    return ((encoder(x + change) - encoder(x)).norm() / change.norm()).item()


@claim(
    "C26", READING_NOTES, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 2, "steps": 15},),
)  # fmt: skip
def weight_decay(seed: int) -> Finding:
    """loss + λ‖W‖_F² lowers the Lipschitz bound Π‖W‖₂ of the trained matrices.

    Short runs from the same start: without decay, with its gradient added to the loss's (Adam), and
    decoupled (AdamW).  Beside the bound: ‖F(x_0 + δ) − F(x_0)‖/‖δ‖ for a small random δ, F the last
    hidden state, of Pre-LN and of a stack without norms (T-Fixup), to which the bound applies.
    """
    steps, decays = 15, {"none": ("adam", 0.0), "L2": ("adam", 0.02), "AdamW": ("adamw", 0.5)}

    def end(draw_seed: int, scheme: str, kind: str) -> tuple[float, float]:
        optimizer, decay = decays[kind]
        train = {"lr": 3e-3, "optimizer": optimizer, "weight_decay": decay}
        stack = small_stack(draw_seed, scheme=scheme, depth=2, **train)
        stack.run(steps)
        return stack.mean_spectral_norm(), sensitivity(stack, random(draw_seed))

    def sample(draw_seed: int, scheme: str, word: str, *kinds: str) -> list[Part]:
        parts, without = [], end(draw_seed, scheme, "none")
        for kind in kinds:
            (bound, response), label = end(draw_seed, scheme, kind), f"{word}, {kind}"
            lower, over, response = bound < without[0], bound / without[0], response / without[1]
            same = Null(1.0, "as without")
            parts += [
                Part.mean(f"{label}: share of runs with a lower Π‖W‖₂", 1.0, float(lower),
                          null=Null(0.5, "by chance")),
                at_most(f"{label}: ‖W‖₂ over that without", 1.0, over, null=same),
                at_most(f"{label}: ‖ΔF‖/‖δ‖ over that without", 1.0, response, stated=False,
                        null=same),
            ]  # fmt: skip
        return parts

    stacks = (("pre_ln", "Pre-LN", "L2", "AdamW"), ("t_fixup", "no norms", "L2"))
    parts = means(sample(s, *stack) for stack in stacks for s in seeds(seed, 8))
    return Finding(
        parts,
        f"2 layers, d = 32, {steps} steps at lr 0.003, {parts[0].draws} seeds, weight decay 0.02 "
        "for L2 (λ = 0.01, Adam) and 0.5 for AdamW; ‖W‖₂ is the geometric mean over the matrices. "
        "The bound falls in every run. The stack's gain on a change of x_0 falls little without "
        "norms, and grows in Pre-LN, whose last norm enlarges a smaller stream.",
    )


@claim("C27", READING_NOTES)
def small_deviation(seed: int) -> Finding:
    """A small start keeps the variance D of Post-LN's residual sum near 1, so that x_0 keeps its
    weight D^(−l/2).

    BERT's sizes: d = 768, 12 heads, GELU, matrices N(0, 0.0176²), the deviation of N(0, 0.02²) cut
    at ±2σ.  Beside Xavier's start.
    """
    bert: dict[str, Any] = {
        "depth": 1, "d_model": 768, "n_heads": 12, "activation": "gelu", "batch_size": 2,
    }  # fmt: skip

    def sample(draw_seed: int, word: str, **start: Any) -> list[Part]:
        attention, feed_forward = stream_powers(small_stack(draw_seed, **bert, **start))["sum"]
        weight, stated = (attention * feed_forward) ** -6, word != "Xavier"
        double = Null(2.0, "a branch of variance 1")
        within: dict[str, Any] = {"tolerance": 0.1, "stated": stated, "null": double}
        weight_of_x0 = f"weight of x_0 after 12 such layers, {word}"
        return [
            Part.mean(f"D, attention, {word}", 1.0, attention, **within),
            Part.mean(f"D, feed-forward, {word}", 1.0, feed_forward, **within),
            at_least(weight_of_x0, 2.0**-12, weight, stated=stated, null=Null(2.0**-12, "D = 2")),
        ]

    repetitions, normal = seeds(seed, 24), {"init_distribution": "normal", "init_std": 0.0176}
    parts = means(sample(s, "0.0176", **normal) for s in repetitions)
    parts += means(sample(s, "Xavier", init_distribution="xavier_normal") for s in repetitions)
    return Finding(
        parts,
        f"One layer of BERT's size, 32 tokens, {parts[0].draws} seeds; 2^(−12) is the weight for "
        "D = 2. Xavier's branches have far less than unit variance too, so that D is 1.2 "
        "there and not 2.",
    )


@claim("C32", READING_NOTES)
def rms_without_biases(seed: int) -> Finding:
    """T5: y = γ x/√(mean(x²) + ε), no centring, and no bias in any layer.

    Compares deepstack's RMSNorm to the formula, and measures the mean that it leaves and the number
    of parameters saved.  Short runs beside LayerNorm with biases are not claimed by the document.
    """
    rng, d, depth = random(seed), 32, 2

    def norm_sample() -> list[Part]:
        rms = NORMS["rms"](d, eps=1e-6, gain=True, bias=False)
        gain = normals(rng, d)
        rms.gain = with_storage(gain, ("norm_gain",), "one")
        x = 1 + normals(rng, 64, d)
        formula = gain * x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        mean = torch.rms_norm(1 + normals(rng, 64, 4096), (4096,)).mean()
        near = agreement(rms(x), formula)
        return [
            Part.mean("1 − distance from the formula", 1.0, near, tolerance=ROUNDING,
                      null=Null(0.0, "as far as 0 is")),
            Part.mean("mean of RMSNorm(x), x ~ N(1, 1): 1/√2", math.sqrt(0.5), mean,
                      null=Null(0.0, "x is centred")),
        ]  # fmt: skip

    def sample(draw_seed: int) -> list[Part]:
        pre_ln: dict[str, Any] = {"scheme": "pre_ln", "depth": depth, "lr": 3e-3}
        small = small_stack(draw_seed, norm_kind="rms", norm_bias=False, bias=False, **pre_ln)
        usual = small_stack(draw_seed, **pre_ln)
        saved, small_saved = (sum(s.built.banks.count().values()) for s in (usual, small))
        ratio = sum(small.run(24)[-8:]) / sum(usual.run(24)[-8:])
        return [
            Part.mean("numbers less, all biases", biases, saved - small_saved,
                      null=Null(0.0, "no bias less")),
            beside("training loss over LayerNorm's with biases", 1.0, ratio,
                   null=Null(1.05, "one part in twenty higher")),
        ]  # fmt: skip

    biases = depth * (3 * d + d + 4 * d + d) + (2 * depth + 1) * d  # of maps, and of norms
    parts = [*means(norm_sample() for _ in range(repeats(8))), *means(map(sample, seeds(seed, 8)))]
    return Finding(
        parts,
        f"Pre-LN, {depth} layers, d = {d}, {parts[-1].draws} seeds, the mean loss of steps 17 to "
        "24 of 24 at lr 0.003. C72 measures the document's guess at transfer to other tasks.",
    )
