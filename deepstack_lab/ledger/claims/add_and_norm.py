"""Claims about Add & Norm: gradients with a residual, kinds of norms, width, sizes of words."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.diagnostics import angular_distance
from deepstack.model import Attention
from deepstack.schemes import NORMS
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
from deepstack_lab.ledger.claim_stack import Trial, flat_part, growth
from deepstack_lab.ledger.draws import normals, random, repeats, seeds
from deepstack_lab.ledger.sources import ADD_AND_NORM, NO_SIZES
from deepstack_lab.ledger.statistics import exponents, gather, means, slopes, time_ratios

EPS = 1e-6  # of the listed norms
Joined = Callable[[Tensor, nn.Module], Tensor]


def listed_layer_norm(
    x: Tensor, gain: Tensor | float = 1.0, bias: Tensor | float = 0.0, eps: float = EPS
) -> Tensor:
    """Return the document's layer norm, line by line."""
    mean = x.mean(-1, keepdim=True)
    std = x.std(-1, keepdim=True, unbiased=False)
    return gain * (x - mean) / (std + eps) + bias


def layer_norm_by_root(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Return the same with σ = √mean((x − μ)²), which is faster than torch's std on a CPU."""
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.pow(2).mean(-1, keepdim=True).sqrt() + EPS) + bias


def listed_rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Return the document's RMSNorm, line by line."""
    return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def norm(x: Tensor) -> Tensor:
    """Return the layer norm of x without gain and bias."""
    return F.layer_norm(x, x.shape[-1:])


FORMS: dict[str, Joined] = {
    "x ← G(x)": lambda x, G: G(x),
    "x ← x + G(x)": lambda x, G: x + G(x),
    "x ← x + G(LN(x))": lambda x, G: x + G(norm(x)),
    "x ← LN(x + G(x))": lambda x, G: norm(x + G(x)),
    "x ← LN(G(x))": lambda x, G: norm(G(x)),
}


def gradients_down(trial: Trial, x: Tensor, joined: Joined) -> Tensor:
    """Return ‖∂<F, R>/∂x‖ at every sublayer's input and at the output: (2N + 1,)."""
    streams = [x.detach().requires_grad_()]
    for layer in trial.model.layers:
        for G in layer.modules_in_order():
            streams.append(joined(streams[-1], G))
    R = torch.randn(x.shape, generator=torch.Generator().manual_seed(trial.config.seed))
    gradients = torch.autograd.grad((streams[-1] * R).sum(), streams)
    return torch.stack([g.norm() for g in gradients])


def added_jacobian(G: nn.Module, x: Tensor) -> Tensor:
    """Return d(x + G)/dx − G', (numbers of x, numbers of x)."""
    jacobian: Callable[..., Tensor] = torch.autograd.functional.jacobian
    added = jacobian(lambda y: y + G(y), x) - jacobian(G, x)
    return added.view(x.numel(), x.numel())


@claim("C13", ADD_AND_NORM)
def residual(seed: int) -> Finding:
    """d(F(x) + x)/dx = F'(x) + 1: every factor below 1 without the residual, and not with it.

    The same sublayers, Xavier's, joined as x ← G(x) and as x ← x + G(x), with norms and without.
    """
    repetitions, depth = seeds(seed, 120), 20

    def sample(draw_seed: int) -> dict[str, Tensor]:
        trial = Trial(draw_seed, scheme="pre_ln", depth=depth)
        x = trial.model.embed(trial.probe).detach()
        sublayers = trial.model.layers[0].modules_in_order()
        added = torch.stack([added_jacobian(G, x[:1, :4]) for G in sublayers])
        return {
            "diagonal": added.diagonal(dim1=1, dim2=2).mean(dim=1),
            "difference": (added - torch.eye(added.shape[-1])).abs().max(),
            **{form: gradients_down(trial, x, joined) for form, joined in FORMS.items()},
        }

    drawn = gather(map(sample, repetitions))
    diagonal, difference = drawn.pop("diagonal").flatten(), drawn.pop("difference").max().item()
    over = {form: g[:, 0] / g[:, -1] for form, g in drawn.items()}
    vanishing = "‖∂L/∂x‖ at the input over that at the output, x ← G(x)"
    parts = [
        Part.mean("diagonal of d(x + G)/dx − G', mean", 1.0, diagonal, tolerance=1e-5,
                  null=Null(0.0, "no residual")),
        Part("largest entry of d(x + G)/dx − G' − 1", 1e-5, difference, 0.0, relation="<=",
             null=Null(1.0, "no residual")),
    ]  # fmt: skip
    same = Null(1.0, "the gradient keeps its length")
    for form, ratio in over.items():
        limit = at_most if form == "x ← G(x)" else at_least
        factor, stated = ratio.pow(1 / (2 * depth)), form != "x ← LN(G(x))"
        quantity = f"gradient's factor a sublayer, {form}"
        parts.append(limit(quantity, 1.0, factor, stated=stated, null=same))
        if form == "x ← G(x)":
            parts.append(at_most(vanishing, 1e-3, ratio, null=same))
    at = range(2 * depth + 1)
    lines = [Line.mean(form, at, g / g[:, -1:], measured=False) for form, g in drawn.items()]
    return Finding(
        parts,
        f"{depth} layers, {2 * depth} sublayers, d = 32, {len(repetitions)} seeds.  The plain sum "
        "makes the gradient grow with depth; a norm in the branch tames that.  In the document's "
        "own form, with a norm after the sum, the factor is a little below 1: the gradient falls "
        "in the last sublayers and hardly changes further down, with the residual or without it.",
        Curves("sublayer, from the input", "‖∂L/∂x‖ over that of the last", lines, log_y=True),
    )


@claim("C14", ADD_AND_NORM, identity=True)
def norms(seed: int) -> Finding:
    """Mean 0 and variance 1: BN by channel, LN by token, (x − μ)/√(σ² + ε) or /(σ + ε); RMSNorm:
    x/√(mean(x²) + ε), by token.

    deepstack's norms on x (batch, positions, channels) of every channel's own mean and scale.
    """
    rng, draws, shape, eps = random(seed), repeats(8), (8, 16, 48), 1e-5
    kinds, trained = ("batch", "layer", "rms"), seeds(seed, 8)
    batch, layer, rms = (NORMS[kind](shape[-1], gain=False, bias=False, eps=eps) for kind in kinds)
    exact = math.sqrt(2 * eps) / (math.sqrt(eps) + eps)
    listed = partial(listed_layer_norm, eps=eps)

    # Var x of a channel is E(1 + |s|)², s ~ N(0, 1); a token has the offsets' variance too
    scales = 2 + 2 * math.sqrt(2 / math.pi)
    of_x = {"channel": Null(scales, "x as it is"), "token": Null(scales + 1, "x as it is")}

    def unit(quantity: str, value: Tensor, axis: str = "token") -> Part:
        return Part.mean(quantity, 1.0, value.mean(), tolerance=1e-4, null=of_x[axis])

    def zero(quantity: str, values: Tensor, most: float = 1e-9) -> Part:
        return at_most(quantity, most, values.abs().max(), null=Null(1.0, "x as it is"))

    def sample() -> list[Part]:
        offset, scale = (normals(rng, shape[-1]) for _ in range(2))
        x = offset + (1 + scale.abs()) * normals(rng, *shape)
        channel, mean_channel = torch.var_mean(batch(x), dim=(0, 1), correction=0)
        token, mean_token = torch.var_mean(layer(x), dim=-1, correction=0)
        # a token as small as the norm's eps allows for
        small = x * math.sqrt(eps) / x.var(-1, keepdim=True, correction=0).sqrt()
        by_channel = (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + eps).sqrt()
        by_root = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        apart = "largest difference from deepstack's"
        ratio = listed(small).norm() / layer(small).norm()
        return [
            zero("BN, by channel: largest |mean|", mean_channel),
            unit("BN, by channel: mean variance", channel, "channel"),
            zero("LN, by token: largest |mean|", mean_token),
            unit("LN, by token: mean variance", token),
            unit("RMSNorm, by token: mean square", rms(x).square()),
            zero(f"(x − μ)/√(σ² + ε) by channel: {apart}", batch(x) - by_channel),
            zero(f"(x − μ)/(σ + ε) by token: {apart}", layer(x) - listed(x), most=1e-4),
            zero(f"x/√(mean(x²) + ε) by token: {apart}", rms(x) - by_root),
            beside("(x − μ)/(σ + ε) over (x − μ)/√(σ² + ε), σ² = ε", exact, ratio, tolerance=1e-6,
                   null=Null(1.0, "the same norm")),
        ]  # fmt: skip

    parts = means(sample() for _ in range(draws))
    for kind in kinds:
        stacks = (Trial(s, scheme="post_ln", depth=2, norm_kind=kind, lr=3e-3) for s in trained)
        losses = [stack.run(20) for stack in stacks]
        quantity = f"{kind} norm: loss after 20 steps over before, Post-LN of 2 layers"
        ends = [sum(run[-5:]) / 5 / run[0] for run in losses]
        parts.append(at_most(quantity, 1.0, ends, null=Null(1.0, "nothing is learnt")))
    return Finding(
        parts,
        f"{draws} draws of x {shape}, ε = {eps:g}.  PyTorch's LN and the document's, which divides "
        "by σ + ε, differ by √2 where σ² = ε and by less than 1e-4 at unit scale.  The document's "
        "BN takes two axes or four, channels second; a stack's channels are the last of three.  "
        "Its LN's listing has nn.Parmaeter and does not run.",
    )


@claim("C15", ADD_AND_NORM)
def beta_at_run_time(seed: int) -> Finding:
    """LN(αx + G(βx)), α = (2N)^¼, β = (8N)^−¼, matrices started with gain 1, is DeepNorm: its
    logits, its branches, its ‖ΔF‖.

    Each number is the listing's over DeepNorm's, from the same random numbers, N = 36.
    """
    depths, repetitions = (6, 36), seeds(seed, 8)
    schemes = "deepnorm_runtime_beta", "deepnorm"

    def sample(draw_seed: int) -> list[Part]:
        stacks = (Trial(draw_seed, scheme=scheme, depth=depths[-1]) for scheme in schemes)
        theirs, ours = map(start_sizes, stacks)
        return [
            Part.mean(q, 1.0, theirs[q] / ours[q], tolerance=0.01,
                      null=scaled if "q kᵀ" in q else once)
            for q in ours
        ]  # fmt: skip

    def trained(scheme: str) -> Tensor:
        stacks = (Trial(s, scheme=scheme, depth=6) for s in repetitions)
        return torch.tensor([sum(stack.run(25)[-5:]) / 5 for stack in stacks])

    beta = (8 * depths[-1]) ** -0.25
    once, scaled = Null(1 / beta, "1/β, β acts once"), Null(beta**2, "β², q and k are scaled")
    theirs, ours = (growth(repetitions, depths, scheme=scheme) for scheme in schemes)
    moved = theirs[:, 1] / ours[:, 1]
    parts = [
        *means(map(sample, repetitions)),
        Part.mean("‖ΔF‖ after one SGD step", 1.0, moved, tolerance=0.01, null=once),
        flat_part("its own ‖ΔF‖ at N = 36 over that at N = 6", theirs, depths, stated=False),
        beside(
            "loss after 25 steps of AdamW, N = 6", 1.0, trained(schemes[0]) / trained(schemes[1]),
            null=Null(1.05, "one part in twenty higher"),
        ),
    ]  # fmt: skip
    return Finding(
        parts,
        f"d = 32, {len(moved)} seeds, β = {beta:.3g}.  Logits carry β², as q and k are scaled "
        "too, and the branch starts at β, not β².  ‖ΔF‖ after one SGD step is flat in depth all "
        "the same: β in the forward pass is in every derivative by a matrix, as the condition "
        "asks.",
    )


@torch.no_grad()
def start_sizes(trial: Trial) -> dict[str, float]:
    """Return the sizes of the first layer's logits and of its branches, by name."""
    layer, x = trial.model.layers[0], trial.model.embed(trial.probe)
    attention, feed_forward = layer.modules_in_order()
    assert isinstance(attention, Attention)
    alpha, residual = layer.scheme.alpha(trial.config.model.depth) or 1.0, layer.scheme.residual
    read: list[Tensor] = []

    def record(y: Tensor) -> Tensor:
        read.append(y)
        return y

    residual(x, record, lambda z: z)
    q, k, _ = attention.project(read[0])
    sizes = {"root mean square of q kᵀ": (q @ k.transpose(-1, -2)).square().mean().sqrt().item()}
    for name, G in (("attention", attention), ("feed-forward", feed_forward)):
        branch = residual(x, G, lambda z: z) - alpha * x
        sizes[f"‖branch‖ of the {name} at the start"] = branch.norm().item()
    return sizes


@torch.no_grad()
def layer_by_layer(seed: int, steps: int = 0, **changes: Any) -> dict[str, Tensor]:
    """Return three numbers of every layer after some steps of training, each (depth,).

    contribution: ‖x_l − x_{l−1}‖/‖x_l‖; angle: of the two; change: of layer l's branch, relative,
    if its input is x_{l−2} in place of x_{l−1}.
    """
    trial = Trial(seed, d_model=64, **changes)
    with torch.enable_grad():
        trial.run(steps)
    (snapshot,) = trial.snapshots(trial.probe_batch)
    x = snapshot.states
    added, size = x[1:] - x[:-1], (x[1:] - x[:-1]).norm(dim=-1)
    before = torch.cat([x[:1], x[:-2]])
    branches = [layer(y) - y for layer, y in zip(trial.model.layers, before, strict=True)]
    return {
        "contribution": (size / x[1:].norm(dim=-1)).mean(dim=(1, 2)),
        "angle": math.pi * angular_distance(snapshot),
        "change": ((torch.stack(branches) - added).norm(dim=-1) / size).mean(dim=(1, 2)),
    }


@claim("C16", ADD_AND_NORM)
def width_not_depth(seed: int) -> Finding:
    """Pre-norm adds width: what layer l contributes falls as 1/√l, the angle of x_l and x_{l+1}
    shrinks, and layers l and l + 1 could stand side by side.

    Pre-LN and Post-LN stacks at the start; exponents in l over its upper three quarters.
    """
    depth, repetitions = 64, seeds(seed, 48)
    pre, post = (
        gather(layer_by_layer(s, scheme=scheme, depth=depth) for s in repetitions)
        for scheme in ("pre_ln", "post_ln")
    )
    layers, start = [float(layer) for layer in range(1, depth + 1)], depth // 4

    def exponent(by_layer: Tensor) -> Tensor:
        return exponents(layers[start:], by_layer[:, start:])

    contribution = "Pre-LN: exponent of ‖x_{l+1} − x_l‖/‖x_{l+1}‖ in l"
    shares = "share of layer l's branch that changes when it is shown the input of layer l − 1"
    alike, falling = Null(0.0, "the same in every layer"), Null(-0.5, "as in Pre-LN")
    another, of_post = Null(1.0, "an unrelated branch"), "Post-LN: exponent of the"
    parts = [
        Part.mean(contribution, -0.5, exponent(pre["contribution"]), tolerance=0.1, null=alike),
        at_most("Pre-LN: exponent of the angle in l", 0.0, exponent(pre["angle"]), null=alike),
        at_most(f"Pre-LN: exponent of the {shares}", 0.0, exponent(pre["change"]), null=alike),
        *(
            beside(f"Pre-LN: the same, l = {at}", 0.0, pre["change"][:, at - 1], null=another)
            for at in (4, 64)
        ),
        beside(f"{of_post} contribution", 0.0, exponent(post["contribution"]), null=falling),
        beside(f"{of_post} angle", 0.0, exponent(post["angle"]), null=falling),
    ]
    drawn = {f"Pre-LN, {name}": values for name, values in pre.items()}
    drawn["Post-LN, contribution"] = post["contribution"]
    lines = []
    for label, values in drawn.items():
        # layer 1 has no layer before it whose input it could be shown
        first = int(label.endswith("change"))
        lines.append(Line.mean(label, layers[first:], values[:, first:], measured=False))
    return Finding(
        parts,
        f"Depth {depth}, d = 64, {len(repetitions)} seeds (20 asked for 38), before training.",
        Curves("layer l", "share of the stream, radians", lines, log_x=True, log_y=True),
    )


@claim("C43", ADD_AND_NORM, source_range=NO_SIZES)
def comparable_words(seed: int) -> Finding:
    """LN keeps the relative sizes of the words of a sentence, BN does not; RMSNorm computes less
    than LN and saves time.

    x (sentences, words, channels): words of their own lengths, channels of their own means;
    deepstack's norms.  'Comparable' has three readings.  Lengths: the slope of log ‖y‖ against
    log ‖x‖ over the words.  Order: the share of pairs of words that keep it in a channel.  Angles:
    the slope of the cosines of two words.  Operations are counted by hand, a number of
    x at a time, with gain and bias.  Times are of the document's listings, in turn.
    """
    rng, draws, shape = random(seed), repeats(96), (8, 16, 64)
    norms = {kind: NORMS[kind](shape[-1], gain=False, bias=False, eps=EPS) for kind in NORMS}
    pairs = torch.triu_indices(shape[1], shape[1], 1)

    def cosines(x: Tensor) -> Tensor:
        unit = x / x.norm(dim=-1, keepdim=True)
        return (unit @ unit.transpose(1, 2))[:, pairs[0], pairs[1]]

    def sample() -> list[Part]:
        lengths = (0.5 * normals(rng, *shape[:2], 1)).exp()
        x = lengths * (normals(rng, 1, 1, shape[-1]) + normals(rng, *shape))
        parts = []
        for kind, word in (("layer", "LN"), ("batch", "BN")):
            y = norms[kind](x)
            length = slopes_by_row(x.norm(dim=-1).log(), y.norm(dim=-1).log())
            angle = slopes_by_row(cosines(x), cosines(y))
            up, still_up = (z[:, pairs[0]] > z[:, pairs[1]] for z in (x, y))
            order, stated = (up == still_up).double().mean(), kind == "layer"
            parts += [
                Part.mean(f"{word}: slope of log ‖y‖ against log ‖x‖", 1.0, length,
                          tolerance=0.1, stated=stated, null=Null(0.0, "one length for all words")),
                Part.mean(f"{word}: share of pairs of words in the same order, by channel", 1.0,
                          order, tolerance=0.01, stated=stated, null=Null(0.5, "by chance")),
                Part.mean(f"{word}: slope of the cosines of words", 1.0, angle, tolerance=0.05,
                          stated=stated, null=Null(0.0, "unrelated angles")),
            ]  # fmt: skip
        return parts

    parts = means(sample() for _ in range(draws))
    # mean, difference, square, its mean, quotient, gain, bias; square, its mean, quotient, gain
    less = Null(1.0, "nothing less")
    quantity = "operations a number, RMSNorm over LN"
    parts.append(Part(quantity, 1.0, 4 / 7, 0.0, relation="<=", null=less))
    x, gain, bias = torch.randn(256, 256, generator=rng), torch.ones(256), torch.zeros(256)
    listed, built_in = partial(listed_rms_norm, x, gain), partial(torch.rms_norm, x, (256,), gain)
    built_in_words = "time, torch.rms_norm over torch.layer_norm: above the share of operations"
    for words, norm in (("", listed_layer_norm), (", σ as a root", layer_norm_by_root)):
        times = time_ratios(listed, partial(norm, x, gain, bias), repeats(12))
        quantity = f"time, RMSNorm over LN, the listings{words}"
        parts.append(at_most(quantity, 1.0, times, null=less))
    times = time_ratios(built_in, partial(torch.layer_norm, x, (256,), gain, bias), repeats(12))
    share = Null(4 / 7, "as the operations")
    parts.append(at_least(built_in_words, 4 / 7, times, stated=False, null=share))
    return Finding(
        parts,
        f"{draws} draws of x {shape}; times on a CPU, in fp32.  LN works on each word alone and "
        "gives all words the length √d, so that two words differ by their angle alone.  BN, which "
        "the document says does not keep words comparable, keeps their order in every channel.  "
        "The listed RMSNorm saves time; torch's own is not one kernel on this CPU and saves less.",
    )


def slopes_by_row(x: Tensor, y: Tensor) -> float:
    """Return the mean least-squares slope of y against x, a row at a time."""
    rows = zip(x, y, strict=True)
    return torch.cat([slopes(a, b[None]) for a, b in rows]).mean().item()
