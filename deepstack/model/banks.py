"""Parameters stacked by role: one tensor (depth, …) where there would be one a layer.

All layers of a stack have equal shapes, so each parameter of a layer becomes a row of one tensor
over all layers, and the modules hold views of its rows.  An optimizer then touches a dozen
tensors instead of twelve thousand, and a norm by layer is one line.  Gradients live in a second
tensor of the same shape, whose rows are the `.grad` of the modules' parameters.  They are set to
zero in place, because setting them to None would detach them from their bank.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from deepstack.model.loop import Loop
from deepstack.schemes.role import RoleParameter, Start, with_storage

# Rows are padded with zeros to a multiple of this many numbers (a cache line).  The fused CPU
# optimizers round the last few numbers of a tensor, those that fill no vector register, in another
# way than the rest; no parameter is ever among them, so a bank and plain parameters stay equal.
ALIGNMENT = 16


class Bank:
    """One parameter of every layer: a key, its role(s), and tensors over all layers.

    parameters: the optimizer's tensors: one tensor (depth, padded size) over all layers or, with
        plain storage, one (1, padded size) a layer.
    shape: of one layer's parameter.
    roles: one name, or one an equal slice of the first axis of shape (the fused q, k, v).
    stack: which layers ('encoder', 'decoder'); None for a parameter outside of the layers
        (embedding, head, …), whose depth axis then has length 1.
    starts: how it starts in each layer.
    start: whether that is as a matrix or a table, which decay, or as the first one.
    """

    def __init__(
        self,
        key: str,
        layers: Sequence[RoleParameter],
        stack: str | None,
        device: torch.device,
        stacked: bool,
    ) -> None:
        first = layers[0]
        self.key, self.roles, self.shape, self.stack = key, first.roles, first.shape, stack
        self.starts: list[Start] = [layer.start for layer in layers]
        drawn = (start for start in self.starts if start in ("matrix", "table"))
        self.start = next(drawn, first.start)
        count = len(layers) if stacked else 1
        size = count, padded_size(self.shape)
        self.parameters = [
            nn.Parameter(torch.zeros(size, device=device)) for _ in range(len(layers) // count)
        ]
        for parameter in self.parameters:
            parameter.grad = torch.zeros(size, device=device)

    def of_layers(self) -> Iterator[RoleParameter]:
        """Yield the parameter of each layer, a view whose gradient is also a view."""
        starts = iter(self.starts)
        for parameter in self.parameters:
            assert parameter.grad is not None
            values, gradients = self.shaped(parameter.detach()), self.shaped(parameter.grad)
            for row, gradient in zip(values, gradients, strict=True):
                view = with_storage(row, self.roles, next(starts))
                view.grad = gradient
                yield view

    @property
    def in_layers(self) -> bool:
        """Whether there is one in every layer of a stack."""
        return self.stack is not None

    @property
    def names(self) -> list[str]:
        """The parameter's names in the model, one a layer."""
        if self.stack is None:
            return [self.key]
        prefix = f"{self.stack}.layers."
        name = self.key.removeprefix(prefix)
        return [f"{prefix}{layer}.{name}" for layer in range(len(self.starts))]

    def by_role(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Each role with its values: views (rows, …), one a tensor in `parameters`."""
        for index, role in enumerate(self.roles):
            parts = [self.shaped(p.detach()) for p in self.parameters]
            yield role, [part.chunk(len(self.roles), dim=1)[index] for part in parts]

    def shaped(self, rows: Tensor) -> Tensor:
        """(rows, padded size) -> (rows, …), a view without the padding."""
        return rows[:, : math.prod(self.shape)].view(len(rows), *self.shape)

    def values(self) -> Tensor:
        """The parameters as one tensor (depth, …): the bank itself, or a copy of plain ones."""
        return self.shaped(self.whole([p.detach() for p in self.parameters]))

    def gradients(self) -> Tensor:
        """Their gradients as one tensor (depth, …)."""
        return self.shaped(self.gradient_rows())

    def gradient_rows(self) -> Tensor:
        """Their gradients as one matrix (depth, padded size)."""
        return self.whole([p.grad for p in self.parameters if p.grad is not None])

    def whole(self, parts: list[Tensor]) -> Tensor:
        """Tensors like `parameters` as one tensor (depth, padded size)."""
        return joined(parts)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """A tensor (depth, …) as one tensor for each of `parameters`: the inverse of `whole`."""
        return list(whole.split(len(self.parameters[0])))

    def copy_(self, values: Tensor) -> None:
        """Overwrite the parameters with values of shape (depth, …)."""
        with torch.no_grad():
            for part, new in zip(self.parameters, self.parts(values), strict=True):
                self.shaped(part).copy_(new)

    @torch.no_grad()
    def tie(self, loop: Loop) -> None:
        """Give repeated layers the parameters of the layers that they repeat."""
        values = self.values()
        self.copy_(loop.spread(loop.once(values), len(values)))

    @torch.no_grad()
    def sum_repeats(self, loop: Loop) -> None:
        """Give every layer the sum of the gradients of the layers with its parameters."""
        rows = self.gradient_rows()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_copy_(gradients, self.parts(loop.spread(loop.sums(rows), len(rows))))

    @torch.no_grad()
    def change(self, by: Callable[[str, Tensor], None]) -> None:
        """Let `by` change each role's values in place: (role, (depth, …)), all layers at once."""
        for role, parts in self.by_role():
            values = joined(parts)
            by(role, values)
            if len(parts) > 1:
                torch._foreach_copy_(parts, list(values.split(1)))


class Banks:
    """Gives a model built on the meta device its storage, and knows every parameter by role.

    stacks: name -> layers, modules with equal parameter names and shapes, which the model has as
        `<name>.layers`.  stacked=False gives every layer storage of its own; the numbers are the
        same bit for bit.
    loop: which layers repeat the parameters of others.  Each repetition has a copy, so that a layer
        has its row in every bank; equal gradients keep the copies equal.  None: no layer.
    """

    def __init__(
        self,
        model: nn.Module,
        stacks: Mapping[str, Sequence[nn.Module]],
        device: torch.device,
        stacked: bool = True,
        loop: Loop | None = None,
    ) -> None:
        self.all: list[Bank] = []
        self.loop = loop
        for path, owners, stack in modules_of(model, stacks):
            for name, parameter in owners[0]._parameters.items():
                if parameter is not None:
                    key = f"{path}.{name}" if path else name
                    layers = [cast(RoleParameter, owner._parameters[name]) for owner in owners]
                    bank = Bank(key, layers, stack, device, stacked)
                    for owner, view in zip(owners, bank.of_layers(), strict=True):
                        owner._parameters[name] = view
                    self.all.append(bank)
        self._gradients = [p.grad for b in self.all for p in b.parameters if p.grad is not None]
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(device)

    def zero_gradients(self) -> None:
        """Set every gradient to zero, in place."""
        torch._foreach_zero_(self._gradients)

    def tie(self) -> None:
        """Make repeated layers equal, if there are any."""
        for bank in self.all:
            if self.loop and bank.in_layers:
                bank.tie(self.loop)

    def sum_repeats(self) -> None:
        """Sum the gradients of shared parameters over their repetitions."""
        for bank in self.all:
            if self.loop and bank.in_layers:
                bank.sum_repeats(self.loop)

    def state(self) -> dict[str, Tensor]:
        """Every parameter by key, as tensors (depth, …)."""
        return {bank.key: bank.values() for bank in self.all}

    def load(self, state: dict[str, Tensor]) -> None:
        """Overwrite every parameter; a key that is missing raises KeyError."""
        for bank in self.all:
            bank.copy_(state[bank.key])

    def count(self) -> dict[str, int]:
        """Return the number of parameters by role; shared parameters count once."""
        counts: dict[str, int] = {}
        for bank in self.all:
            layers = len(bank.starts)
            once = self.loop.owners if self.loop and bank.in_layers else layers
            for role, values in bank.by_role():
                every = sum(v.numel() for v in values)
                counts[role] = counts.get(role, 0) + every // layers * once
        return counts

    def __iter__(self) -> Iterator[Bank]:
        return iter(self.all)


def modules_of(
    model: nn.Module, stacks: Mapping[str, Sequence[nn.Module]]
) -> Iterator[tuple[str, list[nn.Module], str | None]]:
    """Yield path, modules and stack: each module outside of layers, and all layers' at a path."""
    in_stacks = {layer for layers in stacks.values() for layer in layers}
    for path, module in model.named_modules(in_stacks):  # none of those inside of them
        yield path, [module], None
    for stack, layers in stacks.items():
        for path, _ in layers[0].named_modules():
            inside = f"{stack}.layers.{path}" if path else f"{stack}.layers"
            yield inside, [layer.get_submodule(path) for layer in layers], stack


def layer_norms(tensors: Sequence[Tensor]) -> Tensor:
    """sqrt(sum over tensors of ‖t[l]‖²) for every layer l: tensors (depth, …) -> (depth,)."""
    squares = [torch.linalg.vector_norm(t.reshape(len(t), -1), dim=1) for t in tensors]
    return torch.linalg.vector_norm(torch.stack(squares), dim=0)


def global_norm(banks: Sequence[Bank], loop: Loop | None = None) -> Tensor:
    """The norm of all gradients of these banks, taken as the norm of the norms by layer.

    loop: which layers repeat others, of which each counts once.  One fp32 norm over a whole bank is
        off by 6e-4 at depth 1000, and differs from plain storage.
    """
    rows = [
        loop.once(b.gradient_rows()) if loop and b.in_layers else b.gradient_rows() for b in banks
    ]
    by_layer = [torch.linalg.vector_norm(row, dim=1) for row in rows]
    return torch.linalg.vector_norm(torch.cat(by_layer))


def padded_size(shape: Sequence[int]) -> int:
    """The numbers that a row of a bank holds for a parameter of this shape."""
    return -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT


def joined(parts: list[Tensor]) -> Tensor:
    """Tensors as one along the first axis: the very tensor where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextmanager
def restored(banks: Sequence[Bank]) -> Iterator[dict[str, Tensor]]:
    """Yield key -> the present parameters of these banks, and restore them after the block."""
    present = {bank.key: bank.values().clone() for bank in banks}
    try:
        yield present
    finally:
        set_banks(banks, present)


def set_banks(banks: Sequence[Bank], values: Mapping[str, Tensor]) -> None:
    """Set the parameters of these banks to the values by key."""
    for bank in banks:
        bank.copy_(values[bank.key])
