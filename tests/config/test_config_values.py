"""Configurations as values: what is read, what comes back, what makes two of them differ."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deepstack import config as conf
from deepstack.config.schema import sections, setting_keys
from deepstack.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4), ("1E+3", 1000.0), (".5", 0.5), ("5.", 5.0), ("+3", 3), ("007", 7),
        ("0o17", 15), ("0x1F", 31), ("on", "on"), ("1_000", "1_000"), ("12:30", "12:30"),
        ("true", True), ("~", None), ("", None), ("'1'", "1"), ('"a\\tb"', "a\tb"),
        ("[1, a, 2.5]", [1, "a", 2.5]), ("2020-01-01", "2020-01-01"), ("1.2.3", "1.2.3"),
        ("0b1", "0b1"), ("1e", "1e"), ("'😀'", "😀"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(written: str, value: Any) -> None:
    overridden = conf.parse_config("", overrides=[f"task.x={written}"])
    read = conf.parse_config(f"task: {{x: {written}}}")
    assert overridden.task.options() == read.task.options() == {"x": value}
    assert type(read.task.options()["x"]) is type(value)


def test_empty_text_crlf_and_bom_are_read() -> None:
    for text in ("", "# no\n", "---\n", "\ufeff", "model:\n  # depth: 6\n", "train: {muon: }"):
        assert conf.parse_config(text) == conf.Config()
    read = conf.parse_config(b"\xef\xbb\xbfseed: 3\r\nmodel:\r\n  depth: 7\r\n")
    assert (read.seed, read.model.depth) == (3, 7)


def test_overrides_win_and_the_last_of_them() -> None:
    overrides = ["seed=2", "seed=3", "model.depth=48", "train.lr_factors.q=0.5", "train.clip=null"]
    overrides += ["train.betas=[0.5, 0.6]", "task.path=a: b #c", "name='yes'"]
    overrides += ["model.scheme_options={order: 2}", "task.dash=-"]
    read = conf.parse_config("seed: 1\nmodel: {depth: 6}\n", overrides=overrides)
    assert (read.seed, read.model.depth, read.train.lr_factors) == (3, 48, {"q": 0.5})
    assert (read.train.betas, read.train.clip) == ((0.5, 0.6), None)
    assert read.task.options() == {"path": "a: b #c", "dash": "-"}
    assert (read.model.scheme_options, read.name) == ({"order": 2}, "yes")


def test_d_ff_follows_d_model_unless_it_was_given() -> None:
    derived, given = map(conf.parse_config, ("model: {d_model: 32}", "model: {d_ff: 99}"))
    assert derived.model.d_ff == 128
    derived = conf.with_overrides(derived, {"seed": 1})
    assert conf.with_overrides(derived, {"model.d_model": 16}).model.d_ff == 64
    assert conf.with_overrides(given, {"model.d_model": 128}).model.d_ff == 99
    assert conf.parse_config("model: {d_ff: null, d_model: 8}").model.d_ff == 32


def test_with_overrides_changes_a_copy_and_validates() -> None:
    before = conf.Config()
    after = conf.with_overrides(before, {"model.depth": np.int64(48), "train.betas": [0.1, 0.2]})
    assert (before.model.depth, after.model.depth, after.train.betas) == (6, 48, (0.1, 0.2))
    with pytest.raises(ValueError, match="frozen"):
        before.model.depth = 3  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"model\.detph: found the unknown key"):
        conf.with_overrides(before, {"model.detph": 3})


@pytest.mark.parametrize("letter", ["\x7f", "\x85", "\ufeff", "\u2028", "\0", "\ud800"])
def test_a_letter_that_cannot_be_read_back_is_refused(letter: str) -> None:
    message = f"found the control character {letter!r}; allowed printable text"
    text = f"a{letter}b"
    for key, value in (("task.texts", ["a", text]), ("model.scheme_options.a", text)):
        with pytest.raises(ConfigError, match=f"{key}.*{re.escape(message)}"):
            conf.with_overrides(conf.Config(), {key: value})
    with pytest.raises(ValueError, match="allowed printable text"):
        conf.Task(name="text", path=text)


AWKWARD = """
name: on
seed: 2147483647
model: {d_model: 12, n_heads: 3, scheme_options: {a: 1.0, b: 1, c: true, d: 'true'}}
task:
  name: markov
  texts: ['1e3', '~', 'null', "a'b", 'c"d', 'e\\f', ': ', '- x', '#', '', ' a ', "tab\\tend\\n"]
  more: [é, 😀, "\\u202e", '1_000', '.nan', 0.1, 1e300, -5e-324, 1e22, 123456789012, '0x1f']
  letters: "\\r\\u200b\\xa0"
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
    assert conf.values(read).items() >= conf.non_defaults(read).items()
    assert yaml.safe_load(conf.to_yaml(read))["model"]["depth"] == 6


def test_non_defaults_hash_and_run_name() -> None:
    read = conf.parse_config(
        "name: x\nseed: 1\nmodel: {d_model: 32, depth: 1000}\nruntime: {threads: 1}"
    )
    changed = {"model.d_model": 32, "model.depth": 1000, "runtime.threads": 1}
    assert conf.non_defaults(read) == {"name": "x", "seed": 1} | changed
    other = conf.with_overrides(read, {"name": "y", "runtime.threads": 2})
    assert conf.same_experiment(read, other) and conf.config_hash(read) == conf.config_hash(other)
    assert not conf.same_experiment(read, conf.with_overrides(read, {"train.lr": 0.1}))
    assert conf.run_name(read) == f"deepnorm-d1000-s1-{conf.config_hash(read)}"
    # a hash that changed would give every recorded run another name
    assert conf.config_hash(conf.Config()) == "44136f"
    assert conf.config_hash(read) == "29c725"
    for roles in ("[q, w1]", "[w1, q, q]"):
        assert conf.config_hash(conf.parse_config(f"train: {{trainable: {roles}}}")) == "422399"


STUDY = """
model: {d_model: 32}
sweep:
  grid:
    model.depth: [6, 48]
    model.scheme: [post_ln, deepnorm]
    train.betas: [[0.9, 0.98], [0.9, 0.95]]
"""


def test_studies_hold_a_base_and_a_grid() -> None:
    betas = [[0.9, 0.98], [0.9, 0.95]]
    grid = {"model.depth": [6, 48], "model.scheme": ["post_ln", "deepnorm"], "train.betas": betas}
    study = conf.parse_study(STUDY)
    assert study == conf.Study(conf.parse_config("model: {d_model: 32}"), grid)
    assert study.size == 8
    alone = conf.parse_study("seed: 3")
    assert alone == conf.Study(conf.parse_config("seed: 3"), {}) and alone.size == 1
    together = "sweep: {grid: {model.d_model: [30, 60], model.n_heads: [3, 5]}}"
    assert conf.parse_study(together).size == 4  # though 5 heads do not divide the default width


def test_overrides_of_studies_make_replace_and_fix_axes() -> None:
    overrides = ["model.depth=1,2,3", "model.scheme=pre_ln", "seed=0,1"]
    overrides += ["train.betas=[0.1,0.2],[0.3,0.4]", "task.path='a,b'", "train.trainable=[q,k]"]
    study = conf.parse_study(STUDY, overrides=overrides)
    betas = [[0.1, 0.2], [0.3, 0.4]]
    assert study.grid == {"model.depth": [1, 2, 3], "train.betas": betas, "seed": [0, 1]}
    assert study.base.model.scheme == "pre_ln" and study.base.train.trainable == ("q", "k")
    assert study.base.task.options() == {"path": "a,b"}


def test_json_schema_knows_every_key_with_its_meaning() -> None:
    schema = conf.json_schema()
    assert json.loads(json.dumps(schema)) == schema
    for name, section in {"": schema, **schema["$defs"]}.items():
        assert section["additionalProperties"] is not True or name == "Task"
        for key, value in section["properties"].items():
            if not value.keys() & {"$ref", "allOf"}:
                assert value.get("description", "").endswith((".", "?")), (name, key)
    inner = {"model.norm", "model.init", "train.muon"}
    assert set(sections()) == {"", "model", "task", "train", "log", "runtime", *inner}
    by_name = {"model.scheme_options", "train.lr_factors", "train.lr_exponents"}
    assert set(conf.values(conf.Config())) == set(setting_keys()) - by_name


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", "found a folder"),
        ("missing.yaml", "no such file"),
        ("qiuck.yaml", "no such file; did you mean 'quick.yaml'?"),
        ("deepnrm_1000", "no such file; did you mean 'deepnorm_1000'?"),
        ("a\x00b", "a\\x00b: cannot be read: embedded null byte"),
        ("fifo", "found something that is no file"),
        ("\udcff.yaml", "\\udcff.yaml: no such file"),
    ],
)
def test_paths_that_are_no_config(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quick.yaml").write_text("seed: 1")
    os.mkfifo("fifo")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as error:
        conf.load_config(path)
    assert message in str(error.value) and str(error.value).isprintable()
    assert sorted(tmp_path.rglob("*")) == before
