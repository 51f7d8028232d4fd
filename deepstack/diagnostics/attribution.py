"""Attribution of ‖ΔF‖: the effect of the change of one group of parameters at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepstack import config as conf
from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.parameters import Bank

RANGES = 4
SCHEDULE, WHOLE = "schedule", "whole"


@dataclass(frozen=True)
class Part:
    """A group of parameters: one role in all layers and outside of them, or a range of layers.

    pieces: key of a bank -> (layers, index of the role in the bank) of the part's parameters.
    is_role: whether it is a role.  All roles cover each parameter once, and so do all ranges.
    """

    name: str
    sentence: str
    pieces: Mapping[str, list[tuple[slice, int]]]
    is_role: bool

    def put_in(self, bank: Bank, values: Tensor, others: Tensor) -> Tensor:
        """Return a copy of `values` (depth, …) with this part from `others`, of equal shape."""
        mixed, count = values.clone(), len(bank.roles)
        for layers, index in self.pieces.get(bank.key, ()):
            mixed.chunk(count, dim=1)[index][layers] = others.chunk(count, dim=1)[index][layers]
        return mixed


def parts_of(model: Transformer, banks: Sequence[Bank]) -> list[Part]:
    """Return the parts of a model: every role it has, the ranges of its layers, and `outside`.

    The layers of each stack are split into four ranges (fewer if it has fewer layers), named by
    their layers; the numbers continue from an encoder to its decoder.  `outside`: the parameters
    outside of the layers.
    """
    there = {role for bank in banks for role in bank.roles}
    parts = []
    for role in [*(r for r in conf.ROLES if r in there), *sorted(there - {*conf.ROLES})]:
        pieces = {
            bank.key: [(slice(None), bank.roles.index(role))]
            for bank in banks
            if role in bank.roles
        }
        parts.append(Part(role, f"The parameters of role {role}, in whatever layer.", pieces, True))

    def whole_rows(stack: str | None, rows: slice) -> dict[str, list[tuple[slice, int]]]:
        mine = [bank for bank in banks if bank.stack == stack]
        return {bank.key: [(rows, i) for i in range(len(bank.roles))] for bank in mine}

    before = 0
    for side, stack in model.stacks.items():
        depth = len(stack.layers)
        count = min(RANGES, depth)
        for i in range(count):
            first, end = depth * i // count, depth * (i + 1) // count
            name = f"layers_{before + first + 1}_{before + end}"
            sentence = f"All parameters of layers {before + first + 1} to {before + end}."
            parts.append(Part(name, sentence, whole_rows(side, slice(first, end)), False))
        before += depth
    sentence = "All parameters outside of the layers."
    parts.append(Part("outside", sentence, whole_rows(None, slice(None)), False))
    return parts


def columns_of(model: Transformer, parts: Sequence[Part]) -> dict[str, tuple[str, str, str]]:
    """Return column -> symbol, unit, one sentence, without the step, in the order of the files."""
    columns = {p.name: (f"‖ΔF_{{{p.name.replace('_', ' ')}}}‖", "", p.sentence) for p in parts}
    if model.schemes[0].changes_by_step:
        columns[SCHEDULE] = (
            "‖ΔF_{schedule}‖",
            "",
            "Changes of the scheme with the step, parameters as at initialisation.",
        )
    return columns | {WHOLE: ("‖ΔF‖", "", "All of it at once: the model update of the step.")}


def attribute(
    model: Transformer,
    banks: Sequence[Bank],
    initial: Mapping[str, Tensor],
    tokens: Tensor,
    parts: Sequence[Part],
    start: Tensor,
) -> dict[str, Tensor]:
    """Return ‖F(θ_0 + Δθ_part) − F(θ_0)‖ of every part: mean over probe tokens of the 2-norm.

    initial: key of a bank -> θ_0, (depth, …); start: F_0 measured before training, from which
    `schedule` is the distance.  Each changed part costs one forward pass of the probe batch, and
    θ_0 costs one more.  The parameters are restored bit for bit.
    """
    values: dict[str, Tensor] = {}
    with restored(banks) as present, torch.no_grad(), evaluating(model):
        put(banks, initial)
        first = model.hidden(tokens)
        for part in parts:
            moved = first
            mine = [bank for bank in banks if bank.key in part.pieces]
            mixed = {b.key: part.put_in(b, b.values(), present[b.key]) for b in mine}
            changed = [b for b in mine if not torch.equal(mixed[b.key], b.values())]
            put(changed, mixed)
            if changed:
                moved = model.hidden(tokens)
            put(changed, initial)
            values[part.name] = distance(moved - first)
    if model.schemes[0].changes_by_step:
        values[SCHEDULE] = distance(first - start)
    return values


def first_order(
    model: Transformer,
    banks: Sequence[Bank],
    initial: Mapping[str, Tensor],
    tokens: Tensor,
    parts: Sequence[Part],
) -> dict[str, Tensor]:
    """Return ‖J Δθ_part‖ of every part, J = ∂F/∂θ at θ_0, and of all of Δθ as `whole`.

    Forward-mode differentiation, exact to rounding: about three forward passes per part.  The
    vectors J Δθ_part of the roles add up to J Δθ, and so do those of the ranges of layers.
    """
    values: dict[str, Tensor] = {}
    with restored(banks) as present, torch.no_grad(), evaluating(model), model.unfused():
        put(banks, initial)
        moved = {bank.key: present[bank.key] - bank.values() for bank in banks}
        zero = {key: torch.zeros_like(value) for key, value in moved.items()}
        total: Tensor | None = None
        for part in parts:
            mine = [bank for bank in banks if bank.key in part.pieces]
            tangents = {b.key: part.put_in(b, zero[b.key], moved[b.key]) for b in mine}
            vector = push_forward(model, mine, tangents, tokens)
            values[part.name] = distance(vector)
            if part.is_role:
                total = vector if total is None else total + vector
    assert total is not None
    return values | {WHOLE: distance(total)}


def push_forward(
    model: Transformer, banks: Sequence[Bank], tangents: Mapping[str, Tensor], tokens: Tensor
) -> Tensor:
    """Return J t at the present θ, (batch, seq, d_model).  t: key of a bank -> (depth, …)."""
    named = dict(model.named_parameters())
    # Only the math kernel has a forward mode on every device.
    with quiet(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {
            f"model.{name}": forward_ad.make_dual(named[name].detach(), tangent)
            for bank in banks
            for name, tangent in zip(names_of(bank), tangents[bank.key], strict=True)
        }
        F = functional_call(Hidden(model), duals, (tokens,))
        tangent = forward_ad.unpack_dual(F).tangent
        return torch.zeros_like(F) if tangent is None else tangent.clone()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's `torch.jit.script` deprecation warning about its own derivatives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        yield


class Hidden(nn.Module):
    """F as the output of a module, so that `functional_call` can replace its parameters."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.hidden(tokens)


def names_of(bank: Bank) -> list[str]:
    """Return the names in the model of a bank's parameters, one per row."""
    if bank.stack is None:
        return [bank.key]
    prefix = f"{bank.stack}.layers."
    name = bank.key.removeprefix(prefix)
    return [f"{prefix}{layer}.{name}" for layer in range(len(bank.values()))]


def distance(moved: Tensor) -> Tensor:
    """Return the mean over tokens of ‖·‖₂, the norm of the model update."""
    return moved.norm(dim=-1).mean()


@contextmanager
def restored(banks: Sequence[Bank]) -> Iterator[dict[str, Tensor]]:
    """Yield key -> the present parameters of these banks, and restore them after the block."""
    present = {bank.key: bank.values().clone() for bank in banks}
    try:
        yield present
    finally:
        put(banks, present)


def put(banks: Sequence[Bank], values: Mapping[str, Tensor]) -> None:
    """Set the parameters of these banks to the values by key."""
    for bank in banks:
        bank.copy_(values[bank.key])
