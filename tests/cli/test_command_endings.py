"""Signals and errors of the system end every command with one line and an exit code."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers import QUICK, ROOT
from helpers.command_line import TINY, succeed, typed
from helpers.extensions import needs
from helpers.report_pages import draw_only
from helpers.sampling import some

from deepstack.base.text import value_text
from deepstack.cli import main
from deepstack.plots.page import LONGEST, wrap

QUICK_TINY = [QUICK, *TINY]
DEEPSTACK = [sys.executable, "-m", "deepstack"]


def run_check(folder: object = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `deepstack check`, with modules of a folder before all others."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    words = [*DEEPSTACK, "check", QUICK]
    return subprocess.run(words, capture_output=True, text=True, env=environment, **options)


def test_a_command_that_has_imported_triton_ends_without_a_word() -> None:
    """Triton writes thirty lines about leaks if its objects are not freed at exit."""
    pytest.importorskip("triton")
    code = "import sys, triton\nfrom deepstack.cli import main\nsys.argv = ['', '--help']\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    ("module", "number"),
    [("typer", signal.SIGINT), ("typer", signal.SIGHUP), ("torch", signal.SIGTERM)],
)
def test_a_signal_during_an_import_prints_one_line(
    module: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Let the library turn the interrupt into an ImportError, as C extensions do."""
    (tmp_path / f"{module}.py").write_text(
        f"import os\ntry: os.kill(os.getpid(), {int(number)})\n"
        "except BaseException: raise ImportError('broken') from None\n"
    )
    found = run_check(tmp_path)
    assert (found.returncode, found.stderr) == (128 + number, "deepstack: interrupted\n")


def test_a_traceback_shows_control_characters_as_escapes(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError(chr(27) + '[31m' + chr(0x9b))")
    found = run_check(tmp_path)
    assert found.returncode == 1 and "Traceback" in found.stderr
    assert "RuntimeError: \\x1b[31m\\x9b" in found.stderr
    assert not {"\x1b", "\x9b"} & set(found.stderr)


def test_an_import_without_memory_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libtorch.so: failed to map segment from shared object')"
    )
    found = run_check(tmp_path)
    assert found.returncode == 5 and found.stderr.startswith("deepstack: out of memory")
    assert found.stderr.count("\n") == 1


def test_a_small_address_space_is_refused() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (300_000_000, 300_000_000))

    found = run_check(preexec_fn=limit)
    assert found.returncode == 5 and found.stderr.count("\n") == 1
    assert "limited to 300 MB" in found.stderr and "needs 700 MB" in found.stderr


def test_a_deleted_working_directory_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = f'mkdir "{gone}" && cd "{gone}" && rmdir "{gone}" && exec "$@"'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for words in (["train", QUICK], ["rm", "x"]):
        command = ["sh", "-c", script, "sh", *DEEPSTACK, *words]
        found = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert found.returncode == 5 and "the working directory: deleted" in found.stderr
        assert found.stderr.count("\n") == 1


@needs("report")
def test_a_link_to_itself_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    draw_only(monkeypatch)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for code, *words in (
        ("5", "train", *QUICK_TINY, "--out", loop),
        ("2", "report", trained, "--to", loop),
        ("5", "rerun", trained, "--out", loop),
    ):
        monkeypatch.setattr(sys, "argv", ["deepstack", *map(str, words), "-q"])
        with pytest.raises(SystemExit, match=code):
            main()
        assert "loop" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("scheme", "[]"), ("scheme", "{a: 1}"), ("depth", "x"), ("depth", "null")]
)
def test_a_run_with_an_invalid_scheme_or_depth_is_damaged(key: str, value: str, run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(re.sub(rf"(?m)^  {key}:.*", f"  {key}: {value}", path.read_text()))
    listed = typed("ls", run)
    assert listed.exit_code == 0 and f"as model.{key}" in listed.stderr
    assert typed("compare", run).exit_code == 5


def test_nested_lists_in_configs_are_compared(run: Path) -> None:
    path = Path(shutil.copytree(run, run.with_name("other"))) / "config.yaml"
    path.write_text(path.read_text().replace("  name: text", "  name: text\n  mine: [[1], {a: 2}]"))
    succeed("compare", run.parent)


@needs("report")
def test_a_report_names_a_study_that_is_not_utf8(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_only(monkeypatch)
    study = tmp_path / os.fsdecode(b"st\xffudy")
    shutil.copytree(trained, study / trained.name)
    succeed("report", "-q", tmp_path)
    assert "st%FFudy/" in (tmp_path / "report.html").read_text()


def test_a_chart_draws_no_100_000_letters() -> None:
    for letters in ("a" * 100_000, "a " * 50_000):
        assert len("".join(wrap(letters, 7, 2.0))) <= LONGEST + 1
        assert len(value_text(letters)) < LONGEST and len(value_text([letters])) < LONGEST
    assert value_text("a" * 300) == "a" * 300


@pytest.mark.slow
def test_a_sweep_without_space_for_its_temporary_files_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: str(full))  # has no such folder
    found = typed("sweep", *QUICK_TINY, "seed=0,1", "-q", "--out", tmp_path / "results")
    assert found.exit_code == 3, found.exception
    assert found.stderr.count(f"{full}/") == 2 and "No such file" in found.stderr


@pytest.mark.parametrize(
    ("command", "number"),
    some([("sweep", signal.SIGTERM), ("rerun", signal.SIGHUP)], 2),
)
def test_a_signal_removes_temporary_folders(
    command: str, number: signal.Signals, run: Path, tmp_path: Path
) -> None:
    if command == "rerun":  # many steps to make again
        path = run / "config.yaml"
        text = path.read_text().replace("steps: 2", "steps: 100000")
        path.write_text(text.replace("replay: auto", "replay: python"))  # the bytes of eager steps
        words = [run, "--check", "--allow-env-change"]
    else:
        words = [*QUICK_TINY, "--dry-run", "model.d_model=64", "task.seq_len=64"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [*DEEPSTACK, command, *map(str, words)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    while not list(temporary.glob("deepstack-*/*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate()
    assert process.returncode == 128 + number, stderr
    assert b"Traceback" not in stderr and not list(temporary.iterdir())


@pytest.mark.parametrize("number", range(1, 7))
def test_a_killed_export_leaves_no_weights_or_a_whole_export(
    number: int, trained: Path, tmp_path: Path
) -> None:
    """Kill before each opening and each renaming of the three files."""
    target = tmp_path / "x"
    calls = count(1)

    def kill(event: str, given: tuple[Any, ...]) -> None:
        if event == "os.rename" or (event == "open" and given[1] in ("w", "wb")):
            if Path(str(given[0])).parent == target and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        sys.addaudithook(kill)
        typed("export", trained, "--to", target)
        os._exit(0)
    os.waitpid(pid, 0)
    if (target / "weights.safetensors").exists():
        assert all((target / f"weights.{suffix}").stat().st_size for suffix in ("yaml", "json"))
