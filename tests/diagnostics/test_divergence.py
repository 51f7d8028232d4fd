"""The first layer of a step with a value that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.small_runs import small
from torch import Tensor

import deepstack
from deepstack.config import Train, with_overrides
from deepstack.diagnostics import Culprit, culprit
from deepstack.model import build_model
from deepstack.model.build import Built

TOKENS = torch.arange(32).reshape(2, 16)


def built(**settings: object) -> Built:
    return build_model(small(**settings), vocab_size=257)


def sound(model: Built) -> Callable[[], Tensor]:
    """A backward pass that is finite everywhere."""

    def backward() -> Tensor:
        model.banks.zero_gradients()
        return torch.ones(())

    return backward


@pytest.mark.parametrize("layer", [1, 3, 6])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_layer_whose_output_is_not_finite(layer: int, bad: float) -> None:
    """Layers of the decoder follow the four of the encoder."""
    model = built(task__name="reverse", model__family="encoder_decoder", model__decoder_depth=3)
    tokens = torch.ones(2, 32, dtype=torch.long)
    model.model.layers[layer - 1].get_parameter("feed_forward.w2_bias").data[0] = bad
    assert culprit(model, tokens, sound(model)) == ("forward", layer)
    # Only one pass is needed, whatever comes after it.
    assert culprit(model, tokens, None) == ("forward", layer)


def test_tables_and_head_are_no_layers() -> None:
    model = built()
    assert culprit(model, TOKENS, sound(model)) == ("none", None)
    no_loss = culprit(model, TOKENS, lambda: torch.tensor(math.nan))
    assert no_loss == Culprit("head")
    model.model.embedding.data[5] = math.inf
    assert culprit(model, TOKENS, sound(model)) == Culprit("embedding")


@pytest.mark.parametrize("banks", [True, False])
def test_gradients_are_looked_at_from_the_top(banks: bool) -> None:
    model = built(runtime__banks=banks)

    def backward() -> Tensor:
        model.banks.zero_gradients()
        for index in (0, 2):
            layer = model.model.layers[index]
            next(iter(layer.parameters())).grad.view(-1)[3] = math.nan
        return torch.ones(())

    assert culprit(model, TOKENS, backward) == ("backward", 3)


HUGE = {"train__lr": 1e6, "train__clip": None}


@pytest.mark.parametrize(
    ("settings", "facts", "message"),
    [
        # The bound says where it ended; every number is finite.
        ({"train__max_loss": 3.0}, ("loss", "none", {None}), ", more than train.max_loss"),
        # A huge loss, whose gradient overflows: in which layer depends on the processor's rounding.
        ({"model__scheme": "pre_ln"} | HUGE, ("loss", "backward", {1, 2, 3, 4}), "loss is "),
        # Without a norm the next forward pass, the probe's, overflows in the middle of the stack.
        (
            {"model__scheme": "rezero"} | HUGE,
            ("model_update", "forward", {3}),
            "model_update is nan, first not finite in layer 3, forward",
        ),
        # A stack that is not finite before its first step.
        (
            {"model__scheme": "t_fixup", "model__depth": 8}
            | {"model__init": {"distribution": "normal", "std": 1e6}},
            ("loss", "forward", {2}),
            "step 1: loss is nan, first not finite in layer 2, forward",
        ),
    ],
)
def test_the_status_of_a_diverged_run_names_it(
    settings: dict[str, object],
    facts: tuple[str, str, set[int | None]],
    message: str,
    tmp_path: Path,
) -> None:
    usual = {"train.optimizer": "sgd", "train.warmup_steps": 0, "train.schedule": "constant"}
    run = deepstack.train(with_overrides(small(**settings), usual), out=tmp_path)
    assert run.state == "diverged"
    status = run.status
    quantity, found_in, layers = facts
    assert (status["quantity"], status["found_in"]) == (quantity, found_in)
    assert status["first_bad_layer"] in layers
    assert message in run.folder.log_path.read_text()


def test_a_replayed_run_names_what_diverged_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ‖ΔF‖ overflows in a last norm's gain while all layers, loss and gradients are finite; a
    # replayed step knows it only in the midst of the next one, whose update breaks a layer.
    rates = {6: 1e22, 7: 1e36}

    def rate(train: Train, step: int) -> float:
        return rates.get(step, 0.0)

    monkeypatch.setattr("deepstack.training.run.learning_rate", rate)
    given = small(
        model__scheme="pre_ln", model__head="separate", train__optimizer="sgd", train__clip=None,
        train__max_loss=1e38, train__trainable=["final_norm", "w2"],
        train__lr_factors={"w2": 1e-15}, train__eval_every=0, log__layers_every=0,
    )  # fmt: skip
    ends, rows = [], []
    for replay in (False, True):
        own = with_overrides(given, {"runtime.replay": replay})
        run = deepstack.train(own, out=tmp_path / str(replay))
        ends.append({k: v for k, v in run.status.items() if k in ("step", "quantity", "found_in")})
        rows.append((run.path / "steps.csv").read_bytes())
    assert ends == [{"step": 6, "quantity": "model_update", "found_in": "none"}] * 2
    assert rows[0] == rows[1]
