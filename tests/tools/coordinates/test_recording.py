"""Outputs, logits of attention and own changes of a pass, beside direct computations."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.tools.coordinates.cells import content_logits, rms, train_cell
from deepstack.tools.coordinates.recording import LOGITS, record
from deepstack.tools.coordinates.source import default_loss, load_source
from deepstack.tools.coordinates.stacks import names_of, outline_of


def passed(model: nn.Module, run: Any) -> Any:
    return record(model, names_of(outline_of(model), {}), run, 0)


class Fused(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


class Written(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        logits = q @ q.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(q.shape[-2], q.shape[-2]).tril() == 0
        return logits.masked_fill(mask, torch.finfo(logits.dtype).min).softmax(-1) @ q


@pytest.mark.parametrize("kind", [Fused, Written])
def test_the_logits_of_attention_are_those_that_the_softmax_takes(kind: type[nn.Module]) -> None:
    q = torch.randn(3, 2, 5, 8)
    (logits,) = passed(model := kind(), lambda: model(q)).outputs["softmax"]
    expected = q @ q.transpose(-1, -2) / math.sqrt(8)
    shown = torch.ones(5, 5).tril() == 1
    assert torch.allclose(logits[..., shown], expected[..., shown], atol=1e-5)
    content = expected - expected.mean(0)
    assert rms([content_logits(logits)]) == pytest.approx(rms([content[..., shown]]), rel=1e-5)


def test_a_bias_of_positions_is_no_part_of_the_size_of_attention_logits() -> None:
    logits, bias = torch.randn(4, 2, 5, 5), 30 * torch.randn(2, 5, 5)
    assert rms([content_logits(logits + bias)]) == pytest.approx(rms([content_logits(logits)]))


def test_attention_of_torch_belongs_to_its_module() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    model = nn.ModuleDict({"attention": attention})
    found = passed(model, lambda: attention(x, x, x, need_weights=False))
    (logits,) = found.outputs["attention softmax"]
    q, k, _ = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    q, k = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k))
    assert torch.allclose(logits.reshape(2, 2, 3, 3), q @ k.mT / 2, atol=1e-5)


class Changing(nn.Module):
    """A residual block that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x += self.act(self.map(x))
        return x


def test_outputs_are_copies_from_the_time_of_the_call() -> None:
    model, x = nn.Sequential(Changing(), Changing()), torch.randn(3, 4)
    with torch.no_grad():
        first = x + F.relu(model[0].map(x))
        second = first + F.relu(model[1].map(first))
        found = passed(model, lambda: model(x.clone()))
        assert torch.equal(found.outputs["0.map"][0], model[0].map(x))
    assert torch.equal(found.outputs["0.act"][0], F.relu(found.outputs["0.map"][0]))
    assert torch.equal(found.outputs["0"][0], first)
    assert torch.equal(found.outputs["1"][0], second)
    assert found.same == {"": "1"}  # the Sequential's output is its last member's


def test_a_pass_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, x = torch.get_rng_state(), torch.randn(6, 3, 2, 2)
    rng = torch.get_rng_state()
    found = passed(model, lambda: model(x))
    assert all(module.training for module in model.modules())
    assert torch.equal(rng, torch.get_rng_state()) and not torch.equal(state, rng)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert rms(found.outputs["1"]) == pytest.approx(1, rel=1e-3)  # normalised by its batch
    assert found.same["2"] == "1"  # dropout does nothing


def test_the_logits_of_the_loss_have_all_multipliers() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            return F.cross_entropy(5 * super().forward(x), targets)

    model, x = Scaled(4, 3), torch.randn(2, 4)
    (logits,) = passed(model, lambda: model(x, torch.tensor([0, 2]))).outputs[LOGITS]
    assert torch.allclose(logits, 5 * F.linear(x, model.weight, model.bias))


def steps_of(*steps: int) -> Any:
    """Train a model of a matrix and a bias; return model, batch, and values by name."""
    kept: dict[str, Any] = {}

    def build(width: int, depth: int, seed: int) -> nn.Module:
        kept["model"] = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 2))
        kept["start"] = [p.detach().clone() for p in kept["model"].parameters()]
        return kept["model"]

    def batch(seed: int) -> Any:
        kept["batch"] = torch.randn(4, 3), torch.randn(4, 2)
        return kept["batch"]

    cell = train_cell(load_source(build, batch=batch), 8, 1, 0, steps, {})
    values = {(v.name, v.quantity, v.step): v.value for v in cell.values}
    return kept["model"], kept["batch"][0], kept["start"], values


def test_changes_are_those_of_two_passes_and_own_ones_of_the_matrix_alone() -> None:
    model, x, (w, b, w2, b2), values = steps_of(1, 3)
    now, then = F.linear(x, model[0].weight, model[0].bias), F.linear(x, w, b)
    assert values["0", "size", 0] == pytest.approx(rms([then]), rel=1e-6)
    assert values["0", "change", 3] == pytest.approx(rms([(now - then).detach()]), rel=1e-4)
    moved = F.linear(x, model[0].weight - w).detach()
    assert values["0", "own", 3] == pytest.approx(rms([moved]), rel=1e-4)
    out = F.linear(now, model[2].weight, model[2].bias) - F.linear(then, w2, b2)
    assert values["2", "change", 3] == pytest.approx(rms([out.detach()]), rel=1e-4)
    own = F.linear(then, model[2].weight - w2).detach()
    assert values["2", "own", 3] == pytest.approx(rms([own]), rel=1e-4)


def test_measuring_at_more_steps_changes_no_step() -> None:
    *_, often = steps_of(1, 2, 3, 4)
    *_, once = steps_of(4)
    assert {key: value for key, value in often.items() if key[2] in (0, 4)} == once


class Named(nn.Module):
    """Returns its loss in a plain mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.map(x).square().mean()}


def test_the_loss_of_a_mapping_is_its_entry() -> None:
    model, batch = Named(), {"x": torch.randn(2, 4)}
    loss = default_loss(model, batch)
    assert loss is not None and torch.equal(loss, model(**batch)["loss"])
