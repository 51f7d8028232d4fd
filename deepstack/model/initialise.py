"""Initialisation: one table, role -> distribution, which is what the code loops over."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.schemes import find_scheme, with_options
from deepstack.speed import Bank, Banks

# what has a random stream: number 8 * layer + index in a layer, the index alone outside of them
IN_LAYERS = ("q", "k", "v", "o", "w1", "w2")
OUTSIDE = ("embedding", "position", "head.weight", "head.dense")

# a start that is a number says so itself
CONSTANTS: dict[Any, Any] = {"zero": 0.0, "one": 1.0}

# standard deviation of a matrix (n_out, n_in) under gain 1
FANS: dict[str, Callable[[int, int], float]] = {
    "in_out": lambda n_in, n_out: math.sqrt(2 / (n_in + n_out)),
    "in": lambda n_in, n_out: math.sqrt(1 / n_in),
}

# fill a tensor with independent numbers of mean 0 and this standard deviation
DISTRIBUTIONS: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = {
    "xavier_normal": lambda t, std, rng: t.normal_(0.0, std, generator=rng),
    "xavier_uniform": lambda t, std, rng: t.uniform_(
        -math.sqrt(3) * std, math.sqrt(3) * std, generator=rng
    ),
}


def initialise(banks: Banks, model: conf.Model, seed: int) -> None:
    """Draw every parameter: matrices Xavier times the scheme's gain, tables N(0, 1/d), rest 0 or 1.

    | start  | roles                                  | distribution                              |
    |--------|----------------------------------------|-------------------------------------------|
    | matrix | q k v o w1 w2 (and a BERT head's dense) | mean 0, std gain * sqrt(2/(n_in + n_out)) |
    | table  | embedding, position, a separate head   | N(0, gain^2/d_model)                      |
    | zero   | bias, norm_bias                        | 0                                         |
    | one    | norm_gain                              | 1                                         |
    | number | what a scheme owns                     | that number                               |

    'init.fan: in' makes the standard deviation of a matrix gain / sqrt(n_in).  Every matrix has a
    random stream of its own, numbered by seed, role and layer: a layer starts from the same numbers
    whatever the depth and the scheme (its gain apart), so that comparisons are paired.
    """
    scheme, options = find_scheme(model.scheme, model.scheme_options)
    gain_of = with_options(scheme.gain, options)
    with torch.no_grad():
        for bank in banks:
            for role, tensors in bank.by_role():
                rows = [row for tensor in tensors for row in tensor]
                for layer, row in enumerate(rows, start=1):
                    if bank.start not in ("matrix", "table"):
                        row.fill_(CONSTANTS.get(bank.start, bank.start))
                        continue
                    gain = gain_of(role, layer if bank.in_layers else 0, model.depth)
                    rng = generator(seed, stream_number(bank, role, layer), row.device)
                    if bank.start == "table":
                        row.normal_(0.0, gain / math.sqrt(row.shape[-1]), generator=rng)
                        continue
                    std = gain * FANS[model.init.fan](row.shape[1], row.shape[0])
                    DISTRIBUTIONS[model.init.distribution](row, std, rng)


def stream_number(bank: Bank, role: str, layer: int) -> int:
    """The random stream of a matrix; one that a scheme brings along gets a hash of its name."""
    if bank.in_layers and role in IN_LAYERS:
        return 8 * layer + IN_LAYERS.index(role)
    if not bank.in_layers and bank.key in OUTSIDE:
        return OUTSIDE.index(bank.key)
    digest = hashlib.sha256(f"{bank.key}/{role}/{layer}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def generator(seed: int, number: int, device: torch.device) -> torch.Generator:
    """Random stream `number` of a seed.  A CPU generator keeps 32 bits, so numbers are added."""
    base = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "little")
    return torch.Generator(device).manual_seed((base + number) % 2**32)
