"""Wrong configurations, each with the words that answer it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from deepstack import config as conf
from deepstack import yaml_reader
from deepstack.errors import ConfigError

# name -> (YAML, the parts of the message, in their order, with … between them)
BAD: dict[str, tuple[str | bytes, str]] = {
    "unknown key": ("model:\n  detph: 6\n",
     "f.yaml:2:3: model.detph: found the unknown key 'detph'; did you mean 'depth'? allowed "
     "scheme, "),
    "unknown section": ("modle:\n  depth: 6\n", "f.yaml:1:1: modle: … did you mean 'model'?"),
    "key of another section": ("depth: 6\n", "f.yaml:1:1: depth: … did you mean 'model.depth'?"),
    "key of another program": ("train:\n  learning_rate: 1\n",
     "f.yaml:2:3: train.learning_rate: … did you mean 'lr'?"),
    "another program's, elsewhere": ("n_layers: 6", "did you mean 'model.depth'?"),
    "key with a dot": ("model.depth: 6",
     "f.yaml:1:1: model.depth: found a key with a dot; allowed a section `model:` with `depth:`"),
    "key below a key": ("seed: {x: 1}", "f.yaml:1:7: seed: found a section; allowed an integer"),
    "duplicate key": ("seed: 1\ntrain: {lr: 1}\nseed: 2",
     "f.yaml:3:1: seed: found the key twice (first on line 1)"),
    "duplicate key in a section": ("train:\n  lr: 1\n  lr: 2",
     "f.yaml:3:3: train.lr: found the key twice (first on line 2)"),
    "unknown role": ("train: {lr_factors: {norm_gian: 1}}",
     "f.yaml:1:22: train.lr_factors.norm_gian: found the key … did you mean 'norm_gain'?"),
    "unknown role in a list": ("train:\n  trainable:\n    - q\n    - embeding\n",
     "f.yaml:4:7: train.trainable[1]: found 'embeding'; allowed q, k, … did you mean "
     "'embedding'?"),
    "one role without a list": ("train: {trainable: q}",
     "train.trainable: found 'q'; allowed all or a list of: q, k"),
    "no role": ("train: {trainable: []}", "f.yaml:1:20: train.trainable: found"),
    "text for an integer": ('model:\n  depth: "12"',
     "f.yaml:2:10: model.depth: found '12'; allowed an integer from 1 to 1000000; did you mean "
     "12?"),
    "float for an integer": ("model: {depth: 1e3}",
     "model.depth: found 1e3; allowed an integer … did you mean 1000?"),
    "underscores": ("train: {steps: 1_000}", "found '1_000' … did you mean 1000?"),
    "true for an integer": ("seed: true",
     "f.yaml:1:7: seed: found true; allowed an integer from 0"),
    "word for a number": ("train: {lr: fast}", "train.lr: found 'fast'; allowed a number above 0"),
    "yes": ("runtime:\n  banks: yes",
     "f.yaml:2:10: runtime.banks: found 'yes'; allowed true or false; did you mean true?"),
    "0 for false": ("runtime: {banks: 0}", "found 0 … did you mean false?"),
    "a word of other programs": ("runtime: {device: gpu}", "auto, cpu, cuda; did you mean 'cuda'?"),
    "a paper's name": ("model: {positions: rope}", "did you mean 'rotary'?"),
    "torch's name of a number": ("train: {precision: bfloat16}", "did you mean 'bf16'?"),
    "a label for a name": ("model: {scheme: Post-LN}", "found 'Post-LN' … did you mean 'post_ln'?"),
    "a blank in a name": ("name: my study", "found 'my study' … did you mean 'my_study'?"),
    "None": ("train: {clip: None}", "train.clip: found 'None' … or null; did you mean null?"),
    "nothing": ("seed:\n", "f.yaml:1:6: seed: found nothing; allowed an integer"),
    "list for a number": ("seed: [1, 2]", "seed: found the list [1, 2]; allowed an integer"),
    "list for a section": ("model: [6]",
     "f.yaml:1:8: model: found the list [6]; allowed a section with the keys scheme"),
    "number for a section": ("model: 6", "model: found 6; allowed a section with the keys scheme"),
    "wrong literal": ("train: {optimizer: AdmaW}",
     "found 'AdmaW'; allowed adamw, adam, sgd, muon; did you mean 'adamw'?"),
    "literal or number": ("log: {layers_every: lgo}",
     "log.layers_every: found 'lgo'; allowed an integer from 0 … or log; did you mean 'log'?"),
    "one beta": ("train: {betas: [0.9]}", "train.betas: found the list [0.9]; allowed a list of 2"),
    "a beta too large": ("train: {betas: [0.9, 1]}", "f.yaml:1:22: train.betas[1]: found 1;"),
    "section as a task's option": ("task: {name: text, path: {a: 1}}",
     "task.path: found a section; allowed text, a number, true or false, or a list of these"),
    "list in a list": ("task: {states: [[1]]}", "task.states … found the list"),
    "depth 0": ("model: {depth: 0}", "found 0; allowed an integer from 1 to 1000000"),
    "negative rate": ("train: {lr: -1}", "train.lr: found -1; allowed a number above 0"),
    "eps that fp32 lacks": ("train: {eps: 1e-300}",
     "train.eps: found 1e-300; allowed a number from 1.2e-38 to 1"),
    "clip that fp32 lacks": ("train: {clip: 1e-300}",
     "train.clip: found 1e-300; allowed a number from 1e-30 on or null"),
    "dropout 1": ("model: {dropout: 1.0}", "found 1.0; allowed a number from 0 to below 1"),
    "seed of 32 bits": ("seed: 2147483648", "allowed an integer from 0 to 2147483647"),
    "NaN": ("train: {lr: .nan}", "f.yaml:1:13: train.lr: found .nan; allowed a finite number"),
    "infinity": ("train: {max_loss: .inf}", "train.max_loss: found .inf; allowed a finite"),
    "overflow": ("train: {lr: 1e999}", "train.lr: found 1e999; allowed a number below 1.8e308"),
    "huge integer": ("seed: 1" + "0" * 60_000, "f.yaml:1:7: seed: found 1000 … below 2^63"),
    "huge hexadecimal": ("seed: 0x" + "f" * 60_000, "f.yaml:1:7: seed: found 0xfff … below 2^63"),
    "heads and width": ("model:\n  d_model: 66\n  n_heads: 4\n",
     "f.yaml:3:12: model.n_heads: found 4; allowed a divisor of model.d_model = 66: 1, 2, 3, 6,"),
    "width and default heads": ("model:\n  d_model: 33\n",
     "f.yaml:2:12: model.n_heads: found 2; allowed a divisor of model.d_model = 33: 1, 3, 11, 33"),
    "absurd depth": ("model:\n  depth: 1000000000\n",
     "f.yaml:2:10: model.depth: found 1000000000; allowed an integer from 1 to 1000000"),
    "absurd memory": ("model:\n  d_model: 65536\n  depth: 1000\n",
     "f.yaml:2:12: model.d_model: found 65536, a run of about … iB; allowed what fits into"),
    "name with a slash": ("name: ../x", "name: found '../x'; allowed letters, digits, '.', '_'"),
    "hidden name": ("name: .x", "name: found '.x'"),
    "name like an option": ("name: -rf", "name: found '-rf'"),
    "name with a line end": ('name: "a\\n"', "name: found 'a\\n'"),
    "long name": ("name: " + "x" * 65, "(at most 64)"),
    "scheme with a slash": ("model: {scheme: a/b}", "model.scheme: found 'a/b'"),
    "tab": ("model:\n\tdepth: 6", "f.yaml:2:1: found a tab; allowed spaces"),
    "no colon": ("model:\n  depth 6\nseed: 1\n", "f.yaml:2:3: model: found 'depth 6'"),
    "two colons": ("name: a: b", "f.yaml:1:8: found a ':' where no key can be"),
    "indentation": ("model:\n  depth: 6\n   n_heads: 2", "f.yaml:3:11: found a ':'"),
    "out of step": ("model:\n  depth: 6\n n_heads: 2",
     "f.yaml:3:2: found a line that is not in step"),
    "open quote": ("seed: 1\nname: 'x", "f.yaml:2:7: found a quote that is never closed"),
    "open list": ("train:\n  betas: [0.9, 0.98\n", "f.yaml:2:10: found a list that is not closed"),
    "open braces": ("train: {lr: 1\n", "f.yaml:1:8: found a section in braces that is not closed"),
    "text after a quote": ("name: 'a' b", "f.yaml:1:11: found text after a closing quote"),
    "reserved letter": ("name: @x", "f.yaml:1:7: found a value that begins with '@'"),
    "anchor": ("model: &m {depth: 6}", "f.yaml:1:8: model: found the anchor '&m'"),
    "alias": ("seed: *s", "f.yaml:1:7: found the alias '*s'"),
    "merge key": ("model:\n  <<: {depth: 6}", "f.yaml:2:3: model: found the merge key '<<'"),
    "tag": ("name: !!python/name:os.system x", "f.yaml:1:7: name: found the tag"),
    "two documents": ("seed: 1\n---\nseed: 2", "f.yaml:2:1: found a second document"),
    "directive": ("%YAML 1.1\n---\nseed: 1", "found a '%' directive"),
    "key that is a list": ("? [a]\n: 1", "f.yaml:1:3: found a list or section as a key"),
    "text alone": ("hello", "f.yaml:1:1: found 'hello'; allowed `key: value` lines"),
    "list alone": ("- a", "f.yaml:1:1: found a list; allowed `key: value` lines"),
    "17 levels": ("{x: " * 17, "found more than 16 levels"),
    "not UTF-8": (b"seed: 1\nname: \xe4", "f.yaml:2:7: found the byte 0xe4, which is not UTF-8"),
    "UTF-16": ("seed: 1".encode("utf-16"), "f.yaml:1:1: found UTF-16; allowed UTF-8"),
    "NUL": (b"seed: 1\x00", "f.yaml:1:8: found the control character '\\x00'"),
    "escape code": (b"name: \x1b[31m", "f.yaml:1:7: found the control character '\\x1b'"),
    "escaped NUL": ('task: {path: "a\\0"}', "f.yaml:1:14: task.path: found the control character"),
    "surrogate": ("name: \ud800", "f.yaml:1:7: found the byte 0xed"),
    "65 KiB": (b"#" * (64 * 1024 + 1), "f.yaml: found … allowed a configuration of at most 64 KiB"),
    "study as a run": ("sweep:\n  grid: {seed: [0, 1]}",
     "f.yaml:1:1: sweep: this file describes a sweep; use: deepstack sweep f.yaml"),
}  # fmt: skip

# name -> (YAML, overrides, the message)
BAD_OVERRIDES: dict[str, tuple[str, list[str], str]] = {
    "override without =": ("", ["model.depth"],
     "model.depth on the command line: found 'model.depth'; allowed key=value"),
    "key and value apart": ("", ["model.depth", "12"],
     "model.depth on the command line: found 'model.depth'; allowed key=value, such as "
     "model.depth=48; did you mean model.depth=12?"),
    "a key without its value": ("", ["model.dept"],
     "model.dept on the command line: found 'model.dept'; allowed key=value, such as "
     "model.depth=48; did you mean model.depth=VALUE?"),
    "override of nothing": ("", ["=3"], "=3 on the command line: found '=3'; allowed key=value"),
    "override, unknown key": ("", ["model.detph=3"],
     "model.detph=3 on the command line: model.detph: found the unknown key … did you mean "
     "'depth'?"),
    "override, wrong type": ("model: {depth: 6}", ["model.depth=six"],
     "model.depth=six on the command line: model.depth: found 'six'; allowed an integer"),
    "override of a section": ("", ["model=3"],
     "model: found 3; allowed a section with the keys scheme"),
    "override below a value": ("seed: 1", ["seed.x=3"],
     "seed.x=3 on the command line: seed: found a section"),
    "override, several values": ("", ["model.depth=6,48"],
     "found '6,48' … several values make a sweep: deepstack sweep"),
    "override, NaN": ("", ["train.lr=.nan"],
     "train.lr=.nan on the command line: train.lr: found .nan"),
    "override, open list": ("", ["train.betas=[0.9"],
     "train.betas=[0.9 on the command line: train.betas: found a list that is not"),
    "override, surrogate": ("", ["name=\udcff"], "found a control character"),
    "override, absurd": ("", ["model.depth=1000000"],
     "model.depth=1000000 on the command line: model.depth: found 1000000, a run of about"),
}  # fmt: skip

BAD_STUDIES: dict[str, tuple[str, str]] = {
    "unknown axis": ("sweep:\n  grid:\n    model.detph: [6]\n",
     "f.yaml:3:5: sweep.grid.model.detph: found the unknown key … did you mean 'model.depth'?"),
    "axis without its section": ("sweep: {grid: {depth: [6]}}", "did you mean 'model.depth'?"),
    "no list": ("sweep: {grid: {seed: 3}}",
     "f.yaml:1:22: sweep.grid.seed: found 3; allowed a list … did you mean [3]?"),
    "empty list": ("sweep: {grid: {seed: []}}", "sweep.grid.seed: found an empty list"),
    "wrong value": ("sweep:\n  grid:\n    seed: [0, 1, two]\n",
     "f.yaml:3:18: seed: found 'two'; allowed an integer"),
    "value twice": ("sweep: {grid: {seed: [0, 0]}}", "f.yaml:1:26: sweep.grid.seed: found 0 twice"),
    "axis of nothing": ("sweep: {grid: {name: [a]}}",
     "sweep.grid.name: found 'name'; allowed a key that makes"),
    "axis of a section": ("sweep: {grid: {model: [a]}}",
     "sweep.grid.model: found 'model'; allowed a key that makes"),
    "unknown key of sweep": ("sweep: {gird: {seed: [0]}}",
     "f.yaml:1:9: sweep.gird: found the unknown key 'gird'; allowed grid"),
    "sweep of a number": ("sweep: 3", "f.yaml:1:8: sweep: found 3; allowed a section with `grid:`"),
    "grid of a list": ("sweep: {grid: [1]}", "sweep.grid: found a list; allowed lines such as"),
    "an axis in another": ("sweep: {grid: {train.lr_factors: [{q: 1}], train.lr_factors.k: [2]}}",
     "sweep.grid.train.lr_factors: found this key and another below it"),
    "a grid too large": (
     f"sweep: {{grid: {{seed: {[*range(3200)]}, train.steps: {[*range(1, 3201)]}}}}}",
     "f.yaml:1:8: sweep.grid: found 10,240,000 runs (3200 seed x 3200 train.steps), 118.5 days "
     "… allowed at most 10,000"),
    "one run too large": ("sweep:\n  grid:\n    model.depth: [6, 1000000]\n",
     "f.yaml:3:18: model.depth: found 1000000, a run of about … allowed what fits into"),
}  # fmt: skip

BAD_STUDY_OVERRIDES: dict[str, tuple[str, list[str], str]] = {
    "override, wrong value": ("", ["seed=0,1,x"],
     "seed=0,1,x on the command line: seed: found 'x'"),
    "override, open quote": ("", ["seed=0,'1"],
     "on the command line: seed: found a quote that is never closed"),
    "override, nothing between": ("", ["seed=0,,1"], "seed: found nothing; allowed an integer"),
}  # fmt: skip


def message_of(read: Callable[..., Any], text: str | bytes, overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, "f.yaml", overrides)
    assert error.value.exit_code == 2
    return str(error.value)


def assert_says(message: str, parts: str) -> None:
    """One line, printable and short, that holds the parts in their order."""
    at = 0
    for part in parts.split(" … "):
        assert part in message[at:], message
        at = message.index(part, at) + len(part)
    assert message.isprintable() and len(message) < 500


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_and_its_message(name: str) -> None:
    text, parts = BAD[name]
    assert_says(message_of(conf.parse_config, text, []), parts)


@pytest.mark.parametrize("name", BAD_OVERRIDES)
def test_a_bad_override_and_its_message(name: str) -> None:
    text, overrides, parts = BAD_OVERRIDES[name]
    assert_says(message_of(conf.parse_config, text, overrides), parts)


@pytest.mark.parametrize("name", BAD_STUDIES)
def test_a_bad_study_and_its_message(name: str) -> None:
    text, parts = BAD_STUDIES[name]
    assert_says(message_of(conf.parse_study, text, []), parts)


@pytest.mark.parametrize("name", BAD_STUDY_OVERRIDES)
def test_a_bad_override_of_a_study_and_its_message(name: str) -> None:
    text, overrides, parts = BAD_STUDY_OVERRIDES[name]
    assert_says(message_of(conf.parse_study, text, overrides), parts)


def test_grids_beyond_numbers_are_refused() -> None:
    axes = [f"    task.k{i}: {[*range(1, 40)]}\n" for i in range(30)]
    message = message_of(conf.parse_study, "sweep:\n  grid:\n" + "".join(axes), [])
    assert_says(
        message, "f.yaml:2:3: sweep.grid: found more than 1,000,000,000,000 runs (39 task.k0"
    )
    axes = [f"    task.k{i}: [1]\n" for i in range(33)]
    message = message_of(conf.parse_study, "sweep:\n  grid:\n" + "".join(axes), [])
    assert_says(message, "sweep.grid: found 33 keys; allowed a grid of at most 32")


def test_every_mistake_is_told_at_once_in_the_order_of_the_file() -> None:
    text = "seed: -1\nmodel:\n  detph: 3\n  n_heads: 5\n"
    text += "train:\n  lr: .inf\n  lr: 3\nlog: {layers_every: x}"
    message = message_of(conf.parse_config, text, ["train.stpes=3", "x"])
    places = [line.partition(": ")[0] for line in message.splitlines()]
    assert places == [
        "f.yaml:1:7",
        "f.yaml:3:3",
        "f.yaml:4:12",
        "f.yaml:6:7",
        "f.yaml:7:3",
        "f.yaml:8:21",
        "x on the command line",
        "train.stpes=3 on the command line",
    ]


def test_thousands_of_mistakes_are_counted_and_twenty_shown() -> None:
    text = "".join(f"key_{i}: {i}\n" for i in range(3000))
    lines = message_of(conf.parse_config, text, []).splitlines()
    assert len(lines) == 21 and lines[-1] == "... and 2980 more"
    assert lines[0].startswith("f.yaml:1:1: key_0:")


def outcome(text: str | bytes) -> conf.Config | str:
    try:
        return conf.parse_config(text, "f.yaml")
    except ConfigError as error:
        return str(error)


def test_pyyaml_without_libyaml_reads_and_refuses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # where PyYAML itself refuses, the two name places and reasons a little differently
    texts: list[str | bytes] = [text for text, _ in BAD.values() if len(text) < 1000]
    texts += ["", "seed: 1\n", "task: {x: [1, 'a', \"b\\n\"]}", "name: |-\n  x\n", "- a\n- b: c\n"]
    before = [outcome(text) for text in texts]
    monkeypatch.setattr(yaml_reader, "_LOADER", yaml.SafeLoader)
    same = [outcome(text) == expected for text, expected in zip(texts, before, strict=True)]
    assert all(type(outcome(text)) is type(b) for text, b in zip(texts, before, strict=True))
    assert same.count(False) <= 8
