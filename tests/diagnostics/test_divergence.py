"""The first layer of a step with a value that is not finite."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.configs import runs_with
from helpers.small_runs import logs_of, small

import deepstack
from deepstack.config import Train, with_overrides
from deepstack.diagnostics import culprit, divergence
from deepstack.model import build_model

TOKENS = torch.arange(32).reshape(2, 16)


@pytest.mark.parametrize("layer", [1, 3, 6])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_layer_whose_output_is_not_finite(layer: int, bad: float) -> None:
    """Layers of the decoder follow the four of the encoder; no backward pass is needed."""
    both = {"model__family": "encoder_decoder", "model__decoder_depth": 3}
    model = build_model(small(task__name="reverse", **both), vocab_size=257)
    tokens = torch.ones(2, 32, dtype=torch.long)
    model.model.layers[layer - 1].get_parameter("feed_forward.w2_bias").data[0] = bad
    assert culprit(model, [tokens], None) == ("forward", layer)


@pytest.mark.parametrize("banks", [True, False])
def test_the_first_bad_gradient_is_searched_from_the_top(banks: bool) -> None:
    model = build_model(small(runtime__banks=banks), vocab_size=257)
    model.banks.zero_gradients()
    assert culprit(model, [TOKENS], lambda: torch.ones(())) == ("none", None)
    assert culprit(model, [TOKENS], lambda: torch.tensor(math.nan)) == ("head", None)
    for index in (0, 2):
        next(iter(model.model.layers[index].parameters())).grad.view(-1)[3] = math.nan
    assert culprit(model, [TOKENS], lambda: torch.ones(())) == ("backward", 3)
    model.model.embedding.data[5] = math.inf
    assert culprit(model, [TOKENS], None) == ("embedding", None)


def test_a_decoders_gradients_follow_its_encoders() -> None:
    """Layer 2 of the decoder is the sixth of both stacks: the encoder has four."""
    both = {"model__family": "encoder_decoder", "model__decoder_depth": 3}
    model = build_model(small(task__name="reverse", **both), vocab_size=257)
    model.banks.zero_gradients()
    tokens = torch.ones(2, 32, dtype=torch.long)
    for layer in (3, 6):
        weight = model.model.layers[layer - 1].get_parameter("feed_forward.w2_bias")
        weight.grad.view(-1)[0] = math.inf
        assert culprit(model, [tokens], lambda: torch.ones(())) == ("backward", layer)


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
    settings: dict[str, object], facts: Any, message: str, tmp_path: Path
) -> None:
    usual = {"train.optimizer": "sgd", "train.warmup_steps": 0, "train.schedule": "constant"}
    run = deepstack.train(with_overrides(small(**settings), usual), out=tmp_path)
    assert run.state == "diverged"
    assert (run.status["quantity"], run.status["found_in"]) == facts[:2]
    assert run.status["first_bad_layer"] in facts[2]
    assert message in run.folder.log_path.read_text()


def test_a_replayed_run_names_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # ‖ΔF‖ overflows in a last norm's gain while all layers, loss and gradients are finite; a
    # replayed step knows it only in the midst of the next one, whose update breaks a layer.
    def rate(train: Train, step: int) -> float:
        return {6: 1e22, 7: 1e36}.get(step, 0.0)

    monkeypatch.setattr("deepstack.training.run.learning_rate", rate)
    given = small(
        model__scheme="pre_ln", model__head="separate", train__optimizer="sgd", train__clip=None,
        train__max_loss=1e38, train__trainable=["final_norm", "w2"],
        train__lr_factors={"w2": 1e-15}, train__eval_every=0, log__layers_every=0,
    )  # fmt: skip
    runs = runs_with(given, tmp_path, {"runtime.replay": False}, {"runtime.replay": "python"})
    for run in runs:
        end = run.status["step"], run.status["quantity"], run.status["found_in"]
        assert end == (6, "model_update", "none")
        assert logs_of(run)["steps.csv"] == logs_of(runs[0])["steps.csv"]


def test_the_first_bad_layer_of_any_part_of_a_batch_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(divergence, "first_bad_layer", lambda model, tokens: [int(tokens[0, 0])])
    parts: Any = [torch.full((1, 2), 3), torch.full((1, 2), 2)]
    built: Any = SimpleNamespace(model=None)
    assert culprit(built, parts, None) == ("forward", 2)
