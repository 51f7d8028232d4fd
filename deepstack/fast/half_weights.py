"""Copies weights to half precision for a pass under autocast: one copy per shape for all layers.

Autocast copies every weight by itself.  In a deep narrow stack these small copies take as long as
the products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepstack.fast.fused_sublayers import Product

P = TypeVar("P", bound=Product)


@contextmanager
def half_weights(products: Sequence[Product], dtype: torch.dtype) -> Iterator[None]:
    """Give products copies of their weights in this precision for the passes inside the block."""
    for same in by_shape(products):
        weights = stacked([product.weight for product in same]).to(dtype)
        biased = [product.bias for product in same if product.bias is not None]
        biases = stacked(biased).to(dtype).unbind() if biased else [None] * len(same)
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


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return contiguous tensors of one shape as one, (n, …): a view if they are rows of a bank."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(tensors)}
    if len(storages) > 1 or len(steps) != 1 or min(steps) < 0:
        return torch.stack(list(tensors))
    first = tensors[0]
    return first.as_strided((len(tensors), *first.shape), (*steps, *first.stride()))
