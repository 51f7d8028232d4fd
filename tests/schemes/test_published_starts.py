"""Starts and ramps that authors published: packed q, k, v, and the first step of a ramp."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sampling import some
from helpers.small_runs import interrupted, logs_of, rewrite_tensors, small

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.model import build_model
from deepstack.schemes import SCHEMES

PACKED = ("q", "k", "v", "cross_q", "cross_k", "cross_v")
BOTH = {"model.family": "encoder_decoder"}


def values_by_role(config: Config) -> dict[str, list[torch.Tensor]]:
    """The drawn matrices of a model, by role."""
    matrices: dict[str, list[torch.Tensor]] = {}
    for bank in build_model(config, vocab_size=11).banks:
        for role, tensors in bank.by_role():
            if bank.start in ("matrix", "table"):
                matrices.setdefault(role, []).extend(tensors)
    return matrices


# a constraint sets the scale of matrices after they are drawn
DRAWN = [
    (name, {"model.family": family})
    for name in SCHEMES.names()
    for family in SCHEMES[name].families
    if not SCHEMES[name].constrains
]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("t_fixup", BOTH),
        ("admin", BOTH | {"model.decoder_attention": "merged"}),
        ("deepnorm", BOTH | {"train.lr_factors": {"v": 0.5, "cross_v": 0.5}}),
        *some(DRAWN, 9),
    ],
    ids=str,
)
def test_packed_q_k_v_start_as_one_wide_matrix(name: str, given: dict[str, Any]) -> None:
    config = with_overrides(Config(), {"model.scheme": name, "model.depth": 3} | given)
    separate = values_by_role(config)
    packed = values_by_role(with_overrides(config, {"model.init.qkv": "packed"}))
    assert separate.keys() == packed.keys()
    undone = ("v", "cross_v") if name == "t_fixup" else ()
    for role, tensors in separate.items():
        ratio = math.sqrt(0.5) if role in PACKED and role not in undone else 1.0
        torch.testing.assert_close(packed[role], [ratio * one for one in tensors])


@pytest.mark.parametrize(("qkv", "low", "high"), [("packed", 8.2, 9.1), ("separate", 10.5, 11.5)])
def test_admin_s_profile_is_near_the_published_one(qkv: str, low: float, high: float) -> None:
    """Sublayer 200 of 100 layers: 8.84 in `example/profile.ratio.init` of microsoft/admin-torch."""
    changes = {"model.scheme": "admin", "model.depth": 100, "model.init.qkv": qkv}
    one = build_model(with_overrides(Config(), changes), vocab_size=257)
    one.calibrate(torch.randint(257, (8, 64), generator=torch.Generator().manual_seed(0)))
    omega = one.model.schemes[-1].each("omega")[-1]
    assert low < omega.detach().mean().item() < high


def with_last_norms_in_every_layer(key: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    for index, stream in enumerate("xy"):
        now = f"encoder.stream_norms.{index}."
        if key.startswith(now):
            key = key.replace(now, f"encoder.layers.scheme.last_of_{stream}.")
            if value.ndim > 1:
                value = torch.cat([torch.ones_like(value)] * 3 + [value])
    return key, value


@pytest.mark.parametrize(
    ("scheme", "earlier"),
    [
        ("pre_ln", lambda key, value: (key.removeprefix("encoder."), value)),
        ("siamese_norm", with_last_norms_in_every_layer),
    ],
)
def test_an_earlier_checkpoint_goes_on(scheme: str, earlier: Any, tmp_path: Path) -> None:
    config = small(model__scheme=scheme, task__name="copy", train__eval_every=0)
    uninterrupted = deepstack.train(config, out=tmp_path / "a")
    folder = interrupted(config, tmp_path / "b", 5)
    rewrite_tensors(folder.checkpoint_path(5), earlier)
    assert interrupted(config, tmp_path / "b", 1).checkpoint_path(6).is_dir()
    assert logs_of(uninterrupted) == logs_of(deepstack.train(config, out=tmp_path / "b"))
