"""Claims about depth: gradients by layer at the start, and ‖ΔF‖ of one step at several depths."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepstack.config.roles import MATRICES
from deepstack.diagnostics.signals import grad_norm_predicted
from deepstack.parameters import layer_norms
from deepstack.theory.claim import Curves, Finding, Line, Part, beside, claim
from deepstack.theory.claim_stack import Trial, flat_part, growth
from deepstack.theory.draws import F64, random, seeds
from deepstack.theory.sources import LAYER_CAKE
from deepstack.theory.statistics import gather

GROUPS = {
    "matrices": MATRICES,
    "norm gains": ("norm_gain",),
    "norm biases": ("norm_bias",),
    "linear biases": ("bias",),
    "tables": ("embedding", "position"),
}


def feed_forward_gradients(seed: int, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Return ‖∂F/∂θ‖ of each layer's feed-forward over the last one's, measured and claimed.

    The gradient of <F, R>, R of independent N(0, 1), has the mean square ‖∂F/∂θ‖_F².
    """
    trial = Trial(seed, changes)
    trial.built.banks.zero_gradients()
    F = trial.model.hidden(trial.probe)
    R = torch.randn(F.shape, generator=torch.Generator().manual_seed(seed))
    (F * R).sum().backward()
    measured = layer_norms([bank.gradients() for bank in trial.banks_of("w1", "w2")])
    (snapshot,) = trial.snapshots()
    claimed = grad_norm_predicted(snapshot) / snapshot.matrix_grad_norm[-1]
    return {"measured": measured / measured[-1], "claimed": claimed}


@claim("C9", LAYER_CAKE)
def gradient_by_layer(seed: int) -> Finding:
    """‖∂F/∂θ_i‖ falls with K = 2N − i as ((α² − v²w²)/(α² + v²w²))^{K/2}.

    The feed-forward of layer 1 over that of layer N at the start; α, v, w of each sublayer.
    """
    repetitions = seeds(seed, 16)
    small = {"model.init.distribution": "normal", "model.init.std": 0.1}
    stacks: dict[str, dict[str, Any]] = {
        "Post-LN, Xavier": {"model.scheme": "post_ln", "model.depth": 16},
        "Post-LN, N(0, 0.1²)": {"model.scheme": "post_ln", "model.depth": 16, **small},
        "DeepNorm (tight)": {"model.scheme": "deepnorm_tight", "model.depth": 16},
        "DeepNorm, N = 48": {"model.scheme": "deepnorm", "model.depth": 48},
    }
    parts, lines = [], []
    for label, changes in stacks.items():
        drawn = gather(feed_forward_gradients(s, changes) for s in repetitions)
        measured, claimed = drawn["measured"], drawn["claimed"].mean(dim=0).tolist()
        quantity = f"‖∂F/∂θ‖ of layer 1 over layer N, {label}"
        parts.append(Part.mean(quantity, claimed[0], measured[:, 0], tolerance=0.05))
        if len(claimed) < 40:
            layers = list(range(1, len(claimed) + 1))
            lines.append(Line.mean(f"{label}, measured", layers, measured))
            lines.append(Line(f"{label}, claimed", layers, claimed, False))
    # the model of the derivation: every sublayer multiplies by (alpha ± v w)/sqrt(alpha² + v²w²)
    K, share = 32, 0.1  # share = v w / alpha
    sign = 2.0 * torch.randint(2, (4000, K), generator=random(seed), dtype=F64) - 1
    factors = ((1 + share * sign) / math.sqrt(1 + share**2)).log().sum(dim=1)
    typical, scalar = K / 2 * math.log((1 - share**2) / (1 + share**2)), "the scalar model"
    parts.append(
        beside(f"{scalar}, v w/α = 0.1, K = 32: mean log of the product", typical, factors)
    )
    parts.append(beside("the same: mean square of the product", 1.0, (2 * factors).exp()))
    return Finding(
        parts,
        f"d = 32, {len(repetitions)} seeds.  The formula is the typical product of random "
        "signs, of which a vector has one for each direction: the measurement is their root mean "
        "square, which is near 1 a sublayer.  It agrees, to 5%, only where it says nearly 1.",
        Curves("layer l", "‖∂F/∂θ_l‖ over that of layer N", lines),
    )


@claim("C11", LAYER_CAKE)
def one_step(seed: int) -> Finding:
    """‖ΔF‖ = O(η) after one SGD step, whatever N is.

    DeepNorm, one step on one group of parameters at a time; the derivation covers the matrices.
    """
    depths, repetitions = (6, 18, 54), seeds(seed, 8)
    deepnorm, post_ln = {"model.scheme": "deepnorm"}, {"model.scheme": "post_ln"}
    updates = {
        group: growth(repetitions, deepnorm, depths, roles) for group, roles in GROUPS.items()
    }
    halves = growth(repetitions, deepnorm, depths[-1:], lr=0.5e-4)[:, 0]
    full_step = updates["matrices"][:, -1]
    parts = [Part.mean("‖ΔF‖(η)/‖ΔF‖(η/2), N = 54", 2.0, 2 * full_step / halves, tolerance=0.02)]
    for group, moved in updates.items():
        quantity = f"{group}: ‖ΔF‖ at N = 54 over N = 6"
        parts.append(flat_part(quantity, moved, stated=group == "matrices"))
    updates["Post-LN: matrices"] = moved = growth(repetitions, post_ln, depths, lr=1e-6)
    growing = (moved[:, -1] / moved[:, 0]).log()  # spread over an order of magnitude
    parts.append(beside("Post-LN's matrices: ln of the same", 0.0, growing))
    lines = [Line.mean(group, depths, moved) for group, moved in updates.items()]
    return Finding(
        parts,
        f"d = 32, {len(repetitions)} seeds, η = 1e-4 (Post-LN 1e-6); 20% is allowed over 9 times "
        "the depth.  Norms and linear biases are outside the proof and not flat: a norm's gain or "
        "bias moves the stream by O(η) in every sublayer, whatever α and β, and their sum grows "
        "as N.",
        Curves("depth N (layers)", "‖ΔF‖/η after one step", lines, log_x=True, log_y=True),
    )


@claim("C34", LAYER_CAKE)
def sizes_do_not_matter(seed: int) -> Finding:
    """α = (2N)^¼ and β = (8N)^−¼ keep ‖ΔF‖ flat in N whatever d, m and the number of heads are.

    One SGD step on the matrices of DeepNorm stacks of several shapes.
    """
    depths, repetitions = (6, 36), seeds(seed, 8)
    shapes: dict[str, dict[str, Any]] = {
        "d = 32, m = 128, 2 heads": {},
        "d = 16, m = 64": {"model.d_model": 16},
        "d = 64, m = 256": {"model.d_model": 64},
        "d = 32, m = 32": {"model.d_ff": 32},
        "d = 32, 8 heads": {"model.n_heads": 8},
    }
    parts, lines = [], []
    for label, shape in shapes.items():
        moved = growth(repetitions, {"model.scheme": "deepnorm", **shape}, depths)
        parts.append(flat_part(f"{label}: ‖ΔF‖ at N = 36 over N = 6", moved))
        lines.append(Line.mean(label, depths, moved))
    return Finding(
        parts,
        f"{len(repetitions)} seeds, η = 1e-4; 20% is allowed over 6 times the depth.  The level of "
        "‖ΔF‖ does depend on the shape; that it is the same at every depth does not.",
        Curves("depth N (layers)", "‖ΔF‖/η after one step", lines, log_x=True, log_y=True),
    )
