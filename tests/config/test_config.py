"""Configurations: wrong ones with the words that answer them, and the values that are read."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.bad_configs import AWKWARD, BAD, GOOD

from deepstack import config as conf
from deepstack.base import yaml_reader
from deepstack.base.errors import ConfigError
from deepstack.config.keys import sections, setting_keys
from deepstack.config.load import example

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


def test_a_file_that_is_not_a_configuration_is_refused_with_overrides_too() -> None:
    for read in (conf.parse_config, conf.parse_study):
        message = message_of(read, "hello", ["seed=1"])
        assert message == "f.yaml:1:1: found 'hello'; allowed `key: value` lines, such as seed: 0"


def test_up_to_twenty_mistakes_are_reported_in_the_order_of_the_file() -> None:
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


# --- values: read, written back, compared -------------------------------------------------------


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
def test_scalars_follow_yaml_1_2(written: str, value: Any) -> None:
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


def test_a_study_may_lack_a_grid_or_have_keys_that_fit_only_together() -> None:
    alone = conf.parse_study("seed: 3")
    assert alone == conf.Study(conf.parse_config("seed: 3"), {}) and alone.size == 1
    together = "sweep: {grid: {model.d_model: [30, 60], model.n_heads: [3, 5]}}"
    assert conf.parse_study(together).size == 4  # though 5 heads do not divide the default width


def test_overrides_of_studies_make_replace_and_fix_axes() -> None:
    overrides = ["model.depth=1,2,3", "model.scheme=pre_ln", "seed=0,1"]
    overrides += ["train.betas=[0.1,0.2],[0.3,0.4]", "task.path='a,b'", "train.trainable=[q,k]"]
    axes = "model.depth: [6, 48], model.scheme: [post_ln, deepnorm], train.betas: [[0.9, 0.98]]"
    study = conf.parse_study(f"sweep: {{grid: {{{axes}}}}}", overrides=overrides)
    betas = [[0.1, 0.2], [0.3, 0.4]]
    assert study.grid == {"model.depth": [1, 2, 3], "train.betas": betas, "seed": [0, 1]}
    assert study.base.model.scheme == "pre_ln" and study.base.train.trainable == ("q", "k")
    assert study.base.task.options() == {"path": "a,b"}


def test_json_schema_knows_every_key_with_its_meaning() -> None:
    schema = conf.json_schema()
    for name, section in {"": schema, **schema["$defs"]}.items():
        assert section["additionalProperties"] is not True or name == "Task"
        for key, value in section["properties"].items():
            if not value.keys() & {"$ref", "allOf"}:
                assert value.get("description", "").endswith((".", "?")), (name, key)
    inner = {"model.norm", "model.init", "train.muon"}
    assert set(sections()) == {"", "model", "task", "train", "log", "runtime", *inner}
    by_name = {"train.lr_factors", "train.lr_exponents", "log.instruments"}
    by_name |= {key for key in setting_keys() if key.endswith("_options")}
    assert set(conf.values(conf.Config())) == set(setting_keys()) - by_name


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", "found a folder"),
        ("missing.yaml", "no such file"),
        ("qiuck.yaml", "no such file; did you mean 'quick.yaml'?"),
        ("deepnrm_1000", "no such file; did you mean 'deepnorm_1000'?"),
        ("a\x00b", "a\\x00b: cannot be read: embedded null byte"),
        ("fifo", "found something that is not a file"),
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


def test_an_example_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert conf.load_config("quick") == conf.load_config(example("quick"))
    Path("quick").write_text("model: {depth: 3}\n")  # a file of that name comes first
    assert conf.load_config("quick").model.depth == 3
    with pytest.raises(ConfigError, match="quik: no such file; did you mean 'quick'"):
        conf.load_config("quik")
