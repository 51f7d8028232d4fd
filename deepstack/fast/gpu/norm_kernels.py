"""Layer and RMS norms on a GPU, in Triton, with the sum before them and a copy for products.

One launch and one pass over memory compute z = a x + y, norm(z) and its copy in bf16.  Another one
computes the gradients of x and y and the sums over tokens for the gradients of gain and bias.

The same kernels norm the heads of queries and keys.  [q, k, v] are then rows of d_head numbers: of
every token `heads` rows of q and `keys` rows each of k and of v, which stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384  # row that one tile holds
FORWARD, BACKWARD = 1024, 2048  # numbers of a tile: as many rows as fit
PROGRAMS = 528  # of the backward pass, at most; each leaves a row of sums


@triton.jit
def _part(row, HEADS: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether rows of [q, k, v] are of q, 0, of k, 1, or of v, 2."""
    head = row % (HEADS + 2 * KEYS)
    return (head >= HEADS).to(tl.int64) + (head >= HEADS + KEYS).to(tl.int64)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, y, g, b, z, out, copy, mean, rstd, scale, eps, rows, width: tl.constexpr,
    SUM: tl.constexpr, GAIN: tl.constexpr, BIAS: tl.constexpr, COPY: tl.constexpr,
    SAVE: tl.constexpr, RMS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    at = row[:, None] * width + column
    inside = (row[:, None] < rows) & (column < width)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SUM:
        v = v * scale + tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if SAVE:
            tl.store(z + at, v, mask=inside)
    if RMS:
        centred = v
    else:
        m = tl.sum(v, 1) / width
        centred = tl.where(column < width, v - m[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    normalised = centred * r[:, None]
    if HEADS:
        if KEYS == HEADS:
            part = (row // HEADS % 3)[:, None]  # 0: of q, 1: of k, 2: of v
        else:
            part = _part(row, HEADS, KEYS)[:, None]
        if GAIN:
            known = (column < width) & (part < 2)
            normalised *= tl.load(g + part * width + column, mask=known, other=0.0)
        if BIAS:
            known = (column < width) & (part < 2)
            normalised += tl.load(b + part * width + column, mask=known, other=0.0)
        normalised = tl.where(part < 2, normalised, v)
    else:
        if GAIN:
            normalised *= tl.load(g + column, mask=column < width, other=0.0)
        if BIAS:
            normalised += tl.load(b + column, mask=column < width, other=0.0)
    tl.store(out + at, normalised.to(out.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(copy + at, normalised.to(copy.dtype.element_ty), mask=inside)
    if SAVE:
        if not RMS:
            tl.store(mean + row, m, mask=row < rows)
        tl.store(rstd + row, r, mask=row < rows)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dout, z, mean, rstd, g, dx, dy, sums, scale, rows, width: tl.constexpr,
    SUM: tl.constexpr, GAIN: tl.constexpr, KINDS: tl.constexpr,
    RMS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, D)
    known = (column < width)[None, :]
    gain_sums = tl.zeros((R, D), dtype=tl.float32)
    bias_sums = tl.zeros((R, D), dtype=tl.float32)
    term_sums = tl.zeros((R, D), dtype=tl.float32)
    if HEADS:  # the sums above are of q
        key_gain_sums = tl.zeros((R, D), dtype=tl.float32)
        key_bias_sums = tl.zeros((R, D), dtype=tl.float32)
    for tile in range(first, tl.cdiv(rows, R), step):
        row = (tile * R + tl.arange(0, R)).to(tl.int64)
        at = row[:, None] * width + column[None, :]
        inside = (row[:, None] < rows) & known
        d = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        if RMS:
            r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
            normal = v * r
        else:
            m = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
            r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
            normal = tl.where(inside, v - m, 0.0) * r
        if HEADS:
            if KEYS == HEADS:
                part = (row // HEADS % 3)[:, None]
            else:
                part = _part(row, HEADS, KEYS)[:, None]
            given = d
            gain_sums += tl.where(part == 0, d * normal, 0.0)
            bias_sums += tl.where(part == 0, d, 0.0)
            key_gain_sums += tl.where(part == 1, d * normal, 0.0)
            key_bias_sums += tl.where(part == 1, d, 0.0)
            if GAIN:
                of_part = g + part * width + column[None, :]
                d *= tl.load(of_part, mask=known & (part < 2), other=0.0)
        else:
            gain_sums += d * normal
            bias_sums += d
            if GAIN:
                d *= tl.load(g + column, mask=column < width, other=0.0)[None, :]
        along = tl.sum(d * normal, 1)[:, None] / width
        if RMS:
            gradient = (d - normal * along) * r
        else:
            gradient = (d - tl.sum(d, 1)[:, None] / width - normal * along) * r
        if HEADS:
            gradient = tl.where(part < 2, gradient, given)
        if SUM:
            tl.store(dy + at, gradient.to(dy.dtype.element_ty), mask=inside)
            term_sums += gradient
            gradient *= scale
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
    to = sums + first * KINDS * width + column
    tl.store(to, tl.sum(gain_sums, 0), mask=column < width)
    tl.store(to + width, tl.sum(bias_sums, 0), mask=column < width)
    if SUM:
        tl.store(to + 2 * width, tl.sum(term_sums, 0), mask=column < width)
    if HEADS:
        tl.store(to + 2 * width, tl.sum(key_gain_sums, 0), mask=column < width)
        tl.store(to + 3 * width, tl.sum(key_bias_sums, 0), mask=column < width)


class Normed(NamedTuple):
    """norm(z), its copy in another precision, and tensors for the backward pass.

    out: (…, d).
    saved: z, and mean and 1/sqrt(var + eps) of its rows; of an RMS norm twice 1/sqrt(mean(z²) +
        eps).  copy and saved are None unless requested.
    """

    out: Tensor
    copy: Tensor | None
    saved: tuple[Tensor, Tensor, Tensor] | None


def normed(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    plus: Tensor | None = None,
    scale: float = 1.0,
    copy: torch.dtype | None = None,
    save: bool = True,
    rms: bool = False,
    heads: int = 0,
    keys: int = 0,
) -> Normed:
    """Return LN(x), or LN(scale x + plus).  x: (…, d) fp32; plus: (…, d) in any precision.

    rms: the RMS norm in place of LN.
    heads, keys: x is [q, k, v] by head, (tokens, heads + 2 keys, d_head), in any precision; gain
        and bias are (2, d_head), of q and of k.  keys: 0 for as many as heads.
    copy: the precision of a copy of the result.
    save: keep tensors for the backward pass.
    """
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    y = x if plus is None else plus.contiguous()
    out = torch.empty_like(x)
    z = torch.empty_like(x) if save and plus is not None else x
    second = torch.empty_like(x, dtype=copy) if copy else None
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2)) if save else (x, x)
    mean = rstd if rms else mean
    R, D = tile(FORWARD, rows, width)
    _forward[(triton.cdiv(rows, R),)](
        x, y, x if gain is None else gain, x if bias is None else bias,
        z, out, out if second is None else second, mean, rstd, scale, eps, rows, width,
        SUM=plus is not None, GAIN=gain is not None, BIAS=bias is not None,
        COPY=second is not None, SAVE=save, RMS=rms, HEADS=heads, KEYS=keys or heads, R=R, D=D,
        num_warps=warps(D),
    )  # fmt: skip
    return Normed(out, second, (z, mean, rstd) if save else None)


def normed_backward(
    dout: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    gain: Tensor | None,
    *,
    scale: float = 1.0,
    plus: torch.dtype | None = None,
    rms: bool = False,
    heads: int = 0,
    keys: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of x and of `plus` (in the precision `plus`), and sums over tokens.

    rms, heads, keys: as of `normed`.

    sums: (programs, 2 or 3, d).  Added over programs they are the gradients of gain and of bias,
    and the sum over tokens of the gradient of `plus`.  With heads (programs, 4, d_head): gain and
    bias of q, gain and bias of k.
    """
    z, mean, rstd = saved
    dout = dout.contiguous()
    width = z.shape[-1]
    rows = z.numel() // width
    dx = torch.empty_like(z)
    dy = torch.empty_like(z, dtype=plus) if plus else None
    R, D = tile(BACKWARD, rows, width)
    programs = min(PROGRAMS, triton.cdiv(rows, R))
    kinds = 4 if heads else 2 if dy is None else 3
    sums = z.new_empty(programs, kinds, width, dtype=torch.float32)
    _backward[(programs,)](
        dout, z, mean, rstd, z if gain is None else gain, dx, dx if dy is None else dy, sums,
        scale, rows, width,
        SUM=dy is not None, GAIN=gain is not None, KINDS=kinds, RMS=rms,
        HEADS=heads, KEYS=keys or heads, R=R, D=D, num_warps=warps(D),
    )  # fmt: skip
    return dx, dy, sums


def tile(numbers: int, rows: int, width: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of so many numbers."""
    D = triton.next_power_of_2(width)
    return max(1, min(numbers // D, triton.next_power_of_2(rows))), D


def warps(columns: int) -> int:
    """Return the warps of a program: more for long rows, which need more registers."""
    return max(2, min(16, columns // 512))
