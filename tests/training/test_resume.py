"""A run that is refused changes nothing; one interrupted or damaged ends as if nothing had been."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import QUICK
from helpers.command_line import TINY, typed
from helpers.ended_runs import flip
from helpers.extensions import known, needs
from helpers.sampling import some
from helpers.small_runs import data_of, interrupted, logs_of, only_run, reseal, small

import deepstack
from deepstack.base.errors import ResourceError
from deepstack.cli import main
from deepstack.config import with_overrides
from deepstack.records import RunFolder, problems
from deepstack.training import checkpoint

VARIANTS: list[dict[str, Any]] = [
    {},
    {"model__dropout": 0.1},
    {"train__optimizer": "muon", "log__stream_update": True},
    {"train__spectral_penalty": 0.1, "model__dropout": 0.1},
    known({
        "log__attribution_every": 2, "log__first_order": True, "log__sharpness_every": 5,
        "model__depth": 2,
    }),
    known({"log__attribution_every": "log", "log__layers_every": 0, "train__optimizer": "sgd"}),
    {"model__norm__kind": "batch", "model__scheme": "pre_ln"},
    {"model__scheme": "looped", "model__unique_layers": 2},
    {"runtime__replay": True, "runtime__checkpoint_seconds": 0.0},
    {"runtime__replay": True, "train__shards": 2, "runtime__threads": 2},
    {"model__family": "encoder_decoder", "model__scheme": "admin", "task__name": "copy"},
    {
        "model__family": "encoder_decoder", "model__scheme": "admin", "task__name": "copy",
        "model__decoder_attention": "merged",
    },
]  # fmt: skip


@pytest.mark.parametrize("settings", some(VARIANTS, 4), ids=str)
@pytest.mark.parametrize("at", some([4, 1, 7, 11], 4))
def test_interrupted_and_continued_is_uninterrupted(
    at: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = small(**settings)
    whole = deepstack.train(config, out=tmp_path / "a")
    folder = interrupted(config, tmp_path / "b", at)
    assert folder.read_state() == "interrupted"
    assert data_of(whole)["steps.csv"].startswith(folder.steps_path.read_bytes())
    plain = with_overrides(config, {"runtime.banks": False})  # another storage, equal numbers
    resumed = deepstack.train(plain, out=tmp_path / "b", allow_env_change=True)
    assert len(resumed.meta["resumed"]) == 1 and data_of(resumed) == data_of(whole)
    assert logs_of(resumed) == logs_of(whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The data of a run that nothing interrupted."""
    return data_of(deepstack.train(small(), out=tmp_path_factory.mktemp("whole")))


def change_row(step: int) -> Callable[[RunFolder], object]:
    """Change the row of a step in steps.csv."""

    def change(folder: RunFolder) -> None:
        rows = folder.steps_path.read_bytes()
        folder.steps_path.write_bytes(rows.replace(b"\n%d," % step, b"\n%d,9" % step))

    return change


def flip_weight(folder: RunFolder) -> None:
    flip(folder.checkpoint_path(6) / "weights.safetensors", 8 * 4000)


@pytest.mark.parametrize(
    ("seconds", "damage", "problem", "consequence"),
    [
        (0.0, change_row(6), "steps.csv is not the log that checkpoint 6", "from checkpoint 5"),
        (120.0, change_row(3), "steps.csv is not the log", "starting again from step 0"),
        (120.0, flip_weight, "weights.safetensors is not what was", "starting again from step 0"),
    ],
)
def test_a_damaged_run_goes_on_from_the_last_checkpoint_that_fits_its_logs(
    seconds: float,
    damage: Callable[[RunFolder], None],
    problem: str,
    consequence: str,
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    config = small(runtime__checkpoint_seconds=seconds)
    folder = interrupted(config, tmp_path)
    damage(folder)
    damaged = folder.steps_path.read_bytes()
    assert data_of(deepstack.train(config, out=tmp_path)) == whole
    log = folder.log_path.read_text()
    assert problem in log and consequence in log
    assert damage is flip_weight or (folder.path / "aside/1-steps.csv").read_bytes() == damaged


def test_another_runs_checkpoint_is_not_used(whole: dict[str, bytes], tmp_path: Path) -> None:
    folder, seed, wide = (
        interrupted(small(**settings), tmp_path / out)
        for out, settings in (("b", {}), ("c", {"seed": 5}), ("d", {"model.d_ff": 24}))
    )
    target = folder.checkpoint_path(6)
    state = (target / "state.json").read_text()
    for other, problem in ((seed, "another run's"), (wide, "another model's")):
        shutil.rmtree(folder.checkpoint_dir)
        shutil.copytree(other.checkpoint_dir, folder.checkpoint_dir)
        if other is wide:  # with a forged digest of the config
            (target / "state.json").write_text(state)
            reseal(target)
        interrupted(small(), tmp_path / "b")
        assert f"not used: checkpoint 6: is {problem}" in folder.log_path.read_text()
    assert data_of(deepstack.train(small(), out=tmp_path / "b")) == whole


def test_an_interrupt_after_the_last_step_changes_no_file(tmp_path: Path) -> None:
    config = small()
    interrupted(config, tmp_path / "a", config.train.steps)
    runs = [deepstack.train(config, out=tmp_path / name) for name in ("a", "b")]
    one, other = ({p.name for p in run.path.glob("checkpoint/*/*")} for run in runs)
    assert one == other and data_of(runs[0]) == data_of(runs[1])


def test_a_checkpoint_that_reads_back_wrong_is_never_resumed_from(
    whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, right = small(runtime__checkpoint_seconds=0.0), checkpoint.save_file

    def wrong(tensors: dict[str, torch.Tensor], path: Path) -> None:
        """Write another number than the memory has in the checkpoint of step 3."""
        name = next(iter(tensors))
        third = path.parent.resolve().name.startswith(".draft-3-")
        right(tensors | ({name: tensors[name] + 1} if third else {}), path)

    monkeypatch.setattr(checkpoint, "save_file", wrong)
    with pytest.raises(ResourceError, match=r"in \w+\.safetensors differs"):
        deepstack.train(config, out=tmp_path)
    monkeypatch.undo()
    assert data_of(deepstack.train(config, out=tmp_path)) == whole


# --- refused, or nothing left to do ---------------------------------------------------------------


def train(out: Path, *words: str) -> Any:
    return typed("train", QUICK, *TINY, "-q", "--out", out, *words)


@pytest.mark.parametrize("cause", [errno.EROFS, errno.EACCES])
def test_a_finished_run_is_reported_on_a_read_only_disk(
    cause: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path).exit_code == 0
    opened = os.open

    def read_only(path: Any, flags: int, *more: Any, dir_fd: int | None = None) -> int:
        folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(tmp_path) in f"{folder}/{path}":
            raise OSError(cause, os.strerror(cause), str(path))
        return opened(path, flags, *more, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", read_only)
    again = train(tmp_path)
    assert again.exit_code == 0 and Path(again.stdout.strip()).is_dir(), again.stderr
    other = train(tmp_path, "seed=1")
    assert other.exit_code == 5
    assert other.stderr.rstrip().endswith("give another folder with --out")


def run_command(*words: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "deepstack", *map(str, words)]
    return subprocess.run(command, capture_output=True, env=dict(os.environ, **environment))


@pytest.mark.slow(turn=42)
def test_letters_that_a_terminal_or_a_path_lacks_stop_nothing(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = tmp_path / "\u00fcbung \u0394"
    trained = run_command("train", QUICK, *TINY, "--out", out, **plain)
    assert trained.returncode == 0, trained.stderr.decode()
    run = only_run(out / "quick")
    assert run.meta["command"].startswith("deepstack train") and problems(run.folder) == []
    listed = run_command("list", "diagnostics", PYTHONIOENCODING="latin-1:strict")
    assert listed.returncode == 0 and rb"\u2016x_l\u2016" in listed.stdout


@pytest.mark.parametrize(
    ("words", "name", "expected", "code"),
    [
        ("train", b"\xff\xfe", "not UTF-8", 2),
        pytest.param("sweep seed=0,1", b"\xff\xfe", "not UTF-8", 3, marks=pytest.mark.slow),
        ("train", b"x" * 300, "File name too long", 2),
        ("sweep seed=0,1", b"x" * 300, "File name too long", 2),
    ],
    ids=["train bytes", "sweep bytes", "train long", "sweep long"],
)
def test_a_path_that_cannot_be_is_refused_before_anything_is_trained(
    words: str,
    name: bytes,
    expected: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    command, *settings = words.split()
    argv = ["deepstack", command, QUICK, *TINY, *settings, "-q", "--out", out]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr().err
    assert ended.value.code == code and expected in said and "Traceback" not in said, said
    assert not [*tmp_path.glob("*/*/*/steps.csv")]


@needs("export")
def test_weights_of_another_model_are_not_exported(tmp_path: Path) -> None:
    run = Path(train(tmp_path).stdout.strip())
    path = run / "config.yaml"
    for text in (path.read_text().replace("scheme: deepnorm", "scheme: post_ln"), ""):
        path.write_text(text)
        exported = typed("export", run, "--to", tmp_path / "x")
        assert exported.exit_code == 7 and "is another run's" in exported.stderr
        assert not (tmp_path / "x").exists()


def test_a_refusal_after_a_notice_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(Path(train(tmp_path).stdout.strip()))
    meta = run.read_meta()
    meta["environment"]["threads"] = 7
    run.write_meta(meta)
    monkeypatch.setattr("deepstack.training.resources.memory_limit", lambda _: 10**6)
    refused = typed("rerun", run.path, "--out", tmp_path / "new")
    assert refused.exit_code == 2 and "threads was 7" in refused.stderr
    assert not (tmp_path / "new").exists()
