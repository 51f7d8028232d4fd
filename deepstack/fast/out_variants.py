"""An operation in the form that writes its results into memory that is there already."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.fast.probe_fusion import Operation, equal_bits
from deepstack.fast.recording import Call, Shape, TensorRef, converted, shapes_of

aten = torch.ops.aten

# torch's functions in Python take a microsecond less to call than the operations they stand for.
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
# Operations with a number: their own forms that write compute elsewhere and copy, while torch's
# functions take a number where these take a tensor.
WITH_NUMBER = {packet.Scalar: packet.out for packet in (aten.div, aten.mul)}
# What an operation says of what it makes, and its form that writes reads off what it is given.
OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def callable_of(call: Call, tensor: Callable[[TensorRef], Tensor]) -> Operation:
    """The call with tensors for TensorRefs, writing its results where they belong."""
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
    """The form of an operation that writes its results into the tensors named `outs`."""

    operation: Any
    outs: tuple[str, ...]
    dropped: frozenset[str]  # options of the operation, which are those of its results

    def options(self, kwargs: dict[str, Any], results: dict[int, Tensor]) -> dict[str, Any]:
        """What it is given by name."""
        kept = {name: value for name, value in kwargs.items() if name not in self.dropped}
        return kept | dict(zip(self.outs, results.values(), strict=True))


@cache
def writing(operation: Any) -> Writing | None:
    """The form of an operation that writes into given tensors, or None where torch has none."""
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
    """Whether the form that writes gives the bits of the operation itself, tried on random numbers.

    Not all of torch's do: that of batch norm is wrong where rows do not lie side by side.
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
        except RuntimeError:  # it cannot be done to as many rows
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
    """The arguments with a tensor of random numbers for each Shape, every time the same."""
    torch.manual_seed(0)
    return converted(args, filled, Shape), {n: converted(v, filled, Shape) for n, v in kwargs}


def filled(shape: Shape) -> Tensor:
    """A tensor of this shape, of random numbers, or of zeros where they may count something."""
    extent = 1 + sum((n - 1) * step for n, step in zip(shape.size, shape.stride, strict=True))
    numbers = torch.zeros(extent if 0 not in shape.size else 0, dtype=shape.dtype)
    if shape.dtype.is_floating_point:
        numbers.normal_()
    return numbers.as_strided(shape.size, shape.stride)


def copying(operation: Any, results: dict[int, Tensor]) -> Callable[..., None]:
    """The operation, and its results copied to where they belong: torch has no form that writes."""
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
