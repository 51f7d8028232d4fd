"""The parts of ‖ΔF‖ against slow literal versions, and runs that their logging leaves alone."""

import copy
import itertools
import re
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest
import torch
from helpers.configs import every_instrument, runs_with
from helpers.papers import PAPERS
from helpers.plot_runs import make_chart, make_run, rows, words
from helpers.sampling import some
from helpers.small_runs import data_of, small
from helpers.snapshots import ToyModel
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import NothingMatchedError
from deepstack.config import with_overrides
from deepstack.config.instruments import specs
from deepstack.fast.fuse import fuse
from deepstack.instruments.attribution.measure import attribute, first_order, parts_of
from deepstack.schemes import NORMS, SCHEMES

EVERYTHING = every_instrument(3) | {
    "log.attribution_every": 1, "log.skipped_layers": 2, "log.jacobian": True,
    "log.stream_update": True, "train.steps": 4,
}  # fmt: skip
Origin = Literal["initial", "current"]


class Moved(ToyModel):
    """A small model whose parameters have all moved a little from θ_0."""

    def __init__(self, size: float = 1e-2, **changes: Any) -> None:
        super().__init__(**{"model__depth": 5, "model__d_model": 8, "task__seq_len": 4} | changes)
        self.all_banks = self.built.banks.all
        random = torch.Generator().manual_seed(0)
        self.start = self.hidden(self.model)
        self.initial = {bank.key: bank.values().clone() for bank in self.all_banks}
        self.first = copy.deepcopy(self.model)
        for bank in self.all_banks:
            noise = torch.randn(bank.values().shape, generator=random)
            bank.copy_(bank.values() + size * noise)
        self.last = copy.deepcopy(self.model)
        self.parts = parts_of(self.built)
        fuse(self.model.layers)
        self.about = self.built, self.initial, self.tokens, self.parts

    def hidden(self, model: Any) -> Tensor:
        with torch.no_grad():
            return model.hidden(self.tokens)

    def literally(self, part: str, scale: float = 1.0, origin: Origin = "initial") -> nn.Module:
        """A copy of the model, the part's parameters (one by one) moved by scale Δθ.

        From θ_0 towards θ_t, or from θ_t back.
        """
        ends = (self.first, self.last) if origin == "initial" else (self.last, self.first)
        model = copy.deepcopy(ends[0]).double()
        for name, value in model.named_parameters():
            old, new = (end.get_parameter(name).detach().double() for end in ends)
            mask = belongs(part, name, self.model.get_parameter(name), len(self.model.layers))
            value.data += scale * (new - old) * mask
        return model

    def distance(self, model: nn.Module, origin: Origin = "initial") -> float:
        start = copy.deepcopy(self.first if origin == "initial" else self.last).double()
        return (self.hidden(model) - self.hidden(start)).norm(dim=-1).mean().item()


def belongs(part: str, name: str, parameter: Any, layers: int) -> Tensor:
    """Ones at the entries of a parameter that are of a part, and zeros elsewhere."""
    mask = torch.full(parameter.shape, float(part == "whole"), dtype=torch.float64)
    number = re.search(r"layers\.(\d+)\.", name)
    layer = int(number[1]) + 1 if number else None
    if layer and name.startswith("decoder.") and layers > 5:
        layer += 5  # the decoder's follow the encoder's
    if part in parameter.roles:
        index, each = parameter.roles.index(part), len(mask) // len(parameter.roles)
        mask[index * each : (index + 1) * each] = 1
    elif part.startswith("layers_") and layer is not None:
        first, last = map(int, part.split("_")[1:])
        mask.fill_(float(first <= layer <= last))
    elif part == "outside":
        mask.fill_(float(layer is None))
    return mask


CASES = [
    {},
    {"runtime__banks": False},
    {"model__scheme": "admin"},
    {"model__scheme": "peri_ln", "model__norm__kind": "rms"},
    {"model__scheme": "post_ln", "model__norm__kind": "batch", "model__head": "bert"},
    {"model__scheme": "pre_ln", "train__lr_factors": {"v": 0.5}},  # q, k, v in banks of their own
    {
        "model__family": "encoder_decoder", "model__decoder_depth": 2, "model__qk_norm": True,
        "model__positions": "rotary", "model__gated": True, "model__activation": "silu",
    },
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "origin"),
    some([*((case, "initial") for case in CASES), *((case, "current") for case in CASES[:3])], 2),
    ids=str,
)
def test_each_part_is_its_change_alone(changes: dict[str, Any], origin: Origin) -> None:
    moved = Moved(**changes)
    before = {bank.key: bank.values().clone() for bank in moved.all_banks}
    found = attribute(*moved.about, moved.start, origin)
    assert all(torch.equal(before[bank.key], bank.values()) for bank in moved.all_banks)
    assert list(found) == [part.name for part in moved.parts]
    for name, value in found.items():
        expected = moved.distance(moved.literally(name, origin=origin), origin)
        assert value.item() == pytest.approx(expected, rel=2e-3, abs=1e-6), name
        assert (value > 0) == (name != "head"), name  # the head reads F


def test_the_parts_are_every_role_and_four_ranges_of_each_side() -> None:
    moved = Moved(model__family="encoder_decoder", model__depth=5, model__decoder_depth=2)
    names = " ".join(part.name for part in moved.parts)
    assert "cross_q cross_k cross_v cross_o" in names
    assert "layers_1_1 layers_2_2 layers_3_3 layers_4_5 layers_6_6 layers_7_7" in names
    # Every parameter is of one role, and in one range.
    for is_role in (True, False):
        for bank in moved.all_banks:
            zero, one = torch.zeros_like(bank.values()), torch.ones_like(bank.values())
            parts = [part for part in moved.parts if (part.role is not None) == is_role]
            assert torch.equal(sum((p.put_in(bank, zero, one) for p in parts), zero), one)


@pytest.mark.parametrize(
    "changes",
    [
        *some([{"model__scheme": name} for name in SCHEMES if PAPERS[name].differentiable], 8),
        *({"model__norm__kind": kind, "model__activation": "gelu"} for kind in NORMS),
    ],
    ids=str,
)
def test_first_order_is_what_finite_differences_tell(changes: dict[str, Any]) -> None:
    moved = Moved(size=1.0, model__depth=2, **changes)
    linear = first_order(*moved.about)
    for part in ("v", "w2", "norm_gain", "scheme", "layers_2_2", "outside", "whole"):
        if part in linear:
            ahead, behind = (moved.hidden(moved.literally(part, h)) for h in (1e-6, -1e-6))
            expected = ((ahead - behind) / 2e-6).norm(dim=-1).mean().item()
            assert linear[part].item() == pytest.approx(expected, rel=1e-3, abs=1e-5), part


@pytest.mark.parametrize(
    "changes",
    [
        *some(
            [
                {"model.dropout": 0.1, "model.scheme": "admin"},
                {},
                {"runtime.banks": False},
                {"model.norm.kind": "batch", "model.scheme": "post_ln"},
                {"model.scheme": "branch_norm", "model.scheme_options.ramp_steps": 4},
                {"model.family": "encoder_decoder", "model.scheme": "deepnorm"},
            ],
            3,
        ),
        *some([{"model.scheme": name} for name in SCHEMES.names() if name != "branch_norm"], 48, 2),
    ],
    ids=str,
)
def test_training_goes_on_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    config = with_overrides(small(train__steps=4, train__eval_every=2), changes)
    plain, run = runs_with(config, tmp_path, {}, EVERYTHING)
    assert not (plain.path / "attribution.csv").exists() and plain.columns["attribution"] == {}
    assert data_of(plain).items() <= data_of(run).items()
    added = set(run.layer_names()) - {*plain.layer_names()}
    assert added >= {"stream_update", "skip_loss", "skip_loss_increase", "jacobian"}
    assert {*run.log_names()} - {*plain.log_names()} == set(specs())
    found, linear = run.attribution, pd.read_csv(run.path / "first_order.csv")
    assert list(found["step"]) == [1, 2, 3, 4] and list(found) == list(linear)
    # The very number of steps.csv, as it stands there.
    assert list(found["whole"]) == list(run.steps["model_update"])
    # One small step is nearly linear, whatever way through the layers the run itself takes.
    if "schedule" not in found:
        assert linear["whole"].iloc[0] == pytest.approx(found["whole"].iloc[0], rel=0.3)
    assert ("schedule" in found) == SCHEMES[config.model.scheme].changes_by_step
    assert set(found) - {"step"} == set(run.columns["attribution"])
    assert set(run.layer_names()) <= run.columns["layers"].keys()


def test_frozen_parameters_have_no_part_of_the_update(tmp_path: Path) -> None:
    config = small(train__trainable=["w1", "w2"], train__steps=3, log__attribution_every=1)
    found = deepstack.train(config, out=tmp_path).attribution.iloc[-1]
    layers = {f"layers_{l}_{l}" for l in (1, 2, 3, 4)}
    assert set(found.index[found > 0]) == {"step", "whole", "w1", "w2", *layers}


# --- charts --------------------------------------------------------------------------------


def test_shares_against_depth_and_the_exponent_of_each_role(tmp_path: Path) -> None:
    power = {"w2": 0.5, "norm_gain": 1.0, "q": 0.0}
    for depth, seed in itertools.product((6, 48, 100), (0, 1)):
        path = make_run(tmp_path / "study", depth=depth, seed=seed)
        parts = pd.DataFrame({role: [depth**p, 2 * depth**p] for role, p in power.items()}) / 1e3
        parts = parts.assign(layers_1_2=5.0, whole=parts.sum(axis=1) / 2, step=[1, 2])
        text = parts.set_index("step").to_csv() + "3,0.5"  # the last line is torn
        (path / "attribution.csv").write_text(text)
    chart = make_chart("attribution_vs_depth", tmp_path)
    fits = rows(chart, kind="fit").set_index("series")["exponent"]
    assert fits[list(power)].to_dict() == pytest.approx(power, abs=1e-6)
    shares = rows(chart, kind="share", x=48).set_index("series")["y"].to_dict()
    total = 48**0.5 + 48 + 1
    assert shares == pytest.approx({role: 48**p / total for role, p in power.items()})
    assert rows(chart, kind="ratio")["y"].tolist() == pytest.approx([2.0] * 3)
    text = words(chart)
    assert any(t.startswith("norm gain: 1.00 (2 seeds)") for t in text)
    assert any("do not add up" in t for t in text) and "part / sum of parts" in text
    with pytest.raises(NothingMatchedError, match="no run has a row for step 7"):
        make_chart("attribution_vs_depth", tmp_path, at_step=7)
