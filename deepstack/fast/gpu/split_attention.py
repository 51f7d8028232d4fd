"""Attention of fp32 numbers on a GPU's tensor cores, forward only, in Triton.

The kernel computes y = softmax(q kᵀ / sqrt(d_head)) v by blocks of keys.  It keeps the largest
logit and the sums of powers and of powers times v, and rescales the sums when that logit grows
(Milakov & Gimelshein 2018, arXiv:1805.02867).  Each product is three of shorter numbers
(split_product.py).  The second one is yᵀ = vᵀ pᵀ, because Hopper's tf32 products read both factors
along the summed axis.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepstack.fast.gpu.split_product import _three


class Blocks(NamedTuple):
    """A program computes `queries` rows of a head's y, from `keys` keys at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


WIDEST = 128  # head


def blocks_for(head: int) -> Blocks:
    """Return blocks that leave registers for a head this wide."""
    return Blocks(64, 64, warps=4, stages=3) if head <= 64 else Blocks(64, 32, warps=8, stages=2)


@triton.jit
def _attention(  # type: ignore[no-untyped-def]
    qkv, y, scale, seq, heads, blocks, head: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    which, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * M
    width = heads * head
    begin = (which // heads).to(tl.int64) * seq  # of this sequence
    qkv += begin * (3 * width) + which % heads * head
    y += begin * width + which % heads * head
    query, column = first + tl.arange(0, M), tl.arange(0, D)
    row = query.to(tl.int64)[:, None]
    inside = (query < seq)[:, None] & (column < head)[None, :]
    at = qkv + row * (3 * width) + column[None, :]
    if WHOLE:
        q = tl.load(at)
    else:
        q = tl.load(at, mask=inside, other=0.0)
    most = tl.full((M,), float("-inf"), dtype=tl.float32)
    powers = tl.zeros((M,), dtype=tl.float32)
    sums = tl.zeros((D, M), dtype=tl.float32)
    end = tl.minimum(first + M, seq) if CAUSAL else seq
    for start in range(0, end, N):
        key = start + tl.arange(0, N)
        there = key.to(tl.int64) * (3 * width)
        at_k = qkv + width + there[:, None] + column[None, :]
        at_v = qkv + 2 * width + there[None, :] + column[:, None]  # its columns, one a row
        if WHOLE:
            k, v = tl.load(at_k), tl.load(at_v)
        else:
            k = tl.load(at_k, mask=(key < seq)[:, None] & (column < head)[None, :], other=0.0)
            v = tl.load(at_v, mask=(key < seq)[None, :] & (column < head)[:, None], other=0.0)
        logits = _three(q, k, WIDE) * scale  # of 2, not of e
        if CAUSAL:
            logits = tl.where(key[None, :] <= query[:, None], logits, float("-inf"))
        if not WHOLE:
            logits = tl.where((key < seq)[None, :], logits, float("-inf"))
        larger = tl.maximum(most, tl.max(logits, 1))  # key 0 is seen by all: none stays at -inf
        p = tl.exp2(logits - larger[:, None])
        fade = tl.exp2(most - larger)
        powers = powers * fade + tl.sum(p, 1)
        sums = sums * fade[None, :] + _three(v, p, WIDE)
        most = larger
    out = tl.trans(sums / powers[None, :])
    to = y + row * width + column[None, :]
    if WHOLE:
        tl.store(to, out)
    else:
        tl.store(to, out, mask=inside)


def split_attention(
    qkv: Tensor, seq: int, heads: int, causal: bool, *, settings: Blocks | None = None
) -> Tensor:
    """Return concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h, (tokens, d), given [q, k, v].

    All in fp32, to its accuracy.  d_head: at most WIDEST.  Infinite numbers, also of a masked key,
    give NaN or infinite ones, as in `split_product`.
    """
    qkv = qkv.contiguous()
    tokens, width = qkv.shape[0], qkv.shape[1] // 3
    y = torch.empty(tokens, width, dtype=qkv.dtype, device=qkv.device)
    if not y.numel():
        return y
    head = width // heads
    by, tile = settings or blocks_for(head), max(16, triton.next_power_of_2(head))
    blocks = triton.cdiv(seq, by.queries)
    _attention[(tokens // seq * heads * blocks,)](
        qkv, y, head**-0.5 * math.log2(math.e), seq, heads, blocks, head,
        CAUSAL=causal, WIDE=not isinstance(_attention, triton.JITFunction),
        WHOLE=tile == head and seq % by.queries == 0 and seq % by.keys == 0,
        M=by.queries, N=by.keys, D=tile, num_warps=by.warps, num_stages=by.stages,
    )  # fmt: skip
    return y
