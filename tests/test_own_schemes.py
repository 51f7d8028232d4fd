"""Schemes as a reader writes them: what they say is what is trained, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import small

from deepstack.model import build_model
from deepstack.model.build import Built
from deepstack.schemes import Parts, Scheme, parameter


def built(depth: int = 3, **more: Any) -> Built:
    return build_model(small(model__scheme="own", model__depth=depth, **more), vocab_size=7)


def scales(made: Built) -> list[float]:
    """The one number that every layer's scheme has."""
    return [round(scheme.get_parameter("scale").item(), 3) for scheme in made.model.schemes]


@pytest.mark.parametrize("banks", [True, False])
def test_a_parameter_starts_in_each_layer_where_the_scheme_says(banks: bool) -> None:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + s_l G(x)), s_l started at 1/l."""

        def __init__(self, layer: int, depth: int, parts: Parts) -> None:
            super().__init__(layer, depth, parts)
            self.scale = parameter(1, role="scheme", start=1 / layer)

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x + self.scale * G(x))

    assert scales(built(runtime__banks=banks)) == [1.0, 0.5, 0.333]
