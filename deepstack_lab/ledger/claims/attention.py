"""Claims about attention: its products, merged attention, and BERT's head."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.model import Attention, BertHead, MergedAttention
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
from deepstack_lab.ledger.claim_stack import Trial, small_stack
from deepstack_lab.ledger.decoding import generate
from deepstack_lab.ledger.draws import F64, normals, power, random, repeats, seeds
from deepstack_lab.ledger.sources import DEPTH_SCALED, READING_NOTES
from deepstack_lab.ledger.statistics import (
    agreement,
    exponents,
    gather,
    means,
    sweep,
    time_ratios,
)  # fmt: skip

FP32 = 1e-5  # relative rounding error of a chain of products in fp32


@claim("C23", READING_NOTES, identity=True)
def dot_product(seed: int) -> Finding:
    """q, k of unit variance: E[(q·k)²] = Var(q·k) = d_head, so that q·k reaches ±3√d_head.

    Independent vectors; and q, k of the first layer of a stack at its start, where tokens differ
    and W_q and W_k are independent.
    """
    rng, draws = random(seed), repeats(128)

    def sample(d: int) -> list[Part]:
        products = (normals(rng, 1500, d) * normals(rng, 1500, d)).sum(-1)
        quantity, one = f"E[(q·k)²]/d_head, d_head = {d}", Null(1 / d, "does not grow with d_head")
        parts = [Part.mean(quantity, 1.0, power(products) / d, null=one)]
        if d == 64:
            beyond = (products.abs() > 3 * math.sqrt(d)).double().mean()
            quantity = "share beyond 3√d_head, d_head = 64: at least that of a normal"
            normal = Null(0.0027, "as a normal's")
            parts.append(at_least(quantity, 0.0027, beyond, stated=False, null=normal))
        return parts

    parts = means(sample(d) for d in (4, 16, 64) for _ in range(draws))
    stacks = [first_logits(draw_seed) for draw_seed in seeds(seed, 24)]
    one = Null(1 / 8, "does not grow with d_head")
    parts.append(beside("E[(q·k)²]/d_head, layer 1 of a stack", 1.0, stacks, null=one))
    return Finding(
        parts, f"{draws} draws of 1500 pairs; {len(stacks)} seeds of a stack, d = 32, 4 heads."
    )


@torch.no_grad()
def first_logits(seed: int) -> float:
    """Return E[(q·k)²]/d_head of the first layer of a stack at its start."""
    stack = small_stack(seed, depth=1)
    attention = cast(Attention, stack.model.layers[0].attention)
    x = torch.layer_norm(stack.model.embed(stack.batch(1)[0]), (32,))
    q, k, _ = attention.project(x)
    return power(q @ k.transpose(-1, -2)) / q.shape[-1]


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
    sizes, narrow, wide = (4, 16, 64, 256, 512), 512, 4096

    def sample(d: int) -> dict[str, Tensor]:
        q, k = normals(rng, 64, d), normals(rng, 64, keys, d)
        products = (k @ q[:, :, None])[:, :, 0]
        values: dict[str, Tensor] = {}
        for scale, word in ((d**-0.5, "with"), (1.0, "without")):
            s = torch.softmax(products * scale, dim=-1)
            by_logits = softmax_gradient(s)
            by_q = scale * torch.linalg.matrix_norm(s[:, :, None] * (k - s[:, None] @ k))
            values |= {
                f"{word}, largest": s.amax(dim=-1).mean(),
                f"{word}, logits": by_logits.mean(),
                f"{word}, q": by_q.mean(),
                f"{word}, median": by_logits.median(),
            }
        return values

    drawn = sweep(sizes, draws, sample)

    def gradient(d: int) -> float:
        # given q, its products with independent keys are independent N(0, ‖q‖²)
        lengths = normals(rng, 256, d).norm(dim=1, keepdim=True)
        return softmax_gradient(torch.softmax(lengths * normals(rng, 256, keys), -1)).mean().item()

    pairs = torch.tensor([[gradient(narrow), gradient(wide)] for _ in range(draws)])
    falls = exponents((narrow, wide), pairs)
    flat = exponents(sizes[2:], drawn["with, logits"][:, 2:])
    over = {n: drawn[f"without, {n}"] / drawn[f"with, {n}"] for n in ("logits", "q", "median")}
    top_weight, same = drawn["without, largest"][:, -1], Null(1.0, "as with the scale")
    scaled = Null(drawn["with, largest"][:, -1].mean().item(), "as with the scale")
    parts = [
        at_least("largest weight without, d_head = 512", 0.9, top_weight, null=scaled),
        Part.mean(f"exponent of ‖∂s/∂logits‖ without, d_head {narrow} to {wide}", -0.5, falls,
                  tolerance=0.2, null=Null(0.0, "does not vanish")),
        Part.mean("the same with the scale, d_head 64 to 512", 0.0, flat,
                  null=Null(-0.5, "as without")),
        at_most("‖∂s/∂logits‖ without over with, d_head = 64", 1.0, over["logits"][:, 2],
                null=same),
        at_most("‖∂s/∂q‖ without over with, d_head = 64", 1.0, over["q"][:, 2], null=same),
        at_most("the same, d_head = 512", 1.0, over["q"][:, 4], null=same),
        at_most("median of ‖∂s/∂logits‖ without over with, d_head = 512", 1.0,
                over["median"][:, 4], stated=False, null=same),
    ]  # fmt: skip
    labels = {"logits": "by logits", "q": "by q", "median": "by logits, median"}
    lines = [
        Line.mean(f"{label}, {word} 1/√d", sizes, drawn[f"{word}, {name}"])
        for name, label in labels.items()
        for word in ("with", "without")
    ]
    note = (
        f"64 keys, {draws} draws of 64 queries (256 for the exponent). It saturates. The gradient "
        "by the logits falls, more slowly below d_head = 512; at 64 it is not yet below that with "
        "the scale. By the queries the mean does not vanish at all: it gathers, √d_head times as "
        "large, in the few queries whose two largest logits are close, while that of most queries "
        "vanishes (median).  A first fit from d_head = 64 on was replaced after its run."
    )
    return Finding(
        parts, note, Curves("width of a head d", "gradient of the softmax", lines, True, True)
    )


def softmax_gradient(s: Tensor) -> Tensor:
    """Return ‖diag(s) − ssᵀ‖_F of weights s (…, keys) that sum to 1."""
    power = s.square().sum(dim=-1)
    return (power - 2 * s.pow(3).sum(dim=-1) + power.square()).clamp(min=0).sqrt()


TRANSLATOR: dict[str, Any] = {"family": "encoder_decoder", "depth": 1, "task": "markov"}
KINDS = "separate", "merged"  # attentions of a decoder


@claim("C31", DEPTH_SCALED)
def merged_attention(seed: int) -> Finding:
    """MATT(S) = SAAN(S) + ATT(S, H), one output map: self-attention's place is taken by a
    cumulative mean of values, which makes decoding more efficient.

    deepstack's module against the formula; operations of greedy decoding by the same
    encoder-decoder with either.  Beside it times, which depend on the machine, and short runs: the
    document does not say how fast it trains.
    """

    def sample(draw_seed: int) -> dict[str, Tensor | float]:
        stacks = {
            kind: small_stack(draw_seed, decoder_attention=kind, lr=3e-3, **TRANSLATOR)
            for kind in KINDS
        }
        G = cast(MergedAttention, stacks["merged"].model.layers[-1].attention)
        S, H = torch.randn(2, 4, 12, 32, generator=random(draw_seed))
        near = agreement(G(S, H), merged_formula(G, S, H))
        unigram = unigram_losses(stacks["merged"], steps := 50)
        nats = {kind: unigram - torch.tensor(stacks[kind].run(steps), dtype=F64) for kind in KINDS}
        return {"near": near, **{kind: n.view(-1, 10).mean(dim=1) for kind, n in nats.items()}}

    drawn = gather(map(sample, seeds(seed, 48)))
    share, apart = drawn["merged"] / drawn["separate"], drawn["merged"] - drawn["separate"]
    lengths, same = (8, 24, 64), Null(1.0, "as fast")
    speeds = torch.tensor([decoding_speeds(seed, length) for length in lengths])
    parts = [
        Part.mean("1 − distance of deepstack's module from the formula", 1.0, drawn["near"],
                  tolerance=FP32, null=Null(0.0, "as far as 0 is")),
    ]  # fmt: skip
    for length in lengths:
        quantity = f"FLOPs of products with weights, separate over merged, {length} positions"
        ratio = decoding_flops(seed, length)
        parts.append(Part(quantity, 1.0, ratio, 0.0, ">=", null=Null(1.0, "as many")))
    for length, ratios in zip(lengths, speeds, strict=True):
        quantity = f"time a position, separate over merged, {length} positions"
        parts.append(at_least(quantity, 1.0, ratios, stated=False, null=same))
    nothing: dict[str, Any] = {"tolerance": 0.05, "null": Null(0.0, "merged learns nothing")}
    parts += [
        beside("nats below the unigram, merged over separate, steps 11 to 20", 1.0, share[:, 1],
               **nothing),
        beside("the same, steps 41 to 50", 1.0, share[:, 4], **nothing),
        at_least("the same in nats, merged less separate, steps 21 to 30", 0.0, apart[:, 2],
                 stated=False, null=Null(0.0, "no difference")),
    ]  # fmt: skip
    note = (
        f"Task markov, 1 + 1 layers, d = 32, {len(share)} seeds, lr 0.003.  Merged attention "
        "learns more slowly at first and is nearly level after 50 steps.  Decoding with 4 decoder "
        "layers, batch 4; benchmarks/decoding.py has larger sizes."
    )
    lines = [Line.mean("measured", lengths, speeds.t())]
    return Finding(parts, note, Curves("positions", "time, separate over merged", lines))


def unigram_losses(stack: Trial, steps: int) -> Tensor:
    """Return the unigram's loss on the training batches of these steps."""
    size = stack.config.train.batch_size
    batches = (stack.task.train_batch(t, size) for t in range(1, steps + 1))
    return torch.tensor([stack.task.unigram_loss(batch) for batch in batches]).double()


def decoders(seed: int, length: int) -> list[Callable[[], Tensor]]:
    """Return functions that decode with self- and cross-attention, and with merged attention."""
    sizes = {"decoder_depth": 4, "seq_len": length}
    stacks = [small_stack(seed, decoder_attention=kind, **TRANSLATOR, **sizes) for kind in KINDS]
    begin, source = torch.zeros(4, 1, dtype=torch.long), stacks[0].batch(1)[0][:4, :8]
    return [partial(generate, s.model, begin, length, source=source) for s in stacks]


def decoding_flops(seed: int, length: int) -> float:
    """Return the FLOPs of products with weights, separate attentions over merged ones."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, for a second

    counts = []
    for decode in decoders(seed, length):
        with FlopCounterMode(display=False) as counter:
            decode()
        counts.append(counter.get_flop_counts()["Global"][torch.ops.aten.addmm])
    return counts[0] / counts[1]


def decoding_speeds(seed: int, length: int) -> list[float]:
    """Return times of decoding, separate attentions over merged ones."""
    rounds = max(1, 24 // length)  # decoding a few positions is soon disturbed
    apart, merged = decoders(seed, length)
    return time_ratios(apart, merged, repeats(12) + 1, rounds)[1:]  # the first one warms up


def merged_formula(G: MergedAttention, S: Tensor, H: Tensor) -> Tensor:
    """Return (concat_h softmax(q_h k_hᵀ/√d_head) v_h + mean_{j ≤ i} u_j) W_oᵀ + b_o, by position.

    q and u are maps of S, k and v of H; u and v have the same W_v.

    S, H: (batch, positions, d).
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
    a separate bias b.

    Compares deepstack's head `bert`, with all parameters moved off their start, to the formula with
    GELU.  Counts its parameters, and measures how a changed row of E moves the logits.
    """
    d, apart = 32, Null(0.0, "as far as 0 is")

    @torch.no_grad()
    def sample(draw_seed: int) -> list[Part]:
        stack = small_stack(draw_seed, depth=1, head="bert")
        model, rng, vocab = stack.model, random(draw_seed), stack.task.vocab_size
        head = cast(BertHead, model.head)
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
        hidden = model.hidden(stack.batch(1)[0])
        dense = F.gelu(hidden @ head.dense.t() + head.dense_bias)
        z = F.layer_norm(dense, (d,), head.norm.gain, head.norm.bias)
        before = head(hidden, model.embedding)
        near = agreement(before, z @ model.embedding.t() + head.bias)
        change = torch.randn(d, generator=rng)
        model.embedding[7] += change
        tied = agreement((head(hidden, model.embedding) - before)[..., 7], z @ change)
        numbers, moved = stack.built.banks.count()["head"] - vocab, "logits moved by a row of E"
        return [
            Part.mean("1 − distance from the formula", 1.0, near, tolerance=FP32, null=apart),
            Part.mean("numbers of its own beside b: d² + 3d", d**2 + 3 * d, numbers,
                      null=Null(0.0, "the tied head's")),
            Part.mean(f"{moved}, 1 − distance from z·ΔE", 1.0, tied, tolerance=FP32,
                      null=Null(0.0, "not tied: they do not move")),
        ]  # fmt: skip

    parts = means(map(sample, seeds(seed, 8)))
    note = f"d = {d}, {parts[0].draws} seeds. Why BERT has it, the document guesses."
    return Finding(parts, note)
