"""Triton kernels between two products of the backward pass, with sums over tokens.

A library's product needs its output's gradient as one tensor, and its bias that tensor's sum over
tokens.  These kernels write the tensor and sum it too: one row of sums per block of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 128  # of a tile
BLOCK = 128  # tokens of a program, which leaves one row of sums
WARPS = 4


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    dy, y, dx, sums, rows, width, GATE: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    column = tl.program_id(1) * C + tl.arange(0, C)
    total = tl.zeros((R, C), dtype=tl.float32)
    for first in range(0, BLOCK, R):
        row = (block * BLOCK + first + tl.arange(0, R)).to(tl.int64)
        at = row[:, None] * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        d = tl.load(dy + at, mask=inside, other=0.0)
        if GATE:
            d = tl.where(tl.load(y + at, mask=inside, other=0.0) <= 0, 0.0, d)
            tl.store(dx + at, d, mask=inside)
        total += d.to(tl.float32)
    tl.store(sums + block * width + column, tl.sum(total, 0), mask=column < width)


def summed(dy: Tensor, y: Tensor | None = None) -> Tensor:
    """Return sums of dy over blocks of rows, (blocks, columns); with y, set dy to 0 where y <= 0.

    dy, y: (rows, columns) of one precision, contiguous; y = max(x, 0).  NaN in y keeps dy.
    """
    rows, width = dy.shape
    blocks = triton.cdiv(rows, BLOCK)
    sums = torch.empty(blocks, width, device=dy.device)
    grid = (blocks, triton.cdiv(width, COLUMNS))
    _sum[grid](
        dy, dy if y is None else y, dy, sums, rows, width, GATE=y is not None,
        BLOCK=BLOCK, R=ROWS, C=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return sums


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    a, b, c, to, sums, rows, seq, width, head, by_batch, by_head, by_place,
    BLOCK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * C + tl.arange(0, C)
    if part == 0:
        value = a
    elif part == 1:
        value = b
    else:
        value = c
    across = column // head * by_head + column % head
    total = tl.zeros((R, C), dtype=tl.float32)
    for first in range(0, BLOCK, R):
        row = (block * BLOCK + first + tl.arange(0, R)).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        along = row // seq * by_batch + row % seq * by_place
        d = tl.load(value + along[:, None] + across[None, :], mask=inside, other=0.0)
        at = row[:, None] * (3 * width) + part * width + column[None, :]
        tl.store(to + at, d, mask=inside)
        total += d.to(tl.float32)
    to_sums = sums + block * 3 * width + part * width + column
    tl.store(to_sums, tl.sum(total, 0), mask=column < width)


def merge(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate three tensors of heads to (tokens, 3 d); return it and its sums, (blocks, 3 d).

    parts: each (batch, head, seq, d_head), of one precision; d = heads times d_head.
    """
    like = parts[0].stride()
    if like[3] != 1 or any(part.stride() != like for part in parts):
        parts = tuple(part.contiguous() for part in parts)  # type: ignore[assignment]
        like = parts[0].stride()
    batch, heads, seq, head = parts[0].shape
    rows, width = batch * seq, heads * head
    to = parts[0].new_empty(rows, 3 * width)
    blocks = triton.cdiv(rows, BLOCK)
    sums = torch.empty(blocks, 3 * width, device=to.device)
    grid = (blocks, triton.cdiv(width, COLUMNS), 3)
    _merge[grid](
        *parts, to, sums, rows, seq, width, head, *like[:3],
        BLOCK=BLOCK, R=ROWS, C=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return to, sums
