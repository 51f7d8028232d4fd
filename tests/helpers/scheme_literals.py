"""Equations of layers that hand on more than x, or that take many lines; see `papers`.

Each takes the options that change it under their names.
"""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

One = Callable[[Tensor], Tensor]


def norm(module: Any) -> One:
    return lambda z: F.layer_norm(z, z.shape[-1:], module.gain, module.bias, eps=1e-5)


def real_former(p: Any, stream: Any, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Figure 1 c: softmax(Q Kᵀ / sqrt(d_head) + Prev) V, and the sum is the next layer's Prev.

    mean: the softmax takes the sum over l layers divided by l.
    """
    x, previous = stream
    sums = []

    def plus_previous(scores: Tensor) -> Tensor:
        sums.append(scores if previous is None else scores + previous)
        return sums[-1] / p.l if mean else sums[-1]

    x = p.a[0](x + p.A(x, logits=plus_previous))
    return p.f[0](x + p.F(x)), sums[0]


def around_streams(p: Any, stream: Any, weights: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """H around each sublayer, a token at a time.

    weights(c, k, H): A_m (n), A_r (n, n), which mixes rows of H, (n, d) of a token, and B (n).
    """
    x, H = stream
    n = len(H)
    each = p.each()
    for k, (name, G, norms) in enumerate(each, start=len(each) * (p.l - 1)):
        c = getattr(p.s, f"{name}_connections")
        h, mixed, given = torch.zeros_like(x), torch.zeros_like(H), torch.zeros(*H.shape[:-1])
        for b, t in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
            of_token = H[:, b, t]  # the paper's matrix H, (n, d)
            A_m, A_r, given[:, b, t] = weights(c, k % n, of_token)
            h[b, t], mixed[:, b, t] = A_m @ of_token, A_r @ of_token
        y = G(norms[0](h))
        H = torch.stack([mixed[i] + given[i][..., None] * y for i in range(n)])
    return H[0], H


def connected(c: Any, H: Tensor, *starts: Tensor) -> list[Tensor]:
    """Start + trained difference + s tanh(norm(H) W) of each matrix; the last one has its own s."""
    widths = [start.shape[1] for start in starts]
    static = c.static.view(len(H), -1).split(widths, dim=1)
    matrices = [x + y for x, y in zip(starts, static, strict=True)]
    if c.dynamic:
        scales, normed = [c.scale_a] * (len(starts) - 1) + [c.scale_b], norm(c.norm)(H)
        terms = zip(scales, c.map.T.split(widths, dim=1), strict=True)
        moves = [s * torch.tanh(normed @ W) for s, W in terms]
        matrices = [x + move for x, move in zip(matrices, moves, strict=True)]
    return matrices


def hyper_connections(p: Any, stream: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """Equations 1 to 5 and 10 to 14."""

    def weights(c: Any, k: int, H: Tensor) -> Any:
        one = torch.eye(len(H))
        A_m, A_r, B = connected(c, H, one[:, k, None], one, torch.ones(len(H), 1))
        return A_m[:, 0], A_r.T, B[:, 0]

    return around_streams(p, stream, weights)


def dense_former(p: Any, stream: Any, dilation: int = 1, period: int = 1) -> Any:
    """Section 3: block i, then X_i = sum_j alpha_ij X_j, where alpha starts as (0, …, 0, 1).

    dilation x period, as Figure 5 draws it: every k-th, back from block i.
    """
    x, outputs = stream
    y = pre_ln(p, x)
    outputs = (*outputs, y)
    if p.l % period:
        return y, outputs
    read = [j for j in range(p.l + 1) if (p.l - j) % dilation == 0]
    assert len(read) <= len(p.s.weights)
    return y + sum(w * outputs[j] for w, j in zip(p.s.weights, read, strict=False)), outputs


def mudd(
    p: Any, stream: Any, dynamic: bool = True, multiway: bool = True, norms: bool = False,
    multiple: int = 64,
) -> Any:  # fmt: skip
    """`LlamaDecoderLayer` and `Decoder` of the authors' code, a sum and an x_j at a time."""
    r, *qkv, _, hids = stream
    if multiway:
        m, three = p.layer.attention, [p.a[0], *map(norm, p.slot("inputs").norms)]
        maps = zip(qkv, three, m.qkv.chunk(3), m.qkv_bias.chunk(3), strict=True)
        separate = [
            (LN(z) @ W.T + b).unflatten(-1, (-1, 4)).transpose(1, 2) for z, LN, W, b in maps
        ]
        y = r + p.A(r, qkv=lambda _: separate)
    else:
        y = r + p.A(p.a[0](r))
    x = y + p.F(p.f[0](y))
    if norms:
        hids = (norm(p.s.first_norm)(hids[0]),) if p.l == 1 else hids
    hids = (*hids, norm(p.s.output_norm)(x) if norms else x)
    C = 4 if multiway else 1
    width = C * (p.l + 1)
    width = (width // 64 + 1) * 64 if multiple else width
    if dynamic:
        normed = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6)
        normed = norm(p.s.weight_norm)(x) if norms else normed
        hidden = F.gelu(normed @ p.s.w_1[:width].T)
    C_l = 1 if p.l == p.N else C  # dynamic_dense_fix_last_layer
    sums = []
    for c in range(C_l):
        total = torch.zeros_like(x)
        for j, x_j in enumerate(hids):
            a = p.s.b[c, j] + (1.0 if j == p.l and not norms else 0.0)
            if dynamic:
                a = a + (hidden @ p.s.w_2[c, j, :width])[..., None]
            total = total + a * x_j
        if norms:
            total = x + (norm(p.s.sum_norm)(total) if c == 0 else total)
        sums.append(total)
    return *sums * (C // C_l), x, hids


def attn_res(p: Any, stream: Any, blocks: int = 8) -> Any:
    """Full AttnRes where there are no more sublayers than blocks, else the sums of their blocks."""
    h, part, done = stream
    blocks = min(blocks or 2 * p.N, 2 * p.N)
    for j, (name, G, n) in enumerate(p.each(), start=2 * p.l - 1):
        w, v = getattr(p.s, f"{name}_query"), G(n[0](h))
        part = v if part is None else part + v
        if (j * blocks) // (2 * p.N) > ((j - 1) * blocks) // (2 * p.N):
            done, part = [*done, part], None
        sources = [*done] if part is None else [*done, part]
        scores = [(w * v).sum(-1) / torch.sqrt((v**2).mean(-1) + 1e-6) for v in sources]
        share = torch.stack(scores).exp()
        share = share / share.sum(0)
        h = sum(a[..., None] * v for a, v in zip(share, sources, strict=True))
    return h, part, tuple(done)


def doubly_stochastic(R: Tensor, n: int, iterations: int, mixing: str) -> Tensor:
    """A_r of one token: mHC's equation 9, mHC-lite's sum of permutations, KromHC's, JPmHC's."""
    if mixing == "identity":
        return torch.eye(n)
    if mixing == "permutations":
        every = list(permutations(range(n)))
        start = torch.tensor([0.0] + [-8.0] * (len(every) - 1))
        share = (R + start).exp() / (R + start).exp().sum()
        return sum((a * torch.eye(n)[list(P)] for a, P in zip(share, every, strict=True)))
    if mixing == "kronecker":
        product = torch.ones(1, 1)
        for a, b in R.view(-1, 2):
            p = torch.sigmoid(a - b + 8)
            U = p * torch.eye(2) + (1 - p) * torch.eye(2).flip(0)
            product = torch.kron(product, U)
        return product
    if mixing == "cayley":  # the fixed point of algorithm 8 of JPmHC
        W, one = R.view(n, n) - R.view(n, n).T, torch.eye(n)
        return torch.linalg.inv(one - 0.1 / 2 * W) @ (one + 0.1 / 2 * W)
    M = torch.exp(R.view(n, n) + torch.full((n, n), -8.0).fill_diagonal_(0))
    for _ in range(iterations):
        M = M @ torch.diag(1 / M.sum(0))
        M = torch.diag(1 / M.sum(1)) @ M
    return M


def parcae(p: Any, stream: Any, begins: bool, first: bool) -> Any:
    """`DiagonalInjection` of the authors' code before the first layer of a loop, then Pre-LN."""
    h, e = stream
    if begins:
        e = h if first else e
        state = torch.zeros_like(h) if first else h
        dt = torch.log(1 + torch.exp(p.s.injection_d))
        A, B = torch.exp(p.s.injection_a), torch.eye(h.shape[-1]) + p.s.injection_map
        h = state * torch.exp(-dt * A) + dt * (norm(p.s.injection_norm)(e) @ B.T)
    return pre_ln(p, h), e


def mhc(p: Any, stream: Any, iterations: int = 20, mixing: str = "sinkhorn", **_: Any) -> Any:
    """Equations 3, 5 and 7 to 9."""

    def weights(c: Any, k: int, H: Tensor) -> Any:
        n, vec = len(H), H.reshape(-1)
        W = c.map.permute(0, 2, 1).reshape(len(vec), -1)  # phi, of vec(H) as (n d)
        sizes = [n, n, W.shape[1] - 2 * n]
        begin = torch.full((n,), -1.0)
        begin[k] = 1.0
        pre, post, res = ((vec / torch.sqrt((vec**2).mean() + 1e-6)) @ W).split(sizes)
        bias = c.bias.split(sizes)
        A_m = torch.sigmoid(c.scale[0] * pre + begin + bias[0])
        B = 2 * torch.sigmoid(c.scale[1] * post + begin + bias[1])
        R = c.scale[-1] * res + bias[2]
        return A_m, doubly_stochastic(R, n, iterations, mixing), B

    return around_streams(p, stream, weights)


def res_former(
    p: Any, stream: Any, first: Any = 0.5, own: Any = 0.5, last: int = 0, learnable: bool = False
) -> Any:
    """Equation of section 3, with v_1 as it is in the first layer; the `last` layers mix."""
    x, v_1 = stream
    slot = p.slot("mixed_values")
    a, b = (slot.of_first, slot.of_own) if learnable else (first, own)
    firsts = []

    def values(qkv: Tensor) -> Any:
        q, k, v = qkv
        firsts.append(v if v_1 is None else v_1)
        return q, k, v if v_1 is None or p.l <= p.N - (last or p.N) else a * v_1 + b * v

    x = x + p.A(p.a[0](x), qkv=values)
    return x + p.F(p.f[0](x)), firsts[0]


def pre_ln(p: Any, x: Tensor) -> Tensor:
    for _, G, n in p.each():
        x = x + G(n[0](x))
    return x


def x0_lambdas(p: Any, stream: Any, backout: float = 0, **_: Any) -> tuple[Tensor, ...]:
    """nanochat's `forward`, with a constant share of backout."""
    x, x0, *x_backout = stream
    x = pre_ln(p, p.s.r * x + p.s.s * x0)
    if backout and p.l - 1 == p.N // 2:
        x_backout = [x]
    return x, x0, *x_backout


def orthogonal_update(x: Tensor, G: One, n: Any, p: Any) -> Tensor:
    """Equation of section 3: the branch without its projection on the stream of each token."""
    y, P = G(n[0](x)), x[..., :, None] * x[..., None, :]
    P = P / ((x * x).sum(-1) + 1e-6)[..., None, None]
    return x + y - torch.einsum("bsij,bsj->bsi", P, y)


def deep_delta(x: Tensor, G: One, n: Any, delta: Any) -> Tensor:
    """(I - beta k kᵀ) x + beta k v, the Delta operator of section 2, with d_v = 1."""
    c = n[0](x)
    k = G(c)
    k = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True)
    beta = 2 / (1 + torch.exp(-(c @ delta.of_beta + delta.biases[0])))
    v = 4 / (1 + torch.exp(-(x @ delta.of_v + delta.biases[1])))
    operator = torch.eye(x.shape[-1]) - beta[..., None, None] * k[..., :, None] * k[..., None, :]
    return torch.einsum("bsij,bsj->bsi", operator, x) + (beta * v)[..., None] * k


def siamese_norm(p: Any, stream: Any) -> tuple[Tensor, Tensor]:
    """A block of the authors' DeiT, whose index counts from 0: c = sqrt(2 (index + 1))."""
    x, y = stream
    for _, G, (of_x, of_y, of_both) in p.each():
        x = of_x(x)
        u = G(of_both(x + of_y(y)))
        x, y = x + u / (2 * p.l) ** 0.5, y + u
    return x, y


def mv_split(p: Any, x: Tensor) -> Tensor:
    """Sequence by sequence, with the matrix that takes the mean of its tokens."""
    for name, G, n in p.each():
        a, b = (getattr(p.s, f"{name}_{own}") for own in ("mean", "centred"))
        g, tokens = G(x), x.shape[1]
        M = torch.full((tokens, tokens), 1 / tokens)
        x = n[0](x + ((torch.eye(tokens) - M) @ g) * b + (M @ (g - x)) * a)
    return x


def laurel(p: Any, x: Tensor, **_: Any) -> Tensor:
    for name, G, n in p.each():
        A, B = (getattr(p.s, f"{name}_{own}") for own in ("down", "up"))
        rank, d = A.shape
        start = torch.zeros(rank, d)
        for i in range(d):
            start[i % rank, i] = 1 / (rank * d) ** 0.5
        x = x + G(n[0](x)) + x @ (A + start).T @ B.T
    return x


def frac_connections(p: Any, x: Tensor, **_: Any) -> Tensor:
    """Equations 6 to 15 and algorithm 1, a token at a time."""
    for name, G, n in p.each():
        c = getattr(p.s, f"{name}_connections")
        m = len(c.static)
        h, mixed, given = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
        for b, t in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
            H = x[b, t].reshape(m, -1)  # the paper's matrix, (m, d/m)
            Y, A, B = connected(c, H, torch.eye(m), torch.eye(m), torch.ones(m, 1))
            h[b, t], mixed[b, t] = (Y.T @ H).flatten(), (A.T @ H).flatten()
            given[b, t] = B[:, 0].repeat_interleave(x.shape[-1] // m)
        x = mixed + given * G(n[0](h))
    return x


def direction(z: Tensor) -> Tensor:
    return z / torch.sqrt((z**2).sum(-1, keepdim=True))


def ngpt(p: Any, x: Tensor, start: float | None = 0.05) -> Tensor:
    """`Block.forward` of the authors' code, s and a as it keeps them; without a gate v alone."""
    d, heads = x.shape[-1], p.layer.attention.n_heads
    s_qk, s_v = p.slot("q").s * d**0.5, p.slot("w1").s
    a = (start or 1 / p.N) * d**0.5
    a_A, a_M = (torch.abs(a * alpha) for alpha in (p.s.attention_alpha, p.s.feed_forward_alpha))

    def of_heads(all_: Tensor) -> Any:
        q, k, v = all_
        return s_qk * direction(q), s_qk * direction(k), v

    # what `A` has divided by sqrt(d_head) is to be multiplied with it
    h_A = direction(p.A(x, qkv=of_heads, logits=lambda scores: scores * (d / heads)))
    x = direction(x + a_A * (h_A - x))
    h_M = direction(p.F(x, linear=lambda v: v * s_v * d**0.5))
    return direction(x + a_M * (h_M - x))
