"""Claims about the model update of a step: Theorem 4.2 and DeepNorm's condition."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepstack.config.schema import MATRICES
from deepstack.diagnostics import ModelUpdate
from deepstack.schemes import SCHEMES, StackPosition, StackScheme
from deepstack.theory.claim import Curves, Finding, Line, Part, claim
from deepstack.theory.claim_stack import (
    VALUE_PATH,
    Trial,
    by_sublayer,
    descend,
    flat_part,
    gains,
    growth,
    restored,
)
from deepstack.theory.draws import exponents, repeats
from deepstack.theory.sources import LAYER_CAKE

# schemes of the form x <- LN(alpha x + G(x))
OF_THE_THEOREM = ("post_ln", "post_ln_init", "ds_init", "admin", "deepnorm", "deepnorm_adam")


def alphas(trial: Trial) -> Tensor:
    """Return alpha of every sublayer, (2 depth,)."""
    schemes = trial.model.schemes
    if schemes[0].name == "admin":
        return torch.stack([w.detach().mean() for s in schemes for w in s.each("omega")])
    return torch.full((2 * len(schemes),), schemes[0].alpha(len(schemes)) or 1.0)


def right_hand_side(trial: Trial, before: dict[str, Tensor]) -> float:
    """Return Σ_i √(v_i² + w_i²)/α_i ‖θ_i* − θ_i‖, from the weights before and the present ones."""
    v, w = gains(before)
    now = trial.weights()
    moved = by_sublayer({role: now[role] - before[role] for role in now})
    return ((v.square() + w.square()).sqrt() / alphas(trial) * moved).sum().item()


def bound_over_update(seed: int, scheme: str, optimizer: str, steps: int) -> list[float]:
    """Return the right-hand side over ‖ΔF‖ of a random step, then of every training step."""
    trained = {"train.trainable": list(VALUE_PATH), "train.optimizer": optimizer}
    changes = {"model.scheme": scheme, "model.depth": 6, "train.lr": 1e-3, "train.clip": None}
    trial = Trial(seed, changes | trained)
    if trial.built.model.schemes[0].reads_data:
        trial.built.calibrate(trial.batch(1)[0])
    update = ModelUpdate(trial.model, trial.probe)
    before, banks = trial.weights(), trial.banks_of(*VALUE_PATH)
    ratios: list[float] = []

    def measure(step: int = 0) -> None:
        nonlocal before
        moved = update.measure()["model_update_step"].item()
        ratios.append(right_hand_side(trial, before) / moved)
        before = trial.weights()

    with restored(banks):
        rng = torch.Generator().manual_seed(seed)
        for bank in banks:
            old = bank.values()
            bank.copy_(old + 1e-4 * torch.randn(old.shape, generator=rng))
        measure()
    update.measure()
    before = trial.weights()
    trial.run(steps, measure)
    return ratios


@claim("C8", LAYER_CAKE)
def theorem_4_2(seed: int) -> Finding:
    """‖ΔF‖ ≤ Σ_{i=1}^{2N} √(v_i² + w_i²)/α ‖θ_i* − θ_i‖.

    The right-hand side over the measured ‖ΔF‖ (mean over tokens), for every scheme of the form
    LN(αx + G(x)): Δθ independent of the data, and each of 4 steps of training.
    """
    draws, steps = repeats(8), 4
    seeds = [draws * seed + draw for draw in range(draws)]
    random, trained, extra, lines = [], [], [], []
    for name in OF_THE_THEOREM:
        ratios = torch.tensor([bound_over_update(s, name, "sgd", steps) for s in seeds])
        label = SCHEMES[name].label
        at_least: dict[str, Any] = {"relation": ">="}
        random.append(Part.mean(f"{label}: Σ/‖ΔF‖, Δθ random", 1.0, ratios[:, 0], **at_least))
        least = ratios[:, 1:].amin(dim=1)
        trained.append(Part.mean(f"{label}: least Σ/‖ΔF‖ of SGD", 1.0, least, **at_least))
        lines.append(Line.mean(label, list(range(1, steps + 1)), ratios[:, 1:]))
    for name in ("post_ln", "deepnorm"):
        ratios = torch.tensor([bound_over_update(s, name, "adam", steps) for s in seeds])
        quantity = f"{SCHEMES[name].label}: least Σ/‖ΔF‖ of Adam"
        least = ratios[:, 1:].amin(dim=1)
        extra.append(Part.mean(quantity, 1.0, least, relation=">=", stated=False))
    lines.append(Line("the bound", [1, steps], [1.0, 1.0], False))
    return Finding(
        random + trained + extra,
        f"Depth 6, d = 32, {draws} seeds, learning rate 1e-3 on v, o, w1, w2; gains from the "
        "weights at each step.  For a random Δθ the sum is far above ‖ΔF‖, since the terms do not "
        "add up; a gradient step is aligned with the data (C7), and the sum is then an estimate, "
        "not a bound.",
        Curves("step t of SGD", "Σ √(v²+w²)/α ‖Δθ‖ over ‖ΔF‖", lines, log_y=True),
    )


def solved(depth: int, share: float, link: float) -> tuple[float, float]:
    """Return alpha and beta with 2N share β²/α² = 1 and 1/α = link β, by bisection."""
    low, high = 1e-3, 1e3
    for _ in range(200):
        alpha = math.sqrt(low * high)
        excess = 2 * depth * share * (1 / (link * alpha)) ** 2 / alpha**2 - 1
        low, high = (alpha, high) if excess > 0 else (low, alpha)
    return alpha, 1 / (link * alpha)


def coefficients(name: str, depth: int, **options: Any) -> tuple[float, float]:
    """Return a scheme's alpha and beta."""
    scheme = StackScheme(name, options, StackPosition(encoder_depth=depth))
    assert scheme.alpha is not None and scheme.beta is not None
    return scheme.alpha, scheme.beta


@claim("C10", LAYER_CAKE)
def condition(seed: int) -> Finding:
    """2N (v² + w²)/α² = 1 and 1/α = √2 β give α = (2N)^¼, β = (8N)^−¼; with β² for v² + w² and
    1/α = β, α = (2N)^¼, β = (2N)^−¼; in general α = (2N)^p, β = α/√(4N).

    The conditions solved by bisection, deepstack's schemes put into them, and the gains of a
    DeepNorm stack's initial matrices.
    """
    depths = (1, 6, 100, 1000)
    exact: dict[str, Any] = {"tolerance": 1e-9}

    def over(share: float, link: float, a: float, b: float, **more: Any) -> list[Part]:
        pairs = [solved(N, share, link) for N in depths]
        alpha = [x / (a * N) ** 0.25 for N, (x, _) in zip(depths, pairs, strict=True)]
        beta = [x * (b * N) ** 0.25 for N, (_, x) in zip(depths, pairs, strict=True)]
        squares = "v² + w²" if share == 2 else "β²"
        names = f"{squares}, 1/α = {'√2 ' if link > 1 else ''}β"
        return [
            Part.mean(f"{names}: α/({a:g}N)^¼", 1.0, alpha, **exact, **more),
            Part.mean(f"{names}: β/({b:g}N)^−¼", 1.0, beta, **exact, **more),
        ]

    root = math.sqrt(2)
    parts = [*over(2, root, 2, 8), *over(1, 1.0, 2, 2), *over(1, root, 1, 4, stated=False)]
    powers = (0.0, 0.1, 0.25, 0.5)
    for label, share, name, options in (
        ("DeepNorm: 2N (2β²)/α²", 2, "deepnorm", ({},)),
        ("DeepNorm (tight): 2N β²/α²", 1, "deepnorm_tight", ({},)),
        ("DeepNorm (power): 2N (2β²)/α²", 2, "deepnorm_power", [{"power": p} for p in powers]),
    ):
        values = []
        for N in depths:
            for chosen in options:
                alpha, beta = coefficients(name, N, **chosen)
                values.append(2 * N * share * beta**2 / alpha**2)
        parts.append(Part.mean(label, 1.0, values, **exact))
    draws = repeats(8)
    seeds = [draws * seed + draw for draw in range(draws)]
    pairs = [gains(Trial(draw_seed, {"model.depth": 6}).weights()) for draw_seed in seeds]
    sums = torch.stack([12 * (v**2 + w**2) / 12**0.5 for v, w in pairs])
    attention, feed_forward = sums[:, ::2].mean(dim=1), sums[:, 1::2].mean(dim=1)
    ours = "2N (v² + w²)/α² of initial weights"
    parts.append(Part.mean(f"{ours}, attention", 1.0, attention))
    parts.append(Part.mean(f"{ours}, feed-forward", 0.9, feed_forward, stated=False))
    for name in ("deepnorm_tight", "deepnorm_power"):
        chosen_options: dict[str, Any] = {"power": 0.4} if name == "deepnorm_power" else {}
        changes: dict[str, Any] = {"model.scheme": name, "model.scheme_options": chosen_options}
        moved = growth(seeds, changes, (6, 36))
        label = SCHEMES[name].label + (", p = 0.4" if chosen_options else "")
        quantity = f"{label}: ‖ΔF‖ at N = 36 over N = 6"
        parts.append(flat_part(quantity, moved, stated=False))
    return Finding(
        parts,
        f"Algebra at N = 1, 6, 100, 1000, and {draws} initial stacks of depth 6.  Published "
        "Xavier gives a feed-forward of width 4d v² + w² = 9β²/5 in place of 2β², "
        "constants that the document leaves out.  The other points of the curve keep "
        "‖ΔF‖ flat too.",
    )


@claim("C12", LAYER_CAKE)
def tokens(seed: int) -> Finding:
    """‖ΔF‖_F ≤ Σ_{p=1}^{n} ‖Δx_p‖₂.

    One SGD step of a DeepNorm stack, looked at on sequences of n tokens.
    """
    sizes, draws = (4, 8, 16, 32, 64), repeats(48)
    both = torch.zeros(2, draws, len(sizes), dtype=torch.float64)
    for i in range(draws):
        changes = {"model.scheme": "deepnorm", "task.seq_len": 64, "train.batch_size": 2}
        trial = Trial(draws * seed + i, changes)
        trial.backward()
        with torch.no_grad():
            before = [trial.model.hidden(trial.probe[:, :n]) for n in sizes]
            descend(trial.banks_of(*MATRICES), 1e-3)
            for j, n in enumerate(sizes):
                moved = (trial.model.hidden(trial.probe[:, :n]) - before[j]).norm(dim=-1)
                both[0, i, j] = moved.square().sum(dim=1).sqrt().mean()
                both[1, i, j] = moved.sum(dim=1).mean()
    frobenius, total = both
    ratio = (frobenius / total).amax(dim=1)
    extra: dict[str, Any] = {"stated": False, "tolerance": 0.1}
    parts = [
        Part.mean("largest ‖ΔF‖_F/Σ_p‖Δx_p‖", 1.0, ratio, relation="<="),
        Part.mean("exponent of ‖ΔF‖_F in n", 0.5, exponents(sizes, frobenius), **extra),
        Part.mean("exponent of Σ_p‖Δx_p‖ in n", 1.0, exponents(sizes, total), **extra),
    ]
    lines = [
        Line.mean("‖ΔF‖_F", sizes, frobenius),
        Line.mean("Σ_p‖Δx_p‖", sizes, total),
    ]
    return Finding(
        parts,
        f"Depth 6, d = 32, {draws} seeds, 4 sequences each.  The sum grows as n, the norm as √n, "
        "so the bound is loose by √n; the mean over tokens does not depend on n.",
        Curves("tokens in a sequence n", "model update", lines, log_x=True, log_y=True),
    )
