"""Configurations: what is read, what is refused and with which words, and what comes back."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepstack import config as conf
from deepstack.config import estimate, yaml_reader
from deepstack.config.explain import keys, sections
from deepstack.errors import ConfigError

# name -> (YAML, overrides, parts of the message in their order)
BAD: dict[str, tuple[str | bytes, list[str], list[str]]] = {
    # names
    "unknown key": (
        "model:\n  detph: 6\n",
        [],
        ["f.yaml:2:3: model.detph: found the unknown key 'detph'; allowed scheme", "did you mean 'depth'?"],
    ),
    "unknown section": ("modle:\n  depth: 6\n", [], ["f.yaml:1:1: modle:", "did you mean 'model'?"]),
    "key of another section": (
        "depth: 6\n",
        [],
        ["f.yaml:1:1: depth:", "did you mean 'model.depth'?"],
    ),
    "key of another program": (
        "train:\n  learning_rate: 1\n",
        [],
        ["f.yaml:2:3: train.learning_rate:", "did you mean 'lr'?"],
    ),
    "another program's, elsewhere": ("n_layers: 6", [], ["did you mean 'model.depth'?"]),
    "key with a dot": (
        "model.depth: 6",
        [],
        ["f.yaml:1:1: model.depth: found a key with a dot; allowed a section `model:` with `depth:`"],
    ),
    "key below a key": ("seed: {x: 1}", [], ["f.yaml:1:7: seed: found a section; allowed an integer"]),
    "duplicate key": (
        "seed: 1\ntrain: {lr: 1}\nseed: 2",
        [],
        ["f.yaml:3:1: seed: found the key twice (first on line 1)"],
    ),
    "duplicate key in a section": (
        "train:\n  lr: 1\n  lr: 2",
        [],
        ["f.yaml:3:3: train.lr: found the key twice (first on line 2)"],
    ),
    "unknown role": (
        "train: {lr_factors: {norm_gian: 1}}",
        [],
        ["f.yaml:1:22: train.lr_factors.norm_gian: found the key", "did you mean 'norm_gain'?"],
    ),
    "unknown role in a list": (
        "train:\n  trainable:\n    - q\n    - embeding\n",
        [],
        ["f.yaml:4:7: train.trainable[1]: found 'embeding'; allowed q, k,", "did you mean 'embedding'?"],
    ),
    "one role without a list": (
        "train: {trainable: q}",
        [],
        ["train.trainable: found 'q'; allowed all or a list of: q, k"],
    ),
    "no role": ("train: {trainable: []}", [], ["f.yaml:1:20: train.trainable: found"]),
    # types
    "text for an integer": (
        'model:\n  depth: "12"',
        [],
        ["f.yaml:2:10: model.depth: found '12'; allowed an integer from 1 to 1000000; did you mean 12?"],
    ),
    "float for an integer": (
        "model: {depth: 1e3}",
        [],
        ["model.depth: found 1e3; allowed an integer", "did you mean 1000?"],
    ),
    "underscores": ("train: {steps: 1_000}", [], ["found '1_000'", "did you mean 1000?"]),
    "true for an integer": ("seed: true", [], ["f.yaml:1:7: seed: found true; allowed an integer from 0"]),
    "word for a number": ("train: {lr: fast}", [], ["train.lr: found 'fast'; allowed a number above 0"]),
    "yes": (
        "runtime:\n  banks: yes",
        [],
        ["f.yaml:2:10: runtime.banks: found 'yes'; allowed true or false; did you mean true?"],
    ),
    "0 for false": ("runtime: {banks: 0}", [], ["found 0", "did you mean false?"]),
    "None": ("train: {clip: None}", [], ["train.clip: found 'None'", "or null; did you mean null?"]),
    "nothing": ("seed:\n", [], ["f.yaml:1:6: seed: found nothing; allowed an integer"]),
    "list for a number": ("seed: [1, 2]", [], ["seed: found the list [1, 2]; allowed an integer"]),
    "list for a section": (
        "model: [6]",
        [],
        ["f.yaml:1:8: model: found the list [6]; allowed a section with the keys scheme"],
    ),
    "number for a section": ("model: 6", [], ["model: found 6; allowed a section with the keys scheme"]),
    "wrong literal": (
        "train: {optimizer: AdmaW}",
        [],
        ["found 'AdmaW'; allowed adamw, adam, sgd; did you mean 'adamw'?"],
    ),
    "literal or number": (
        "log: {layers_every: lgo}",
        [],
        ["log.layers_every: found 'lgo'; allowed an integer from 0", "or log; did you mean 'log'?"],
    ),
    "one beta": ("train: {betas: [0.9]}", [], ["train.betas: found the list [0.9]; allowed a list of 2"]),
    "a beta too large": ("train: {betas: [0.9, 1]}", [], ["f.yaml:1:22: train.betas[1]: found 1;"]),
    "section as a task's option": (
        "task: {name: text, path: {a: 1}}",
        [],
        ["task.path: found a section; allowed text, a number, true or false, or a list of these"],
    ),
    "list in a list": ("task: {states: [[1]]}", [], ["task.states", "found the list"]),
    # ranges
    "depth 0": ("model: {depth: 0}", [], ["found 0; allowed an integer from 1 to 1000000"]),
    "negative rate": ("train: {lr: -1}", [], ["train.lr: found -1; allowed a number above 0"]),
    "dropout 1": ("model: {dropout: 1.0}", [], ["found 1.0; allowed a number from 0 to below 1"]),
    "seed of 32 bits": ("seed: 2147483648", [], ["allowed an integer from 0 to 2147483647"]),
    "NaN": ("train: {lr: .nan}", [], ["f.yaml:1:13: train.lr: found .nan; allowed a finite number"]),
    "infinity": ("train: {max_loss: .inf}", [], ["train.max_loss: found .inf; allowed a finite"]),
    "overflow": ("train: {lr: 1e999}", [], ["train.lr: found 1e999; allowed a number below 1.8e308"]),
    "huge integer": ("seed: 1" + "0" * 60_000, [], ["f.yaml:1:7: seed: found 1000", "below 2^63"]),
    "huge hexadecimal": ("seed: 0x" + "f" * 60_000, [], ["f.yaml:1:7: seed: found 0xfff", "below 2^63"]),
    "heads and width": (
        "model:\n  d_model: 66\n  n_heads: 4\n",
        [],
        ["f.yaml:3:12: model.n_heads: found 4; allowed a divisor of model.d_model = 66: 1, 2, 3, 6,"],
    ),
    "width and default heads": (
        "model:\n  d_model: 33\n",
        [],
        ["f.yaml:2:12: model.n_heads: found 2; allowed a divisor of model.d_model = 33: 1, 3, 11, 33"],
    ),
    "absurd depth": (
        "model:\n  depth: 1000000000\n",
        [],
        ["f.yaml:2:10: model.depth: found 1000000000; allowed an integer from 1 to 1000000"],
    ),
    "absurd memory": (
        "model:\n  d_model: 65536\n  depth: 1000\n",
        [],
        ["f.yaml:2:12: model.d_model: found 65536, a run of about", "TiB; allowed what fits into"],
    ),
    # names of files
    "name with a slash": ("name: ../x", [], ["name: found '../x'; allowed letters, digits, '.', '_'"]),
    "hidden name": ("name: .x", [], ["name: found '.x'"]),
    "name like an option": ("name: -rf", [], ["name: found '-rf'"]),
    "name with a line end": ('name: "a\\n"', [], ["name: found 'a\\n'"]),
    "long name": (f"name: {'x' * 65}", [], ["(at most 64)"]),
    "scheme with a slash": ("model: {scheme: a/b}", [], ["model.scheme: found 'a/b'"]),
    # YAML
    "tab": ("model:\n\tdepth: 6", [], ["f.yaml:2:1: found a tab; allowed spaces"]),
    "no colon": ("model:\n  depth 6\nseed: 1\n", [], ["f.yaml:2:3: model: found 'depth 6'"]),
    "two colons": ("name: a: b", [], ["f.yaml:1:8: found a ':' where no key can be"]),
    "indentation": ("model:\n  depth: 6\n   n_heads: 2", [], ["f.yaml:3:11: found a ':'"]),
    "out of step": ("model:\n  depth: 6\n n_heads: 2", [], ["f.yaml:3:2: found a line that is not in step"]),
    "open quote": ("seed: 1\nname: 'x", [], ["f.yaml:2:7: found a quote that is never closed"]),
    "open list": ("train:\n  betas: [0.9, 0.98\n", [], ["f.yaml:2:10: found a list that is not closed"]),
    "open braces": ("train: {lr: 1\n", [], ["f.yaml:1:8: found a section in braces that is not closed"]),
    "text after a quote": ("name: 'a' b", [], ["f.yaml:1:11: found text after a closing quote"]),
    "reserved letter": ("name: @x", [], ["f.yaml:1:7: found a value that begins with '@'"]),
    "anchor": ("model: &m {depth: 6}", [], ["f.yaml:1:8: model: found the anchor '&m'"]),
    "alias": ("seed: *s", [], ["f.yaml:1:7: found the alias '*s'"]),
    "merge key": ("model:\n  <<: {depth: 6}", [], ["f.yaml:2:3: model: found the merge key '<<'"]),
    "tag": ("name: !!python/name:os.system x", [], ["f.yaml:1:7: name: found the tag"]),
    "two documents": ("seed: 1\n---\nseed: 2", [], ["f.yaml:2:1: found a second document"]),
    "directive": ("%YAML 1.1\n---\nseed: 1", [], ["found a '%' directive"]),
    "key that is a list": ("? [a]\n: 1", [], ["f.yaml:1:3: found a list or section as a key"]),
    "text alone": ("hello", [], ["f.yaml:1:1: found 'hello'; allowed `key: value` lines"]),
    "list alone": ("- a", [], ["f.yaml:1:1: found a list; allowed `key: value` lines"]),
    "17 levels": ("{x: " * 17, [], ["found more than 16 levels"]),
    # bytes
    "not UTF-8": (b"seed: 1\nname: \xe4", [], ["f.yaml:2:7: found the byte 0xe4, which is not UTF-8"]),
    "UTF-16": ("seed: 1".encode("utf-16"), [], ["f.yaml:1:1: found UTF-16; allowed UTF-8"]),
    "NUL": (b"seed: 1\x00", [], ["f.yaml:1:8: found the control character '\\x00'"]),
    "escape code": (b"name: \x1b[31m", [], ["f.yaml:1:7: found the control character '\\x1b'"]),
    "escaped NUL": ('task: {path: "a\\0"}', [], ["f.yaml:1:14: task.path: found the control character"]),
    "surrogate": ("name: \ud800", [], ["f.yaml:1:7: found the byte 0xed"]),
    "65 KiB": (b"#" * (64 * 1024 + 1), [], ["f.yaml: found", "allowed a configuration of at most 64 KiB"]),
    # overrides
    "override without =": ("", ["model.depth"], ["model.depth on the command line: found 'model.depth'; allowed key=value"]),
    "override of nothing": ("", ["=3"], ["=3 on the command line: found '=3'; allowed key=value"]),
    "override, unknown key": (
        "",
        ["model.detph=3"],
        ["model.detph=3 on the command line: model.detph: found the unknown key", "did you mean 'depth'?"],
    ),
    "override, wrong type": (
        "model: {depth: 6}",
        ["model.depth=six"],
        ["model.depth=six on the command line: model.depth: found 'six'; allowed an integer"],
    ),
    "override of a section": ("", ["model=3"], ["model: found 3; allowed a section with the keys scheme"]),
    "override below a value": ("seed: 1", ["seed.x=3"], ["seed.x=3 on the command line: seed: found a section"]),
    "override, several values": ("", ["model.depth=6,48"], ["found '6,48'", "several values make a sweep: deepstack sweep"]),
    "override, NaN": ("", ["train.lr=.nan"], ["train.lr=.nan on the command line: train.lr: found .nan"]),
    "override, open list": ("", ["train.betas=[0.9"], ["train.betas=[0.9 on the command line: train.betas: found a list that is not"]),
    "override, surrogate": ("", ["name=\udcff"], ["found a control character"]),
    "override, absurd": ("", ["model.depth=1000000"], ["model.depth=1000000 on the command line: model.depth: found 1000000, a run of about"]),
    # studies
    "study as a run": (
        "sweep:\n  grid: {seed: [0, 1]}",
        [],
        ["f.yaml:1:1: sweep: this file describes a sweep; use: deepstack sweep f.yaml"],
    ),
}  # fmt: skip

BAD_STUDIES: dict[str, tuple[str, list[str], list[str]]] = {
    "unknown axis": (
        "sweep:\n  grid:\n    model.detph: [6]\n",
        [],
        ["f.yaml:3:5: sweep.grid.model.detph: found the unknown key", "did you mean 'model.depth'?"],
    ),
    "axis without its section": ("sweep: {grid: {depth: [6]}}", [], ["did you mean 'model.depth'?"]),
    "no list": ("sweep: {grid: {seed: 3}}", [], ["f.yaml:1:22: sweep.grid.seed: found 3; allowed a list", "did you mean [3]?"]),
    "empty list": ("sweep: {grid: {seed: []}}", [], ["sweep.grid.seed: found an empty list"]),
    "wrong value": (
        "sweep:\n  grid:\n    seed: [0, 1, two]\n",
        [],
        ["f.yaml:3:18: seed: found 'two'; allowed an integer"],
    ),
    "value twice": ("sweep: {grid: {seed: [0, 0]}}", [], ["f.yaml:1:26: sweep.grid.seed: found 0 twice"]),
    "axis of nothing": ("sweep: {grid: {name: [a]}}", [], ["sweep.grid.name: found 'name'; allowed a key that makes"]),
    "axis of a section": ("sweep: {grid: {model: [a]}}", [], ["sweep.grid.model: found 'model'; allowed a key that makes"]),
    "unknown key of sweep": ("sweep: {gird: {seed: [0]}}", [], ["f.yaml:1:9: sweep.gird: found the unknown key 'gird'; allowed grid"]),
    "sweep of a number": ("sweep: 3", [], ["f.yaml:1:8: sweep: found 3; allowed a section with `grid:`"]),
    "grid of a list": ("sweep: {grid: [1]}", [], ["sweep.grid: found a list; allowed lines such as"]),
    "an axis in another": (
        "sweep: {grid: {train.lr_factors: [{q: 1}], train.lr_factors.k: [2]}}",
        [],
        ["sweep.grid.train.lr_factors: found this key and another below it"],
    ),
    "a grid too large": (
        f"sweep: {{grid: {{seed: {list(range(3200))}, train.steps: {list(range(1, 3201))}}}}}",
        [],
        ["f.yaml:1:8: sweep.grid: found 10,240,000 runs (3200 seed x 3200 train.steps), 118.5 days", "allowed at most 10,000"],
    ),
    "a grid beyond numbers": (
        "sweep:\n  grid:\n" + "".join(f"    task.k{i}: [1, 2, 3]\n" for i in range(2000)),
        [],
        ["sweep.grid: found more than 1,000,000,000,000 runs"],
    ),
    "one run too large": (
        "sweep:\n  grid:\n    model.depth: [6, 1000000]\n",
        [],
        ["f.yaml:3:18: model.depth: found 1000000, a run of about", "allowed what fits into"],
    ),
    "override, wrong value": ("", ["seed=0,1,x"], ["seed=0,1,x on the command line: seed: found 'x'"]),
    "override, open quote": ("", ["seed=0,'1"], ["on the command line: seed: found a quote that is never closed"]),
    "override, nothing between": ("", ["seed=0,,1"], ["seed: found nothing; allowed an integer"]),
}  # fmt: skip


def message_of(read: Any, text: str | bytes, overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, "f.yaml", overrides)
    assert error.value.exit_code == 2
    return str(error.value)


def assert_in_order(parts: list[str], message: str) -> None:
    at = 0
    for part in parts:
        assert part in message[at:], message
        at = message.index(part, at) + len(part)


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_and_their_messages(name: str) -> None:
    text, overrides, parts = BAD[name]
    message = message_of(conf.parse_config, text, overrides)
    assert_in_order(parts, message)
    assert "\n" not in message, "one mistake, one line"
    assert message.isprintable() and len(message) < 500


@pytest.mark.parametrize("name", BAD_STUDIES)
def test_bad_studies_and_their_messages(name: str) -> None:
    text, overrides, parts = BAD_STUDIES[name]
    message = message_of(conf.parse_study, text, overrides)
    assert_in_order(parts, message)
    assert "\n" not in message and message.isprintable() and len(message) < 500


def test_every_mistake_is_told_at_once_in_the_order_of_the_file() -> None:
    text = "seed: -1\nmodel:\n  detph: 3\n  n_heads: 5\ntrain:\n  lr: .inf\n  lr: 3\nlog: {layers_every: x}"
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


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4), ("1e3", 1000.0), ("1E+3", 1000.0), (".5", 0.5), ("5.", 5.0), ("-0", 0),
        ("+3", 3), ("007", 7), ("0o17", 15), ("0x1F", 31), ("yes", "yes"), ("on", "on"),
        ("no", "no"), ("Off", "Off"), ("1_000", "1_000"), ("12:30", "12:30"), ("true", True),
        ("FALSE", False), ("~", None), ("null", None), ("", None), ("'1'", "1"), ('"a\\tb"', "a\tb"),
        ("2020-01-01", "2020-01-01"), ("1.2.3", "1.2.3"), ("a b", "a b"), ("[1, a, 2.5]", [1, "a", 2.5]),
        ("0b1", "0b1"), ("1e", "1e"), ("-", "-"), (".", "."), ("é", "é"), ("'😀'", "😀"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(written: str, value: Any) -> None:
    overridden = conf.parse_config("", overrides=[f"task.x={written}"])
    if written != "-":
        read = conf.parse_config(f"task:\n  x: {written}\n")
        assert read.task.options() == {"x": value}
        assert type(read.task.options()["x"]) is type(value)
    assert overridden.task.options() == {"x": value}


def test_an_empty_file_is_a_config() -> None:
    for text in (
        "",
        "# nothing\n",
        "---\n",
        "\ufeff",
        "model:\n  # depth: 6\n",
        "train: {lr_factors: }",
    ):
        assert conf.parse_config(text) == conf.Config()
    assert conf.Config().model.d_ff == 256


def test_text_with_crlf_and_bom_is_read() -> None:
    read = conf.parse_config(b"\xef\xbb\xbfseed: 3\r\nmodel:\r\n  depth: 7\r\n")
    assert (read.seed, read.model.depth) == (3, 7)
    message = message_of(conf.parse_config, b"\xef\xbb\xbfseed: 3\r\nmodle: 1\r\n", [])
    assert message.startswith("f.yaml:2:1:")


def test_overrides_win_and_the_last_of_them() -> None:
    read = conf.parse_config(
        "seed: 1\nmodel: {depth: 6}\n",
        overrides=[
            "seed=2",
            "seed=3",
            "model.depth=48",
            "train.lr_factors.q=0.5",
            "train.betas=[0.5, 0.6]",
            "train.clip=null",
            "task.path=a: b #c",
            "model.scheme_options={order: 2}",
            "name='yes'",
        ],
    )
    assert (read.seed, read.model.depth, read.train.lr_factors) == (3, 48, {"q": 0.5})
    assert (read.train.betas, read.train.clip) == ((0.5, 0.6), None)
    assert read.task.options() == {"path": "a: b #c"}
    assert (read.model.scheme_options, read.name) == ({"order": 2}, "yes")


def test_d_ff_follows_d_model_unless_it_was_given() -> None:
    derived, given = (
        conf.parse_config("model: {d_model: 32}"),
        conf.parse_config("model: {d_ff: 99}"),
    )
    assert derived.model.d_ff == 128
    assert conf.with_overrides(derived, {"model.d_model": 64}).model.d_ff == 256
    twice = conf.with_overrides(conf.with_overrides(derived, {"seed": 1}), {"model.d_model": 16})
    assert twice.model.d_ff == 64
    assert conf.with_overrides(given, {"model.d_model": 128}).model.d_ff == 99
    assert conf.parse_config("model: {d_ff: null, d_model: 8}").model.d_ff == 32


def test_with_overrides_changes_a_copy_and_validates() -> None:
    import numpy as np

    before = conf.Config()
    after = conf.with_overrides(before, {"model.depth": np.int64(48), "train.betas": [0.1, 0.2]})
    assert (before.model.depth, after.model.depth, after.train.betas) == (6, 48, (0.1, 0.2))
    with pytest.raises(ConfigError) as error:
        conf.with_overrides(before, {"model.detph": 3, "seed": "x"})
    assert "model.detph: found the unknown key" in str(error.value)
    assert "seed: found 'x'" in str(error.value)


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        conf.Config().model.depth = 3  # type: ignore[misc]


AWKWARD = """
name: on
seed: 2147483647
model: {d_model: 12, n_heads: 3, scheme_options: {a: 1.0, b: 1, c: true, d: 'true'}}
task:
  name: markov
  texts: ['1e3', '~', 'null', "a'b", 'c"d', 'e\\f', ': ', '- x', '#', '', ' a ', "tab\\tend\\n"]
  more: [é, 😀, "\\u202e", '1_000', '.nan', 0.1, 1e300, -5e-324, 1e22, 123456789012, '0x1f']
  path: ../some file.txt
  nothing: null
train: {lr: 3e-4, betas: [0, 0.5], clip: null, trainable: [q, w1], lr_factors: {k: 0, head: 2.5}}
log: {layers_every: 10}
"""


@pytest.mark.parametrize("text", ["", AWKWARD])
def test_to_yaml_reads_back_equal(text: str) -> None:
    read = conf.parse_config(text)
    again = conf.parse_config(conf.to_yaml(read))
    assert again == read and conf.to_yaml(again) == conf.to_yaml(read)
    assert conf.same_experiment(read, again) and conf.config_hash(read) == conf.config_hash(again)
    assert conf.values(read).items() >= conf.non_defaults(read).items()
    by_another = yaml.safe_load(conf.to_yaml(conf.Config()))
    assert by_another["model"]["depth"] == 6


def test_non_defaults_hash_and_run_name() -> None:
    read = conf.parse_config(
        "name: x\nseed: 1\nmodel: {d_model: 32, depth: 1000}\nruntime: {threads: 1}"
    )
    assert conf.non_defaults(read) == {
        "name": "x",
        "seed": 1,
        "model.d_model": 32,
        "model.depth": 1000,
        "runtime.threads": 1,
    }
    other = conf.with_overrides(read, {"name": "y", "runtime.threads": 2})
    assert conf.same_experiment(read, other) and conf.config_hash(read) == conf.config_hash(other)
    assert not conf.same_experiment(read, conf.with_overrides(read, {"train.lr": 0.1}))
    assert conf.run_name(read) == f"deepnorm-d1000-s1-{conf.config_hash(read)}"
    # a hash that changed would give every recorded run another name
    assert conf.config_hash(conf.Config()) == "44136f"
    assert conf.config_hash(read) == "9f3f7c"


@pytest.mark.parametrize(
    ("name", "path", "study"),
    [
        ("kept", "configs/x.yaml", "kept"),
        (None, "configs/depth_sweep.yaml", "depth_sweep"),
        (None, "a b/ü x.yaml", "_x"),
        (None, "..yaml", "runs"),
        (None, "-rf.yaml", "rf"),
    ],
)
def test_study_name_stays_in_its_folder(name: str | None, path: str, study: str) -> None:
    assert conf.study_name(conf.Config(name=name), path) == study


STUDY = """
model: {d_model: 32}
sweep:
  grid:
    model.depth: [6, 48]
    model.scheme: [post_ln, deepnorm]
    train.betas: [[0.9, 0.98], [0.9, 0.95]]
"""


def test_studies_hold_a_base_and_a_grid() -> None:
    study = conf.parse_study(STUDY)
    assert study.base == conf.parse_config("model: {d_model: 32}")
    assert list(study.grid) == ["model.depth", "model.scheme", "train.betas"]
    assert study.grid["train.betas"] == [[0.9, 0.98], [0.9, 0.95]] and study.size == 8
    assert conf.parse_study("seed: 3") == conf.Study(conf.parse_config("seed: 3"), {})
    assert conf.parse_study("seed: 3").size == 1


def test_overrides_of_studies_make_replace_and_fix_axes() -> None:
    overrides = [
        "model.depth=1,2,3",
        "model.scheme=pre_ln",
        "seed=0,1",
        "train.betas=[0.1,0.2],[0.3,0.4]",
    ]
    study = conf.parse_study(
        STUDY, overrides=[*overrides, "task.path='a,b'", "train.trainable=[q,k]"]
    )
    assert study.grid == {
        "model.depth": [1, 2, 3],
        "train.betas": [[0.1, 0.2], [0.3, 0.4]],
        "seed": [0, 1],
    }
    assert study.base.model.scheme == "pre_ln" and study.base.train.trainable == ("q", "k")
    assert study.base.task.options() == {"path": "a,b"}


def test_values_that_do_not_go_alone_may_go_together() -> None:
    study = conf.parse_study("sweep: {grid: {model.d_model: [30, 60], model.n_heads: [3, 5]}}")
    assert study.size == 4


def test_json_schema_knows_every_key_with_its_meaning() -> None:
    schema = conf.json_schema()
    assert json.loads(json.dumps(schema)) == schema
    for name, section in {"": schema, **schema["$defs"]}.items():
        assert section["additionalProperties"] is not True or name == "Task"
        for key, value in section["properties"].items():
            if "$ref" not in value:
                assert value.get("description", "").endswith((".", "?")), (name, key)
    assert set(sections()) == {
        "",
        "model",
        "model.norm",
        "model.init",
        "task",
        "train",
        "log",
        "runtime",
    }
    assert set(conf.values(conf.Config())) == set(keys()) - {
        "model.scheme_options",
        "train.lr_factors",
    }


def test_every_key_has_a_description_in_python_too() -> None:
    for model in (conf.Model, conf.Norm, conf.Init, conf.Task, conf.Train, conf.Log, conf.Runtime):
        assert model.__doc__
        for key, field in model.model_fields.items():
            assert field.description or key in ("norm", "init"), key


def test_locate_finds_the_place_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("model:\n  scheme: nonsense\n")
    assert conf.locate(file, [], "model.scheme") == f"{file}:2:11"
    override = ["model.scheme=x"]
    assert conf.locate(file, override, "model.scheme") == "model.scheme=x on the command line"
    assert conf.locate(file, [], "task.name") == str(file)


# hostile bytes


def refused_or_read(data: str | bytes, overrides: list[str] | None = None) -> None:
    """Whatever it is, it ends in a config or in a message, and soon."""
    begin = time.perf_counter()
    for read in (conf.parse_config, conf.parse_study):
        try:
            read(data, "f.yaml", overrides or [])
        except ConfigError as error:
            assert str(error) and len(str(error)) < 20_000
            assert str(error).replace("\n", "").isprintable()
    assert time.perf_counter() - begin < 2


HOSTILE: dict[str, str | bytes] = {
    "deep lists": "[" * 65_000,
    "deep lists over lines": "[\n" * 30_000,
    "deep sections": "{a: " * 16_000,
    "deep block lists": "- " * 30_000,
    "deep block keys": "? " * 30_000,
    "deep indentation": "".join(" " * i + "a:\n" for i in range(350)),
    "billion laughs": "a: &a [x,x]\n" + "".join(f"b{i}: &b{i} [*a,*a]\n" for i in range(99)),
    "many keys": "".join(f"k{i}:\n" for i in range(9000)),
    "many long keys": "".join(f"{'batch_size' * 3}{i}:\n" for i in range(1500)),
    "many values": "task: {x: [" + "1," * 32_000 + "]}",
    "many duplicates": "a:\n" * 20_000,
    "many mistakes in a section": "model:\n" + "".join(f"  depht{i}: 1\n" for i in range(4000)),
    "many roles": "train: {lr_factors: {" + "".join(f"r{i}: 1, " for i in range(6000)) + "}}",
    "many in a list": "train: {trainable: [" + "qq, " * 16_000 + "]}",
    "many options": "task: {" + "".join(f"o{i}: {{}}, " for i in range(6000)) + "}",
    "long key": "k" * 65_000 + ": 1",
    "long value": "name: " + "x" * 65_000,
    "long digits": "seed: " + "9" * 65_000,
    "long float": "train: {lr: " + "9" * 60_000 + ".5e-60000}",
    "long exponent": "train: {lr: 1e-" + "9" * 60_000 + "}",
    "long line of dots": "seed: " + "." * 65_000,
    "tabs": "\t" * 65_000,
    "line ends": "\n" * 65_000,
    "carriage returns": "\r" * 65_000 + "x",
    "quotes": "'" * 65_001,
    "double quotes": '"' * 65_001,
    "backslashes": 'name: "' + "\\" * 60_000,
    "colons": ":" * 65_000,
    "spaced colons": ": " * 32_000,
    "commas": "[" + "," * 65_000,
    "dashes": "-" * 65_000,
    "document marks": "---\n" * 16_000,
    "percents": "%" * 65_000,
    "stars": "*" * 65_000,
    "exclamation marks": "!" * 65_000,
    "block scalar": "name: |\n" + "  x\n" * 16_000,
    "folded scalar": "name: >9\n" + " x\n" * 16_000,
    "dots in a key": "." * 65_000 + ": 1",
    "dotted axes": "sweep: {grid: {" + "a." * 30_000 + ": [1]}}",
    "many axes": "sweep:\n grid:\n" + "".join(f"  task.x{i}: [1]\n" for i in range(3000)),
    "lone surrogates": "\ud800\udfff" * 10_000,
    "escaped surrogates": 'name: "' + "\\ud800" * 9_000 + '"',
    "noncharacters": "\uffff\ufffe",
    "NULs": b"\x00" * 65_536,
    "all bytes": bytes(range(256)) * 256,
    "UTF-32": "seed: 1".encode("utf-32"),
    "half a letter": "name: é".encode()[:-1],
    "byte order marks": "\ufeff" * 1000,
    "other line ends": "seed: 1\u2028model: \x85 3",
    "right to left": "n\u202eame: 1",
    "wide letters": "𝕞odel: {depth: ٣}",
    "full-width digits": "seed: １２",
    "name of the machinery": "model: {model_config: 1, __class__: 2, model_fields_set: 3}\n__init__: 4",
    "options of the machinery": "task: {model_config: 1, __dict__: 2, __pydantic_extra__: 3, options: 4}",
    "keys without text": "'': 1\nmodel: {'': 2}\ntrain: {lr_factors: {'': 1}}\ntask: {'': 3}",
    "keys of space": "' ': 1\n'.': 2\n'..': 3\n'[key]': 4",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_soon(name: str) -> None:
    refused_or_read(HOSTILE[name])


PIECES = [
    "model", "depth", "train", "lr", "sweep", "grid", "seed", ":", ": ", "\n", "\n  ", "- ", "[",
    "]", "{", "}", ",", "'", '"', "#", "&a", "*a", "!!x", "<<", "|", ">", "%", "@", "`", "?", "~",
    "1", "-1", "1e9", ".nan", "0x", "true", "null", "\t", "\r\n", "...", "---", "é", "\ufeff", "\\",
    "a.b", "=", " ",
]  # fmt: skip


def test_random_texts_end_in_a_config_or_a_message() -> None:
    dice = random.Random(0)
    for _ in range(1500):
        text = "".join(dice.choices(PIECES, k=dice.randrange(1, 30)))
        refused_or_read(text)
        refused_or_read("", [text, f"model.depth={text}", f"{text}=1"])


def test_random_bytes_end_in_a_config_or_a_message() -> None:
    dice = random.Random(1)
    good = AWKWARD.encode() + STUDY.encode().replace(b"model:", b"log:", 1)
    for _ in range(500):
        refused_or_read(dice.randbytes(dice.randrange(200)))
        changed = bytearray(good)
        for _ in range(dice.randrange(1, 8)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        refused_or_read(bytes(changed))


def test_pyyaml_without_libyaml_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text for text, _, _ in BAD.values() if len(text) < 1000] + [AWKWARD, "", STUDY]
    expected = [outcome(text) for text in texts]
    monkeypatch.setattr(yaml_reader, "_LOADER", yaml.SafeLoader)
    for text, before in zip(texts, expected, strict=True):
        now = outcome(text)
        assert type(now) is type(before), text
        if isinstance(before, conf.Config) or ("'" in before and "YAML" not in before):
            assert isinstance(now, conf.Config) or now.split(":")[0] == "f.yaml"
        if isinstance(before, conf.Config):
            assert now == before


def outcome(text: str | bytes) -> conf.Config | str:
    try:
        return conf.parse_config(text, "f.yaml")
    except ConfigError as error:
        return str(error)


# files


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (".", "found a folder"),
        ("missing.yaml", "no such file"),
        ("qiuck.yaml", "no such file; did you mean 'quick.yaml'?"),
        ("quick", "no such file; did you mean 'quick.yaml'?"),
        ("a\x00b", "a\\x00b: found a path that cannot be one"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("fifo", "found something that is no file"),
        ("/dev/zero", "found something that is no file"),
        ("\udcff.yaml", "\\udcff.yaml: no such file"),
        ("quick.yaml/x", "cannot be read: Not a directory"),
    ],
)
def test_paths_that_are_no_config(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quick.yaml").write_text("seed: 1")
    os.mkfifo("fifo")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as error:
        conf.load_config(path)
    assert said in str(error.value) and str(error.value).isprintable()
    assert sorted(tmp_path.rglob("*")) == before


def test_load_config_and_load_study_read_files(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(STUDY)
    assert conf.load_study(file, ["seed=0,1"]).size == 16
    file.write_text("seed: 5")
    assert conf.load_config(str(file), ["model.depth=9"]).model.depth == 9
    assert conf.load_config(os.fsencode(file).decode()).seed == 5


def test_annotated_defaults_are_a_config() -> None:
    read = conf.parse_config(conf.annotated_defaults("schema.json"))
    assert conf.non_defaults(read) == {"model.depth": 48}


def test_import_is_light_and_quick() -> None:
    code = (
        "import time, sys; begin = time.perf_counter(); import deepstack.config; "
        "took = time.perf_counter() - begin; "
        "print(took, *[m for m in ('torch', 'pandas', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    # the least of several: other processes share this machine
    seen = []
    for _ in range(4):
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        took, *heavy = out.stdout.split()
        assert heavy == []
        seen.append(float(took))
    assert min(seen) < 0.5


# estimates


def test_parameter_count_is_that_of_the_model() -> None:
    counts = conf.parameter_count(conf.Config(), 257)
    d, n = 64, 6
    assert counts["q"] == n * d * d and counts["w1"] == counts["w2"] == 4 * n * d * d
    assert counts["bias"] == n * (4 * d + 4 * d + d)
    assert counts["norm_gain"] == counts["norm_bias"] == n * 2 * d
    assert (counts["embedding"], counts["position"], counts["head"]) == (257 * d, 64 * d, 257)
    assert set(counts) <= set(conf.ROLES)
    bare = conf.parse_config(
        "model: {head: bert, positions: sinusoidal, norm: {gain: false, bias: false}}"
    )
    assert set(conf.parameter_count(bare, 257)) == {
        "q", "k", "v", "o", "w1", "w2", "bias", "embedding", "head",
    }  # fmt: skip
    assert conf.parameter_count(bare, 257)["head"] == d * d + 3 * d + 257
    more = conf.parameter_count(conf.Config(), 257, final_norm=True, scheme_parameters=2)
    assert (more["final_norm"], more["scheme"]) == (2 * d, 2 * n)


@pytest.mark.parametrize(
    ("override", "more"),
    [
        ("model.depth=12", True),
        ("train.batch_size=32", True),
        ("task.seq_len=128", True),
        ("model.dropout=0.1", True),
        ("model.d_ff=512", True),
        ("train.optimizer=sgd", False),
        ("train.trainable=[q]", False),
        ("train.precision=bf16", False),
        ("log.layers_every=0", False),
    ],
)
def test_memory_estimate_follows_the_config(override: str, more: bool) -> None:
    usual = conf.memory_estimate(conf.Config(), 257)
    changed = conf.memory_estimate(conf.parse_config("", overrides=[override]), 257)
    assert changed > usual if more else changed < usual
    assert sum(conf.memory_terms(conf.Config(), 257).values()) == usual


def test_memory_estimate_of_a_known_run() -> None:
    read = conf.parse_config("model: {depth: 1000, d_model: 32}\ntrain: {batch_size: 8}")
    # measured on a CPU: 1.53e9 bytes above the process
    terms = conf.memory_terms(read, 257)
    above = sum(terms.values()) - terms["Python and torch"] - terms["looks at every layer"]
    assert 0.7 < above / 1.53e9 / 1.048 < 1.5


def test_absurd_runs_are_refused_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "machine_memory", lambda: 2**30)
    monkeypatch.setattr(estimate, "on_gpu", lambda config: False)
    conf.refuse_absurd(conf.Config())
    with pytest.raises(ConfigError) as error:
        conf.refuse_absurd(conf.parse_config("model: {depth: 5000}", "f"))
    message = str(error.value)
    assert "model.depth: found 5000, a run of about" in message and error.value.key == "model.depth"
    fits = int(message.rpartition("at most about ")[2])
    assert 10 < fits < 5000
    fitting = conf.memory_estimate(conf.parse_config(f"model: {{depth: {fits}}}"), 257)
    assert 0.8 * 2**30 < fitting <= 2**30


def test_machine_memory_is_plausible() -> None:
    assert 2**28 < conf.machine_memory() < 2**50
