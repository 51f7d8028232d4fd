"""Claims about attention: its products, merged attention, and BERT's head."""

from __future__ import annotations

import math
import time
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.model import generate
from deepstack.model.cross_attention import MergedAttention
from deepstack.model.heads import BertHead
from deepstack.model.sublayers import Attention
from deepstack.theory.claim import Curves, Finding, Line, Part, claim
from deepstack.theory.claim_stack import started
from deepstack.theory.draws import (
    F64,
    agreement,
    normals,
    power,
    random,
    repeats,
    seeds,
    slope,
)
from deepstack.theory.sources import DEPTH_SCALED, READING_NOTES

FP32 = 1e-5  # relative rounding error of a chain of products in fp32


@claim("C23", READING_NOTES)
def dot_product(seed: int) -> Finding:
    """q, k of unit variance: E[(q·k)²] = Var(q·k) = d_head, so that q·k reaches ±3√d_head.

    Independent vectors; and q, k of the first layer of a stack at its start, where tokens differ
    and W_q and W_k are independent.
    """
    rng = random(seed)
    parts, ratios, draws = [], [], repeats(128)
    for d in (4, 16, 64):
        products = [(normals(rng, 1500, d) * normals(rng, 1500, d)).sum(-1) for _ in range(draws)]
        squares = [power(p) / d for p in products]
        parts.append(Part.mean(f"E[(q·k)²]/d_head, d_head = {d}", 1.0, squares))
        beyond = [(p.abs() > 3 * math.sqrt(d)).double().mean().item() for p in products]
        ratios.append(beyond)
    stacks = []
    for draw_seed in seeds(seed, 24):
        stack = started(draw_seed, {"model.depth": 1, "model.scheme": "post_ln"})
        attention = cast(Attention, stack.model.layers[0].attention)
        with torch.no_grad():
            x = torch.layer_norm(stack.model.start(stack.batch(1)[0]), (32,))
            q, k, _ = attention.project(x)
            stacks.append(power(q @ k.transpose(-1, -2)) / q.shape[-1])
    parts += [
        Part.mean("share beyond 3√d_head, d_head = 64: at least that of a normal", 0.0027,
                  ratios[2], relation=">=", stated=False),
        Part.mean("E[(q·k)²]/d_head, layer 1 of a stack", 1.0, stacks, stated=False),
    ]  # fmt: skip
    return Finding(
        parts, f"{draws} draws of 1500 pairs; {len(stacks)} seeds of a stack, d = 32, 4 heads."
    )


@claim("C36", READING_NOTES)
def saturation(seed: int) -> Finding:
    """Without 1/√d_head the softmax of q·k saturates as d_head grows (64 in BERT), and its gradient
    vanishes.

    s = softmax(q·k_j) over 64 keys of unit variance, with and without the scale.  The gradients
    are ‖∂s/∂logits‖_F = ‖diag(s) − ssᵀ‖_F and ‖∂s/∂q‖_F, means over queries.  'Vanishes' means a
    power law here.  The gap between the two largest logits grows as √d_head.  The share of queries
    with a gap below 1, and with it the mean gradient, falls as d_head^(−1/2).
    """
    rng, keys, draws = random(seed), 64, repeats(24)
    sizes = (4, 16, 64, 256, 512)
    measured: dict[str, list[list[float]]] = {}
    for d in sizes:
        rows: dict[str, list[float]] = {}
        for _ in range(draws):
            q, k = normals(rng, 64, d), normals(rng, 64, keys, d)
            products = (k @ q[:, :, None])[:, :, 0]
            for scale, word in ((d**-0.5, "with"), (1.0, "without")):
                s = torch.softmax(products * scale, dim=-1)
                by_logits = softmax_gradient(s)
                rows.setdefault(f"{word}, largest", []).append(s.amax(dim=-1).mean().item())
                rows.setdefault(f"{word}, logits", []).append(by_logits.mean().item())
                rows.setdefault(f"{word}, median", []).append(by_logits.median().item())
                Jk = s[:, :, None] * (k - s[:, None] @ k)
                by_q = scale * torch.linalg.matrix_norm(Jk)
                rows.setdefault(f"{word}, q", []).append(by_q.mean().item())
        for name, values in rows.items():
            measured.setdefault(name, []).append(values)
    narrow, wide = 512, 4096
    falls = []
    for _ in range(draws):
        averages = []
        for d in (narrow, wide):
            # given q, its products with independent keys are independent N(0, ‖q‖²)
            lengths = normals(rng, 256, d).norm(dim=1, keepdim=True)
            s = torch.softmax(lengths * normals(rng, 256, keys), dim=-1)
            averages.append(softmax_gradient(s).mean().item())
        falls.append(math.log(averages[1] / averages[0]) / math.log(wide / narrow))

    def exponents(name: str, first: int) -> list[float]:
        columns = torch.tensor(measured[name][first:]).log().t()
        return [slope(torch.tensor(sizes[first:]).log(), column) for column in columns]

    def ratio(name: str, size: int) -> list[float]:
        both = measured[f"without, {name}"][size], measured[f"with, {name}"][size]
        return [a / b for a, b in zip(*both, strict=True)]

    parts = [
        Part.mean("largest weight without, d_head = 512", 0.9, measured["without, largest"][-1],
                  relation=">="),
        Part.mean(f"exponent of ‖∂s/∂logits‖ without, d_head {narrow} to {wide}", -0.5, falls,
                  tolerance=0.2),
        Part.mean("the same with the scale, d_head 64 to 512", 0.0, exponents("with, logits", 2)),
        Part.mean("‖∂s/∂logits‖ without over with, d_head = 64", 1.0, ratio("logits", 2),
                  relation="<="),
        Part.mean("‖∂s/∂q‖ without over with, d_head = 64", 1.0, ratio("q", 2), relation="<="),
        Part.mean("the same, d_head = 512", 1.0, ratio("q", 4), relation="<="),
        Part.mean("median of ‖∂s/∂logits‖ without over with, d_head = 512", 1.0,
                  ratio("median", 4), relation="<=", stated=False),
    ]  # fmt: skip
    lines = []
    for name, label in (("logits", "by logits"), ("q", "by q"), ("median", "by logits, median")):
        for word in ("with", "without"):
            draws_of_sizes = torch.tensor(measured[f"{word}, {name}"], dtype=F64).t()
            lines.append(Line.mean(f"{label}, {word} 1/√d", sizes, draws_of_sizes))
    note = (
        f"64 keys, {draws} draws of 64 queries (256 for the exponent). It saturates. The gradient "
        "by the logits falls, more slowly below d_head = 512; at 64 it is not yet below that with "
        "the scale. By the queries the mean does not vanish at all: it gathers, √d_head times as "
        "large, in the few queries whose two largest logits are close, while that of most queries "
        "vanishes (median)."
    )
    return Finding(
        parts, note, Curves("width of a head d", "gradient of the softmax", lines, True, True)
    )


def softmax_gradient(s: Tensor) -> Tensor:
    """Return ‖diag(s) − ssᵀ‖_F of weights s (…, keys) that sum to 1."""
    power = s.square().sum(dim=-1)
    return (power - 2 * s.pow(3).sum(dim=-1) + power.square()).clamp(min=0).sqrt()


@claim("C31", DEPTH_SCALED)
def merged_attention(seed: int) -> Finding:
    """MATT(S) = SAAN(S) + ATT(S, H), one output map: self-attention's place is taken by a
    cumulative mean of values; it trains like both sublayers apart and decodes faster.

    deepstack's module against the formula; short runs and greedy decoding of the same
    encoder-decoder with either.
    """
    near = []
    learnt: dict[str, list[Tensor]] = {"merged": [], "separate": []}
    for draw_seed in seeds(seed, 48):
        for kind, nats in learnt.items():
            keys = {
                "model.family": "encoder_decoder", "model.scheme": "post_ln", "model.depth": 1,
                "model.decoder_attention": kind, "task.name": "markov", "train.lr": 3e-3,
            }  # fmt: skip
            stack = started(draw_seed, keys)
            if kind == "merged":
                G = cast(MergedAttention, stack.model.layers[-1].attention)
                S, H = torch.randn(2, 4, 12, 32, generator=random(draw_seed))
                near.append(agreement(G(S, H), merged_formula(G, S, H)))
            losses = torch.tensor(stack.run(50), dtype=torch.float64)
            nats.append((stack.unigram_losses(50) - losses).view(5, 10).mean(dim=1))
    merged, separate = (torch.stack(nats) for nats in learnt.values())
    share = merged / separate
    lengths = (8, 24, 64)
    speeds = {length: decoding_speeds(seed, length) for length in lengths}
    parts = [
        Part.mean("1 − distance of deepstack's module from the formula", 1.0, near, tolerance=FP32),
        Part.mean("nats below the unigram, merged over separate, steps 11 to 20", 1.0, share[:, 1],
                  tolerance=0.05),
        Part.mean("the same, steps 41 to 50", 1.0, share[:, 4], tolerance=0.05),
        Part.mean("the same in nats, merged less separate, steps 21 to 30", 0.0,
                  (merged - separate)[:, 2], relation=">=", stated=False),
        *(
            Part.mean(f"time a position, separate over merged, {length} positions", 1.0, ratios,
                      relation=">=")
            for length, ratios in speeds.items()
        ),
    ]  # fmt: skip
    note = (
        f"Task markov, 1 + 1 layers, d = 32, {len(near)} seeds, lr 0.003.  Merged attention learns "
        "more slowly at first and is nearly level after 50 steps.  Decoding with 4 decoder layers, "
        "batch 4; benchmarks/decoding.py has larger sizes."
    )
    by_length = torch.tensor(list(speeds.values()), dtype=F64).t()
    lines = [Line.mean("measured", lengths, by_length)]
    return Finding(parts, note, Curves("positions", "time, separate over merged", lines))


def decoding_speeds(seed: int, length: int) -> list[float]:
    """Return times of decoding with self- and cross-attention over those of merged attention."""
    keys = {
        "model.family": "encoder_decoder", "model.scheme": "post_ln", "model.depth": 1,
        "model.decoder_depth": 4, "task.name": "markov", "task.seq_len": length,
    }  # fmt: skip
    kinds = ("separate", "merged")
    stacks = [started(seed, {**keys, "model.decoder_attention": kind}) for kind in kinds]
    begin, source = torch.zeros(4, 1, dtype=torch.long), stacks[0].batch(1)[0][:4, :8]
    ratios = []
    for turn in range(repeats(12) + 1):
        seconds = []
        for stack in stacks:
            began = time.perf_counter()
            generate(stack.model, begin, length, source=source)
            seconds.append(time.perf_counter() - began)
        if turn:  # the first one warms up
            ratios.append(seconds[0] / seconds[1])
    return ratios


def merged_formula(G: MergedAttention, S: Tensor, H: Tensor) -> Tensor:
    """Return (concat_h softmax(q_h k_hᵀ/√d_head) v_h + mean_{j ≤ i} u_j) W_oᵀ + b_o, by position.

    q and u are maps of S, k and v of H; u and v have the same W_v.  S, H: (batch, positions, d).
    """
    q, u = F.linear(S, G.q, G.q_bias), F.linear(S, G.v, G.v_bias)
    k, v = F.linear(H, G.k, G.k_bias), F.linear(H, G.v, G.v_bias)
    width = q.shape[-1] // G.n_heads
    rows = []
    for i in range(S.shape[1]):
        heads = []
        for h in range(G.n_heads):
            columns = slice(h * width, (h + 1) * width)
            logits = (k[:, :, columns] @ q[:, i, columns, None])[:, :, 0] / math.sqrt(width)
            heads.append((torch.softmax(logits, dim=-1)[:, :, None] * v[:, :, columns]).sum(dim=1))
        rows.append(torch.cat(heads, dim=-1) + u[:, : i + 1].mean(dim=1))
    return F.linear(torch.stack(rows, dim=1), G.o, G.o_bias)


@claim("C28", READING_NOTES)
def masked_token_head(seed: int) -> Finding:
    """logits = LN(act(F Wᵀ + c)) Eᵀ + b: dense, activation, LN, then the token table E itself, with
    a bias b of its own.

    Compares deepstack's head `bert`, with all parameters moved off their start, to the formula with
    GELU.  Counts its parameters, and measures how a changed row of E moves the logits.
    """
    d, near, own_numbers, tied = 32, [], [], []
    for draw_seed in seeds(seed, 8):
        stack = started(draw_seed, {"model.depth": 1, "model.head": "bert"})
        model, rng, vocab = stack.model, random(draw_seed), stack.task.vocab_size
        head = cast(BertHead, model.head)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
            hidden = model.hidden(stack.batch(1)[0])
            z = F.gelu(hidden @ head.dense.t() + head.dense_bias)
            z = (z - z.mean(-1, keepdim=True)) / (
                z.var(-1, correction=0, keepdim=True) + 1e-5
            ).sqrt()
            gain, bias = head.norm.gain, head.norm.bias
            assert gain is not None and bias is not None
            z = z * gain + bias
            before = head(hidden, model.embedding)
            near.append(agreement(before, z @ model.embedding.t() + head.bias))
            change = torch.randn(d, generator=rng)
            model.embedding[7] += change
            moved = head(hidden, model.embedding) - before
            tied.append(agreement(moved[..., 7], z @ change))
        own_numbers.append(stack.built.banks.count()["head"] - vocab)
    parts = [
        Part.mean("1 − distance from the formula", 1.0, near, tolerance=FP32),
        Part.mean("numbers of its own beside b: d² + 3d", d**2 + 3 * d, own_numbers),
        Part.mean("logits moved by a row of E, 1 − distance from z·ΔE", 1.0, tied, tolerance=FP32),
    ]
    return Finding(parts, f"d = {d}, {len(near)} seeds. Why BERT has it, the document guesses.")
