"""Diagnostics as a reader writes them: values of each layer, in files that are theirs alone."""

from typing import Any

import pytest
import torch
from helpers.snapshots import ToyModel

from deepstack.diagnostics.layers import diagnostic
from deepstack.errors import PluginError
from deepstack.schemes import Scheme


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda s: s.stream.mean(dim=-1), r"found \(4,\) for own; .* \(3,\), .* or \(3, 2\)"),
        (lambda s: s.stream.mean(), r"found \(\) for own"),
        (lambda s: s.param_norm.numpy(), "found ndarray for own"),
        (lambda s: 1.0, "found float for own"),
        (lambda s: {"a": s.stream.mean(dim=-1)}, r"found \(4,\) for own_a"),
        (lambda s: s.entering, r"found \(3, 2, 24\) for own"),
    ],
)
def test_values_that_are_not_one_a_layer_are_refused(given: Any, said: str) -> None:
    @diagnostic("own", "o", parts=())
    def own(snapshot: Any) -> Any:
        """What a reader gives."""
        return given(snapshot)

    with pytest.raises(PluginError, match=f"diagnostic 'own': {said}"):
        ToyModel().values()


def test_one_value_a_layer_or_a_sublayer_or_a_part_is_taken() -> None:
    for name, given in (
        ("by_layer", lambda s: s.param_norm),
        ("by_sublayer", lambda s: s.branch.mean(dim=-1)),
        ("by_part", lambda s: {"a": s.param_norm}),
    ):
        diagnostic(name, "o")(given)
    found = ToyModel().values()
    names = ("by_layer", "by_sublayer_attention", "by_sublayer_feed_forward", "by_part_a")
    assert all(found[name].shape == (3,) for name in names)
    assert torch.equal(found["by_layer"], found["param_norm"])


def test_a_file_of_another_diagnostic_is_not_overwritten() -> None:
    with pytest.raises(PluginError, match="its file ln_input_attention is also one of 'ln_input'"):
        diagnostic("ln_input_attention", "o", parts=())(lambda snapshot: snapshot.param_norm)
    with pytest.raises(PluginError, match="its file grad_norm is also one of 'grad_norm'"):
        diagnostic("grad", "o", parts=("norm",))(lambda snapshot: {"norm": snapshot.param_norm})


def test_a_scheme_that_drops_branches_in_training_is_looked_at_in_evaluation() -> None:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)), in training x <- LN(x)."""

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x) if self.training else norm(x + G(x))

    toy = ToyModel(model__scheme="own")
    toy.model.train()
    gains = toy.values()["effective_gain_attention"]
    assert torch.isfinite(gains).all() and toy.model.layers[0].scheme.training
