"""Copies weights to half precision for a pass under autocast: one copy per shape for all layers.

Autocast copies every weight by itself.  In a deep narrow stack these small copies take as long as
the products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepstack.fast.fused_sublayers import Product

P = TypeVar("P", bound=Product)


@contextmanager
def half_weights(products: Sequence[Product], dtype: torch.dtype) -> Iterator[None]:
    """Give products copies of their weights in this precision for the passes inside the block."""
    for same in by_shape(products):
        weights = stacked([product.weight for product in same], dtype)
        biased = [product.bias for product in same if product.bias is not None]
        biases = stacked(biased, dtype).unbind() if biased else [None] * len(same)
        for product, weight, bias in zip(same, weights.unbind(), biases, strict=True):
            product.half_weights = weight, bias
    try:
        yield
    finally:
        for product in products:
            product.half_weights = None


def products_of(layers: Iterable[Any]) -> Iterator[Product]:
    """Yield the products of fused layers."""
    for layer in layers:
        for sublayer in getattr(layer, "sublayer_functions", ()):
            for operation in getattr(sublayer, "operations", ()):
                if isinstance(operation, Product):
                    yield operation


def by_shape(products: Iterable[P]) -> list[list[P]]:
    """Group products by weight shape and whether they have a bias."""
    groups: dict[Any, list[P]] = {}
    for product in products:
        groups.setdefault((product.weight.shape, product.bias is None), []).append(product)
    return list(groups.values())


def stacked(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return tensors of one shape as one, (n, …): a view if they are evenly spaced in memory.

    dtype: of the result; that of the tensors if None.
    """
    first = tensors[0]
    kind = dtype or first.dtype
    places = [tensor.storage_offset() for tensor in tensors]
    apart = places[1] - places[0] if len(places) > 1 else first.numel()
    rows = range(places[0], places[0] + len(places) * apart, apart) if apart > 0 else ()
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(memory) > 1 or places != list(rows) or not all(t.is_contiguous() for t in tensors):
        return torch.stack([converted(tensor, kind) for tensor in tensors])
    view = first.as_strided((len(tensors), *first.shape), (apart, *first.stride()))
    return converted(view, kind)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in this precision: x itself, or a contiguous copy."""
    if x.dtype is dtype:
        return x
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
