"""Replaces recorded operations by their `out=` variants, which write into given memory.

A variant is used only if it gives the same bits as the operation on random numbers of the same
shapes.  Otherwise the operation runs and its results are copied into the given memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.fast.recording import Call, Shape, TensorRef, converted, shapes_of

aten = torch.ops.aten

Operation = tuple[Callable[..., Any], Any, dict[str, Any]]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# These Python functions of torch take a microsecond less to call than the equal operations.
SHORT: dict[Any, Callable[..., Any]] = {
    aten.add.out: torch.add,
    aten.add_.Tensor: Tensor.add_,
    aten.addmm.out: torch.addmm,
    aten.addmm_.default: Tensor.addmm_,
    aten.bmm.out: torch.bmm,
    aten.cat.out: torch.cat,
    aten.copy_.default: Tensor.copy_,
    aten.div.out: torch.div,
    aten.mm.out: torch.mm,
    aten.mul.out: torch.mul,
    aten.mul_.Tensor: Tensor.mul_,
    aten.relu_.default: torch.relu_,
    aten.sub.out: torch.sub,
    aten.sum.IntList_out: torch.sum,
}
# Operations with a scalar: their own `out=` variants compute elsewhere and copy.  torch's
# functions accept a scalar in place of the tensor argument of these variants.
WITH_NUMBER = {packet.Scalar: packet.out for packet in (aten.div, aten.mul)}
# Options of an operation that its `out=` variant takes from the given tensor.
OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def callable_of(call: Call, tensor: Callable[[TensorRef], Tensor]) -> Operation:
    """Return the call with tensors for TensorRefs, writing its results into their tensors."""
    args = converted(call.args, tensor, TensorRef)
    kwargs = {name: converted(value, tensor, TensorRef) for name, value in call.kwargs.items()}
    results = {index: tensor(place) for index, place in call.results.items()}
    operation = call.operation
    if results:
        variant = writing(operation)
        if variant is None or len(variant.outs) != len(results) or not same_bits(call):
            return copying(operation, results), args, kwargs
        operation, kwargs = variant.operation, variant.options(kwargs, results)
    return SHORT.get(operation, operation._op), args, kwargs


class Writing(NamedTuple):
    """The `out=` variant of an operation, which writes into the arguments named `outs`."""

    operation: Any
    outs: tuple[str, ...]
    dropped: frozenset[str]  # options that the variant takes from the given tensors

    def options(self, kwargs: dict[str, Any], results: dict[int, Tensor]) -> dict[str, Any]:
        """Return the keyword arguments of the variant: kept options and output tensors."""
        kept = {name: value for name, value in kwargs.items() if name not in self.dropped}
        return kept | dict(zip(self.outs, results.values(), strict=True))


@cache
def writing(operation: Any) -> Writing | None:
    """Return the `out=` variant of an operation, or None if torch has none."""
    if operation in WITH_NUMBER:
        return Writing(WITH_NUMBER[operation], ("out",), frozenset())
    packet, own = operation._overloadpacket, operation._schema
    if own.is_mutable:
        return None
    names = [(a.name, str(a.type)) for a in own.arguments]
    for overload in packet.overloads():
        other = getattr(packet, overload)
        outs = [a for a in other._schema.arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        dropped = frozenset(name for name, _ in names) - {name for name, _ in rest}
        fits = [n for n in names if n[0] not in dropped] == rest and dropped <= OPTIONS
        single = all(str(a.type) == "Tensor" for a in outs)
        if fits and single and len(outs) == len(own.returns) > 0:
            return Writing(other, tuple(a.name for a in outs), dropped)
    return None


def same_bits(call: Call) -> bool:
    """Return whether the `out=` variant gives the operation's exact bits on random numbers.

    Some variants of torch do not: that of batch norm is wrong for non-contiguous rows.
    """
    kwargs = tuple((name, shapes_of(value)) for name, value in call.kwargs.items())
    results = tuple((index, shapes_of(place)) for index, place in call.results.items())
    return _tried(call.operation, shapes_of(call.args), kwargs, results)


@cache
def _tried(
    operation: Any,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    results: tuple[tuple[int, Shape], ...],
) -> bool:
    variant = writing(operation)
    assert variant is not None
    with torch.random.fork_rng(devices=[]):
        given, options = drawn(args, kwargs)
        try:
            found = operation(*given, **options)
        except RuntimeError:  # the operation rejects these shapes
            return False
        values = found if isinstance(found, (list, tuple)) else (found,)
        expected = [values[index] for index, _ in results]
        if any(x.shape != shape.size for x, (_, shape) in zip(expected, results, strict=True)):
            return False
        given, options = drawn(args, kwargs)
        outs = {index: filled(shape) for index, shape in results}
        run = SHORT.get(variant.operation, variant.operation)
        run(*given, **variant.options(options, outs))
    return all(map(equal_bits, expected, outs.values()))


def drawn(args: Any, kwargs: tuple[tuple[str, Any], ...]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with a tensor for each Shape, drawn from a fixed seed."""
    torch.manual_seed(0)
    return converted(args, filled, Shape), {n: converted(v, filled, Shape) for n, v in kwargs}


def filled(shape: Shape) -> Tensor:
    """Return a tensor of this shape: random if floating point, else zeros (safe as indices)."""
    extent = 1 + sum((n - 1) * step for n, step in zip(shape.size, shape.stride, strict=True))
    numbers = torch.zeros(extent if 0 not in shape.size else 0, dtype=shape.dtype)
    if shape.dtype.is_floating_point:
        numbers.normal_()
    return numbers.as_strided(shape.size, shape.stride)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors agree to the last bit, NaNs included."""
    word = WORDS[one.dtype.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(word), other.view(word))


def copying(operation: Any, results: dict[int, Tensor]) -> Callable[..., None]:
    """Return a function that runs the operation and copies its results into the given tensors."""
    run, places = operation._op, list(results.items())

    def one(*args: Any, **kwargs: Any) -> None:
        only.copy_(run(*args, **kwargs))

    def several(*args: Any, **kwargs: Any) -> None:
        found = run(*args, **kwargs)
        for index, place in places:
            place.copy_(found[index])

    if [str(value.type) for value in operation._schema.returns] == ["Tensor"]:
        only = results[0]
        return one
    return several
