"""Products and attention of small layers on a GPU, in Triton.

A library's kernels are made for large products: they take several times as long, and bias and
activation are further launches.  These kernels take one launch each.  At width 64 a product takes 2
to 3 microseconds instead of 3 to 13, a layer's attention 8 instead of 27.  Products of fp32 numbers
do not use TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 32, 32, 64  # of a product's tiles


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x, w, b, gate, y, rows, columns: tl.constexpr, depth: tl.constexpr,
    STRAIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, GATE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    columns_here = tl.program_id(1) * N + tl.arange(0, N)
    column = columns_here[None, :]
    sums = tl.zeros((M, N), dtype=tl.float32)
    for first in range(0, depth, K):
        inner = first + tl.arange(0, K)
        across = inner[None, :] < depth
        a = tl.load(x + row * depth + inner[None, :], mask=(row < rows) & across, other=0.0)
        if STRAIGHT:  # w: (depth, columns)
            there = (inner[:, None] < depth) & (column < columns)
            c = tl.load(w + inner[:, None] * columns + column, mask=there, other=0.0)
        else:  # w: (columns, depth), read along its rows
            there = (columns_here[:, None] < columns) & across
            at = columns_here[:, None] * depth + inner[None, :]
            c = tl.trans(tl.load(w + at, mask=there, other=0.0))
        sums = tl.dot(a, c.to(a.dtype), sums, input_precision="ieee")
    inside = (row < rows) & (column < columns)
    if BIAS:
        sums += tl.load(b + column, mask=column < columns, other=0.0).to(tl.float32)
    if RELU:
        sums = tl.where(sums < 0, 0.0, sums)  # NaN stays
    at = row * columns + column
    if GATE:
        sums = tl.where(tl.load(gate + at, mask=inside, other=0.0) <= 0, 0.0, sums)
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=inside)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    straight: bool = False,
    relu: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    """Return x Wᵀ + b, or x W if `straight`; then max(·, 0) if `relu`; then 0 where gate <= 0.

    x: (rows, depth); W: (columns, depth), or straight (depth, columns), contiguous, in any
        precision.
    gate: (rows, columns).  Sums are of fp32 numbers; the result has x's precision.
    """
    x, gate = x.contiguous(), None if gate is None else gate.contiguous()
    rows, depth = x.shape
    columns = weight.shape[1 if straight else 0]
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _product[grid](
        x, weight, weight if bias is None else bias, x if gate is None else gate, y,
        rows, columns, depth,
        STRAIGHT=straight, BIAS=bias is not None, RELU=relu, GATE=gate is not None,
        M=ROWS, N=COLUMNS, K=min(DEPTH, max(16, triton.next_power_of_2(depth))),
    )  # fmt: skip
    return y


@triton.jit
def _weights(q, k, scale, seq, CAUSAL: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    query, key = tl.arange(0, S)[:, None], tl.arange(0, S)[None, :]
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = key < seq
    if CAUSAL:
        seen = seen & (key <= query)
    logits = tl.where(seen, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv, y, scale, seq, heads, head,
    CAUSAL: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    batch, which = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * head
    row, column = tl.arange(0, S)[:, None], tl.arange(0, D)[None, :]
    inside = (row < seq) & (column < head)
    at = qkv + (batch * seq + row) * 3 * width + which * head + column
    q = tl.load(at, mask=inside, other=0.0)
    k = tl.load(at + width, mask=inside, other=0.0)
    v = tl.load(at + 2 * width, mask=inside, other=0.0)
    p = _weights(q, k, scale, seq, CAUSAL, S)
    out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    to = y + (batch * seq + row) * width + which * head + column
    tl.store(to, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _attend_backward(  # type: ignore[no-untyped-def]
    qkv, dy, dqkv, scale, seq, heads, head,
    CAUSAL: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    batch, which = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * head
    row, column = tl.arange(0, S)[:, None], tl.arange(0, D)[None, :]
    inside = (row < seq) & (column < head)
    offset = (batch * seq + row) * 3 * width + which * head + column
    q = tl.load(qkv + offset, mask=inside, other=0.0)
    k = tl.load(qkv + offset + width, mask=inside, other=0.0)
    v = tl.load(qkv + offset + 2 * width, mask=inside, other=0.0)
    at = dy + (batch * seq + row) * width + which * head + column
    g = tl.load(at, mask=inside, other=0.0)
    p = _weights(q, k, scale, seq, CAUSAL, S)
    dv = tl.dot(tl.trans(p).to(g.dtype), g, input_precision="ieee")
    dp = tl.dot(g, tl.trans(v), input_precision="ieee")
    ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
    dq = tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    dk = tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    to = dqkv + offset
    kind = dqkv.dtype.element_ty
    tl.store(to, dq.to(kind), mask=inside)
    tl.store(to + width, dk.to(kind), mask=inside)
    tl.store(to + 2 * width, dv.to(kind), mask=inside)


LONGEST, WIDEST = 32, 64  # sequence and head of the attention below


def attend(qkv: Tensor, seq: int, heads: int, causal: bool) -> Tensor:
    """Return concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h, (tokens, d), given [q, k, v]."""
    qkv = qkv.contiguous()
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    y = torch.empty(tokens, width, dtype=qkv.dtype, device=qkv.device)
    grid, settings = launch(tokens, width, seq, heads, causal)
    _attend[grid](qkv, y, (width // heads) ** -0.5, seq, heads, width // heads, **settings)
    return y


def attend_backward(qkv: Tensor, dy: Tensor, seq: int, heads: int, causal: bool) -> Tensor:
    """Return the gradient of [q, k, v], given the gradient of `attend`'s result."""
    qkv, dy = qkv.contiguous(), dy.contiguous()
    tokens, width = dy.shape
    dqkv = torch.empty_like(qkv)
    grid, settings = launch(tokens, width, seq, heads, causal)
    scale = (width // heads) ** -0.5
    _attend_backward[grid](qkv, dy, dqkv, scale, seq, heads, width // heads, **settings)
    return dqkv


def launch(
    tokens: int, width: int, seq: int, heads: int, causal: bool
) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid, one program per sequence and head, and the sizes of its tiles."""
    tile = {
        "S": max(16, triton.next_power_of_2(seq)),
        "D": max(16, triton.next_power_of_2(width // heads)),
    }
    return (tokens // seq * heads,), {"CAUSAL": causal, **tile}
