"""Claims about how matrices start, and the systems that differ by their start."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.diagnostics import beta_rc
from deepstack.model import DISTRIBUTIONS
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
from deepstack_lab.ledger.claim_stack import Trial, small_stack
from deepstack_lab.ledger.draws import F64, normals, power, random, repeats, seeds
from deepstack_lab.ledger.sources import DEPTH_SCALED, READING_NOTES
from deepstack_lab.ledger.statistics import agreement, gather, means


@claim("C18", READING_NOTES)
def nearly_orthogonal(seed: int) -> Finding:
    """W (m × n, m ≥ n), entries of mean 0 and variance 1/m: WᵀW ≈ I, the better the larger m;
    W keeps lengths, and a square W has W⁻¹ ≈ Wᵀ.

    Square matrices of three distributions, entry by entry and as a whole.  'Nearly' means an error
    of 1/√m, as large as the entries.
    """
    rng, sizes, draws = random(seed), (16, 64, 256), repeats(8)
    kinds: dict[str, Callable[[int], Tensor]] = {
        "normal": lambda m: normals(rng, m, m),
        "uniform": lambda m: math.sqrt(3) * (2 * torch.rand(m, m, generator=rng, dtype=F64) - 1),
        "±1": lambda m: 2.0 * torch.randint(0, 2, (m, m), generator=rng).to(F64) - 1,
    }

    def errors(kind: str, m: int) -> dict[str, float]:
        """Return root mean square of the entries off the diagonal, ‖·‖_F/‖I‖_F and ‖·‖₂."""
        error = gram_error(kinds[kind](m) / math.sqrt(m))
        entries = math.sqrt(power(error[~torch.eye(m, dtype=torch.bool)]))
        norm = torch.linalg.matrix_norm(error, ord=2).item()
        return {"entries": entries, "F": power(error) ** 0.5 * math.sqrt(m), "norm": norm}

    drawn = [{k: gather(errors(k, m) for _ in range(draws)) for k in kinds} for m in sizes]
    entries, frobenius = (torch.stack([d["normal"][k] for d in drawn], 1) for k in ("entries", "F"))
    m = sizes[-1]

    def products() -> list[Part]:
        W, x = normals(rng, m, m) / math.sqrt(m), normals(rng, m, 8)
        back = torch.linalg.solve(W, x)
        length, inverse = (W @ x).square().sum() / x.square().sum(), 1 - agreement(W.t() @ x, back)
        return [
            Part.mean("‖Wx‖²/‖x‖²", 1.0, length, null=Null(1 / 3, "variance 1/(3m), nn.Linear's")),
            Part.mean("‖W⁻¹x − Wᵀx‖/‖W⁻¹x‖, 1/√m if as near as the entries", m**-0.5, inverse,
                      null=Null(1.0, "Wᵀx is small beside W⁻¹x")),
        ]  # fmt: skip

    of_products = means(products() for _ in range(draws))
    wide = [power(gram_error(normals(rng, 4096, 16) / 64)) ** 0.5 * 4 for _ in range(draws)]
    straight, exact = torch.empty(m, m, dtype=F64), []
    for _ in range(draws):
        DISTRIBUTIONS["orthogonal"].fill(straight, 1.0, rng)
        exact.append(1 - torch.linalg.matrix_norm(gram_error(straight), ord=2).item())
    distance, root = "‖WᵀW − I‖_F/‖I‖_F", "(WᵀW − I)_ij, root mean square, i ≠ j"
    far, as_entries = Null(1.0, "as far as 0 is"), Null(m**-0.5, "as the entries")
    parts = [
        *(
            Part.mean(f"{root}, {kind}, m = {m}", m**-0.5, of_kind["entries"],
                      null=Null(1.0, "parallel columns"))
            for kind, of_kind in drawn[-1].items()
        ),
        *of_products,
        Part.mean(distance, m**-0.5, frobenius[:, -1], null=far),
        beside(f"{distance}, √(1 + 1/m)", (1 + 1 / m) ** 0.5, frobenius[:, -1], null=as_entries),
        beside("‖WᵀW − I‖₂, (1 + 1)² − 1", 3.0, drawn[-1]["normal"]["norm"], tolerance=0.05,
               null=as_entries),
        beside("the same in F, m = 4096, n = 16", (17 / 4096) ** 0.5, wide, null=far),
        beside("1 − ‖WᵀW − I‖₂, orthogonal start", 1.0, exact, tolerance=1e-5,
               null=Null(0.0, "as far as 0 is")),
    ]  # fmt: skip
    note = (
        f"m = n = {m}, {draws} draws of each. Near the identity entry by entry only: n² errors of "
        "1/√m add up to a distance from I as large as I, at every size, and the inverse is not "
        "the transpose. It is near where m is far above n."
    )
    lines = [
        Line.mean("entries, i ≠ j", sizes, entries),
        Line("1/√m", sizes, [m**-0.5 for m in sizes], measured=False),
        Line.mean(distance, sizes, frobenius),
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
    rng, draws, matrix = random(seed), repeats(16), torch.empty(500, 500)

    def cut(deviation: float) -> float:
        """Return the mean square of a normal distribution of this deviation, cut at twice it."""
        limits = -2 * deviation, 2 * deviation
        torch.nn.init.trunc_normal_(matrix, 0.0, deviation, *limits, generator=rng)
        return power(matrix.double())

    def sample() -> list[Part]:
        share, bert = cut(0.5) / 0.25, math.sqrt(cut(0.2))
        DISTRIBUTIONS["truncated_normal"].fill(matrix, 0.3, rng)
        ours, small = power(matrix.double()) / 0.09, 768**-0.5
        as_large = Null(small, "as large")
        return [
            Part.mean("Var/σ²", 0.7737413, share, null=Null(1.0, "not cut")),
            Part.mean("standard deviation for σ = 0.2", 0.176, bert, tolerance=5e-4 / 0.176,
                      null=Null(0.2, "not cut")),
            at_most("the same, beside 1/√768", small, bert, null=as_large),
            at_most("for σ = 0.02", small, bert / 10, stated=False, null=as_large),
            beside("Var/scale² of deepstack's truncated_normal", 1.0, ours,
                   null=Null(0.7737413, "the cut is not undone")),
        ]  # fmt: skip

    parts = means(sample() for _ in range(draws))
    return Finding(
        parts,
        f"{draws} draws of 250 000 numbers. 0.2 is a slip for BERT's 0.02: 0.176 is five times "
        "1/√768, 0.0176 is half of it, as the document says later.",
    )


@claim("C30", DEPTH_SCALED)
def ds_init(seed: int) -> Finding:
    """W ~ U(−γα/√l, γα/√l), γ = √(6/(n_in + n_out)): less variance in layer l, and β_RC nearer 1.

    β_RC = ‖δ_z‖/‖δ_r‖ of every sublayer of the encoder, r = z + G(z), beside Post-LN's from the
    same random numbers.
    """
    depth, scale, repetitions = 8, 0.8, seeds(seed, 8)
    layer = torch.arange(1, depth + 1).double()[:, None, None]
    uniform = {"depth": depth, "d_model": 64, "init_distribution": "xavier_uniform"}

    def sample(draw_seed: int) -> dict[str, Tensor]:
        scaled = small_stack(
            draw_seed, scheme="ds_init", scheme_options={"scale": scale}, **uniform
        )
        shares = []
        for W in scaled.matrices().values():
            gamma = math.sqrt(6 / (W.shape[1] + W.shape[2]))
            shares.append(W.double() / (gamma * scale / layer.sqrt()))
        stacks = {
            scheme: small_stack(draw_seed, scheme=scheme, **uniform)
            for scheme in ("post_ln", "ds_init")
        }
        return {
            "deviation": torch.tensor([math.sqrt(3 * power(share)) for share in shares]),
            "edge": torch.tensor([share.abs().max() for share in shares]),
            **{scheme: beta_rc(stack.snapshots()[0]) - 1 for scheme, stack in stacks.items()},
        }

    drawn = gather(map(sample, repetitions))
    post_ln, small = drawn["post_ln"].float(), drawn["ds_init"].float()
    nearer = small.abs().sum(dim=(1, 2)) < post_ln.abs().sum(dim=(1, 2))
    mean = small.mean(dim=(1, 2)) / post_ln.mean(dim=(1, 2))
    alike = Null(layer.sqrt().mean().item(), "the same in every layer")
    parts = [
        Part.mean("standard deviation over γα/√(3l)", 1.0, drawn["deviation"].flatten(),
                  null=alike),
        Part.mean("largest |W| over γα/√l", 1.0, drawn["edge"].flatten(), tolerance=0.002,
                  null=alike),
        Part.mean("share of the starts in which β_RC is nearer 1 than Post-LN's", 1.0, nearer,
                  null=Null(0.5, "by chance")),
        at_most("mean of β_RC − 1, over Post-LN's", 1.0, mean, null=Null(1.0, "as Post-LN's")),
    ]  # fmt: skip
    lines = [
        Line.mean(f"{word}, {kind}", range(1, depth + 1), values[:, :, i].double())
        for word, values in (("Post-LN", post_ln), ("DS-Init", small))
        for i, kind in enumerate(("attention", "feed-forward"))
    ]
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

    def sample(draw_seed: int) -> list[Part]:
        zero = {"init_distribution": "zero_identity"}
        w1 = small_stack(draw_seed, **zero).matrices()["w1"][0].double()
        straight = agreement(w1.t() @ w1, torch.eye(w1.shape[1]))
        logits = running_logits(small_stack(draw_seed, scheme="real_former"))
        W = normals(random(draw_seed), 48, 32)
        u, v = singular_vectors(W)
        before, after = (torch.linalg.svdvals(M) for M in (W, W - 0.01 * (u @ W @ v) * u.outer(v)))
        norms = [penalised_norm(draw_seed, penalty) for penalty in (0.1, 0.0)]
        ratio, seeds_apart = norms[0] / norms[1], "1 − distance of the matrices of two seeds"
        from_x_0 = "12 layers: 1 − distance of F from x_0"
        apart, drawn = Null(1 - math.sqrt(2), "unrelated"), Null(1 - math.sqrt(2), "drawn")
        return [
            Part.mean(f"ReZero, {from_x_0}", 1.0, identity(draw_seed, "rezero"), null=apart),
            Part.mean("Fixup, 12 layers: the same", 1.0, identity(draw_seed, "fixup"), null=apart),
            Part.mean("RealFormer: 1 − distance of S_4 from Σ q kᵀ/√d_head", 1.0, logits,
                      tolerance=1e-5, null=Null(0.5, "layer 4 alone, a quarter of the variance")),
            Part.mean(f"ZerO: {seeds_apart}", 1.0, of_two_seeds(draw_seed, **zero), null=drawn),
            Part.mean("ZerO: 1 − ‖W_1ᵀW_1 − I‖_F/‖I‖_F", 1.0, straight, tolerance=1e-5,
                      null=Null(0.0, "as far as 0 is")),
            beside(f"Xavier: {seeds_apart}", 1.0, of_two_seeds(draw_seed), null=drawn),
            Part.mean("σ₁ after a step of rate 0.01 on σ₁²/2, over before", 0.99,
                      after[0] / before[0], tolerance=1e-4, null=Null(1.0, "not lowered")),
            Part.mean("share of the runs in which λ = 0.1 lowers Π‖W‖₂", 1.0, float(ratio < 1),
                      null=Null(0.5, "by chance")),
            at_most("‖W‖₂, with λ = 0.1 over without", 1.0, ratio, null=Null(1.0, "not lowered")),
        ]  # fmt: skip

    parts = means(map(sample, seeds(seed, 8)))
    return Finding(
        parts,
        f"{parts[0].draws} seeds; RealFormer and ZerO with 4 layers, d = 32, 4 heads; runs of 8 "
        "steps of Post-LN, 2 layers, at lr 0.003; ‖W‖₂ is the geometric mean over the matrices.",
    )


def identity(seed: int, scheme: str) -> float:
    """Return the agreement of F with x_0 in a stack of 12 layers."""
    stack = small_stack(seed, scheme=scheme, depth=12)
    tokens = stack.batch(1)[0]
    return agreement(stack.model.hidden(tokens), stack.model.embed(tokens))


def of_two_seeds(seed: int, **changes: Any) -> float:
    """Return the agreement of the matrices of small stacks of this seed and the next."""
    stacks = (small_stack(draw_seed, **changes) for draw_seed in (seed, seed + 1))
    return agreement(*(torch.cat([W.flatten() for W in s.matrices().values()]) for s in stacks))


def penalised_norm(seed: int, penalty: float) -> float:
    """Return the mean spectral norm after a short run with this penalty."""
    stack = small_stack(seed, depth=2, lr=3e-3, spectral_penalty=penalty)
    stack.run(8)
    return stack.mean_spectral_norm()


def running_logits(stack: Trial) -> float:
    """Return the agreement of the last layer's S with the sum of all layers' logits."""
    passed: list[tuple[Tensor, Tensor]] = []

    def record(module: nn.Module, args: tuple[Tensor, Any], output: tuple[Tensor, Tensor]) -> None:
        passed.append((args[0], output[0]))

    for scheme in stack.model.schemes:
        scheme.slots["logits"].register_forward_hook(record)
    with torch.no_grad():
        stack.model(stack.batch(1)[0])
    logits, totals = zip(*passed, strict=True)
    return agreement(totals[-1], torch.stack(logits).sum(dim=0))


def singular_vectors(W: Tensor, steps: int = 500) -> tuple[Tensor, Tensor]:
    """Return u₁ and v₁, the singular vectors of the largest singular value, by power iteration."""
    v = torch.ones(W.shape[1], dtype=W.dtype)
    for _ in range(steps):
        v = W.t() @ (W @ v)
        v = v / v.norm()
    return W @ v / (W @ v).norm(), v
