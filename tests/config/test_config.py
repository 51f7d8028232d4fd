"""Wrong configurations, each with the words that answer it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from helpers.bad_configs import BAD, GOOD

from deepstack import config as conf
from deepstack import yaml_reader
from deepstack.errors import ConfigError

BAD_OVERRIDES = [
    ("model.depth",
     "model.depth on the command line: found 'model.depth'; allowed key=value"),
    ("model.detph=3",
     "model.detph=3 on the command line: model.detph: found the unknown key … did you mean "
     "'depth'?"),
    ("model=3", "model: found 3; allowed a section with the keys scheme"),
    ("model.depth=6,48", "found '6,48' … several values make a sweep: deepstack sweep"),
    ("name=\udcff", "found the control character"),
]  # fmt: skip

AXES = "sweep:\n  grid: {model.scheme: [post_ln, deepnorm], model.depth: [6, 48]}\n"

BAD_STUDIES: dict[str, tuple[str, str]] = {
    "unknown axis": ("sweep:\n  grid:\n    model.detph: [6]\n",
     "f.yaml:3:5: sweep.grid.model.detph: found 'model.detph'; … did you mean 'model.depth'?"),
    "no list": ("sweep: {grid: {seed: 3}}",
     "f.yaml:1:22: sweep.grid.seed: found 3; allowed a list of values"),
    "wrong value": ("sweep:\n  grid:\n    seed: [0, 1, two]\n",
     "f.yaml:3:18: seed: found 'two'; allowed an integer"),
    "wrong role": ("sweep: {grid: {train.lr_factors: [{norm_gian: 1}]}}",
     "f.yaml:1:36: train.lr_factors.norm_gian: found the key … did you mean 'norm_gain'?"),
    "axis of nothing": ("sweep: {grid: {name: [a]}}",
     "sweep.grid.name: found 'name', in which no two runs may differ"),
    "an axis in another": ("sweep: {grid: {train.lr_factors: [{q: 1}], train.lr_factors.k: [2]}}",
     "sweep.grid.train.lr_factors.k: found this key and train.lr_factors"),
    "two lengths as axes": ("sweep: {grid: {train.flops: [1e9, 2e9], train.steps: [3, 4]}}",
     "train.steps: found this key and train.flops; allowed one of them"),
    "too many keys": ("sweep:\n  grid:\n" + "".join(f"    task.k{i}: [1]\n" for i in range(33)),
     "sweep.grid: found too many entries; allowed at most 32"),
    "unknown part": ("sweep: {zipp: {}}",
     "f.yaml:1:9: sweep.zipp: found the unknown key 'zipp'; did you mean 'zip'? allowed: grid, "),
    "unequal": ("sweep: {zip: {seed: [1, 2], model.depth: [1]}}",
     "f.yaml:1:29: sweep.zip.model.depth: found 1 values; allowed 2, as seed has"),
    "key twice": ("sweep: {grid: {seed: [1]}, zip: {seed: [1], model.depth: [1]}}",
     "f.yaml:1:34: sweep.zip.seed: found this key and seed; allowed one of them"),
    "exclude of a section": (AXES + "  exclude: {model.depth: 6}",
     "f.yaml:3:12: sweep.exclude: found a section; allowed a list of: a section"),
    "exclude, unknown key": (AXES + "  exclude: [{model.shceme: post_ln}]",
     "f.yaml:3:14: sweep.exclude.model.shceme: unknown swept key 'model.shceme'; did you mean "
     "'model.scheme'? allowed: model.scheme, model.depth"),
    "exclude, wrong value": (AXES + "  exclude: [{model.scheme: [post_ln, deepnrm]}]",
     "f.yaml:3:38: sweep.exclude.model.scheme: unknown swept value 'deepnrm'; did you mean "
     "'deepnorm'? allowed: post_ln, deepnorm"),
    "exclude of all": (AXES + "  exclude: [{model.depth: [6, 48]}]",
     "f.yaml:2:3: sweep.exclude: found that every run is left out"),
    "override of the excluded": (AXES + "  exclude: [{model.depth: 48}]\n"
     "  overrides: [{where: {model.depth: 48}, set: {train.lr: 1}}]",
     "f.yaml:4:15: sweep.overrides: found an entry that matches no cell"),
    "override of a swept key": (
     AXES + "  overrides: [{where: {model.depth: 48}, set: {model.scheme: pre_ln}}]",
     "f.yaml:3:48: sweep.overrides.set.model.scheme: found 'model.scheme', which the sweep varies"),
    "override, unknown key": (AXES + "  overrides: [{where: {model.depth: 6}, set: {train.rl: 1}}]",
     "f.yaml:3:47: sweep.overrides.set.train.rl: found 'train.rl'; allowed a dotted "
     "key such as model.depth; did you mean 'train.lr'?"),
    "override, wrong value": (
     AXES + "  overrides: [{where: {model.depth: 6}, set: {train.lr: -1}}]",
     "f.yaml:3:57: train.lr: found -1; allowed a number above 0"),
}  # fmt: skip

BAD_STUDY_OVERRIDES = [
    ("seed=0,1,x", "seed=0,1,x on the command line: seed: found 'x'"),
    ("seed=0,'1", "seed=0,'1 on the command line: seed: found … allowed an integer"),
]


def message_of(read: Callable[..., Any], text: str | bytes, overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, "f.yaml", overrides)
    assert error.value.exit_code == 2
    return str(error.value)


CASES = [
    *((conf.parse_config, text, [], parts) for text, parts in BAD.values()),
    *((conf.parse_config, "", [override], parts) for override, parts in BAD_OVERRIDES),
    *((conf.parse_study, text, [], parts) for text, parts in BAD_STUDIES.values()),
    *((conf.parse_study, "", [override], parts) for override, parts in BAD_STUDY_OVERRIDES),
]


@pytest.mark.parametrize(
    ("read", "text", "overrides", "parts"), CASES, ids=[parts for *_, parts in CASES]
)
def test_a_mistake_and_its_message(
    read: Callable[..., Any], text: str, overrides: list[str], parts: str
) -> None:
    """One line, printable and short, that holds the parts in their order."""
    message = message_of(read, text, overrides)
    assert re.search(".*".join(map(re.escape, parts.split(" … "))), message), message
    assert message.isprintable() and len(message) < 500


def test_a_file_that_is_no_configuration_is_refused_with_overrides_too() -> None:
    for read in (conf.parse_config, conf.parse_study):
        message = message_of(read, "hello", ["seed=1"])
        assert message == "f.yaml:1:1: found 'hello'; allowed `key: value` lines"


def test_mistakes_are_told_at_once_in_the_order_of_the_file_twenty_at_most() -> None:
    text = "seed: -1\nmodel:\n  detph: 3\n  n_heads: 5\n"
    text += "train:\n  lr: .inf\n  lr: 3\nlog: {layers_every: x}"
    message = message_of(conf.parse_config, text, ["train.stpes=3", "x"])
    places = [line.partition(": ")[0] for line in message.splitlines()]
    in_file = [f"f.yaml:{place}" for place in ("1:7", "3:3", "4:12", "6:7", "7:3", "8:21")]
    assert places == [*in_file, "x on the command line", "train.stpes=3 on the command line"]
    text = "".join(f"key_{i}: {i}\n" for i in range(3000))
    lines = message_of(conf.parse_config, text, []).splitlines()
    assert len(lines) == 21 and lines[-1] == "... and more"
    assert lines[0].startswith("f.yaml:1:1: key_0:")


def test_pyyaml_without_libyaml_reads_and_refuses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    good = conf.parse_study(GOOD)
    monkeypatch.setattr(yaml_reader, "_LOADER", yaml.SafeLoader)
    assert conf.parse_study(GOOD) == good
    for text, _ in BAD.values():  # PyYAML's own places and reasons differ a little
        if len(text) < 1000:
            assert message_of(conf.parse_config, text, []).startswith("f.yaml:")
