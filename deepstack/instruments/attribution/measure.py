"""Attribution of ‖ΔF‖: the effect of the change of one group of parameters at a time."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepstack import config as conf
from deepstack.config import Columns
from deepstack.diagnostics import Instrument, Row, RunState, evaluating, measuring, token_distance
from deepstack.fast import ReplayedPass
from deepstack.instruments.attribution.settings import AttributionSettings
from deepstack.model import Bank, Built, Transformer, restored, set_banks

RANGES = 4
SCHEDULE, WHOLE = "schedule", "whole"

HiddenFunction = Callable[[Tensor], Tensor]
"""tokens -> F at the present parameters."""


class Attribution(Instrument, name="attribution"):
    """The effect of the change of each part on F, and of all of it."""

    passes: tuple[Transformer, HiddenFunction] | None = None

    def columns_of(self, built: Built) -> Columns:
        return columns_of(built, parts_of(built))

    def measure(self, state: RunState) -> Row:
        parts, start = parts_of(state.built), state.update.initial
        origin = own_settings(state).attribution_from
        hidden = self.hidden_of(state)
        with state.model.with_fast_paths():  # as F_0 and F_t of steps.csv
            row = attribute(state.built, state.initial, state.inputs, parts, start, origin, hidden)
        # Use the probe's values after the step, so that the number equals the one in steps.csv.
        row[WHOLE] = token_distance(state.update.previous - start)
        return row

    def hidden_of(self, state: RunState) -> HiddenFunction:
        """Return the function tokens -> F of the model, one for all rows of a run."""
        if self.passes is None or self.passes[0] is not state.model:
            self.passes = state.model, replayed_hidden(state)
        return self.passes[1]


class FirstOrder(Attribution, name="first_order"):
    """The same of the model linearised at θ_0."""

    def measure(self, state: RunState) -> Row:
        parts = parts_of(state.built)
        row = first_order(state.built, state.initial, state.inputs, parts)
        return {name: row.get(name) for name in columns_of(state.built, parts)}


def own_settings(state: RunState) -> AttributionSettings:
    """Return the `log` section, which has the settings of this instrument."""
    log: Any = state.config.log
    assert isinstance(log, AttributionSettings)
    return log


class Part(NamedTuple):
    """A group of parameters: one role in all layers and outside of them, or a range of layers.

    role: the role, None for a range.  All roles cover each parameter once, and so do all ranges.
    stack, layers: the range; stack None: parameters outside of the layers.
    """

    name: str
    sentence: str
    role: str | None = None
    stack: str | None = None
    layers: slice = slice(None)

    def indices(self, bank: Bank) -> list[int]:
        """Return the indices of the roles of a bank that are of this part."""
        is_whole = self.role is None and bank.stack == self.stack
        return [i for i, role in enumerate(bank.roles) if is_whole or role == self.role]

    def put_in(self, bank: Bank, values: Tensor, others: Tensor) -> Tensor:
        """Return a copy of `values` (depth, …) with this part from `others`, of equal shape."""
        mixed, count = values.clone(), len(bank.roles)
        for index in self.indices(bank):
            new = others.chunk(count, dim=1)[index][self.layers]
            mixed.chunk(count, dim=1)[index][self.layers] = new
        return mixed


def parts_of(built: Built) -> list[Part]:
    """Return the parts of a model: every role it has, the ranges of its layers, and `outside`.

    The layers of each stack are split into four ranges (fewer if it has fewer layers), named by
    their layers; the numbers continue from an encoder to its decoder.  `outside`: the parameters
    outside of the layers.
    """
    there = {role for bank in built.banks for role in bank.roles}
    roles = [*(role for role in conf.ROLES if role in there), *sorted(there - {*conf.ROLES})]
    parts = [Part(r, f"The parameters of role {r}, in whatever layer.", role=r) for r in roles]
    before = 0
    for side, stack in built.model.stacks.items():
        depth = len(stack.layers)
        count = min(RANGES, depth)
        ends = [depth * i // count for i in range(count + 1)]
        for first, end in pairwise(ends):
            numbers = before + first + 1, before + end
            sentence = "All parameters of layers {} to {}.".format(*numbers)
            name = "layers_{}_{}".format(*numbers)
            parts.append(Part(name, sentence, stack=side, layers=slice(first, end)))
        before += depth
    return [*parts, Part("outside", "All parameters outside of the layers.")]


def columns_of(built: Built, parts: Sequence[Part]) -> dict[str, tuple[str, str, str]]:
    """Return column -> symbol, unit, one sentence, without the step, in the order of the files."""
    columns = {p.name: (f"‖ΔF_{{{p.name.replace('_', ' ')}}}‖", "", p.sentence) for p in parts}
    if built.model.schemes[0].changes_by_step:
        sentence = "Changes of the scheme with the step, parameters as at initialisation."
        columns[SCHEDULE] = ("‖ΔF_{schedule}‖", "", sentence)
    return columns | {WHOLE: ("‖ΔF‖", "", "All of it at once: the model update of the step.")}


def replayed_hidden(state: RunState) -> HiddenFunction:
    """Return a model's tokens -> F: on a CPU the replay of a recorded pass, by torch's functions.

    A row of an attribution takes about fifteen passes.  torch's functions keep every bit, also in
    runs whose steps are too few to be replayed.
    """
    model, runtime = state.model, state.config.runtime
    is_plain = runtime.replay is not False and runtime.compile is not True
    if model.embedding.is_cuda or not model.schemes[0].static or not is_plain:
        return model.hidden
    replayed = ReplayedPass(model.hidden, kernels=None, threads=1)
    return lambda tokens: replayed(tokens).clone()  # the next replay overwrites the result


def attribute(
    built: Built,
    initial: Mapping[str, Tensor],
    tokens: Tensor,
    parts: Sequence[Part],
    start: Tensor,
    origin: Literal["initial", "current"] = "initial",
    hidden: HiddenFunction | None = None,
) -> dict[str, Tensor]:
    """Return how far the change of each part moves F: mean over probe tokens of the 2-norm.

    origin: `initial` applies the change to θ_0, ‖F(θ_0 + Δθ_part) − F(θ_0)‖; `current` takes it
        back from θ_t, ‖F(θ_t) − F(θ_t − Δθ_part)‖.
    initial: key of a bank -> θ_0, (depth, …).
    start: F_0 measured before training, from which `schedule` is the distance.  Each changed part
        costs one forward pass of the probe batch, and the origin costs one more.  The parameters
        are restored bit for bit.
    hidden: the model's tokens -> F in evaluation mode; by default `model.hidden`.
    """
    values: dict[str, Tensor] = {}
    model, banks = built.model, built.banks.all
    hidden = hidden or model.hidden
    with restored(banks) as current, torch.no_grad(), evaluating(model):
        first, last = (initial, current) if origin == "initial" else (current, initial)
        set_banks(banks, first)
        unmoved = hidden(tokens)
        for part in parts:
            mine = [bank for bank in banks if part.indices(bank)]
            mixed = {b.key: part.put_in(b, b.values(), last[b.key]) for b in mine}
            changed = [b for b in mine if not torch.equal(mixed[b.key], b.values())]
            set_banks(changed, mixed)
            moved = hidden(tokens) if changed else unmoved
            set_banks(changed, first)
            values[part.name] = token_distance(moved - unmoved)
        if model.schemes[0].changes_by_step:
            set_banks(banks, initial)
            values[SCHEDULE] = token_distance(hidden(tokens) - start)
    return values


def first_order(
    built: Built, initial: Mapping[str, Tensor], tokens: Tensor, parts: Sequence[Part]
) -> dict[str, Tensor]:
    """Return ‖J Δθ_part‖ of every part, J = ∂F/∂θ at θ_0, and of all of Δθ as `whole`.

    Forward-mode differentiation, exact to rounding: about three forward passes per part.  The
    vectors J Δθ_part of the roles add up to J Δθ, and so do the vectors of the ranges of layers.
    """
    vectors: dict[str, Tensor] = {}
    model, banks = built.model, built.banks.all
    with restored(banks) as present, torch.no_grad(), measuring(model):
        set_banks(banks, initial)
        moved = {bank.key: present[bank.key] - bank.values() for bank in banks}
        zero = {key: torch.zeros_like(value) for key, value in moved.items()}
        for part in parts:
            mine = [bank for bank in banks if part.indices(bank)]
            tangents = {b.key: part.put_in(b, zero[b.key], moved[b.key]) for b in mine}
            vectors[part.name] = push_forward(model, mine, tangents, tokens)
    total = reduce(torch.add, [vectors[part.name] for part in parts if part.role is not None])
    return {name: token_distance(vector) for name, vector in (vectors | {WHOLE: total}).items()}


def push_forward(
    model: Transformer, banks: Sequence[Bank], tangents: Mapping[str, Tensor], tokens: Tensor
) -> Tensor:
    """Return J t at the present θ, (batch, seq, d_model).  t: key of a bank -> (depth, …)."""
    named = dict(model.named_parameters())
    # Only the math kernel has a forward mode on every device.
    quiet = warnings.catch_warnings(action="ignore", category=DeprecationWarning)
    with quiet, forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {
            f"model.{name}": forward_ad.make_dual(named[name].detach(), tangent)
            for bank in banks
            for name, tangent in zip(bank.names, tangents[bank.key], strict=True)
        }
        F = functional_call(Hidden(model), duals, (tokens,))
        tangent = forward_ad.unpack_dual(F).tangent
        return torch.zeros_like(F) if tangent is None else tangent.clone()


class Hidden(nn.Module):
    """F as the output of a module, so that `functional_call` can replace its parameters."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.hidden(tokens)
