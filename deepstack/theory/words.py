"""Claims about what norms keep of a sentence and cost, and about tanh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deepstack.schemes import NORMS
from deepstack.theory.claim import Finding, Part, at_least, at_most, beside, claim
from deepstack.theory.draws import normals, power, random, repeats
from deepstack.theory.initialisation import activation_parts, through
from deepstack.theory.sources import ADD_AND_NORM, READING_NOTES
from deepstack.theory.statistics import means, slopes, time_ratios

EPS = 1e-6
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def listed_layer_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Return the document's layer norm, line by line."""
    mean = x.mean(-1, keepdim=True)
    std = x.std(-1, keepdim=True, unbiased=False)
    return gain * (x - mean) / (std + EPS) + bias


def layer_norm_by_root(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Return the same with σ = √mean((x − μ)²), which is faster than torch's std on a CPU."""
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.pow(2).mean(-1, keepdim=True).sqrt() + EPS) + bias


def listed_rms_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Return the document's RMSNorm, line by line; it has no bias."""
    return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


@claim("C43", ADD_AND_NORM)
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
                          tolerance=0.1, stated=stated),
                Part.mean(f"{word}: share of pairs of words in the same order, by channel", 1.0,
                          order, tolerance=0.01, stated=stated),
                Part.mean(f"{word}: slope of the cosines of words", 1.0, angle, tolerance=0.05,
                          stated=stated),
            ]  # fmt: skip
        return parts

    parts = means(sample() for _ in range(draws))
    # mean, difference, square, its mean, quotient, gain, bias; square, its mean, quotient, gain
    parts.append(Part("operations a number, RMSNorm over LN", 1.0, 4 / 7, 0.0, relation="<="))
    x, gain, bias = torch.randn(256, 256, generator=rng), torch.ones(256), torch.zeros(256)

    def times(rms_norm: Norm, norm: Norm) -> list[float]:
        one, other = partial(rms_norm, x, gain, bias), partial(norm, x, gain, bias)
        return time_ratios(one, other, repeats(12))

    for words, norm in (("", listed_layer_norm), (", σ as a root", layer_norm_by_root)):
        listed = times(listed_rms_norm, norm)
        parts.append(at_most(f"time, RMSNorm over LN, the listings{words}", 1.0, listed))
    built_in = times(
        lambda x, g, b: torch.rms_norm(x, g.shape, g),
        lambda x, g, b: torch.layer_norm(x, g.shape, g, b),
    )
    built_in_words = "time, torch.rms_norm over torch.layer_norm: above the share of operations"
    parts.append(at_least(built_in_words, 4 / 7, built_in, stated=False))
    note = (
        f"{draws} draws of x {shape}; times on a CPU, in fp32.  LN works on each word alone and "
        "gives all words the length √d, so that two words differ by their angle alone.  BN, which "
        "the document says does not keep words comparable, keeps their order in every channel.  "
        "The listed RMSNorm saves time; torch's own is not one kernel on this CPU and saves less."
    )
    return Finding(parts, note)


def slopes_by_row(x: Tensor, y: Tensor) -> float:
    """Return the mean least-squares slope of y against x, a row at a time."""
    rows = zip(x, y, strict=True)
    return torch.cat([slopes(a, b[None]) for a, b in rows]).mean().item()


@claim("C48", READING_NOTES)
def tanh(seed: int) -> Finding:
    """tanh x ≈ x for small x, so Xavier fits tanh as it is: E[x²] stays; tanh/√E[tanh(x)²],
    x ~ N(0, 1), preserves second moments: E[tanh(x)²] = 0.3942945.

    By random numbers, by quadrature, and through layers of Var W = 1/n_in.  Xavier fits if layers
    keep E[x²] within 5%, from E[x²] = 1, which the document takes, and from a small one.
    """
    rng, draws, square = random(seed), repeats(64), 0.3942945
    parts = activation_parts(rng, "tanh", torch.tanh, square, draws, 1e-7)
    plain = [through(rng, torch.tanh, layers=12) for _ in range(draws)]
    fits = "E[x²] over that before, tanh as it is, "
    for layers in (1, 12):
        values = [moments[layers - 1] for moments in plain]
        quantity = f"{fits}E[x²] = 1, layers: {layers}"
        parts.append(Part.mean(quantity, 1.0, values, tolerance=0.05))
    for size in (0.1, 0.3):
        small = [power(torch.tanh(size * normals(rng, 100_000))) / size**2 for _ in range(draws)]
        quantity = f"E[tanh(x)²]/E[x²], x ~ N(0, {size}²)"
        parts.append(Part.mean(quantity, 1.0, small, tolerance=0.05, stated=size == 0.1))
    slow = [24 * moments[-1] for moments in plain]
    parts.append(beside("2l E[x_l²] after l = 12 layers", 1.0, slow, tolerance=0.05))
    note = (
        f"{draws} draws.  For x of a tenth tanh is the identity to 2% and Xavier keeps E[x²]; "
        "from E[x²] = 1 one layer leaves 0.39 of it and 12 layers a twentieth, as 1/(2l): x gets "
        "small, and then the claim is true.  Divided by the root of its constant tanh keeps E[x²]."
    )
    return Finding(parts, note)
