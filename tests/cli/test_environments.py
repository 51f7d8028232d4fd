"""Commands do the same under what schedulers, containers, notebooks and other tools set."""

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.command_line import TINY, typed
from helpers.report_pages import draw_only

import deepstack
from deepstack.cli import main
from deepstack.config import load_config, machine

SECONDS = 240  # far more than any of it takes: a hang fails the test
OUT = "Ergebnisse 深さ глубина عمق 50% $x"  # names in any script
RUN = [QUICK, *TINY, "log.layers_every=0"]
COMMANDS: dict[str, list[str]] = {
    "train": ["train", *RUN, "--out", OUT],
    "sweep": ["sweep", *RUN, "--seeds", "0,1", "--workers", "1", "--out", OUT, "--json"],
    "signal": ["signal", *RUN, "--depths", "2", "--seeds", "0", "--out", OUT, "--json"],
    "calibrate": ["calibrate", *RUN, "--depths", "1,2", "--seeds", "0", "--out", OUT, "--json"],
    "plot": ["plot", "metric", "STUDY", "--x", "step", "--y", "loss", "--to", OUT],
    "report": ["report", "STUDY", "--to", f"{OUT}.html"],
    "compare": ["compare", "STUDY", "--json"],
    "ls": ["ls", "STUDY", "--json"],
    "list": ["list", "schemes", "--json"],
    "check": ["check", *RUN, "--json"],
}
RANKS = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two runs, which no test changes."""
    out = tmp_path_factory.mktemp("study")
    for scheme in ("post_ln", "deepnorm"):
        config = load_config(Path(QUICK), [*TINY, f"model.scheme={scheme}"])
        deepstack.train(config, out=out, study="quick")
    return out / "quick"


@pytest.fixture
def port() -> Iterator[str]:
    """A port that another program listens at."""
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        yield str(used.getsockname()[1])


@dataclass(frozen=True)
class Ended:
    """The exit code, output and files of a command."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    def refuse_noise(self) -> None:
        """Assert that the command has ended well, without tracebacks and warnings."""
        assert self.code == 0, self.stderr
        assert not re.search("Traceback|Warning", self.stderr), self.stderr


def words_of(command: str, study: Path) -> list[str]:
    return [str(study) if word == "STUDY" else word for word in COMMANDS[command]]


def check_results(command: str, ended: Ended, study: Path) -> None:
    """Assert that a command has printed and written its usual results."""
    ended.refuse_noise()
    folder = ended.folder
    if command in ("compare", "ls", "list"):
        assert json.loads(ended.stdout) == json.loads(typed(*words_of(command, study)).stdout)
    elif command in ("sweep", "signal", "calibrate", "check"):
        assert json.loads(ended.stdout)
    if command in ("train", "sweep"):
        metas = [json.loads(path.read_bytes()) for path in folder.glob(f"{OUT}/quick/*/meta.json")]
        assert len(metas) == {"train": 1, "sweep": 2}[command]
        assert all(meta["environment"]["processes"] == 1 for meta in metas)
        assert all(meta["git"] in ({}, meta["git"] | own_commit()) for meta in metas)
    elif command == "plot":
        assert list(folder.glob(f"{OUT}/*.png"))
    elif command == "report":
        assert "post_ln" in (folder / f"{OUT}.html").read_text(encoding="utf-8")


def own_commit() -> dict[str, str]:
    """Return the commit of the tested source, or nothing outside of a checkout."""
    asked = ["git", "-C", str(Path(deepstack.__file__).parents[1]), "rev-parse", "HEAD"]
    answer = subprocess.run(asked, capture_output=True, text=True)
    return {} if answer.returncode else {"commit": answer.stdout.strip()}


def all_at_once(folder: Path, port: str) -> dict[str, str]:
    """Return an environment with everything that can be set beside everything else."""
    other = folder / "other repository"
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    home = folder / "home"
    home.mkdir(mode=0o500)
    return os.environ | {
        **RANKS,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "1",
        "MPLBACKEND": "backend_of_another_environment",
        "FORCE_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "20",
        "GIT_DIR": str(other / ".git"),
        "GIT_WORK_TREE": str(other),
        "PYTHONWARNINGS": "error",
        "LC_ALL": "C",
        "LANG": "C",
        "HOME": str(home),
    }


DEFAULT = ("train",)


@pytest.mark.parametrize(
    "command",
    [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS],
)
def test_a_command_works_under_all_settings_at_once(
    command: str, study: Path, tmp_path: Path, port: str
) -> None:
    """RANK and its kin, MPLBACKEND, FORCE_COLOR, TERM=dumb, GIT_DIR, LANG=C, umask 077, …."""
    words = [sys.executable, "-m", "deepstack", *words_of(command, study)]
    (tmp_path / "work").mkdir()
    environment = all_at_once(tmp_path, port)
    if command == "train":  # the only command that takes part in a group of ranks
        environment["WORLD_SIZE"] = "1"
    ended = start(words, tmp_path / "work", environment)
    check_results(command, ended, study)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "work").rglob("*"))


def start(words: list[str], folder: Path, environment: Mapping[str, str]) -> Ended:
    """Run a program in a folder, with the umask 077."""
    ended = subprocess.run(
        words, capture_output=True, timeout=SECONDS, cwd=folder, env=environment, umask=0o077
    )
    return Ended(ended.returncode, ended.stdout.decode(), ended.stderr.decode(), folder)


@pytest.mark.slow
def test_a_run_needs_no_assertion_of_python(study: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "deepstack", *COMMANDS["train"]]
    check_results("train", start(words, tmp_path, os.environ | {"PYTHONOPTIMIZE": "1"}), study)


def test_optimised_python_names_the_variable_that_removes_docstrings() -> None:
    environment = os.environ | {"PYTHONOPTIMIZE": "2"}
    words = [sys.executable, "-m", "deepstack", "list", "schemes"]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert ended.returncode == 1 and ended.stdout == ""
    (line,) = ended.stderr.strip().splitlines()
    assert "docstrings" in line and "unset PYTHONOPTIMIZE" in line


@dataclass(frozen=True)
class Setting:
    """One thing that others set: variables, those that are unset, umask, or a control group."""

    variables: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    umask: int = 0o022
    group: str = ""


SETTINGS = {
    "a rank of a group that does not exist": Setting(RANKS | {"MASTER_PORT": "PORT"}),
    "a group of one rank": Setting(RANKS | {"WORLD_SIZE": "1", "MASTER_PORT": "PORT"}),
    "LOCAL_RANK alone": Setting({"LOCAL_RANK": "1"}),
    "a Slurm task": Setting({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}),
    "FORCE_COLOR": Setting({"FORCE_COLOR": "1"}),
    "NO_COLOR": Setting({"NO_COLOR": "1", "COLUMNS": "20"}),
    "TERM=dumb": Setting({"TERM": "dumb"}),
    "a notebook": Setting({"MPLBACKEND": "module://no_such_backend", "JPY_PARENT_PID": "1"}),
    "a git hook": Setting({"GIT_DIR": ".git", "GIT_INDEX_FILE": ".git/index", "GIT_PREFIX": ""}),
    "no HOME": Setting(unset=("HOME", "USER", "LOGNAME", "XDG_CONFIG_HOME")),
    "HOME that cannot be written": Setting({"HOME": "/proc"}),
    "umask 077": Setting(umask=0o077),
    "a nested control group": Setting(group="0::/slice/job/step\n"),
}
BY_ITSELF = ("train", "plot", "report", "compare", "ls", "list", "check")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_commands_work_under_each_setting(
    name: str, study: Path, tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forks of this process, which has imported everything."""
    draw_only(monkeypatch, "loss_vs_step")
    setting = SETTINGS[name]
    for variable, value in setting.variables.items():
        monkeypatch.setenv(variable, value.replace("PORT", port))
    for variable in setting.unset:
        monkeypatch.delenv(variable, raising=False)
    if setting.group:
        group = tmp_path / "groups" / "slice" / "job"
        (group / "step").mkdir(parents=True)
        (group / "memory.max").write_text(f"{2**31}\n")
        (group / "cpu.max").write_text("100000 100000\n")
        (tmp_path / "own").write_text(setting.group)
        monkeypatch.setattr(machine, "MOUNT", tmp_path / "groups")
        monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    for command in BY_ITSELF:
        if command == "train" and setting.variables.get("WORLD_SIZE") == "2":
            continue  # it waits for the other rank
        (tmp_path / command).mkdir()
        check_results(
            command, fork(words_of(command, study), tmp_path / command, setting.umask), study
        )


def fork(words: list[str], folder: Path, umask: int) -> Ended:
    """Run a command of deepstack in a fork of this process."""

    def child() -> None:
        os.chdir(folder)
        os.umask(umask)
        for number, file in ((1, folder / "stdout"), (2, folder / "stderr")):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8") for number in (1, 2))
        sys.argv = ["deepstack", *words]
        main()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(SECONDS)
    assert process.exitcode is not None
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    return Ended(process.exitcode, *texts, folder)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1", "2"])
def test_runs_of_a_sweep_train_alone_in_a_launched_process(
    size: str, tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (RANKS | {"WORLD_SIZE": size, "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    config = load_config(Path(QUICK), TINY)
    runs = deepstack.sweep(config, {"seed": [0, 1]}, out=tmp_path, workers=2)
    assert [run.state for run in runs] == ["done", "done"]
