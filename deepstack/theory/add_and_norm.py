"""Claims about Add & Norm: gradients with a residual, kinds of norms, the width of pre-norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.model.sublayers import Attention
from deepstack.schemes import NORMS
from deepstack.theory.claim import Curves, Finding, Line, Part, claim
from deepstack.theory.claim_stack import Trial, flat_part, growth
from deepstack.theory.draws import F64, exponents, normals, repeats
from deepstack.theory.sources import ADD_AND_NORM

# the formulas that the document lists
FORMULAS = {
    "batch": "(x − μ)/√(σ² + ε) by channel",
    "layer": "(x − μ)/(σ + ε) by token",
    "rms": "x/√(mean(x²) + ε) by token",
}
Joined = Callable[[Tensor, nn.Module], Tensor]


def gradients_down(trial: Trial, x: Tensor, joined: Joined) -> Tensor:
    """Return ‖∂<F, R>/∂x‖ at every sublayer's input and at the output: (2N + 1,)."""
    streams = [x.detach().requires_grad_()]
    for layer in trial.model.layers:
        for G in layer.modules_in_order():
            streams.append(joined(streams[-1], G))
    R = torch.randn(x.shape, generator=torch.Generator().manual_seed(trial.config.seed))
    gradients = torch.autograd.grad((streams[-1] * R).sum(), streams)
    return torch.stack([g.norm() for g in gradients]).double()


@claim("C13", ADD_AND_NORM)
def residual(seed: int) -> Finding:
    """d(F(x) + x)/dx = F'(x) + 1: every factor below 1 without the residual, and not with it.

    The same sublayers, Xavier's, joined as x ← G(x) and as x ← x + G(x), with norms and without.
    """
    depth, draws = 20, repeats(40)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    forms: dict[str, Joined] = {
        "x ← G(x)": lambda x, G: G(x),
        "x ← x + G(x)": lambda x, G: x + G(x),
        "x ← x + G(LN(x))": lambda x, G: x + G(norm(x)),
        "x ← LN(x + G(x))": lambda x, G: norm(x + G(x)),
        "x ← LN(G(x))": lambda x, G: norm(G(x)),
    }
    seen = {form: torch.zeros(draws, 2 * depth + 1, dtype=F64) for form in forms}
    diagonal, difference = [], 0.0
    for draw in range(draws):
        trial = Trial(draws * seed + draw, {"model.scheme": "pre_ln", "model.depth": depth})
        x = trial.model.start(trial.probe).detach()
        for form, joined in forms.items():
            seen[form][draw] = gradients_down(trial, x, joined)
        for G in trial.model.layers[0].modules_in_order():
            alone, total = (
                torch.autograd.functional.jacobian(f, x[:1, :4])
                for f in (G, lambda y, G=G: y + G(y))
            )
            size = x[:1, :4].numel()
            added = (total - alone).view(size, size)
            diagonal.append(added.diagonal().mean().item())
            difference = max(difference, (added - torch.eye(size)).abs().max().item())
    factors = {form: (g[:, 0] / g[:, -1]).pow(1 / (2 * depth)) for form, g in seen.items()}
    per = "gradient's factor a sublayer"
    parts = [
        Part.mean("diagonal of d(x + G)/dx − G', mean", 1.0, diagonal, tolerance=1e-5),
        Part("largest entry of d(x + G)/dx − G' − 1", 1e-5, difference, 0.0, relation="<="),
        Part.mean(f"{per}, x ← G(x)", 1.0, factors["x ← G(x)"], relation="<="),
        Part.mean(
            "‖∂L/∂x‖ at the input over that at the output, x ← G(x)",
            1e-3,
            seen["x ← G(x)"][:, 0] / seen["x ← G(x)"][:, -1],
            relation="<=",
        ),
        Part.mean(f"{per}, x ← x + G(x)", 1.0, factors["x ← x + G(x)"], relation=">="),
        Part.mean(f"{per}, x ← x + G(LN(x))", 1.0, factors["x ← x + G(LN(x))"], relation=">="),
        Part.mean(f"{per}, x ← LN(x + G(x))", 1.0, factors["x ← LN(x + G(x))"], relation=">="),
        Part.mean(
            f"{per}, x ← LN(G(x))", 1.0, factors["x ← LN(G(x))"], relation=">=", stated=False
        ),
    ]
    lines = [
        Line.mean(form, list(range(2 * depth + 1)), g / g[:, -1:], measured=False)
        for form, g in seen.items()
    ]
    return Finding(
        parts,
        f"{depth} layers, {2 * depth} sublayers, d = 32, {draws} seeds.  The plain sum makes the "
        "gradient grow with depth; a norm in the branch tames that.  In the document's own form, "
        "with a norm after the sum, the factor is a little below 1: the gradient falls in the "
        "last sublayers and hardly changes further down, with the residual or without it.",
        Curves("sublayer, from the input", "‖∂L/∂x‖ over that of the last", lines, log_y=True),
    )


@claim("C14", ADD_AND_NORM)
def norms(seed: int) -> Finding:
    """Mean 0 and variance 1: BN by channel, LN by token, (x − μ)/√(σ² + ε) or /(σ + ε); RMSNorm:
    x/√(mean(x²) + ε), by token.

    deepstack's norms on x (batch, positions, channels) of every channel's own mean and scale.
    """
    draws, shape, eps = repeats(8), (8, 16, 48), 1e-5
    rng = torch.Generator().manual_seed(seed)
    modules = {
        kind: NORMS[kind](shape[-1], gain=False, bias=False, eps=eps)
        for kind in ("batch", "layer", "rms")
    }
    draws_of: dict[str, list[float]] = {}
    for _ in range(draws):
        offset, scale = (normals(rng, shape[-1]) for _ in range(2))
        x = offset + (1 + scale.abs()) * normals(rng, *shape)
        y = {kind: norm(x) for kind, norm in modules.items()}
        by_channel, by_token = y["batch"].flatten(0, 1).t(), y["layer"].flatten(0, 1)
        for quantity, rows in (("BN, by channel", by_channel), ("LN, by token", by_token)):
            variance, mean = torch.var_mean(rows, dim=1, correction=0)
            draws_of.setdefault(f"{quantity}: largest |mean|", []).append(mean.abs().max().item())
            draws_of.setdefault(f"{quantity}: mean variance", []).append(variance.mean().item())
        rms = y["rms"].square().mean().item()
        draws_of.setdefault("RMSNorm, by token: mean square", []).append(rms)
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        listed = {
            "batch": (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + eps).sqrt(),
            "layer": (x - mean) / (variance.sqrt() + eps),
            "rms": x / (x.square().mean(-1, keepdim=True) + eps).sqrt(),
        }
        for kind, expected in listed.items():
            quantity = f"{FORMULAS[kind]}: largest difference from deepstack's"
            draws_of.setdefault(quantity, []).append((y[kind] - expected).abs().max().item())
        # a token as small as the norm's eps allows for
        small = x * math.sqrt(eps) / variance.sqrt()
        listed_small = (small - small.mean(-1, keepdim=True)) / (math.sqrt(eps) + eps)
        ratio = listed_small.norm() / modules["layer"](small).norm()
        draws_of.setdefault("(x − μ)/(σ + ε) over (x − μ)/√(σ² + ε), σ² = ε", []).append(
            ratio.item()
        )
    parts = []
    for quantity, values in draws_of.items():
        if " over " in quantity:
            exact = math.sqrt(2 * eps) / (math.sqrt(eps) + eps)
            more: dict[str, Any] = {"tolerance": 1e-6, "stated": False}
            parts.append(Part.mean(quantity, exact, values, **more))
        elif "largest" in quantity:
            most = 1e-4 if quantity.startswith(FORMULAS["layer"]) else 1e-9
            parts.append(Part.mean(quantity, most, values, relation="<="))
        else:
            parts.append(Part.mean(quantity, 1.0, values, tolerance=1e-4))
    for kind in modules:
        losses = [relative_loss(draw + draws * seed, kind) for draw in range(draws)]
        quantity = f"{kind} norm: loss after 20 steps over before, Post-LN of 2 layers"
        parts.append(Part.mean(quantity, 1.0, losses, relation="<="))
    return Finding(
        parts,
        f"{draws} draws of x {shape}, ε = {eps:g}.  PyTorch's LN and the document's, which divides "
        "by σ + ε, differ by √2 where σ² = ε and by less than 1e-4 at unit scale.  The document's "
        "BN takes two axes or four, channels second; a stack's channels are the last of three.",
    )


def relative_loss(seed: int, norm: str) -> float:
    """Return the mean loss of steps 16 to 20 over that of step 1."""
    changes = {"model.scheme": "post_ln", "model.depth": 2, "model.norm.kind": norm}
    losses = Trial(seed, changes | {"train.lr": 3e-3}).run(20)
    return last_loss(losses) / losses[0]


@claim("C15", ADD_AND_NORM)
def beta_at_run_time(seed: int) -> Finding:
    """LN(αx + G(βx)), α = (2N)^¼, β = (8N)^−¼, matrices started with gain 1, is DeepNorm: its
    logits, its branches, its ‖ΔF‖.

    Each number is that of the listing over DeepNorm's, from the same random numbers, N = 36.
    """
    draws, depths = repeats(8), (6, 36)
    seeds = [draws * seed + draw for draw in range(draws)]
    names = ("deepnorm_runtime_beta", "deepnorm")
    measured: dict[str, list[float]] = {}
    for draw_seed in seeds:
        stacks = [
            starts(Trial(draw_seed, {"model.scheme": name, "model.depth": depths[-1]}))
            for name in names
        ]
        for quantity in stacks[0]:
            measured.setdefault(quantity, []).append(stacks[0][quantity] / stacks[1][quantity])
    parts = [
        Part.mean(quantity, 1.0, values, tolerance=0.01) for quantity, values in measured.items()
    ]
    moved = {name: growth(seeds, {"model.scheme": name}, depths) for name in names}
    theirs, ours = (moved[name] for name in names)
    parts += [
        Part.mean("‖ΔF‖ after one SGD step", 1.0, theirs[:, 1] / ours[:, 1], tolerance=0.01),
        flat_part("its own ‖ΔF‖ at N = 36 over that at N = 6", theirs, stated=False),
    ]
    losses = []
    for draw_seed in seeds:
        runs = [Trial(draw_seed, {"model.scheme": n, "model.depth": 6}).run(25) for n in names]
        losses.append(last_loss(runs[0]) / last_loss(runs[1]))
    parts.append(Part.mean("loss after 25 steps of AdamW, N = 6", 1.0, losses, stated=False))
    beta = (8 * depths[-1]) ** -0.25
    return Finding(
        parts,
        f"d = 32, {draws} seeds, β = {beta:.3g}.  Logits carry β², as q and k are scaled too, and "
        "the branch starts at β, not β².  ‖ΔF‖ after one SGD step is flat in depth all the same: β "
        "in the forward pass is in every derivative by a matrix, as the condition asks.",
    )


def starts(trial: Trial) -> dict[str, float]:
    """Return the sizes of the first layer's logits and of its branches, by name."""
    layer, x = trial.model.layers[0], trial.model.start(trial.probe)
    attention, feed_forward = layer.modules_in_order()
    assert isinstance(attention, Attention)
    sizes = {}
    with torch.no_grad():
        alpha = layer.scheme.alpha(trial.config.model.depth) or 1.0

        def logits(y: Tensor) -> Tensor:
            q, k, _ = attention.project(y)
            sizes["root mean square of q kᵀ"] = (q @ k.transpose(-1, -2)).square().mean().sqrt()
            return y

        layer.scheme.residual(x, logits, lambda z: z)
        for name, G in (("attention", attention), ("feed-forward", feed_forward)):
            branch = layer.scheme.residual(x, G, lambda z: z) - alpha * x
            sizes[f"‖branch‖ of the {name} at the start"] = branch.norm()
    return {quantity: value.item() for quantity, value in sizes.items()}


def last_loss(losses: list[float]) -> float:
    """Return the mean of the last five losses."""
    return sum(losses[-5:]) / 5


def angle(x: Tensor, y: Tensor) -> float:
    """Return the mean angle between the tokens of two streams, in radians."""
    return torch.acos(F.cosine_similarity(x, y, dim=-1).clamp(-1, 1)).mean().item()


def layer_by_layer(seed: int, scheme: str, depth: int) -> Tensor:
    """Return three numbers of every layer, (3, depth).

    ‖x_l − x_{l−1}‖/‖x_l‖; the angle of the two; and the relative change of layer l's branch if its
    input is x_{l−2} in place of x_{l−1}.
    """
    trial = Trial(seed, {"model.scheme": scheme, "model.depth": depth, "model.d_model": 64})
    measured = torch.zeros(3, depth, dtype=F64)
    with torch.no_grad():
        x = list(trial.model.last.stream(trial.model.start(trial.probe)))
        for i, layer in enumerate(trial.model.layers):
            added = x[i + 1] - x[i]
            measured[0, i] = (added.norm(dim=-1) / x[i + 1].norm(dim=-1)).mean()
            measured[1, i] = angle(x[i], x[i + 1])
            before = x[max(i - 1, 0)]
            parallel = layer(before) - before
            measured[2, i] = ((parallel - added).norm(dim=-1) / added.norm(dim=-1)).mean()
    return measured


@claim("C16", ADD_AND_NORM)
def width_not_depth(seed: int) -> Finding:
    """Pre-norm adds width: what layer l contributes falls as 1/√l, the angle of x_l and x_{l+1}
    shrinks, and layers l and l + 1 could stand side by side.

    Pre-LN and Post-LN stacks at the start; exponents in l over its upper three quarters.
    """
    depth, draws = 64, repeats(20)
    seeds = [draws * seed + draw for draw in range(draws)]
    measured = {
        scheme: torch.stack([layer_by_layer(draw_seed, scheme, depth) for draw_seed in chosen])
        for scheme, chosen in (("pre_ln", seeds), ("post_ln", seeds))
    }
    layers = [float(layer) for layer in range(1, depth + 1)]
    start = depth // 4
    slope = {
        scheme: [exponents(layers[start:], values[:, i, start:]) for i in range(3)]
        for scheme, values in measured.items()
    }
    pre, post = slope["pre_ln"], slope["post_ln"]
    about: dict[str, Any] = {"tolerance": 0.1}
    shares = "share of layer l's branch that changes when it is shown the input of layer l − 1"
    parts = [
        Part.mean("Pre-LN: exponent of ‖x_{l+1} − x_l‖/‖x_{l+1}‖ in l", -0.5, pre[0], **about),
        Part.mean("Pre-LN: exponent of the angle in l", 0.0, pre[1], relation="<="),
        Part.mean(f"Pre-LN: exponent of the {shares}", 0.0, pre[2], relation="<="),
        *(
            Part.mean(
                f"Pre-LN: the same, l = {at}", 0.0, measured["pre_ln"][:, 2, at - 1], stated=False
            )
            for at in (4, 64)
        ),
        Part.mean("Post-LN: exponent of the contribution", 0.0, post[0], stated=False),
        Part.mean("Post-LN: exponent of the angle", 0.0, post[1], stated=False),
    ]
    names = ("contribution", "angle", "change")
    lines = [
        # layer 1 has no layer before it whose input it could be shown
        Line.mean(
            f"{label}, {names[i]}",
            layers[i == 2 :],
            measured[scheme][:, i, i == 2 :],
            measured=False,
        )
        for scheme, label, chosen in (("pre_ln", "Pre-LN", (0, 1, 2)), ("post_ln", "Post-LN", (0,)))
        for i in chosen
    ]
    return Finding(
        parts,
        f"Depth {depth}, d = 64, {draws} seeds, before training.",
        Curves("layer l", "share of the stream, radians", lines, log_x=True, log_y=True),
    )
