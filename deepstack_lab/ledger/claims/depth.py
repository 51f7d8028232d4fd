"""Claims about gradients by layer, ‖ΔF‖ of one step at several depths, and DeepNorm's condition."""

import math
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from deepstack.config import MATRICES
from deepstack.diagnostics import ModelUpdate, grad_norm_predicted
from deepstack.model import layer_norms, restored
from deepstack.schemes import SCHEMES, StackPosition, StackScheme
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
from deepstack_lab.ledger.claim_stack import Trial, descend, flat_part, growth
from deepstack_lab.ledger.draws import F64, random, seeds
from deepstack_lab.ledger.sources import LAYER_CAKE
from deepstack_lab.ledger.statistics import exponents, gather

GROUPS = {
    "matrices": MATRICES,
    "norm gains": ("norm_gain",),
    "norm biases": ("norm_bias",),
    "linear biases": ("bias",),
    "tables": ("embedding", "position"),
}


def feed_forward_gradients(seed: int, directions: int = 8, **changes: Any) -> dict[str, Tensor]:
    """Return ‖∂F/∂θ‖ of each layer's feed-forward over the last one's, measured and claimed.

    The gradient of <F, R>, R of independent N(0, 1), has the mean square ‖∂F/∂θ‖_F².

    largest: the ratio of the lower layer that is largest by one half of the R, by the other half,
        since the largest of several estimates is above the largest of the numbers.
    last: ‖ΔF‖/‖Δθ‖ of a random Δθ of the last layer, as a root mean square over tokens.
    """
    trial, rng, squares = Trial(seed, **changes), torch.Generator().manual_seed(seed), []
    F, banks = trial.model.hidden(trial.probe), trial.banks_of("w1", "w2")
    for _ in range(directions):
        trial.built.banks.zero_gradients()
        (F * torch.randn(F.shape, generator=rng)).sum().backward(retain_graph=True)
        squares.append(layer_norms([bank.gradients() for bank in banks]).square())
    choice, check = (torch.stack(squares[at::2]).mean(dim=0).sqrt() for at in (0, 1))
    norms = torch.stack(squares).mean(dim=0).sqrt()
    (snapshot,) = trial.snapshots()
    numbers = sum(bank.values()[-1].numel() for bank in banks) * F[..., 0].numel()
    return {
        "measured": norms / norms[-1],
        "claimed": grad_norm_predicted(snapshot) / snapshot.matrix_grad_norm[-1],
        "largest": check[choice[:-1].argmax()] / check[-1],
        "last": norms[-1] / math.sqrt(numbers),
    }


@claim("C9", LAYER_CAKE)
def gradient_by_layer(seed: int) -> Finding:
    """‖∂F/∂θ_i‖ falls with K = 2N − i as ((α² − v²w²)/(α² + v²w²))^{K/2}, so that
    ‖∂F/∂θ_i‖ ≤ ‖∂F/∂θ_2N‖ for every i.

    The feed-forward of layer 1 over layer N's at the start; α, v, w of each sublayer.  Then
    the layer i < N in which the ratio is largest, for schemes with α > 1 and v, w < 1.
    """
    small: dict[str, Any] = {"init_distribution": "normal", "init_std": 0.1}
    xavier: dict[str, Any] = {}
    level = Null(1.0, "no decay")
    parts, bounds, lines = [], [], []
    for label, scheme, depth, start, within, count in (
        ("Post-LN, Xavier", "post_ln", 16, xavier, 0.05, 16),
        ("Post-LN, N(0, 0.1²)", "post_ln", 16, small, 0.05, 16),
        ("DeepNorm (tight)", "deepnorm_tight", 16, xavier, 0.05, 16),
        ("DeepNorm, N = 6", "deepnorm", 6, xavier, 0.01, 40),
    ):
        drawn = gather(
            feed_forward_gradients(s, scheme=scheme, depth=depth, **start)
            for s in seeds(seed, count)
        )
        measured, claimed = drawn["measured"], drawn["claimed"].mean(dim=0).tolist()
        quantity = f"‖∂F/∂θ‖ of layer 1 over layer N, {label}"
        first = measured[:, 0]
        parts.append(Part.mean(quantity, claimed[0], first, tolerance=within, null=level))
        if scheme != "post_ln":
            quantity = f"‖∂F/∂θ_i‖ of the largest i < N over that of layer N, {label}"
            bounds.append(at_most(quantity, 1.0, drawn["largest"], null=level))
        if depth == 16:
            layers = list(range(1, depth + 1))
            lines.append(Line.mean(f"{label}, measured", layers, measured))
            lines.append(Line(f"{label}, claimed", layers, claimed, False))
    # the model of the derivation: every sublayer multiplies by (alpha ± v w)/sqrt(alpha² + v²w²)
    K, share = 32, 0.1  # share = v w / alpha
    sign = 2.0 * torch.randint(2, (4000, K), generator=random(seed), dtype=F64) - 1
    factors = ((1 + share * sign) / math.sqrt(1 + share**2)).log().sum(dim=1)
    typical = K / 2 * math.log((1 - share**2) / (1 + share**2))
    scalar = "the scalar model, v w/α = 0.1, K = 32: mean log of the product"
    square = Null(math.exp(2 * typical), "the typical product, squared")
    also = [
        beside(scalar, typical, factors, null=Null(0.0, "no decay")),
        beside("the same: mean square of the product", 1.0, (2 * factors).exp(), null=square),
    ]
    return Finding(
        [*parts, *bounds, *also],
        "d = 32, 16 seeds, 40 of N = 6.  The formula is the typical product of random signs, of "
        "which a vector has one for each direction: the measurement is their root mean square, "
        "which is near 1 a sublayer.  So no layer's gradient decays, and in most stacks some layer "
        "has a larger one than the last.",
        Curves("layer l", "‖∂F/∂θ_l‖ over that of layer N", lines),
    )


@claim("C11", LAYER_CAKE)
def one_step(seed: int) -> Finding:
    """‖ΔF‖ = O(η) after one SGD step, whatever N is.

    DeepNorm, one step on one group of parameters at a time; the derivation covers the matrices.
    """
    depths, repetitions = (6, 18, 54), seeds(seed, 8)
    updates = {
        group: growth(repetitions, depths, roles, scheme="deepnorm")
        for group, roles in GROUPS.items()
    }
    halves = growth(repetitions, depths[-1:], step=0.5e-4, scheme="deepnorm")[:, 0]
    full_step = updates["matrices"][:, -1]
    ratio, null = 2 * full_step / halves, Null(4.0, "O(η²)")
    parts = [Part.mean("‖ΔF‖(η)/‖ΔF‖(η/2), N = 54", 2.0, ratio, tolerance=0.02, null=null)]
    for group, moved in updates.items():
        quantity = f"{group}: ‖ΔF‖ at N = 54 over N = 6"
        parts.append(flat_part(quantity, moved, depths, stated=group == "matrices"))
    updates["Post-LN: matrices"] = moved = growth(repetitions, depths, step=1e-6, scheme="post_ln")
    growing = (moved[:, -1] / moved[:, 0]).log()  # spread over an order of magnitude
    root = Null(0.5 * math.log(depths[-1] / depths[0]), "grows as √N")
    parts.append(beside("Post-LN's matrices: ln of the same", 0.0, growing, null=root))
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
        "d = 16, m = 64": {"d_model": 16},
        "d = 64, m = 256": {"d_model": 64},
        "d = 32, m = 32": {"d_ff": 32},
        "d = 32, 8 heads": {"n_heads": 8},
    }
    parts, lines = [], []
    for label, shape in shapes.items():
        moved = growth(repetitions, depths, scheme="deepnorm", **shape)
        parts.append(flat_part(f"{label}: ‖ΔF‖ at N = 36 over N = 6", moved, depths))
        lines.append(Line.mean(label, depths, moved))
    return Finding(
        parts,
        f"{len(repetitions)} seeds, η = 1e-4; 20% is allowed over 6 times the depth.  The level of "
        "‖ΔF‖ does depend on the shape; that it is the same at every depth does not.",
        Curves("depth N (layers)", "‖ΔF‖/η after one step", lines, log_x=True, log_y=True),
    )


# schemes of the form x <- LN(alpha x + G(x))
OF_THE_THEOREM = ("post_ln", "post_ln_init", "ds_init", "admin", "deepnorm", "deepnorm_adam")


def bound_over_update(seed: int, scheme: str, optimizer: str, steps: int) -> list[float]:
    """Return the right-hand side over ‖ΔF‖ of a random step, then of every training step."""
    roles, train = ["v", "o", "w1", "w2"], {"lr": 1e-3, "clip": None, "optimizer": optimizer}
    trial = Trial(seed, scheme=scheme, depth=6, trainable=roles, **train)
    if trial.model.schemes[0].reads_data:
        trial.built.calibrate(trial.batch(1)[0])
    update, banks = ModelUpdate(trial.model, trial.probe), trial.banks_of(*roles)
    before, ratios = trial.values(), []

    def measure(step: int = 0) -> None:
        from deepstack.instruments.bound import bound

        nonlocal before
        moved = update.measure()["model_update_step"].item()
        (snapshot,) = trial.snapshots(initial=before)
        ratios.append(bound(snapshot).sum().item() / moved)
        before = trial.values()

    with restored(banks):
        rng = torch.Generator().manual_seed(seed)
        for bank in banks:
            old = bank.values()
            bank.copy_(old + 1e-4 * torch.randn(old.shape, generator=rng))
        measure()
    update.measure()
    before = trial.values()
    trial.run(steps, measure)
    return ratios


@claim("C8", LAYER_CAKE)
def theorem_4_2(seed: int) -> Finding:
    """‖ΔF‖ ≤ Σ_{i=1}^{2N} √(v_i² + w_i²)/α ‖θ_i* − θ_i‖.

    The right-hand side over the measured ‖ΔF‖ (mean over tokens), for every scheme of the form
    LN(αx + G(x)): Δθ independent of the data, and each of 4 steps of training.
    """
    steps, repetitions = 4, seeds(seed, 8)

    def ratios(name: str, optimizer: str) -> Tensor:
        return torch.tensor([bound_over_update(s, name, optimizer, steps) for s in repetitions])

    sgd = {SCHEMES[name].label: ratios(name, "sgd") for name in OF_THE_THEOREM}
    adam = {SCHEMES[name].label: ratios(name, "adam") for name in ("post_ln", "deepnorm")}
    null = Null(1.0, "no larger than ‖ΔF‖")
    parts = [
        at_least(f"{label}: Σ/‖ΔF‖, Δθ random", 1.0, r[:, 0], null=null) for label, r in sgd.items()
    ]
    for optimizer, by_label in (("SGD", sgd), ("Adam", adam)):
        for label, values in by_label.items():
            quantity, least = f"{label}: least Σ/‖ΔF‖ of {optimizer}", values[:, 1:].amin(dim=1)
            parts.append(at_least(quantity, 1.0, least, stated=optimizer == "SGD", null=null))
    lines = [Line.mean(label, range(1, steps + 1), r[:, 1:]) for label, r in sgd.items()]
    lines.append(Line("the bound", [1, steps], [1.0, 1.0], False))
    return Finding(
        parts,
        f"Depth 6, d = 32, {len(repetitions)} seeds, learning rate 1e-3 on v, o, w1, w2; gains "
        "from the weights at each step.  For a random Δθ the sum is far above ‖ΔF‖, since the "
        "terms do not add up; a gradient step is aligned with the data (C7), and the sum is then "
        "an estimate, not a bound.",
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


@claim("C10", LAYER_CAKE)
def condition(seed: int) -> Finding:
    """2N (v² + w²)/α² = 1 and 1/α = √2 β give α = (2N)^¼, β = (8N)^−¼; with β² for v² + w² and
    1/α = β, α = (2N)^¼, β = (2N)^−¼; in general α = (2N)^p, β = α/√(4N).

    The conditions solved by bisection, deepstack's schemes put into them, and the gains of a
    DeepNorm stack's initial matrices.
    """
    depths, repetitions = (1, 6, 100, 1000), seeds(seed, 8)
    exact: dict[str, Any] = {"tolerance": 1e-9}
    parts = []
    for label, share, link, a, b in (
        ("v² + w², 1/α = √2 β", 2, math.sqrt(2), 2, 8),
        ("β², 1/α = β", 1, 1.0, 2, 2),
        ("β², 1/α = √2 β", 1, math.sqrt(2), 1, 4),
    ):
        pairs = {N: solved(N, share, link) for N in depths}
        alpha = [x / (a * N) ** 0.25 for N, (x, _) in pairs.items()]
        beta = [x * (b * N) ** 0.25 for N, (_, x) in pairs.items()]
        stated = share == 2 or link == 1
        ones = [
            Null(fmean((c * N) ** p for N in depths), "1 at every N")
            for c, p in ((a, -0.25), (b, 0.25))
        ]
        parts += [
            Part.mean(f"{label}: α/({a:g}N)^¼", 1.0, alpha, **exact, stated=stated, null=ones[0]),
            Part.mean(f"{label}: β/({b:g}N)^−¼", 1.0, beta, **exact, stated=stated, null=ones[1]),
        ]
    powers = [{"power": p} for p in (0.0, 0.1, 0.25, 0.5)]
    for label, share, name, options in (
        ("DeepNorm: 2N (2β²)/α²", 2, "deepnorm", [{}]),
        ("DeepNorm (tight): 2N β²/α²", 1, "deepnorm_tight", [{}]),
        ("DeepNorm (power): 2N (2β²)/α²", 2, "deepnorm_power", powers),
    ):
        values = []
        for N, chosen in product(depths, options):
            scheme = StackScheme(name, chosen, StackPosition(encoder_depth=N))
            assert scheme.alpha is not None and scheme.beta is not None
            values.append(2 * N * share * scheme.beta**2 / scheme.alpha**2)
        post_ln = Null(fmean(2 * N * share for N in depths), "α = β = 1")
        parts.append(Part.mean(label, 1.0, values, **exact, null=post_ln))

    def gains(draw_seed: int) -> dict[str, Tensor]:
        from deepstack.instruments.bound import terms

        (snapshot,) = Trial(draw_seed, depth=6).snapshots()
        symbols = terms(snapshot)
        sums = 12 * (symbols.v**2 + symbols.w**2) / 12**0.5
        return dict(zip(snapshot.sublayers, sums.mean(dim=0), strict=True))

    drawn, ours = gather(map(gains, repetitions)), "2N (v² + w²)/α² of initial weights"
    post_ln, whole = Null(24.0, "α = β = 1"), Null(1.0, "as attention's")
    parts.append(Part.mean(f"{ours}, attention", 1.0, drawn["attention"], null=post_ln))
    parts.append(beside(f"{ours}, feed-forward", 0.9, drawn["feed_forward"], null=whole))
    for label, name, chosen in (
        ("DeepNorm (tight)", "deepnorm_tight", {}),
        ("DeepNorm (power), p = 0.4", "deepnorm_power", {"power": 0.4}),
    ):
        moved = growth(repetitions, ends := (6, 36), scheme=name, scheme_options=chosen)
        parts.append(flat_part(f"{label}: ‖ΔF‖ at N = 36 over N = 6", moved, ends, stated=False))
    return Finding(
        parts,
        f"Algebra at N = 1, 6, 100, 1000, and {len(repetitions)} initial stacks of depth 6.  "
        "Published Xavier gives a feed-forward of width 4d v² + w² = 9β²/5 in place of 2β², "
        "constants that the document leaves out.  The other points of the curve keep "
        "‖ΔF‖ flat too.",
    )


@claim("C12", LAYER_CAKE, identity=True)
def tokens(seed: int) -> Finding:
    """‖ΔF‖_F ≤ Σ_{p=1}^{n} ‖Δx_p‖₂.

    One SGD step of a DeepNorm stack, looked at on sequences of n tokens.
    """
    sizes, repetitions = (4, 8, 16, 32, 64), seeds(seed, 48)

    def sample(draw_seed: int) -> dict[str, Tensor]:
        trial = Trial(draw_seed, scheme="deepnorm", seq_len=64, batch_size=2)
        trial.backward()
        with torch.no_grad():
            before = [trial.model.hidden(trial.probe[:, :n]) for n in sizes]
            descend(trial.banks_of(*MATRICES), 1e-3)
            after = [trial.model.hidden(trial.probe[:, :n]) for n in sizes]
        moved = [(F - F_0).norm(dim=-1) for F, F_0 in zip(after, before, strict=True)]
        return {
            "‖ΔF‖_F": torch.stack([m.square().sum(dim=1).sqrt().mean() for m in moved]),
            "Σ_p‖Δx_p‖": torch.stack([m.sum(dim=1).mean() for m in moved]),
        }

    drawn = gather(map(sample, repetitions))
    ratio = (drawn["‖ΔF‖_F"] / drawn["Σ_p‖Δx_p‖"]).amax(dim=1)
    parts = [at_most("largest ‖ΔF‖_F/Σ_p‖Δx_p‖", 1.0, ratio, null=Null(1.0, "as large"))]
    lines, flat = [], Null(0.0, "the same for every n")
    for power, (name, values) in zip((0.5, 1.0), drawn.items(), strict=True):
        slope = exponents(sizes, values)
        parts.append(beside(f"exponent of {name} in n", power, slope, tolerance=0.1, null=flat))
        lines.append(Line.mean(name, sizes, values))
    return Finding(
        parts,
        f"Depth 6, d = 32, {len(repetitions)} seeds, 4 sequences each.  The sum grows as n, the "
        "norm as √n, so the bound is loose by √n; the mean over tokens does not depend on n.",
        Curves("tokens in a sequence n", "model update", lines, log_x=True, log_y=True),
    )
