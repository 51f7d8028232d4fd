"""Claims about gradients: of losses, of layers, and of one sublayer by its weights."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.diagnostics import Snapshot, beta_ln, beta_rc
from deepstack.model import layer_norms
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
from deepstack_lab.ledger.claim_stack import POST_LN, Trial, flat_part, small_stack
from deepstack_lab.ledger.draws import F64, normals, random, repeats, seeds
from deepstack_lab.ledger.sources import (
    DEEP_TRANSLATION,
    DEPTH_SCALED,
    LAYER_CAKE,
    NO_SIZES,
    READING_NOTES,
)  # fmt: skip
from deepstack_lab.ledger.statistics import agreement, exponents, gather, sweep

WORDS = {
    "attention": "self-attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
}


def mean_ratios(snapshots: Sequence[Snapshot]) -> dict[str, Tensor]:
    """Return the means of β_LN, β_RC and β = β_LN β_RC over the sublayers of each kind."""
    columns: dict[str, list[Tensor]] = {}
    for snapshot in snapshots:
        ln, rc = beta_ln(snapshot), beta_rc(snapshot)
        for symbol, values in {"β_LN": ln, "β_RC": rc, "β": ln * rc}.items():
            for name, column in zip(snapshot.sublayers, values.t(), strict=True):
                columns.setdefault(f"{symbol}, {WORDS[name]}", []).append(column)
    return {quantity: torch.cat(values).mean() for quantity, values in columns.items()}


def explosion(encoder: Snapshot) -> float:
    """Return ln(‖δ‖ at the first input over ‖δ‖ at the last output)/Σ ln β."""
    ratio = encoder.delta_in[0, 0] / encoder.delta_norm_out[-1, -1]
    return (ratio.log() / (beta_ln(encoder) * beta_rc(encoder)).log().sum()).item()


@claim(
    "C29", DEPTH_SCALED, source_range=DEEP_TRANSLATION,
    trials=(POST_LN | {"depth": 6, "family": "encoder_decoder", "steps": 10, "task": "reverse"},),
)  # fmt: skip
def error_signals(seed: int) -> Finding:
    """β_LN = ‖δ_r‖/‖δ_o‖ < 1 (0.82 to 0.86), β_RC = ‖δ_z‖/‖δ_r‖ > 1 (1.10 to 1.22);
    β = β_LN β_RC < 1 for feed-forward, > 1 for self- and cross-attention;
    δ_r = diag(g/σ)(I − (1 − r̄r̄ᵀ)/d) δ_o; too large a β makes gradients vanish.

    r = z + G(z), o = LN(r), δ the gradient of the loss, in every sublayer of a Post-LN
    encoder-decoder at its start and after a short training.
    """
    repetitions, steps, depth = seeds(seed, 96), 10, 6

    def sample(draw_seed: int) -> dict[str, Tensor | float]:
        stack = small_stack(draw_seed, depth=depth, family="encoder_decoder", task="reverse")
        start = stack.snapshots()
        ln, rc = beta_ln(start[0]).flatten(), beta_rc(start[0]).flatten()
        stack.run(steps)
        trained = mean_ratios(stack.snapshots(stack.batch(steps + 1)))
        return {
            **mean_ratios(start),
            **{f"{quantity}, step {steps}": value for quantity, value in trained.items()},
            **{"β of LN": ln, "β of the sum": rc, "both": ln * rc},
            "explosion": explosion(small_stack(draw_seed, depth=depth).snapshots()[0]),
        }

    drawn = gather(map(sample, repetitions))
    parts, same = [], Null(1.0, "δ keeps its length")
    for symbol, limit, least, most in (
        ("β_LN", at_most, 0.82, 0.86),
        ("β_RC", at_least, 1.1, 1.22),
    ):
        kinds, middle = [f"{symbol}, {word}" for word in WORDS.values()], (least + most) / 2
        parts += [limit(kind, 1.0, drawn[kind], null=same) for kind in kinds]
        within: dict[str, Any] = {"tolerance": most / middle - 1, "null": same}
        parts += [Part.mean(f"{k}, {least} to {most}", middle, drawn[k], **within) for k in kinds]
    for moment in ("", f", step {steps}"):
        for word in WORDS.values():
            limit, quantity = at_most if word == "feed-forward" else at_least, f"β, {word}{moment}"
            parts.append(limit(quantity, 1.0, drawn[quantity], stated=not moment, null=same))
    rng = random(seed)
    near = gather(jacobian_agreement(rng) for _ in range(32))
    zero = Null(0.0, "as far as 0 is")
    parts += [
        Part.mean("δ_r by autograd, 1 − its distance from the formula", 1.0, near["document"],
                  tolerance=1e-9, null=zero),
        beside("the same, I − (11ᵀ + r̄r̄ᵀ)/d", 1.0, near["right"], tolerance=1e-9, null=zero),
        Part.mean("ln(‖δ‖ first/last)/Σ ln β, −1 where large β vanish", -1.0, drawn["explosion"],
                  tolerance=1e-3, null=Null(0.0, "β says nothing of it")),
    ]  # fmt: skip
    at = range(1, 2 * depth + 1)
    lines = [Line.mean(word, at, drawn[word]) for word in ("β of LN", "β of the sum", "both")]
    note = (
        f"6 + 6 layers, d = 32, {len(repetitions)} seeds; Xavier, gain 1. Cross-attention's β is "
        "below 1: it reads z for its queries alone, through which hardly any gradient comes, so "
        "β_RC ≈ 1. The formula has the sign of r̄r̄ᵀ wrong, and β multiplies what goes down: above "
        "1 gradients explode."
    )
    return Finding(parts, note, Curves("sublayer of the encoder", "ratio of norms", lines))


def jacobian_agreement(rng: torch.Generator, d: int = 64) -> dict[str, float]:
    """Return the agreement of δ_r of LN with the document's formula and with the right one."""
    r, gradient = normals(rng, 2, d)
    r.requires_grad_()
    (true,) = torch.autograd.grad(torch.layer_norm(r, (d,), eps=0.0), r, gradient)
    r = r.detach()
    sigma = r.std(correction=0)
    unit = (r - r.mean()) / sigma

    def formula(sign: int) -> Tensor:
        return (torch.eye(d, dtype=F64) - (1 + sign * unit.outer(unit)) / d) @ gradient / sigma

    return {"document": agreement(true, formula(-1)), "right": agreement(true, formula(1))}


@claim(
    "C35", READING_NOTES, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 12, "steps": 10},),
)  # fmt: skip
def no_warmup(seed: int) -> Finding:
    """Post-LN without warm-up: gradients of lower layers vanish, upper layers learn faster, Adam's
    updates of lower layers are as large as of upper ones and mostly noise; the last LN's gain grows
    when logits are small.

    A deep Post-LN encoder at its start, and after Adam's first steps at the full rate, with and
    without warm-up.  The share of signal in a layer's gradient is ‖E g‖²/E‖g‖² over batches,
    unbiased.  Lower and upper: means over a third of the layers.  Updates are as large if they
    differ by less than 10%, and upper layers learn faster if theirs are larger by more.  Then a
    shallow stack whose tied table starts small.
    """
    depth, batches, steps, repetitions = 12, 4, 10, seeds(seed, 40)
    moments = {"start": 0, "no warm-up": 1, "warm-up": 1000}

    def sample(draw_seed: int, moment: str) -> dict[str, Tensor]:
        warm_up = moments[moment]
        stack = small_stack(draw_seed, depth=depth, optimizer="adam", warmup_steps=warm_up)
        moved = {} if moment == "start" else {"moved": update_norms(stack, steps)}
        norm, share = signal_share(stack, batches)
        return {"norm": norm, "share": share, **moved}

    drawn = {moment: gather(sample(s, moment) for s in repetitions) for moment in moments}

    def ends(by_layer: Tensor) -> tuple[Tensor, Tensor]:
        return by_layer[:, : depth // 3].mean(dim=1), by_layer[:, -(depth // 3) :].mean(dim=1)

    low, top = ends(drawn["no warm-up"]["share"])
    start_low, start_top = ends(drawn["start"]["share"])
    lower_moved, upper_moved = ends(drawn["no warm-up"]["moved"])
    norms = {moment: ends(drawn[moment]["norm"]) for moment in moments}
    falling = {moment: (lower / upper).log() for moment, (lower, upper) in norms.items()}
    gains = [last_gain(draw_seed) for draw_seed in repetitions]
    lower_over_upper, moved = "ln ‖∂L/∂θ_l‖, lower over upper", lower_moved / upper_moved
    level, half = Null(0.0, "equal gradients"), Null(0.5, "as much signal as noise")
    later = Null(falling["no warm-up"].mean().item(), f"as after {steps} steps without")
    as_before: dict[str, Any] = {"tolerance": 0.5, "null": later}
    as_gradients = Null(falling["no warm-up"].mean().exp().item(), "as the gradients")
    parts = [
        at_most(f"{lower_over_upper}, after {steps} steps", 0.0, falling["no warm-up"], null=level),
        Part.mean("Adam's update, lower over upper", 1.0, moved, tolerance=0.1, null=as_gradients),
        at_most("the same, where upper layers learn faster", 0.9, moved,
                null=Null(1.0, "equal updates")),
        at_most("share of signal, lower", 0.5, low, null=half),
        at_least("gain of the last LN over the mean of the others", 1.0, gains,
                 null=Null(1.0, "as the others'")),
        beside(f"{lower_over_upper}, at the start", 0.0, falling["start"], **as_before),
        beside(f"the same after {steps} steps of a warm-up of 1000", 0.0, falling["warm-up"],
               **as_before),
        at_least("share of signal, upper", 0.5, top, stated=False, null=half),
        at_most("share of signal, lower, at the start", 0.5, start_low, stated=False, null=half),
        at_least("the same, upper", 0.5, start_top, stated=False, null=half),
    ]  # fmt: skip
    lines = [Line.mean(moment, range(1, depth + 1), drawn[moment]["norm"]) for moment in moments]
    note = (
        f"{depth} layers, d = 32, lr 0.001, {batches} batches of 8 sequences, {len(gains)} seeds; "
        "the gain after 30 steps in a stack of 3 layers. The gradients of the lower layers do not "
        "vanish at the start, but after a few steps at the full rate. Adam moves all layers alike, "
        "so the upper ones learn no faster. Noise is most of the gradient in all layers, the upper "
        "ones too."
    )
    return Finding(parts, note, Curves("layer l", "‖∂L/∂θ_l‖", lines, log_y=True))


def update_norms(stack: Trial, steps: int) -> Tensor:
    """Return the mean of ‖θ_l,t − θ_l,t−1‖ over the first steps by layer, (depth,)."""
    values = [stack.values()]
    stack.run(steps, lambda t: values.append(stack.values()))
    changes = ([a - b for a, b in zip(now, old, strict=True)] for old, now in pairwise(values))
    return torch.stack([layer_norms(change) for change in changes]).mean(dim=0)


def signal_share(stack: Trial, batches: int) -> tuple[Tensor, Tensor]:
    """Return the mean ‖g‖ over batches and ‖E g‖²/E‖g‖² by layer, each (depth,)."""
    drawn = []
    for t in range(1, batches + 1):
        stack.backward(t)
        drawn.append([bank.gradients().double() for bank in stack.layer_banks])
    norms = torch.stack([layer_norms(gradients) for gradients in drawn])  # (batches, depth)
    mean = layer_norms([torch.stack(rows).mean(dim=0) for rows in zip(*drawn, strict=True)])
    square = norms.square().mean(dim=0)  # of the signal plus the noise
    noise = (square - mean.square()) * batches / (batches - 1)
    return norms.mean(dim=0), 1 - noise / square


def last_gain(seed: int, steps: int = 30) -> float:
    """Return the mean gain of the last LN over the others' mean gain, after training.

    The head is tied to a token table that starts with the standard deviation 0.02.
    """
    stack = small_stack(seed, depth=3, lr=3e-3)
    embedding = stack.model.embedding
    with torch.no_grad():
        embedding.mul_(0.02 / embedding.std())
    stack.run(steps)
    named = stack.model.named_parameters()
    means = torch.stack([g.detach().mean() for name, g in named if name.endswith("gain")])
    return (means[-1] / means[:-1].mean()).item()


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
        quantity = f"{label}: ‖∂L/∂F‖ at N = 54 over N = 6"
        parts.append(flat_part(quantity, torch.tensor(by_seed), depths))
    rng, draws, widths = random(seed), repeats(48), (32, 96, 288)
    alpha, beta = 12**0.25, 48**-0.25  # DeepNorm's at N = 6
    claimed = math.sqrt(2) * beta / alpha
    for words, a, b in (("DeepNorm, N = 6", alpha, beta), ("α = v = w = 1", 1.0, 1.0)):
        ratio = scalar_gradients(rng, a, b, repeats(40_000)) / (2 * b**2 / a**2)
        quantity, within = f"scalar f, E‖∂f/∂θ‖² over (v² + w²)/α², {words}", 0.05
        null = Null(0.25, "as at α = v = w = 1") if b < 1 else Null(4.0, "no term dropped")
        parts.append(Part.mean(quantity, 1.0, ratio, tolerance=within, stated=b < 1, null=null))
    drawn = sweep(widths, draws, lambda d: parameter_gradients(rng, d, alpha, beta))
    over = "over √(v² + w²)/α, exponent in d"
    random_step, largest = drawn["random"] / claimed, drawn["largest"] / claimed
    of_d: dict[str, Any] = {"tolerance": 0.05, "null": Null(0.5, "grows as √d")}
    also: dict[str, Any] = {"stated": False, "null": Null(1.0, "as large as claimed")}
    parts += [
        Part.mean(f"‖∂f/∂θ Δθ‖/‖Δθ‖ {over}", 0.0, exponents(widths, random_step), **of_d),
        Part.mean(f"‖∂f/∂θ‖₂ {over}", 0.0, exponents(widths, largest), **of_d),
        at_most("‖∂f/∂θ Δθ‖/‖Δθ‖ over √(v² + w²)/α, d = 96", 1.0, random_step[:, 1], **also),
        at_most("‖∂f/∂θ‖₂ over √(v² + w²)/α, d = 96", 1.0, largest[:, 1], **also),
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
    return gradient_of_output(Trial(seed, scheme=scheme, depth=depth))


def gradient_of_output(trial: Trial) -> float:
    """Return ‖∂L/∂F‖ of the first batch with the present parameters."""
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
