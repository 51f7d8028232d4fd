"""Only schemes that declare themselves static are replayed; all others run eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_runs import data_of, small

import deepstack
from deepstack.errors import ConfigError, PluginError
from deepstack.schemes import SCHEMES, Parts, Scheme

LATE = 7  # the step from which the residual coefficient is 3


def define(set_value: Any, read_value: Any, *, static: bool) -> None:
    """Register a scheme whose a_t is 1 before step LATE, and 3 from there on."""

    class Late(Scheme, name="late", label="Late", paper="none", static=static):
        """x <- LN(a_t x + G(x))."""

        buffer: torch.Tensor

        def __init__(self, layer: int, depth: int, parts: Parts) -> None:
            super().__init__(layer, depth, parts)
            self.register_buffer("buffer", torch.ones(()), persistent=False)

        def at_step(self, step: int) -> None:
            set_value(self, 1.0 if step < LATE else 3.0)

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(read_value(self) * x + G(x))


def set_attribute(scheme: Scheme, value: float) -> None:
    scheme.a = value  # type: ignore[assignment]


def read_attribute(scheme: Scheme) -> Any:
    return scheme.a


def fill_buffer(scheme: Any, value: float) -> None:
    scheme.buffer.fill_(value)


def read_buffer(scheme: Any) -> Any:
    return scheme.buffer


def trained(folder: Path, replay: bool | str, steps: int = 12) -> tuple[dict[str, bytes], bool]:
    config = small(
        model__scheme="late", model__depth=1, train__steps=steps, train__eval_every=0,
        log__layers_every=0, runtime__replay=replay,
    )  # fmt: skip
    run = deepstack.train(config, out=folder / str(replay))
    return data_of(run), run.meta["environment"]["replayed"]


def test_a_scheme_that_declares_nothing_is_not_replayed_and_refused_if_asked_for(
    tmp_path: Path,
) -> None:
    define(set_attribute, read_attribute, static=False)
    eager, _ = trained(tmp_path, False, steps=50)
    chosen, replayed = trained(tmp_path, "auto", steps=50)
    assert not replayed
    assert chosen == eager
    with pytest.raises(ConfigError, match=r"runtime.replay: .* a scheme that declares static=True"):
        trained(tmp_path, True)


def test_a_static_scheme_that_sets_buffers_is_replayed(tmp_path: Path) -> None:
    define(fill_buffer, read_buffer, static=True)
    eager, _ = trained(tmp_path, False)
    chosen, replayed = trained(tmp_path, True)
    assert replayed
    assert chosen == eager


def test_every_scheme_of_deepstack_is_static_and_a_subclass_declares_for_itself() -> None:
    assert all(SCHEMES[name].static for name in SCHEMES.names())
    deepnorm: Any = SCHEMES["deepnorm"]

    class Mine(deepnorm, name="mine", label="Mine", paper="none"):
        """x <- LN(alpha x + G(x))."""

    assert not Mine.static


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("replay", [False, True])
def test_a_buffer_that_a_step_writes_into_is_refused(
    dropout: float, replay: bool, tmp_path: Path
) -> None:
    """A running mean, for example: it would begin anew in a resumed run."""
    define(fill_buffer, lambda scheme: scheme.buffer.mul_(1.01).clone(), static=True)
    config = small(model__scheme="late", model__dropout=dropout, runtime__replay=replay)
    with pytest.raises(PluginError, match="a step writes into the buffer buffer of Late, which no"):
        deepstack.train(config, out=tmp_path)
