"""Claims about how matrices start, and how activations keep the second moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.model.initialise import DISTRIBUTIONS
from deepstack.model.sublayers import scaled_linear
from deepstack.theory.claim import Curves, Finding, Line, Part, claim
from deepstack.theory.claim_stack import Trial, started
from deepstack.theory.draws import (
    F64,
    ROUNDING,
    agreement,
    normals,
    power,
    random,
    repeats,
    seeds,
)
from deepstack.theory.gradients import mean_spectral_norm, signals
from deepstack.theory.sources import DEPTH_SCALED, READING_NOTES


@claim("C18", READING_NOTES)
def nearly_orthogonal(seed: int) -> Finding:
    """W (m × n, m ≥ n), entries of mean 0 and variance 1/m: WᵀW ≈ I, the better the larger m;
    W keeps lengths, and a square W has W⁻¹ ≈ Wᵀ.

    Square matrices of three distributions, entry by entry and as a whole.  'Nearly' means an error
    of 1/√m, that of the entries.
    """
    rng, sizes, draws = random(seed), (16, 64, 256), repeats(8)
    kinds: dict[str, Callable[[int], Tensor]] = {
        "normal": lambda m: normals(rng, m, m),
        "uniform": lambda m: math.sqrt(3) * (2 * torch.rand(m, m, generator=rng, dtype=F64) - 1),
        "±1": lambda m: 2.0 * torch.randint(0, 2, (m, m), generator=rng).to(F64) - 1,
    }
    parts, entries, frobenius = [], [], []
    for m in sizes:
        errors = {kind: [gram_error(draw(m) / math.sqrt(m)) for _ in range(draws)]
                  for kind, draw in kinds.items()}  # fmt: skip
        off = [math.sqrt(power(e[~torch.eye(m, dtype=torch.bool)])) for e in errors["normal"]]
        entries.append(off)
        frobenius.append([power(e) ** 0.5 * math.sqrt(m) for e in errors["normal"]])
        if m == sizes[-1]:
            for kind in kinds:
                apart = [e[~torch.eye(m, dtype=torch.bool)] for e in errors[kind]]
                root = [math.sqrt(power(e)) for e in apart]
                quantity = f"(WᵀW − I)_ij, root mean square, i ≠ j, {kind}, m = {m}"
                parts.append(Part.mean(quantity, m**-0.5, root))
            norm = [torch.linalg.matrix_norm(e, ord=2).item() for e in errors["normal"]]
    m = sizes[-1]
    lengths, inverse = [], []
    for _ in range(draws):
        W, x = normals(rng, m, m) / math.sqrt(m), normals(rng, m, 8)
        lengths.append((W @ x).square().sum().item() / x.square().sum().item())
        back = torch.linalg.solve(W, x)
        inverse.append(1 - agreement(W.t() @ x, back))
    wide = [power(gram_error(normals(rng, 4096, 16) / 64)) ** 0.5 * 4 for _ in range(draws)]
    straight = torch.empty(m, m, dtype=F64)
    exact = []
    for _ in range(2):
        DISTRIBUTIONS["orthogonal"].fill(straight, 1.0, rng)
        exact.append(1 - torch.linalg.matrix_norm(gram_error(straight), ord=2).item())
    parts += [
        Part.mean("‖Wx‖²/‖x‖²", 1.0, lengths),
        Part.mean("‖W⁻¹x − Wᵀx‖/‖W⁻¹x‖, 1/√m if as near as the entries", m**-0.5, inverse),
        Part.mean("‖WᵀW − I‖_F/‖I‖_F", m**-0.5, frobenius[-1]),
        Part.mean("‖WᵀW − I‖_F/‖I‖_F, √(1 + 1/m)", (1 + 1 / m) ** 0.5, frobenius[-1], stated=False),
        Part.mean("‖WᵀW − I‖₂, (1 + 1)² − 1", 3.0, norm, tolerance=0.05, stated=False),
        Part.mean("the same in F, m = 4096, n = 16", (17 / 4096) ** 0.5, wide, stated=False),
        Part.mean("1 − ‖WᵀW − I‖₂, orthogonal start", 1.0, exact, tolerance=1e-5, stated=False),
    ]
    note = (
        f"m = n = {m}, {draws} draws of each. Near the identity entry by entry only: n² errors of "
        "1/√m add up to a distance from I as large as I, at every size, and the inverse is not "
        "the transpose. It is near where m is far above n."
    )
    lines = [
        Line.mean("entries, i ≠ j", sizes, torch.tensor(entries, dtype=F64).t()),
        Line("1/√m", sizes, [m**-0.5 for m in sizes], measured=False),
        Line.mean("‖WᵀW − I‖_F/‖I‖_F", sizes, torch.tensor(frobenius, dtype=F64).t()),
    ]
    return Finding(parts, note, Curves("m = n", "distance from I", lines, True, True))


def gram_error(W: Tensor) -> Tensor:
    """Return WᵀW − I."""
    return W.t() @ W - torch.eye(W.shape[1], dtype=W.dtype)


@claim("C19", READING_NOTES)
def truncated_normal(seed: int) -> Finding:
    """N(0, σ²) cut at ±2σ has variance 0.7737413 σ²; BERT's σ = 0.2 makes that 0.176, which is
    small beside 1/√768 = 0.0361.

    torch's own truncated normal, and deepstack's, which undoes the factor.
    """
    rng, draws = random(seed), repeats(16)
    cut, scaled_back = torch.empty(500, 500), torch.empty(500, 500)
    shares, bert, scaled = [], [], []
    for _ in range(draws):
        torch.nn.init.trunc_normal_(cut, 0.0, 0.5, -1.0, 1.0, generator=rng)
        shares.append(power(cut.double()) / 0.25)
        torch.nn.init.trunc_normal_(cut, 0.0, 0.2, -0.4, 0.4, generator=rng)
        bert.append(math.sqrt(power(cut.double())))
        DISTRIBUTIONS["truncated_normal"].fill(scaled_back, 0.3, rng)
        scaled.append(power(scaled_back.double()) / 0.09)
    parts = [
        Part.mean("Var/σ²", 0.7737413, shares),
        Part.mean("standard deviation for σ = 0.2", 0.176, bert, tolerance=5e-4 / 0.176),
        Part.mean("the same, beside 1/√768", 768**-0.5, bert, relation="<="),
        Part.mean("for σ = 0.02", 768**-0.5, [b / 10 for b in bert], relation="<=", stated=False),
        Part.mean("Var/scale² of deepstack's truncated_normal", 1.0, scaled, stated=False),
    ]
    note = (
        f"{draws} draws of 250 000 numbers. 0.2 is a slip for BERT's 0.02: 0.176 is five times "
        "1/√768, 0.0176 is half of it, as the document says later."
    )
    return Finding(parts, note)


def through(
    rng: torch.Generator, activation: Callable[[Tensor], Tensor], layers: int, width: int = 256
) -> list[float]:
    """Return E[x²] after each of the layers x <- activation(W x), Var W = 1/width, from E[x²] = 1.

    The laws are those of large widths: a finite one moves E[x²] by about layers/width.
    """
    x, moments = normals(rng, width, 64), []
    for _ in range(layers):
        x = activation(normals(rng, width, width) @ x / math.sqrt(width))
        moments.append(power(x))
    return moments


def expectation(f: Callable[[Tensor], Tensor]) -> float:
    """Return E[f(x)], x ~ N(0, 1), by the trapezoid rule on [−12, 12]."""
    x = torch.linspace(-12, 12, 240_001, dtype=F64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    return torch.trapezoid(f(x) * density, x).item()


@claim("C20", READING_NOTES)
def scaled_sigmoid(seed: int) -> Finding:
    """E[sigmoid(x)²] = 0.2933790, x ~ N(0, 1): sigmoid/√0.2933790 preserves second moments.

    By random numbers, by quadrature, and through layers of Var W = 1/n_in.
    """
    rng, layers, draws = random(seed), 12, repeats(96)
    drawn = [power(torch.sigmoid(normals(rng, 100_000))) for _ in range(draws)]
    exact = expectation(lambda x: torch.sigmoid(x) ** 2)
    root = math.sqrt(0.2933790)
    deep = [through(rng, lambda x: torch.sigmoid(x) / root, layers) for _ in range(draws)]
    plain = [through(rng, torch.sigmoid, layers)[-1] for _ in range(repeats(4))]
    parts = [
        Part.mean("E[sigmoid(x)²]", 0.2933790, drawn),
        Part("the same by quadrature", 0.2933790, exact, 0.0, tolerance=5e-8 / 0.29),
        Part.mean("E[x²] after 1 layer", 1.0, [d[0] for d in deep]),
        Part.mean(f"after {layers} layers", 1.0, [d[-1] for d in deep], tolerance=0.02),
        Part.mean("without the root", 1.0, plain, stated=False),
    ]
    note = f"{draws} draws of 100 000 numbers, and of layers of width 256 with 64 tokens; 2% is "
    return Finding(parts, note + "allowed over 12 layers of finite width.")


@claim("C21", READING_NOTES)
def selu(seed: int) -> Finding:
    """SELU = λ ELU_a, λ = 1.0507, a = 1.6733: E[SELU(x)²] = 1 for x ~ N(0, 1).

    By random numbers, by quadrature, and through layers of Var W = 1/n_in, with torch's constants.
    Any a has a λ that does this; with SELU's pair the mean is kept at 0 as well.
    """
    rng, layers, draws = random(seed), 12, repeats(64)
    drawn = [power(F.selu(normals(rng, 100_000))) for _ in range(draws)]
    means = [F.selu(normals(rng, 100_000)).mean().item() for _ in range(draws)]
    deep = [through(rng, F.selu, layers) for _ in range(draws)]
    other = 1 / math.sqrt(expectation(lambda x: F.elu(x) ** 2))
    also = [power(other * F.elu(normals(rng, 100_000))) for _ in range(draws)]
    parts = [
        Part.mean("E[SELU(x)²]", 1.0, drawn),
        Part("the same by quadrature", 1.0, expectation(lambda x: F.selu(x) ** 2), 0.0,
             tolerance=1e-6),
        Part.mean("E[x²] after 1 layer", 1.0, [d[0] for d in deep]),
        Part.mean(f"after {layers} layers", 1.0, [d[-1] for d in deep], tolerance=0.02),
        Part.mean("E[SELU(x)]", 0.0, means, stated=False),
        Part.mean(f"E[(λ ELU(x))²], a = 1, λ = {other:.4f}", 1.0, also, stated=False),
    ]  # fmt: skip
    note = f"{draws} draws of 100 000 numbers, and of layers of width 256 with 64 tokens; 2% is "
    return Finding(parts, note + "allowed over 12 layers of finite width.")


@claim("C22", READING_NOTES)
def ntk(seed: int) -> Finding:
    """y = Wx/√m + b, Var W = 1: E[y²] = E[x²].

    deepstack's own product under `ntk`, beside the standard one with the very same function, whose
    gradient and step of SGD are others.
    """
    rng, m = random(seed), 128
    moments, gradients, moves = [], [], []
    for _ in range(repeats(32)):
        x, target = normals(rng, 64, m), normals(rng, 64, m)
        W = normals(rng, m, m).requires_grad_()
        y = scaled_linear(x, W)
        moments.append(power(y.detach()) / power(x))
        (scaled,) = torch.autograd.grad((y * target).sum(), W)
        V = (W.detach() / math.sqrt(m)).requires_grad_()
        (standard,) = torch.autograd.grad((F.linear(x, V) * target).sum(), V)
        gradients.append((scaled.norm() / standard.norm()).item())
        moved = F.linear(x, standard), scaled_linear(x, scaled)
        moves.append((moved[1].norm() / moved[0].norm()).item())
    parts = [
        Part.mean(f"E[y²]/E[x²], m = {m}", 1.0, moments),
        Part.mean("‖∂L/∂W‖ over the standard one's, 1/√m", m**-0.5, gradients,
                  tolerance=ROUNDING, stated=False),
        Part.mean("change of y by a step of SGD, over the standard one's, 1/m", 1 / m, moves,
                  tolerance=ROUNDING, stated=False),
    ]  # fmt: skip
    note = f"{len(moments)} draws. The same function at the start, but not the same training."
    return Finding(parts, note)


@claim("C30", DEPTH_SCALED)
def ds_init(seed: int) -> Finding:
    """W ~ U(−γα/√l, γα/√l), γ = √(6/(n_in + n_out)): less variance in layer l, and β_RC nearer 1.

    β_RC = ‖δ_z‖/‖δ_r‖ of every sublayer of the encoder, r = z + G(z), beside Post-LN's from the
    same random numbers.
    """
    depth, repetitions, scale = 8, seeds(seed, 8), 0.8
    deviations, edge, nearer, mean = [], [], [], []
    ratios: dict[str, list[Tensor]] = {"post_ln": [], "ds_init": []}
    for draw_seed in repetitions:
        for scheme, values in ratios.items():
            keys = {"model.scheme": scheme, "model.depth": depth, "model.d_model": 64}
            stack = started(draw_seed, {**keys, "model.init.distribution": "xavier_uniform"})
            values.append(signals(stack).values["β_RC"] - 1)
        options = {"model.scheme": "ds_init", "model.scheme_options": {"scale": scale}}
        stack = started(draw_seed, {**keys, **options, "model.init.distribution": "xavier_uniform"})
        for matrix in stack.matrices().values():
            W = matrix.double()
            gamma = math.sqrt(6 / (W.shape[1] + W.shape[2]))
            bound = gamma * scale / torch.arange(1, depth + 1).to(W)[:, None, None].sqrt()
            deviations.append(math.sqrt(3 * power(W / bound)))
            edge.append((W / bound).abs().max().item())
        nearer.append(float(ratios["ds_init"][-1].abs().sum() < ratios["post_ln"][-1].abs().sum()))
        mean.append((ratios["ds_init"][-1].mean() / ratios["post_ln"][-1].mean()).item())
    parts = [
        Part.mean("standard deviation over γα/√(3l)", 1.0, deviations),
        Part.mean("largest |W| over γα/√l", 1.0, edge, tolerance=0.002),
        Part.mean("share of the starts in which β_RC is nearer 1 than Post-LN's", 1.0, nearer),
        Part.mean("mean of β_RC − 1, over Post-LN's", 1.0, mean, relation="<="),
    ]
    layers = list(range(1, depth + 1))
    lines = []
    for scheme, word in (("post_ln", "Post-LN"), ("ds_init", "DS-Init")):
        for i, kind in enumerate(("attention", "feed-forward")):
            draws = torch.stack(ratios[scheme])[:, i::2].double()
            lines.append(Line.mean(f"{word}, {kind}", layers, draws))
    note = (
        f"Encoder of {depth} layers, d = 64, {len(repetitions)} seeds; α = {scale} for the "
        "distribution, 1 for β_RC."
    )
    return Finding(parts, note, Curves("layer l", "‖δ_z‖/‖δ_r‖ − 1", lines))


@claim("C33", READING_NOTES)
def systems(seed: int) -> Finding:
    """ReZero and Fixup start as the identity; RealFormer's logits are S_l = q kᵀ/√d_head + S_{l−1};
    ZerO starts without random numbers; the spectral norm is a regulariser.

    Measures deepstack's implementations: the output of a stack of 12 layers, S_4 against the sum of
    the layers' logits, matrices from two seeds, and short runs with and without λ/2 Σ‖W‖₂² in the
    loss (`train.spectral_penalty`).  Then takes one step down the gradient of ‖W‖₂²/2 = σ₁²/2, that
    is σ₁ u₁v₁ᵀ by power iteration.
    """
    same: dict[str, list[float]] = {"rezero": [], "fixup": []}
    logits, zero_starts, drawn, straight, lowered, trained = [], [], [], [], [], []
    for draw_seed in seeds(seed, 8):
        for scheme, agreements in same.items():
            model = started(draw_seed, {"model.scheme": scheme, "model.depth": 12}).model
            tokens = started(draw_seed, {"model.depth": 1}).batch(1)[0]
            agreements.append(agreement(model.hidden(tokens), model.start(tokens)))
        logits.append(running_logits(started(draw_seed, {"model.scheme": "real_former"})))
        start = {"model.init.distribution": "zero_identity"}
        zero_starts.append(agreement(matrices(draw_seed, start), matrices(draw_seed + 1, start)))
        drawn.append(agreement(matrices(draw_seed, {}), matrices(draw_seed + 1, {})))
        w1 = started(draw_seed, start).matrices()["w1"][0].double()
        straight.append(agreement(w1.t() @ w1, torch.eye(w1.shape[1])))
        W = normals(random(draw_seed), 48, 32)
        u, v = singular_vectors(W)
        before, after = (torch.linalg.svdvals(M) for M in (W, W - 0.01 * (u @ W @ v) * u.outer(v)))
        lowered.append((after[0] / before[0]).item())
        ends = []
        for penalty in (0.1, 0.0):
            keys = {"model.depth": 2, "train.lr": 3e-3, "train.spectral_penalty": penalty}
            stack = started(draw_seed, keys)
            stack.run(8)
            ends.append(mean_spectral_norm(stack))
        trained.append(ends[0] / ends[1])
    parts = [
        Part.mean("ReZero, 12 layers: 1 − distance of F from x_0", 1.0, same["rezero"]),
        Part.mean("Fixup, 12 layers: the same", 1.0, same["fixup"]),
        Part.mean("RealFormer: 1 − distance of S_4 from Σ q kᵀ/√d_head", 1.0, logits,
                  tolerance=1e-5),
        Part.mean("ZerO: 1 − distance of the matrices of two seeds", 1.0, zero_starts),
        Part.mean("ZerO: 1 − ‖W_1ᵀW_1 − I‖_F/‖I‖_F", 1.0, straight, tolerance=1e-5),
        Part.mean("Xavier: 1 − distance of the matrices of two seeds", 1.0, drawn, stated=False),
        Part.mean("σ₁ after a step of rate 0.01 on σ₁²/2, over before", 0.99, lowered,
                  tolerance=1e-4),
        Part.mean("share of the runs in which λ = 0.1 lowers Π‖W‖₂", 1.0,
                  [float(ratio < 1) for ratio in trained]),
        Part.mean("‖W‖₂, with λ = 0.1 over without", 1.0, trained, relation="<="),
    ]  # fmt: skip
    note = (
        f"{len(trained)} seeds; RealFormer and ZerO with 4 layers, d = 32, 4 heads; runs of 8 "
        "steps of Post-LN, 2 layers, at lr 0.003; ‖W‖₂ is the geometric mean over the matrices."
    )
    return Finding(parts, note)


def matrices(seed: int, keys: Mapping[str, Any]) -> Tensor:
    """Return all numbers of the matrices of a small stack's layers."""
    banks = started(seed, keys).layer_banks
    return torch.cat([bank.values().flatten() for bank in banks if bank.start == "matrix"])


def running_logits(stack: Trial) -> float:
    """Return the agreement of the last layer's S with the sum of all layers' logits."""
    logits: list[Tensor] = []
    total: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, Any], output: tuple[Tensor, Tensor]) -> None:
        logits.append(args[0])
        total.append(output[0])

    hooks = [s.slots["logits"].register_forward_hook(note) for s in stack.model.schemes]
    with torch.no_grad():
        stack.model(stack.batch(1)[0])
    for hook in hooks:
        hook.remove()
    return agreement(total[-1], torch.stack(logits).sum(dim=0))


def singular_vectors(W: Tensor, steps: int = 500) -> tuple[Tensor, Tensor]:
    """Return u₁ and v₁, the singular vectors of the largest singular value, by power iteration."""
    v = torch.ones(W.shape[1], dtype=W.dtype)
    for _ in range(steps):
        v = W.t() @ (W @ v)
        v = v / v.norm()
    return W @ v / (W @ v).norm(), v
