"""Settings of a model that do not go together are refused, with the settings that are allowed."""

from typing import Any

import pytest
from helpers.configs import config_with
from helpers.extensions import needs

from deepstack.base.errors import ConfigError
from deepstack.model import build_model

BOTH = {"model.family": "encoder_decoder"}
MERGED = BOTH | {"model.decoder_attention": "merged"}
PACKED = {"model.init.qkv": "packed"}
WIDTH = {"model.scheme": "complete_p", "model.scheme_options": {"base_width": 8}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    # families that no paper has
    ({"model.family": "decoder", "model.scheme": "t_fixup"}, "allowed.*encoder_decoder"),
    (BOTH | {"model.scheme": "keel"}, "has no equations here"),
    (BOTH | {"model.scheme": "real_former"}, "no equations here"),
    (MERGED | {"model.scheme": "deepnorm"}, "three sublayers"),
    # norms, queries and keys
    ({"model.family": "decoder", "model.norm.kind": "batch"}, "those after it"),
    ({"model.scheme": "deepnorm", "model.norm.final_gain": True}, "has no final norm"),
    ({"model.positions": "rotary", "model.n_heads": 64}, "heads of 1; allowed with an even"),
    (
        MERGED | {"model.positions": "rotary", "model.scheme": "ds_init"},
        "decoder_attention=separate",
    ),
    ({"model.qk_norm": True, "model.scheme": "hybrid_norm"}, "norms of queries and keys"),
    (
        {"model.scheme": "res_post_norm", "model.scheme_options": {"start": 0.0},
         "model.norm.gain": False},
        r"model.norm.gain: false.*allowed with",
    ),
    (
        {"model.scheme": "mudd", "model.scheme_options": {"norms": True}, "model.norm.gain": False},
        r"no gain to start at 0.001; allowed with",
    ),
    # initial values
    (
        PACKED | {"model.init.distribution": "orthogonal"},
        r"model\.init\.qkv: found packed, unused under",
    ),
    ({"model.init.std": 0.1}, r"std: found 0.1, unused .*; allowed 0.02, or .*=normal"),
    (
        {"model.init.distribution": "orthogonal", "model.init.fan": "in"},
        "fan: found in, unused under .*=orthogonal; allowed in_out, or .*=xavier_normal or",
    ),
    (
        {"model.norm.kind": "rms", "model.norm.start": 0.8},
        "start: found 0.8, unused under .*kind=rms; allowed 0.5, or .*kind=dynamic_tanh",
    ),
    (PACKED | {"model.init.fan": "in"}, r"model\.init\.qkv: found packed, unused under"),
    (
        {"model.scheme": "ngpt", "model.init.distribution": "ntk"},
        "distribution: found ntk.*scheme=ngpt puts them back",
    ),
    # options of schemes
    (
        {"model.scheme": "frac_connections", "model.d_model": 12, "model.n_heads": 3,
         "model.scheme_options": {"fractions": 5}},
        r"fractions: found 5, allowed a divisor of .*12",
    ),
    (WIDTH | {"model.head": "bert"}, "µP has no rule"),
    (WIDTH | {"model.init.distribution": "ntk"}, "µP has no rule"),
    (WIDTH | {"train.optimizer": "adam", "train.weight_decay": 0.1}, "µP has no rule"),
    ({"model.depth": 6, "model.unique_layers": 4}, "found 4; allowed a divisor of model.depth = 6"),
    ({"train.momentum": 0.9}, r"found 0.9, unused under .*=adamw; allowed 0.0, or .*=sgd"),
    # logs
    ({"log.skipped_layers": 17}, r"log\.skipped_layers: found 17; allowed .*16"),
    pytest.param(
        {"log.first_order": True},
        r"log\.first_order: found true, unused under",
        marks=needs("attribution"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(config_with(settings), vocab_size=11)
