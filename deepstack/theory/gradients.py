"""Claims about gradients, and the small stacks and short runs that measure them."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.diagnostics import take
from deepstack.parameters import layer_norms
from deepstack.theory.claim import Curves, Finding, Line, Part, Relation, claim
from deepstack.theory.claim_stack import Trial, started
from deepstack.theory.draws import agreement, random, seeds
from deepstack.theory.sources import DEPTH_SCALED, READING_NOTES
from deepstack.training import mean_loss


def mean_spectral_norm(stack: Trial) -> float:
    """Return the geometric mean of ‖W‖₂ over the matrices of the layers."""
    norms = [
        torch.linalg.matrix_norm(W.double(), ord=2).flatten() for W in stack.matrices().values()
    ]
    return torch.cat(norms).log().mean().exp().item()


class Signals(NamedTuple):
    """β_LN, β_RC and their product β of every sublayer, in the order of the forward pass.

    names: of the sublayers; values: symbol -> (sublayers,); ratio: ‖δ‖ at the input of the first
    sublayer over ‖δ‖ at the output of the last.
    """

    names: list[str]
    values: dict[str, Tensor]
    ratio: float

    def mean(self, symbol: str, kind: str) -> float:
        """Return the mean over the sublayers of a kind."""
        return self.values[symbol][[name == kind for name in self.names]].mean().item()


def signals(stack: Trial, step: int = 1) -> Signals:
    """Return the ratios of the error signal in each sublayer z -> r = z + G(z) -> o = LN(r)."""
    inputs, targets = stack.batch(step)
    banks = stack.layer_banks
    initial = [bank.values() for bank in banks]
    loss = partial(mean_loss, targets=targets)
    snapshots = take(stack.model, banks, inputs, loss, before=None, initial=initial)
    z, r, o = (
        torch.cat([getattr(snapshot, name).flatten() for snapshot in snapshots])
        for name in ("delta_in", "delta_norm_in", "delta_norm_out")
    )
    names = [
        name for snapshot in snapshots for _ in snapshot.schemes for name in snapshot.sublayers
    ]
    values = {"β_LN": r / o, "β_RC": z / r, "β": z / o}
    return Signals(names, values, (z[0] / o[-1]).item())


KINDS = {
    "attention": "self-attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
}


@claim("C29", DEPTH_SCALED)
def error_signals(seed: int) -> Finding:
    """β_LN = ‖δ_r‖/‖δ_o‖ < 1 (0.82 to 0.86), β_RC = ‖δ_z‖/‖δ_r‖ > 1 (1.10 to 1.22);
    β = β_LN β_RC < 1 for feed-forward, > 1 for self- and cross-attention;
    δ_r = diag(g/σ)(I − (1 − r̄r̄ᵀ)/d) δ_o; too large a β makes gradients vanish.

    r = z + G(z), o = LN(r), δ the gradient of the loss, in every sublayer of a Post-LN
    encoder-decoder at its start and after a short training.
    """
    repetitions, steps = seeds(seed, 48), 10
    keys = {
        "model.scheme": "post_ln", "model.family": "encoder_decoder", "model.depth": 6,
        "task.name": "reverse",
    }  # fmt: skip
    start, trained, slopes = [], [], []
    for draw_seed in repetitions:
        stack = started(draw_seed, keys)
        start.append(signals(stack))
        encoder = signals(started(draw_seed, {"model.scheme": "post_ln", "model.depth": 6}))
        slopes.append(math.log(encoder.ratio) / encoder.values["β"].log().sum().item())
        stack.run(steps)
        trained.append(signals(stack, steps + 1))
    parts = []
    ranges: list[tuple[str, Relation, float, float]] = [
        ("β_LN", "<=", 0.82, 0.86),
        ("β_RC", ">=", 1.1, 1.22),
    ]
    for symbol, relation, least, most in ranges:
        by_kind = {kind: [ratios.mean(symbol, kind) for ratios in start] for kind in KINDS}
        parts += [
            Part.mean(f"{symbol}, {KINDS[k]}", 1.0, v, relation=relation)
            for k, v in by_kind.items()
        ]
        middle = (least + most) / 2
        parts += [
            Part.mean(f"{symbol}, {KINDS[k]}, {least} to {most}", middle, v,
                      tolerance=most / middle - 1)
            for k, v in by_kind.items()
        ]  # fmt: skip
    for kind, word in KINDS.items():
        relation = "<=" if kind == "feed_forward" else ">="
        parts.append(
            Part.mean(f"β, {word}", 1.0, [s.mean("β", kind) for s in start], relation=relation)
        )
    for kind, word in KINDS.items():
        relation = "<=" if kind == "feed_forward" else ">="
        after = [s.mean("β", kind) for s in trained]
        parts.append(
            Part.mean(f"β, {word}, step {steps}", 1.0, after, relation=relation, stated=False)
        )
    stated, right = jacobian(random(seed))
    parts += [
        Part.mean(
            "δ_r by autograd, 1 − its distance from the formula", 1.0, stated, tolerance=1e-9
        ),
        Part.mean("the same, I − (11ᵀ + r̄r̄ᵀ)/d", 1.0, right, tolerance=1e-9, stated=False),
        Part.mean(
            "ln(‖δ‖ first/last)/Σ ln β, −1 where large β vanish", -1.0, slopes, tolerance=1e-3
        ),
    ]
    encoder_only = list(range(1, start[0].names.index("cross_attention")))
    lines = [
        Line.mean(word, encoder_only,
                  torch.stack([one.values[symbol][: len(encoder_only)] for one in start]).double())
        for symbol, word in (("β_LN", "β of LN"), ("β_RC", "β of the sum"), ("β", "both"))
    ]  # fmt: skip
    note = (
        f"6 + 6 layers, d = 32, {len(repetitions)} seeds; Xavier, gain 1. Cross-attention's β is "
        "below 1: it reads z for its queries alone, through which hardly any gradient comes, so "
        "β_RC ≈ 1. The formula has the sign of r̄r̄ᵀ wrong, and β multiplies what goes down: above "
        "1 gradients explode."
    )
    return Finding(parts, note, Curves("sublayer of the encoder", "ratio of norms", lines))


def jacobian(rng: torch.Generator, d: int = 64, draws: int = 32) -> tuple[list[float], list[float]]:
    """Return the agreement of δ_r of LN with the document's formula and with the right one."""
    near: tuple[list[float], list[float]] = [], []
    for _ in range(draws):
        r, gradient = torch.randn(2, d, dtype=torch.float64, generator=rng)
        r.requires_grad_()
        (true,) = torch.autograd.grad(torch.layer_norm(r, (d,), eps=0.0), r, gradient)
        r = r.detach()
        sigma = r.std(correction=0)
        rows, one = ((r - r.mean()) / sigma).outer((r - r.mean()) / sigma), torch.ones(d, d)
        for sign, values in zip((-1, 1), near, strict=True):
            matrix = torch.eye(d, dtype=torch.float64) - (one + sign * rows) / d
            values.append(agreement(true, matrix @ gradient / sigma))
    return near


@claim("C35", READING_NOTES)
def no_warmup(seed: int) -> Finding:
    """Post-LN without warm-up: gradients of lower layers vanish, Adam's updates of them are as
    large as of upper ones and mostly noise; the last LN's gain grows when logits are small.

    A deep Post-LN encoder at its start, and after Adam's first steps at the full rate, with and
    without warm-up.  The share of signal in a layer's gradient is ‖E g‖²/E‖g‖² over batches,
    unbiased.  Lower and upper: means over a third of the layers.  Then a shallow stack whose tied
    table starts small.
    """
    depth, batches, steps = 12, 4, 10
    moments = {"start": 0, "no warm-up": 1, "warm-up": 1000}
    norms: dict[str, list[Tensor]] = {moment: [] for moment in moments}
    shares: dict[str, list[Tensor]] = {moment: [] for moment in moments}
    updates = []
    for draw_seed in seeds(seed, 12):
        for moment, warmup in moments.items():
            keys = {"model.scheme": "post_ln", "model.depth": depth, "train.warmup_steps": warmup}
            stack = started(draw_seed, {**keys, "train.optimizer": "adam"})
            if moment != "start":
                moved = update_norms(stack, steps)
                if moment == "no warm-up":
                    updates.append(moved)
            norm, share = signal_share(stack, batches)
            norms[moment].append(norm)
            shares[moment].append(share)

    def ends(by_layer: list[Tensor]) -> tuple[Tensor, Tensor]:
        rows = torch.stack(by_layer)
        return rows[:, : depth // 3].mean(dim=1), rows[:, -(depth // 3) :].mean(dim=1)

    def ratio(by_layer: list[Tensor]) -> Tensor:
        low, top = ends(by_layer)
        return low / top

    (low, top), (start_low, start_top) = ends(shares["no warm-up"]), ends(shares["start"])
    gains = [last_gain(draw_seed) for draw_seed in seeds(seed, 12)]
    parts = [
        Part.mean(f"ln ‖∂L/∂θ_l‖, lower over upper, after {steps} steps", 0.0,
                  ratio(norms["no warm-up"]).log(), relation="<="),
        Part.mean("Adam's update, lower over upper", 1.0, ratio(updates), tolerance=0.1),
        Part.mean("share of signal, lower", 0.5, low, relation="<="),
        Part.mean("gain of the last LN over the mean of the others", 1.0, gains, relation=">="),
        Part.mean("ln ‖∂L/∂θ_l‖, lower over upper, at the start", 0.0, ratio(norms["start"]).log(),
                  relation="<=", stated=False),
        Part.mean(f"the same after {steps} steps of a warm-up of 1000", 0.0,
                  ratio(norms["warm-up"]).log(), relation="<=", stated=False),
        Part.mean("share of signal, upper", 0.5, top, relation=">=", stated=False),
        Part.mean("share of signal, lower, at the start", 0.5, start_low, relation="<=",
                  stated=False),
        Part.mean("the same, upper", 0.5, start_top, relation=">=", stated=False),
    ]  # fmt: skip
    layers, lines = list(range(1, depth + 1)), []
    for moment, values in norms.items():
        lines.append(Line.mean(moment, layers, torch.stack(values).double()))
    note = (
        f"{depth} layers, d = 32, lr 0.001, {batches} batches of 8 sequences, {len(gains)} seeds; "
        "the gain after 30 steps in a stack of 3 layers. The gradients of the lower layers do not "
        "vanish at the start, but after a few steps at the full rate. Noise is most of the "
        "gradient in all layers, the upper ones too."
    )
    return Finding(parts, note, Curves("layer l", "‖∂L/∂θ_l‖", lines, log_y=True))


def update_norms(stack: Trial, steps: int) -> Tensor:
    """Return the mean of ‖θ_l,t − θ_l,t−1‖ over the first steps by layer, (depth,)."""
    banks = stack.layer_banks
    values = [[bank.values().clone() for bank in banks]]
    stack.run(steps, lambda t: values.append([bank.values().clone() for bank in banks]))
    pairs = (zip(now, before, strict=True) for before, now in pairwise(values))
    return torch.stack([layer_norms([a - b for a, b in sample]) for sample in pairs]).mean(dim=0)


def signal_share(stack: Trial, batches: int) -> tuple[Tensor, Tensor]:
    """Return the mean ‖g‖ over batches and ‖E g‖²/E‖g‖² by layer, each (depth,)."""
    by_layer = [list(layer.parameters()) for layer in stack.model.layers]
    flat = [parameter for layer in by_layer for parameter in layer]
    drawn = []
    for t in range(1, batches + 1):
        gradients = iter(torch.autograd.grad(stack.loss(*stack.batch(t)), flat))
        drawn.append([torch.cat([next(gradients).flatten() for _ in layer]) for layer in by_layer])
    norms, shares = [], []
    for rows in zip(*drawn, strict=True):
        g = torch.stack(rows).double()  # (batches, parameters of the layer)
        noise = g.var(dim=0, correction=1).sum()
        signal = g.mean(dim=0).square().sum() - noise / batches
        norms.append(g.norm(dim=1).mean())
        shares.append(signal / (signal + noise))
    return torch.stack(norms), torch.stack(shares)


def last_gain(seed: int, steps: int = 30) -> float:
    """Return the mean gain of the last LN over that of the others, after training.

    The head is tied to a token table that starts with the standard deviation 0.02.
    """
    stack = started(seed, {"model.scheme": "post_ln", "model.depth": 3, "train.lr": 3e-3})
    model = stack.model
    with torch.no_grad():
        model.embedding.mul_(0.02 / model.embedding.std())
    stack.run(steps)
    gains = torch.stack(
        [g.detach() for name, g in model.named_parameters() if name.endswith("gain")]
    )
    means = gains.mean(dim=1)
    return (means[-1] / means[:-1].mean()).item()
