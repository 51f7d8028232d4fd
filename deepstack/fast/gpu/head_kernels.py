"""Rotation and repetition of heads on a GPU, in Triton, between a product and the attention.

A token's row is [q, k, v]: `heads` heads of queries, then `keys` heads each of keys and of values.
One launch and one pass over memory rotate the heads of q and k, and repeat a head of k or v for all
the heads of q that read it.  Another one computes the gradient: it adds the gradients of all
repetitions of a head, and rotates the sum back.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepstack.fast.gpu.norm_kernels import tile, warps

NUMBERS = 1024  # of a tile

Angles = tuple[Tensor, Tensor]
"""The cosine and the signed sine of `Rotation`, (seq_len, d_head) fp32 each."""


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    h, cosines, sines, token, part, seq, column, width: tl.constexpr,
    BACK: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return rows h, (R, D), rotated if of q or k."""
    even, odd = tl.split(tl.reshape(h, (R, D // 2, 2)))
    other = tl.reshape(tl.join(odd, even), (R, D))
    at = (token % seq)[:, None] * width + column
    cosine = tl.load(cosines + at, mask=column < width, other=0.0)
    sine = tl.load(sines + at, mask=column < width, other=0.0)
    if BACK:
        sine = -sine
    return tl.where((part < 2)[:, None], h * cosine + other * sine, h)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, y, cosines, sines, rows, seq, width: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, TURN: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)  # of y
    column = tl.arange(0, D)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    token, head, part = row // (3 * HEADS), row % HEADS, row // HEADS % 3
    source = tl.where(part == 0, head, HEADS + (part - 1) * KEYS + head // (HEADS // KEYS))
    from_ = x + (token * (HEADS + 2 * KEYS) + source)[:, None] * width
    h = tl.load(from_ + column, mask=inside, other=0.0).to(tl.float32)
    if TURN:
        h = _turned(h, cosines, sines, token, part, seq, column, width, False, R, D)
    tl.store(y + row[:, None] * width + column, h.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy, dx, cosines, sines, rows, seq, width: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, TURN: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)  # of dx
    column = tl.arange(0, D)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    token, head = row // (HEADS + 2 * KEYS), row % (HEADS + 2 * KEYS)
    part = (head >= HEADS).to(tl.int64) + (head >= HEADS + KEYS).to(tl.int64)
    repeated = HEADS // KEYS
    first = tl.where(part == 0, head, part * HEADS + (head - HEADS) % KEYS * repeated)
    h = tl.zeros((R, D), dtype=tl.float32)
    for i in range(0, repeated):
        there = inside & ((part > 0) | (i == 0))[:, None]
        from_ = dy + (token * 3 * HEADS + first + i)[:, None] * width
        h += tl.load(from_ + column, mask=there, other=0.0).to(tl.float32)
    if TURN:
        h = _turned(h, cosines, sines, token, part, seq, column, width, True, R, D)
    tl.store(dx + row[:, None] * width + column, h.to(dx.dtype.element_ty), mask=inside)


def arranged(x: Tensor, heads: int, keys: int, angles: Angles | None, seq: int) -> Tensor:
    """Return [q, k, v], (tokens, 3 d), with q and k rotated and k and v for all heads of q.

    x: [q, k, v], (tokens, (heads + 2 keys) d_head), in any precision; d = heads d_head.
    angles: None for no rotation.  seq: tokens of a sequence, at most seq_len.
    """
    width = x.shape[1] // (heads + 2 * keys)
    y = x.new_empty(len(x), 3 * heads * width)
    _launch(_forward, x.contiguous(), y, width, heads, keys, angles, seq)
    return y


def arranged_backward(dy: Tensor, heads: int, keys: int, angles: Angles | None, seq: int) -> Tensor:
    """Return the gradient of x, given the gradient of `arranged`'s result."""
    width = dy.shape[1] // (3 * heads)
    dx = dy.new_empty(len(dy), (heads + 2 * keys) * width)
    _launch(_backward, dy.contiguous(), dx, width, heads, keys, angles, seq)
    return dx


def _launch(
    kernel: triton.JITFunction, given: Tensor, result: Tensor, width: int, heads: int, keys: int,
    angles: Angles | None, seq: int,
) -> None:  # fmt: skip
    rows = result.numel() // width
    R, D = tile(NUMBERS, rows, width)
    kernel[(triton.cdiv(rows, R),)](
        given, result, *(angles or (given, given)), rows, seq, width,
        HEADS=heads, KEYS=keys, TURN=angles is not None, R=R, D=D, num_warps=warps(D),
    )  # fmt: skip
