"""Every YAML that the project ships is loaded and built; example and built-in study are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers import ROOT

from deepstack.config import load_config, load_study, with_overrides
from deepstack.config.load import example
from deepstack.model import build_model
from deepstack.schemes import stack_positions
from deepstack.sweeps import expand
from deepstack.tasks import task_of

FILES = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("experiments/*/*.yaml")])


def test_the_promised_examples_are_there() -> None:
    names = {"quick", "deepnorm_1000", "deepnorm_1000_gpu", "post_ln_1000", "pre_ln_1000"}
    names |= {"depth_sweep", "text_file", "bench_narrow", "bench_wide", "modern_48"}
    assert names <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_yaml_is_loaded_and_built(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # text_file.yaml names a file of the checkout
    if "sweep" in yaml.safe_load(path.read_text()):
        study = load_study(path)
        configs = expand(study)
        assert len(configs) == study.size > 1
    else:
        configs = [load_config(path)]
    vocab = task_of(configs[0]).vocab_size
    assert all(config.model.depth >= 2 for config in configs)
    for each in {c.model.scheme: c for c in configs}.values():  # in few layers: it is built alike
        config = with_overrides(each, {"model.depth": 2})
        counts = build_model(config, vocab_size=vocab, device="meta").banks.count()
        layers = sum(place.depth for place in stack_positions(config.model).values())
        assert counts["w1"] == layers * config.model.d_model * (config.model.d_ff or 0)


def test_the_three_1000_layer_configs_differ_in_their_scheme_alone() -> None:
    names = {"deepnorm": "deepnorm_1000", "post_ln": "post_ln_1000", "pre_ln": "pre_ln_1000"}
    dumps = []
    for scheme, name in names.items():
        found = load_config(example(name)).model_dump()
        assert found["model"].pop("scheme") == scheme
        dumps.append(found)
    assert dumps[0] == dumps[1] == dumps[2]


def test_the_built_in_study_has_the_settings_of_deepnorm_1000() -> None:
    study = load_study(example("depth_sweep"))
    assert load_config(example("deepnorm_1000")) in expand(study)
