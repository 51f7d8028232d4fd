"""Claims about depth: gradients by layer at the start, and ‖ΔF‖ of one step at several depths."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepstack.config.schema import MATRICES
from deepstack.theory.claim import Curves, Finding, Line, Part, claim
from deepstack.theory.claim_stack import Trial, by_sublayer, flat_part, gains, growth
from deepstack.theory.draws import F64, repeats
from deepstack.theory.sources import LAYER_CAKE

GROUPS = {
    "matrices": MATRICES,
    "norm gains": ("norm_gain",),
    "norm biases": ("norm_bias",),
    "linear biases": ("bias",),
    "tables": ("embedding", "position"),
}


def scalar_product(trial: Trial, seed: int) -> Tensor:
    """Return <F, R>, R of independent N(0, 1); its gradient has the mean square ‖∂F/∂θ‖_F²."""
    F = trial.model.hidden(trial.probe)
    R = torch.randn(F.shape, generator=torch.Generator().manual_seed(seed))
    return (F * R).sum()


def feed_forward_gradients(seed: int, changes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return ‖∂F/∂θ‖ of each layer's feed-forward over the last one's, measured and claimed."""
    trial = Trial(seed, changes)
    depth = trial.config.model.depth
    trial.built.banks.zero_gradients()
    scalar_product(trial, seed).backward()
    measured = by_sublayer(trial.gradients())[1::2]
    v, w = gains(trial.weights())
    alpha = trial.model.schemes[0].alpha(depth) or 1.0
    share = (v * w / alpha).square()
    # above v w = alpha the formula's base is negative; take 0, its value at v w = alpha
    factor = ((1 - share).clamp(min=0) / (1 + share)).sqrt()
    above = torch.stack([factor[i + 1 :].prod() for i in range(1, 2 * depth, 2)])
    return measured / measured[-1], above


@claim("C9", LAYER_CAKE)
def gradient_by_layer(seed: int) -> Finding:
    """‖∂F/∂θ_i‖ falls with K = 2N − i as ((α² − v²w²)/(α² + v²w²))^{K/2}.

    The feed-forward of layer 1 over that of layer N at the start; α, v, w of each sublayer.
    """
    draws = repeats(16)
    seeds = [draws * seed + draw for draw in range(draws)]
    small = {"model.init.distribution": "normal", "model.init.std": 0.1}
    stacks: dict[str, dict[str, Any]] = {
        "Post-LN, Xavier": {"model.scheme": "post_ln", "model.depth": 16},
        "Post-LN, N(0, 0.1²)": {"model.scheme": "post_ln", "model.depth": 16, **small},
        "DeepNorm (tight)": {"model.scheme": "deepnorm_tight", "model.depth": 16},
        "DeepNorm, N = 48": {"model.scheme": "deepnorm", "model.depth": 48},
    }
    parts, lines = [], []
    for label, changes in stacks.items():
        depth = changes["model.depth"]
        pairs = [feed_forward_gradients(s, changes) for s in seeds]
        measured = torch.stack([sample[0] for sample in pairs])
        claimed = torch.stack([sample[1] for sample in pairs]).mean(dim=0)
        quantity = f"‖∂F/∂θ‖ of layer 1 over layer N, {label}"
        parts.append(Part.mean(quantity, claimed[0].item(), measured[:, 0], tolerance=0.05))
        if depth < 40:
            layers = list(range(1, depth + 1))
            lines.append(Line.mean(f"{label}, measured", layers, measured))
            lines.append(Line(f"{label}, claimed", layers, claimed.tolist(), False))
    # the model of the derivation: every sublayer multiplies by (alpha ± v w)/sqrt(alpha² + v²w²)
    rng = torch.Generator().manual_seed(seed)
    K, share = 32, 0.1  # share = v w / alpha
    sign = 2.0 * torch.randint(2, (4000, K), generator=rng, dtype=F64) - 1
    factors = ((1 + share * sign) / math.sqrt(1 + share**2)).log().sum(dim=1)
    typical = K / 2 * math.log((1 - share**2) / (1 + share**2))
    parts += [
        Part.mean(
            "the scalar model, v w/α = 0.1, K = 32: mean log of the product",
            typical,
            factors,
            stated=False,
        ),
        Part.mean("the same: mean square of the product", 1.0, (2 * factors).exp(), stated=False),
    ]
    return Finding(
        parts,
        f"d = 32, {draws} seeds.  The formula is the typical product of random "
        "signs, of which a vector has one for each direction: the measurement is their root mean "
        "square, which is near 1 a sublayer.  It agrees, to 5%, only where it says nearly 1.",
        Curves("layer l", "‖∂F/∂θ_l‖ over that of layer N", lines),
    )


@claim("C11", LAYER_CAKE)
def one_step(seed: int) -> Finding:
    """‖ΔF‖ = O(η) after one SGD step, whatever N is.

    DeepNorm, one step on one group of parameters at a time; the derivation covers the matrices.
    """
    depths, draws, lr = (6, 18, 54), repeats(8), 1e-4
    seeds = [draws * seed + draw for draw in range(draws)]
    updates = {group: torch.zeros(draws, len(depths), dtype=F64) for group in GROUPS}
    halves = []
    for i, draw_seed in enumerate(seeds):
        for j, depth in enumerate(depths):
            trial = Trial(draw_seed, {"model.scheme": "deepnorm", "model.depth": depth})
            trial.backward()
            for group, roles in GROUPS.items():
                updates[group][i, j] = trial.update_of(lr, trial.banks_of(*roles)) / lr
        half = trial.update_of(lr / 2, trial.banks_of(*MATRICES)) / (lr / 2)
        halves.append(2 * updates["matrices"][i, -1].item() / half)
    post_ln = growth(seeds, {"model.scheme": "post_ln"}, depths)
    parts = [Part.mean("‖ΔF‖(η)/‖ΔF‖(η/2), N = 54", 2.0, halves, tolerance=0.02)]
    for group, moved in updates.items():
        quantity = f"{group}: ‖ΔF‖ at N = 54 over N = 6"
        parts.append(flat_part(quantity, moved, stated=group == "matrices"))
    growing = (post_ln[:, -1] / post_ln[:, 0]).log()  # spread over an order of magnitude
    quantity = "Post-LN's matrices: ln of the same"
    parts.append(Part.mean(quantity, 0.0, growing, stated=False))
    lines = [
        Line.mean(group, depths, moved)
        for group, moved in (*updates.items(), ("Post-LN: matrices", post_ln))
    ]
    return Finding(
        parts,
        f"d = 32, {draws} seeds, η = 1e-4 (Post-LN 1e-6); 20% is allowed over 9 times the depth.  "
        "Norms and linear biases are outside the proof and not flat: a norm's gain or bias moves "
        "the stream by O(η) in every sublayer, whatever α and β, and their sum grows as N.",
        Curves("depth N (layers)", "‖ΔF‖/η after one step", lines, log_x=True, log_y=True),
    )


@claim("C34", LAYER_CAKE)
def sizes_do_not_matter(seed: int) -> Finding:
    """α = (2N)^¼ and β = (8N)^−¼ keep ‖ΔF‖ flat in N whatever d, m and the number of heads are.

    One SGD step on the matrices of DeepNorm stacks of several shapes.
    """
    depths, draws = (6, 36), repeats(8)
    seeds = [draws * seed + draw for draw in range(draws)]
    shapes: dict[str, dict[str, Any]] = {
        "d = 32, m = 128, 2 heads": {},
        "d = 16, m = 64": {"model.d_model": 16},
        "d = 64, m = 256": {"model.d_model": 64},
        "d = 32, m = 32": {"model.d_ff": 32},
        "d = 32, 8 heads": {"model.n_heads": 8},
    }
    parts, lines = [], []
    for label, shape in shapes.items():
        moved = growth(seeds, {"model.scheme": "deepnorm", **shape}, depths)
        parts.append(flat_part(f"{label}: ‖ΔF‖ at N = 36 over N = 6", moved))
        lines.append(Line.mean(label, depths, moved))
    return Finding(
        parts,
        f"{draws} seeds, η = 1e-4; 20% is allowed over 6 times the depth.  The level of ‖ΔF‖ does "
        "depend on the shape; that it is the same at every depth does not.",
        Curves("depth N (layers)", "‖ΔF‖/η after one step", lines, log_x=True, log_y=True),
    )
