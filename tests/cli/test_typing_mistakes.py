"""Each typed mistake ends with exit 2 and names the text to type; the obvious is accepted."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import TINY, refusal, succeed, typed
from helpers.extensions import needs, needs_command
from helpers.plot_runs import make_run
from helpers.registries import restored_names

from deepstack.base.registry import nearest
from deepstack.base.text import bytes_text
from deepstack.base.yaml_reader import read
from deepstack.config import Config, largest_size, load_config, memory_estimate, parse_config
from deepstack.config.estimate import refuse_absurd
from deepstack.schemes import SCHEMES

MISTAKES: list[tuple[list[object], str]] = [
    (["quick", "model.depth=3"], "it is a configuration: deepstack train quick model.depth=3"),
    (["depth_sweep"], "it is a configuration: deepstack sweep depth_sweep"),
    (["train"], "Missing argument 'CONFIG'. For example: deepstack train quick"),
    (["list"], "Missing argument 'KIND'. One of: configs, settings, schemes"),
    (["list", "settings", "trian"], "did you mean 'train'?"),
    (["list", "schemes", "train"], "allowed: deepstack list schemes"),
    (["answer", "a", "b"], "one study at a time: deepstack answer STUDY"),
    (["check", "quick", "log.to=wandb"], "did you mean log.to=[wandb]?"),
    (["check", "quick", "model.scheme=mine"], "a scheme of your own comes with --plugin FILE"),
    (["check", "quick", "model.scheme=zzzz"], "more (deepstack list schemes)"),
    (["sweep", "quick", "--workers", "9" * 20, "--dry-run"], "allowed an integer from 1 to 10000"),
]


@pytest.mark.parametrize(
    ("words", "text"),
    [pytest.param(words, text, marks=needs_command(words[:1])) for words, text in MISTAKES],
)
def test_a_typed_mistake_names_the_text_to_type(words: list[object], text: str) -> None:
    message = refusal(2, *words)
    assert text in " ".join(message.split()) and "admin'?" not in message


def test_a_folder_in_place_of_a_command_is_listed(tmp_path: Path) -> None:
    assert f"it is a folder: deepstack ls {tmp_path}" in refusal(2, tmp_path)


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (["list", "scheme"], ["list", "schemes"]),
        pytest.param(["list", "analysis"], ["list", "analyses"], marks=needs("depth_use")),
        (["check", "quick", "runtime.device=auto"], ["check", "quick"]),
    ],
)
def test_the_obvious_is_accepted(words: list[str], other: list[str]) -> None:
    assert succeed(*words) == succeed(*other)


def test_a_section_of_the_settings_is_listed() -> None:
    rows = succeed("list", "settings", "train.muon").splitlines()
    assert sum("train.muon." in row for row in rows) == len(rows) - 2 > 2


def test_gpu_is_another_word_for_cuda() -> None:
    assert parse_config("runtime: {device: gpu}").runtime.device == "cuda"


def test_a_plugin_without_the_scheme_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty_one.py").write_text("x = 1\n")
    with restored_names():
        message = refusal(
            2, "check", "quick", "model.scheme=mine", "--plugin", tmp_path / "empty_one.py"
        )
    assert "empty_one.py of --plugin defines no scheme of that name" in message
    assert len(message) < 400  # and not all schemes


def test_short_words_are_not_taken_for_others() -> None:
    assert nearest("mine", SCHEMES) is None
    assert nearest("kel", SCHEMES) == nearest("kele", SCHEMES) == "keel"


@pytest.mark.parametrize(
    ("command", "text"),
    [("check", ""), ("check", "# a comment\n"), ("check", "{}\n"), ("sweep", "---\n")],
)
def test_an_empty_configuration_is_said_to_be_one(tmp_path: Path, command: str, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    words: list[object] = [command, file, *TINY]
    words += ["--dry-run", "--out", tmp_path] if command == "sweep" else []
    shown = typed(*words)
    assert shown.exit_code == 0 and f"{file} has no settings: all but those" in shown.stderr
    file.write_text("seed: 0\n")
    assert "has no settings" not in typed(*words).stderr


PLACES = [
    ("model:\n\tdepth: 3\n", "f:2:1: found a tab before the text; allowed spaces"),
    ("model:\n  depth: 3\n\theads: 2\n", "f:3:1: found a tab"),
    ("model:\n  depth:\u00a03\n  d_model: 8\n", "f:2:9: found a no-break space (U+00A0)"),
    ("model:\n\u00a0\u00a0depth: 3\n", "f:2:1: found a no-break space"),
    ("model:\n  depth：3\n  d_model: 8\n", "f:2:8: found a full-width colon (U+FF1A)"),
    ("model：\n  depth: 3\n", "f:1:6: found a full-width colon"),
    ("model:\n  depth: 3\ntrain：\n  steps: 3\n", "f:3:6: found a full-width colon"),
    ("seed:3\nmodel:\n  depth: 3\n", "f:1:1: found 'seed:3'; write 'seed: 3'"),
]


@pytest.mark.parametrize(("text", "message"), PLACES)
def test_signs_that_look_like_those_of_yaml_are_named_where_they_stand(
    text: str, message: str
) -> None:
    _, problems = read(text, "f")
    assert str(problems[-1]).startswith(message), problems[-1]


def test_a_text_in_quotes_may_have_such_signs() -> None:
    assert read("a: 'b：\u00a0\t'\n", "f")[1] == []


def test_a_size_beyond_the_memory_names_the_largest_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 2**30
    monkeypatch.setattr("deepstack.config.estimate.machine_memory", lambda: limit)
    message = refusal(2, "check", "quick", "model.depth=1000000", "runtime.device=cpu")
    most = int(message.partition("at most about ")[2].split(",")[0])
    config = load_config("quick", ["runtime.device=cpu"])

    def needed(depth: int) -> int:
        model = config.model.model_copy(update={"depth": depth})
        return memory_estimate(config.model_copy(update={"model": model}))

    assert needed(most) <= limit < needed(int(1.1 * most)) and bytes_text(limit) in message
    assert largest_size(config, "model.depth", lambda one: False) == 0
    refuse_absurd(Config())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    for command in ("train", "sweep"):
        message = refusal(5, command, "quick", *TINY, "--out", "/proc/x")
        end = "no folder can be made (No such file or directory); give another folder with --out"
        assert message.rstrip().endswith(end)


def test_the_disk_that_a_sweep_needs_is_never_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: (10**9, 10**9, 1000))
    message = refusal(5, "sweep", "quick", *TINY, "--out", tmp_path)
    needed = message.partition("needs about ")[2].partition(" on the disk")[0]
    assert "1000 B are free" in message and float(needed.split()[0]) > 0, message


@needs("export", "depth_use")
def test_commands_on_a_run_refuse_what_they_would_harm_or_ignore(run: Path, tmp_path: Path) -> None:
    before = sorted(run.rglob("*"))
    for to in (run, run / "inside" / "x.safetensors"):
        assert f"found the run {run.name}" in refusal(2, "export", run, "--to", to)
    assert "--what: found no name; allowed some of" in refusal(2, "analyze", run, "--what", "")
    assert sorted(run.rglob("*")) == before


@needs("report")
def test_a_report_is_written_over_no_device(tmp_path: Path) -> None:
    make_run(tmp_path / "s")
    os.mkfifo(tmp_path / "pipe")
    for more in ([], ["--latex"]):
        message = refusal(2, "report", tmp_path / "s", *more, "--to", tmp_path / "pipe")
        assert "found a device or a pipe; allowed a file such as report" in message
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_every_file_of_a_run_has_the_group_policy_of_its_folder(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        result: Any = typed("train", "quick", *TINY, "--out", tmp_path, "-q")
    finally:
        os.umask(before)
    files = [path for path in Path(result.stdout.strip()).rglob("*")]
    assert len(files) > 8 and any(path.name == ".lock" for path in files)
    assert [path.name for path in files if not path.stat().st_mode & stat.S_IWGRP] == []
