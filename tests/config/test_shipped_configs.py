"""Every YAML that the project ships is loaded and built; example and built-in study are found."""

from pathlib import Path

import pytest
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
    study = load_study(path)  # a configuration is a study of one run
    configs = expand(study)
    assert len(configs) == study.size and bool(study.keys) == (study.size > 1)
    vocab = task_of(configs[0]).vocab_size
    assert all(config.model.depth >= 2 for config in configs)
    for each in {c.model.scheme: c for c in configs}.values():  # in few layers: it is built alike
        config = with_overrides(each, {"model.depth": 2})
        counts = build_model(config, vocab_size=vocab, device="meta").banks.count()
        layers = sum(place.depth for place in stack_positions(config.model).values())
        assert counts["w1"] == layers * config.model.d_model * (config.model.d_ff or 0)


def test_the_three_1000_layer_configs_differ_in_their_scheme_alone() -> None:
    deepnorm = load_config(example("deepnorm_1000"))
    for scheme in ("deepnorm", "post_ln", "pre_ln"):
        same_but_scheme = with_overrides(deepnorm, {"model.scheme": scheme})
        assert load_config(example(f"{scheme}_1000")) == same_but_scheme
    # the built-in study has the same settings
    assert deepnorm in expand(load_study(example("depth_sweep")))
