"""Attention statistics of documents and windows, against the argument of the softmax."""

from typing import Any

import pytest
import torch
from helpers.products import Products
from helpers.snapshots import ToyModel


@pytest.mark.parametrize("mask", ["documents", "window", "both"])
@pytest.mark.parametrize("scheme", ["real_former", "post_ln"])
def test_attention_statistics_see_documents_and_windows(scheme: str, mask: str) -> None:
    """The reference is the argument of the softmax itself, or its mask."""
    changes: dict[str, Any] = {"model__family": "decoder", "model__scheme": scheme}
    changes |= {"model__document_end": 3} if mask != "window" else {}
    changes |= {"model__attention_options": {"window": 2}} if mask != "documents" else {}
    toy = ToyModel(**changes)
    toy.tokens[:, ::3] = 3  # ends of documents
    with Products() as products, torch.no_grad():
        toy.model(toy.tokens)
    logged = toy.values()
    for name, wanted in (
        ("attention_entropy_attention", products.entropies),
        ("largest_logit_attention", products.largest),
    ):
        assert logged[name].tolist() == pytest.approx(wanted, rel=1e-4), name
    open_toy = ToyModel(model__family="decoder", model__scheme=scheme)
    entropy = open_toy.values()["attention_entropy_attention"]
    assert (logged["attention_entropy_attention"] < entropy).all()  # fewer positions are read
