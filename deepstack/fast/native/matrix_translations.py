"""The records of products, layer norms, softmax and attention."""

import math
from typing import Any

from deepstack.fast.native import layouts
from deepstack.fast.native.layouts import need
from deepstack.fast.native.translate import Operands, Translator, translates
from deepstack.fast.recording import TensorRef

# Most positions of keys of which the kernel keeps all attention weights in the cache.
LONGEST_ATTENTION = 256


def transposed(x: TensorRef) -> TensorRef:
    """Return the tensor with its last two dimensions exchanged."""
    size, stride = (*x.size[:-2], *x.size[:-3:-1]), (*x.stride[:-2], *x.stride[:-3:-1])
    return x._replace(size=size, stride=stride)


def add_product(
    t: Translator,
    out: TensorRef,
    a: TensorRef,
    b: TensorRef,
    *,
    bias: TensorRef | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """Add out = alpha a b + (bias by column, or beta out), for matrices or batches of them."""
    need(all(len(x.size) == len(out.size) for x in (a, b)))
    m, n = out.size[-2:]
    k = a.size[-1]
    batches = out.size[0] if len(out.size) == 3 else 1
    need(m * n * k * batches > 0 and m * n * k < t.largest_product)
    if out.stride[-1] != 1 and n > 1:
        need(bias is None and (out.stride[-2] == 1 or m == 1))
        out, a, b = transposed(out), transposed(b), transposed(a)
        m, n = n, m
    row = out.stride[-2] if m > 1 else n
    strides = [x.stride[0] if len(x.size) == 3 else 0 for x in (out, a, b)]
    integers = [m, n, k, *a.stride[-2:], *b.stride[-2:], row, batches, *strides]
    addresses = [t.address(x) for x in (out, a, b)]
    need(row >= n)
    if bias is not None:
        need(bias.size[-1] == n and math.prod(bias.size) == n)
        need(bias.stride[-1] == 1 or n == 1)
        addresses.append(t.address(bias))
    t.add("product", addresses, integers, [alpha, beta])


@translates("mm.default", "mm.out", "bmm.default", "bmm.out")
def product(t: Translator, o: Operands) -> None:
    add_product(t, o.out, *o.args[:2])


@translates("mv.default", "mv.out")
def matrix_vector(t: Translator, o: Operands) -> None:
    x, out = o.args[1], o.out
    column = x._replace(size=(*x.size, 1), stride=(*x.stride, 1))
    result = out._replace(size=(*out.size, 1), stride=(*out.stride, 1))
    add_product(t, result, o.args[0], column)


@translates(
    "addmm.default", "addmm_.default", "addmm.out", "baddbmm.default", "baddbmm_.default",
    "baddbmm.out",
)  # fmt: skip
def product_and_sum(t: Translator, o: Operands) -> None:
    added, a, b = o.args[:3]
    alpha, beta, out = o.arg(4, "alpha", 1), o.arg(3, "beta", 1), o.out
    if added == out:
        add_product(t, out, a, b, alpha=alpha, beta=beta)
    elif beta == 1 and len(out.size) == 2 and math.prod(added.size) == out.size[1]:
        add_product(t, out, a, b, bias=added, alpha=alpha)
    else:
        t.copy(out, added)
        add_product(t, out, a, b, alpha=alpha, beta=beta)


def need_contiguous(*tensors: TensorRef | None) -> None:
    """Refuse tensors whose elements do not lie side by side."""
    for x in tensors:
        need(x is None or layouts.is_contiguous(x.size, x.stride))


def address_or_0(t: Translator, x: TensorRef | None) -> int:
    """Return the address of a tensor, or 0 without one."""
    return 0 if x is None else t.address(x)


@translates("native_layer_norm.default", "native_layer_norm.out")
def layer_norm(t: Translator, o: Operands) -> None:
    x, shape, gain, bias, eps = o.args
    y, mean, rstd = outputs(o, "out0", "out1", "out2")
    need(len(shape) == 1)
    need_contiguous(y, mean, rstd, gain, bias)
    integers = layouts.rows(x.size, x.stride)
    addresses = [t.address(tensor) for tensor in (y, mean, rstd, x)]
    t.add("layer_norm", [*addresses, address_or_0(t, gain), address_or_0(t, bias)], integers, [eps])


@translates("native_layer_norm_backward.default", "native_layer_norm_backward.out")
def layer_norm_gradient(t: Translator, o: Operands) -> None:
    dy, x, shape, mean, rstd, gain, _, mask = o.args
    found = outputs(o, "out0", "out1", "out2")
    results = [tensor if wanted else None for tensor, wanted in zip(found, mask, strict=True)]
    need(
        len(shape) == 1 and all(r is not None or not m for r, m in zip(results, mask, strict=True))
    )
    need_contiguous(*results, mean, rstd, gain)
    integers = layouts.rows(x.size, x.stride, dy.stride)
    dx, *others = (address_or_0(t, tensor) for tensor in results)
    inputs = [*(t.address(tensor) for tensor in (dy, x, mean, rstd)), address_or_0(t, gain)]
    # threads divide the rows of dx, but the columns of the other gradients
    if dx:
        t.add("layer_norm_gradient", [dx, 0, 0, *inputs], integers)
    if any(others):
        t.add("layer_norm_gradient", [0, *others, *inputs], integers)


def outputs(o: Operands, *names: str) -> list[TensorRef | None]:
    """Return several results, new ones or given by name."""
    return [o.results.get(i, o.kwargs.get(name)) for i, name in enumerate(names)]


@translates("_softmax.default", "_softmax.out")
def softmax(t: Translator, o: Operands, kind: str = "softmax") -> None:
    x, dim, half = o.args
    need(not half)
    need_contiguous(o.out)
    integers = layouts.around(x.size, x.stride, dim)
    t.add(kind, [t.address(o.out), t.address(x)], integers)


@translates("_log_softmax.default", "_log_softmax.out")
def log_softmax(t: Translator, o: Operands) -> None:
    softmax(t, o, "log_softmax")


@translates("_softmax_backward_data.default", "_softmax_backward_data.out")
def softmax_gradient(t: Translator, o: Operands, kind: str = "softmax_gradient") -> None:
    dy, y, dim, _ = o.args
    need_contiguous(y, o.out)
    sizes = layouts.around(y.size, y.stride, dim)[:3]
    integers = layouts.around(dy.size, dy.stride, dim)
    need(integers[:3] == sizes)
    t.add(kind, [t.address(o.out), t.address(dy), t.address(y)], integers)


@translates("_log_softmax_backward_data.default", "_log_softmax_backward_data.out")
def log_softmax_gradient(t: Translator, o: Operands) -> None:
    softmax_gradient(t, o, "log_softmax_gradient")


def attention_layout(q: TensorRef, k: TensorRef, operands: list[Any], causal: bool) -> list[int]:
    """Return the integers of an attention's record; operands have strides of their own."""
    batch, heads, positions, width = q.size
    keys = k.size[2]
    need(k.size[:2] == (batch, heads) and k.size[3] == width and keys <= LONGEST_ATTENTION)
    need(min(batch, heads, positions, width, keys) > 0)
    need(all(x.stride[3] == 1 or width == 1 for x in operands if len(x.size) == 4))
    strides = [s for x in operands for s in x.stride[:3]]
    strides += [0] * (24 - len(strides))
    return [batch, heads, positions, width, int(causal), *strides, keys]


@translates("_scaled_dot_product_flash_attention_for_cpu.default")
def attention(t: Translator, o: Operands) -> None:
    q, k, v = o.args[:3]
    y, logsumexp = outputs(o, "", "")
    need(y is not None and logsumexp is not None and v.size == k.size)
    need(o.arg(3, "dropout_p", 0.0) == 0 and o.kwargs.get("attn_mask") is None)
    assert y is not None and logsumexp is not None
    need(logsumexp.size == q.size[:3])
    integers = attention_layout(q, k, [y, q, k, v, logsumexp], o.arg(4, "is_causal", False))
    addresses = [t.address(x) for x in (y, q, k, v, logsumexp)]
    t.add("attention", addresses, integers, [scale_of(o, q)])


@translates("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_gradient(t: Translator, o: Operands) -> None:
    dy, q, k, v, _, logsumexp = o.args[:6]
    need(o.args[6] == 0 and o.kwargs.get("attn_mask") is None and v.size == k.size)
    need(o.results.keys() == {0, 1, 2})
    need(logsumexp.size == q.size[:3])
    operands = [o.results[0], o.results[1], o.results[2], dy, q, k, v, logsumexp]
    integers = attention_layout(q, k, operands, o.args[7])
    t.add("attention_gradient", [t.address(x) for x in operands], integers, [scale_of(o, q)])


def scale_of(o: Operands, q: TensorRef) -> float:
    """Return the factor of the logits."""
    scale = o.kwargs.get("scale")
    return float(q.size[3] ** -0.5 if scale is None else scale)
