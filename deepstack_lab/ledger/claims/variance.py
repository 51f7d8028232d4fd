"""Claims about second moments at the start: linear maps and attention."""

import math

import torch
from torch import Tensor

from deepstack_lab.ledger.claim import (
    Curves,
    Finding,
    Line,
    Null,
    Part,
    beside,
    claim,
)  # fmt: skip
from deepstack_lab.ledger.claim_stack import Trial
from deepstack_lab.ledger.draws import (
    F64,
    D,
    normals,
    power,
    random,
    repeats,
    rows,
    seeds,
)
from deepstack_lab.ledger.sources import LAYER_CAKE
from deepstack_lab.ledger.statistics import exponents, means, sweep


@claim("C1", LAYER_CAKE)
def linear_layer(seed: int) -> Finding:
    """Var W = gain²/n_in: E[y²] = gain² E[x²], ‖y‖/‖x‖ ~ gain √(n_out/n_in); 2 gain²/n_in before
    ReLU.

    x: (tokens, n_in), of mean 0, and, before ReLU, of mean 1: nothing needs a mean of 0.
    """
    rng, n_in, n_out, draws = random(seed), 64, 192, repeats(200)

    def sample(gain: float) -> list[Part]:
        x, W = normals(rng, 16, n_in), normals(rng, n_in, n_out) / math.sqrt(n_in)
        linear, shifted = power(gain * x @ W) / power(x), x + 1
        relu = power(torch.relu(math.sqrt(2) * gain * shifted @ W)) / power(shifted)
        half = power(torch.relu(gain * shifted @ W)) / power(shifted)
        square, doubled = gain**2, "E[ReLU(y)²]/E[x²], variance 2 gain²/n_in"
        xavier, halved = "variance 2 gain²/(n_in + n_out)", Null(square / 2, "ReLU halves it")
        rising = Null(square, "ReLU changes nothing")
        return [
            Part.mean(f"E[y²]/E[x²], gain {gain}", square, linear, null=Null(square / 2, xavier)),
            Part.mean(
                f"E‖y‖²/E‖x‖², n_out/n_in = 3, gain {gain}", 3 * square, n_out / n_in * linear,
                null=Null(3 * square / 2, xavier),
            ),
            Part.mean(f"{doubled}, gain {gain}", square, relu, null=halved),
            beside(f"the same, variance gain²/n_in, gain {gain}", square / 2, half, null=rising),
        ]  # fmt: skip

    parts = means(sample(gain) for gain in (1.0, 0.3) for _ in range(draws))
    chain = [relu_chain(rng, layers=8, width=96) for _ in range(2 * draws)]
    halved, chained = Null(2**-8, "ReLU halves it"), "E[x_8²]/E[x_0²], 8 such layers with ReLU"
    parts.append(Part.mean(f"{chained}, gain 1", 1.0, chain, null=halved))
    return Finding(
        parts,
        f"{draws} draws of W ({n_in}, {n_out}) with 16 inputs each, {2 * draws} of 8 layers of "
        "width 96.  Before ReLU x has mean 1: the second moment stays the same, whatever the mean.",
    )


def relu_chain(rng: torch.Generator, layers: int, width: int) -> float:
    """Return E[x_L²]/E[x_0²] of x ← ReLU(x W), Var W = 2/width, over 8 inputs."""
    x = normals(rng, 8, width)
    start = power(x)
    for _ in range(layers):
        x = torch.relu(x @ normals(rng, width, width) * math.sqrt(2 / width))
    return power(x) / start


@claim("C2", LAYER_CAKE)
def xavier_as_published(seed: int) -> Finding:
    """Var W = 2/(n_in + n_out): E[y²]/E[x²] = 2 n_in/(n_in + n_out); Var W = 1/n_in: it is 1; and
    backwards E[δ_x²]/E[δ_y²] = n_out Var W.

    The matrices of deepstack's own Post-LN stacks, started as published and with 'init.fan: in'.
    """
    rng, depth = random(seed), 6

    def part(quantity: str, predicted: float, W: Tensor, null: Null) -> Part:
        x = normals(rng, 64, W.shape[1])
        return Part.mean(quantity, predicted, power(x @ W.t()) / power(x), null=null)

    def backwards(quantity: str, predicted: float, W: Tensor, other: float) -> Part:
        delta = normals(rng, 64, W.shape[0])
        null = Null(other if other != predicted else 1 / 3, "another variance")
        ratio = power(delta @ W) / power(delta)
        return Part.mean(f"{quantity}, backwards", predicted, ratio, null=null)

    parts, shapes = [], {"v": "(d, d)", "w1": "(d, 4d)", "w2": "(4d, d)"}
    published, fan_in = (1.0, 2 / 5, 8 / 5), (1.0, 1.0, 1.0)
    for label, rival, fan, ratios in (
        ("as published", "1/n_in", "in_out", zip(published, fan_in, strict=True)),
        ("1/n_in", "as published", "in", zip(fan_in, published, strict=True)),
    ):
        pairs = list(zip(shapes.items(), ratios, strict=True))
        for draw_seed in seeds(seed, 4):
            matrices = Trial(draw_seed, scheme="post_ln", depth=depth, init_fan=fan).matrices()
            for (role, shape), (ratio, other) in pairs:
                null = Null(other, rival) if other != ratio else Null(1 / 3, "nn.Linear's start")
                of_role = matrices[role].double()
                parts += [part(f"{label}, {shape}", ratio, W, null) for W in of_role]
                n_out, n_in = of_role.shape[-2:]
                back, as_other = ratio * n_out / n_in, other * n_out / n_in
                parts += [backwards(f"{label}, {shape}", back, W, as_other) for W in of_role]
    parts = means([parts])
    draws = parts[0].draws
    return Finding(
        parts,
        f"{draws} matrices each ({depth} layers, {draws // depth} draws, d = 32), 64 inputs of "
        "variance 1.  As published, the first map of the feed-forward loses 3/5 of the second "
        "moment and the second one gains 3/5; gradients the other way round, so that it keeps the "
        "mean of both directions.",
    )


@claim("C3", LAYER_CAKE)
def attention_keeps_the_size(seed: int) -> Finding:
    """mean(x_i) = 0 and var(x_i) = 1: ‖x_i‖ = √d, ‖softmax(q)X‖ ≤ √d, and softmax(q)X ≍ x_i.

    x_i: n independent rows of N(0, 1), layer-normalised; q_i ~ N(0, spread²).  The magnitudes are
    the same (≍) if ‖softmax(q)X‖/√d does not fall with n: its exponent in n is 0.
    """
    rng, draws = random(seed), repeats(240)
    sizes, spreads = (4, 16, 64, 256, 1024), torch.tensor([0.0, 1.0, 3.0], dtype=F64)

    def sample(n: int) -> dict[str, Tensor]:
        X = rows(rng, n)
        s = torch.softmax(spreads[:, None] * normals(rng, n), dim=1)
        ratio = (s @ X).norm(dim=1) / math.sqrt(D)
        return {"norm": X.norm(dim=1).mean() / math.sqrt(D), "ratio": ratio, "flat": s.norm(dim=1)}

    norm, ratio, flat = sweep(sizes, draws, sample).values()
    ratio, flat = ratio.movedim(2, 0), flat.movedim(2, 0)  # (spreads, draws, sizes)
    bound_label = "largest ‖softmax(q)X‖/√d of all draws"
    parts = [
        Part.mean("‖x_i‖/√d", 1.0, norm.t(), tolerance=1e-9,
                  null=Null(math.sqrt(D), "d, as the paper prints")),
        Part(bound_label, 1.0, ratio.max().item(), 0.0, relation="<=",
             null=Null(2.0, "weights 1 in place of a softmax: √n, n = 4")),
    ]  # fmt: skip
    also, lines, averaged = [], [], Null(-0.5, "a mean of n rows")
    for spread, measured, law in zip(spreads.tolist(), ratio, flat, strict=True):
        quantity = f"exponent of ‖softmax(q)X‖ in n, spread {spread}"
        parts.append(Part.mean(quantity, 0.0, exponents(sizes, measured), null=averaged))
        quantity, values = f"‖softmax(q)X‖/√(d Σs_i²), n = 256, spread {spread}", measured / law
        one_row = Null(1 / law[:, 3].mean().item(), "‖x_i‖ over it")
        also.append(beside(quantity, 1.0, values[:, 3], tolerance=0.02, null=one_row))
        lines.append(Line.mean(f"q of spread {spread:g}, measured", sizes, measured))
        claimed = law.mean(dim=0).tolist()
        lines.append(Line(f"q of spread {spread:g}, √(Σs_i²)", sizes, claimed, False))
    return Finding(
        [*parts, *also],
        f"{draws} draws for each n in {sizes}, d = {D}.  The bound is Jensen's and holds; equality "
        "of magnitude does not, for independent rows are averaged: the norm is √(d Σs_i²), which "
        "is √(d/n) for flat weights.  It holds where rows are alike or one weight is near 1.",
        Curves("keys n", "‖softmax(q)X‖/√d", lines, log_x=True, log_y=True),
    )
