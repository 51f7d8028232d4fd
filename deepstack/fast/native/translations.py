"""The records of each elementwise operation, copy, sum and norm."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from deepstack.fast.native import layouts
from deepstack.fast.native.layouts import need
from deepstack.fast.native.translate import Operands, Translator, translates
from deepstack.fast.recording import TensorRef


def is_number(value: Any) -> bool:
    """Return whether an argument is a Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def with_in_place(name: str) -> list[str]:
    """Return an operation and its forms that write into their argument or into `out`."""
    return [f"{name}.default", f"{name}_.default", f"{name}.out"]


# Functions of one number without options, by operation.
UNARY = {
    "abs": "abs", "sgn": "sign", "sign": "sign", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "reciprocal": "reciprocal", "exp": "exp", "log": "log", "sin": "sine", "cos": "cosine",
    "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "silu": "silu", "square": "square",
}  # fmt: skip


def unary(kind: str, t: Translator, o: Operands) -> None:
    """Add a function of one number."""
    t.elementwise(kind, o.out, o.args[0])


for operation, kind in UNARY.items():
    translates(*with_in_place(operation))(partial(unary, kind))


@translates(*with_in_place("neg"))
def negate(t: Translator, o: Operands) -> None:
    t.elementwise("scale", o.out, o.args[0], constants=[-1.0, 0.0])


@translates("clone.default", "copy_.default", "_to_copy.default", "alias_copy.default")
def copy(t: Translator, o: Operands) -> None:
    source = o.args[1] if not o.results else o.args[0]
    t.copy(o.out, source)


@translates("add.Tensor", "add_.Tensor", "add.Scalar", "add_.Scalar", "add.out")
def add(t: Translator, o: Operands, sign: float = 1.0) -> None:
    x, y = o.args[:2]
    alpha = sign * o.arg(2, "alpha", 1)
    if is_number(y):
        t.elementwise("scale", o.out, x, constants=[1.0, alpha * y])
    else:
        t.elementwise("add", o.out, x, y, constants=[alpha])


translates("sub.Tensor", "sub_.Tensor", "sub.Scalar", "sub_.Scalar", "sub.out")(
    partial(add, sign=-1.0)
)


@translates("rsub.Scalar")
def reversed_subtract(t: Translator, o: Operands) -> None:
    need(is_number(o.args[1]) and o.arg(2, "alpha", 1) == 1)
    t.elementwise("scale", o.out, o.args[0], constants=[-1.0, o.args[1]])


@translates("mul.Tensor", "mul_.Tensor", "mul.Scalar", "mul_.Scalar", "mul.out")
def multiply(t: Translator, o: Operands) -> None:
    x, y = o.args[:2]
    if is_number(y):
        t.elementwise("scale", o.out, x, constants=[y, 0.0])
    else:
        t.elementwise("multiply", o.out, x, y)


@translates("div.Tensor", "div_.Tensor", "div.Scalar", "div_.Scalar", "div.out")
def divide(t: Translator, o: Operands) -> None:
    x, y = o.args[:2]
    if is_number(y):
        t.elementwise("divide", o.out, x, constants=[y])
    else:
        t.elementwise("quotient", o.out, x, y)


@translates("pow.Tensor_Scalar", "pow_.Scalar")
def power(t: Translator, o: Operands) -> None:
    kinds = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "copy"}
    need(is_number(o.args[1]))
    t.elementwise(kinds.get(float(o.args[1]), "power"), o.out, o.args[0], constants=[o.args[1]])


@translates("clamp.default", "clamp_.default", "clamp_min.default", "clamp_min_.default")
def clamp(t: Translator, o: Operands) -> None:
    low, high = o.arg(1, "min"), o.arg(2, "max")
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    need(is_number(low) and is_number(high) and not math.isnan(low) and not math.isnan(high))
    t.elementwise("clamp", o.out, o.args[0], constants=[low, high])


@translates("threshold.default", "threshold_.default")
def threshold(t: Translator, o: Operands) -> None:
    t.elementwise("threshold", o.out, o.args[0], constants=[o.args[1], o.args[2]])


@translates("threshold_backward.default", "threshold_backward.grad_input")
def threshold_gradient(t: Translator, o: Operands) -> None:
    t.elementwise("threshold_gradient", o.out, *o.args[:2], constants=[o.args[2]])


def gradient(kind: str, t: Translator, o: Operands) -> None:
    """Add a function of a gradient and the activation's input or result."""
    t.elementwise(kind, o.out, *o.args[:2])


for operation in ("sigmoid", "tanh", "silu"):
    translates(f"{operation}_backward.default", f"{operation}_backward.grad_input")(
        partial(gradient, f"{operation}_gradient")
    )


@translates("gelu.default", "gelu_backward.default", "gelu.out", "gelu_backward.grad_input")
def gelu(t: Translator, o: Operands) -> None:
    inputs = [arg for arg in o.args if isinstance(arg, TensorRef)]
    tanh = o.kwargs.get("approximate", "none") == "tanh"
    need(not tanh or len(inputs) == 1)
    kind = "gelu_gradient" if len(inputs) == 2 else "gelu_tanh" if tanh else "gelu"
    t.elementwise(kind, o.out, *inputs)


@translates("elu.default", "elu_.default")
def elu(t: Translator, o: Operands) -> None:
    alpha, scale, inner = o.arg(1, "alpha", 1), o.arg(2, "scale", 1), o.arg(3, "input_scale", 1)
    need(inner == 1)
    t.elementwise("elu", o.out, o.args[0], constants=[scale, alpha * scale])


@translates("elu_backward.default")
def elu_gradient(t: Translator, o: Operands) -> None:
    dy, alpha, scale, inner, is_result, x = o.args
    need(inner == 1 and not is_result)
    t.elementwise("elu_gradient", o.out, dy, x, constants=[scale, alpha * scale])


@translates("addcmul.default", "addcmul_.default", "addcmul.out")
def add_product(t: Translator, o: Operands, kind: str = "add_product") -> None:
    t.elementwise(kind, o.out, *o.args[:3], constants=[o.arg(3, "value", 1)])


translates("addcdiv.default", "addcdiv_.default")(partial(add_product, kind="add_quotient"))


@translates("lerp.Tensor", "lerp_.Tensor")
def interpolate(t: Translator, o: Operands) -> None:
    t.elementwise("lerp", o.out, *o.args[:3])


@translates("where.self")
def where(t: Translator, o: Operands) -> None:
    t.elementwise("where", o.out, *o.args[:3])


@translates("masked_fill.Scalar", "masked_fill_.Scalar")
def masked_fill(t: Translator, o: Operands) -> None:
    t.elementwise("masked_fill", o.out, *o.args[:2], constants=[o.args[2]])


def set_value(t: Translator, out: TensorRef, value: float) -> None:
    """Add a record that sets every element."""
    need(is_number(value))
    t.elementwise("set_value", out, constants=[value])


# By operation: the argument with the value, or the value.
FILLS: dict[str, Callable[[Operands], float]] = {
    "zero_.default": lambda o: 0.0,
    "zeros.default": lambda o: 0.0,
    "zeros_like.default": lambda o: 0.0,
    "new_zeros.default": lambda o: 0.0,
    "ones.default": lambda o: 1.0,
    "ones_like.default": lambda o: 1.0,
    "new_ones.default": lambda o: 1.0,
    "full.default": lambda o: o.args[1],
    "full_like.default": lambda o: o.args[1],
    "new_full.default": lambda o: o.args[2],
    "fill_.Scalar": lambda o: o.args[1],
}


def fill(value: Callable[[Operands], float], t: Translator, o: Operands) -> None:
    """Add a record that sets the output."""
    set_value(t, o.out, value(o))


for operation, value in FILLS.items():
    translates(operation)(partial(fill, value))


@translates("cat.default", "cat.out")
def concatenate(t: Translator, o: Operands) -> None:
    tensors, dim, at = o.args[0], o.arg(1, "dim", 0), 0
    for tensor in tensors:
        if tensor.size == (0,):
            continue
        length = tensor.size[dim]
        t.copy(t.part(o.out, dim, at, length), tensor)
        at += length


@translates("stack.default", "stack.out")
def stack(t: Translator, o: Operands) -> None:
    for index, tensor in enumerate(o.args[0]):
        t.copy(t.entry(o.out, o.arg(1, "dim", 0), index), tensor)


@translates("slice_backward.default")
def slice_gradient(t: Translator, o: Operands) -> None:
    dy, size, dim, start, _, step = o.args
    start = max(start + size[dim] if start < 0 else start, 0)
    if dy.size != tuple(size):
        set_value(t, o.out, 0.0)
    t.copy(t.part(o.out, dim, start, dy.size[dim], step), dy)


@translates("select_backward.default")
def select_gradient(t: Translator, o: Operands) -> None:
    dy, size, dim, index = o.args
    set_value(t, o.out, 0.0)
    t.copy(t.entry(o.out, dim, index % size[dim]), dy)


def reduce(t: Translator, o: Operands, kind: str, dims: Any, is_mean: bool = False) -> None:
    """Add a sum, a mean or a norm over dimensions; None or none are all."""
    x = o.args[0]
    dims = tuple(range(len(x.size))) if dims is None or not len(dims) else tuple(dims)
    need(o.kwargs.get("dtype") is None)
    integers, count = layouts.reduction(x.size, x.stride, dims, o.out.size, o.out.stride)
    constants = [float(count) if is_mean else 1.0]
    t.add(kind, [t.address(o.out), t.address(x)], integers, constants)


@translates("sum.default", "sum.dim_IntList", "sum.IntList_out")
def sum_(t: Translator, o: Operands) -> None:
    reduce(t, o, "sum", o.arg(1, "dim"))


@translates("mean.default", "mean.dim")
def mean(t: Translator, o: Operands) -> None:
    reduce(t, o, "sum", o.arg(1, "dim"), is_mean=True)


@translates("linalg_vector_norm.default", "linalg_vector_norm.out")
def norm(t: Translator, o: Operands) -> None:
    need(o.arg(1, "ord", 2) == 2)
    reduce(t, o, "norm", o.arg(2, "dim"))


@translates("_foreach_norm.Scalar")
def norms(t: Translator, o: Operands) -> None:
    for index, x in enumerate(o.args[0]):
        norm(t, Operands((x, *o.args[1:]), o.kwargs, {0: o.results[index]}))


@translates("_foreach_zero_.default")
def zero_all(t: Translator, o: Operands) -> None:
    for x in o.args[0]:
        set_value(t, x, 0.0)


@translates("_foreach_copy_.default")
def copy_all(t: Translator, o: Operands) -> None:
    for out, source in zip(*o.args[:2], strict=True):
        t.copy(out, source)


@translates("_foreach_add_.Scalar")
def add_number_to_all(t: Translator, o: Operands) -> None:
    need(is_number(o.args[1]))
    for x in o.args[0]:
        t.elementwise("scale", x, x, constants=[1.0, o.args[1]])


@translates("_foreach_add_.List")
def add_all(t: Translator, o: Operands, sign: float = 1.0) -> None:
    alpha = sign * o.arg(2, "alpha", 1)
    for x, y in zip(*o.args[:2], strict=True):
        t.elementwise("add", x, x, y, constants=[alpha])


translates("_foreach_sub_.List")(partial(add_all, sign=-1.0))


@translates("_foreach_mul_.List")
def multiply_all(t: Translator, o: Operands) -> None:
    for x, y in zip(*o.args[:2], strict=True):
        t.elementwise("multiply", x, x, y)
