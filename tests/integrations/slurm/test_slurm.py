"""Job arrays for Slurm: the directives of the script, and its actions when it runs."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cluster_results import until
from helpers.command_line import typed

from deepstack.base.errors import ConfigError, ResourceError
from deepstack.config import Config, load_config, with_overrides
from deepstack.integrations.slurm.arrays import STARTS_AT_MOST, max_array_size, submit, write_array
from deepstack.records import RunFolder
from deepstack.sweeps import Cell
from deepstack.training import run_name

MEBI = 2**20


def cell_of(out: Path, name: str, memory: int = 100 * MEBI, **settings: object) -> Cell:
    config = with_overrides(Config(), {k.replace("__", "."): v for k, v in settings.items()})
    return Cell(config, RunFolder(out / "s" / name), "new", 1000, memory)


def directives(script: Path) -> list[str]:
    lines = script.read_text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_the_array_has_what_its_largest_run_needs(tmp_path: Path) -> None:
    small = cell_of(tmp_path, "small")
    large = cell_of(tmp_path, "large", 800 * MEBI, runtime__threads=3)
    more = ["--partition=long", "--mem=9G"]
    script = write_array([small, large], "s", tmp_path, workers=4, hours=1.01, directives=more)
    assert directives(script) == [
        "--job-name=s",
        "--array=0-1%4",
        f'--output="{tmp_path}/s/slurm/%A_%a.log"',
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@60",
        "--cpus-per-task=3",
        "--time=61",
        *more,
    ]
    # 1.5 times the estimate, and a compilation of the kernels in the first task of a node
    assert "--mem=1712M" in directives(write_array([small, large], "s", tmp_path))
    plain = cell_of(tmp_path, "plain", 800 * MEBI, runtime__replay="python")
    assert "--mem=1200M" in directives(write_array([plain], "s", tmp_path))
    assert load_config(tmp_path / "s" / "slurm" / "large.yaml") == large.config
    gpu = cell_of(tmp_path, "gpu", runtime__device="cuda")
    assert "--gres=gpu:1" in directives(write_array([small, gpu], "s", tmp_path))
    for option in ("--mem-per-cpu=2G", "--mem-per-gpu 9G", "--gpus=a100:1", "-G 1"):
        lines = directives(write_array([small, gpu], "s", tmp_path, directives=[option]))
        kind = "--mem" if "mem" in option else "--g"
        assert [line for line in lines if line.startswith((kind, "-G"))] == [option]


def test_a_sweep_above_max_array_size_is_submitted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    log = tmp_path / "log"
    program(tmp_path / "sbatch", f'echo "$@" >> {log}; wc -l < {log}')
    words = ["sweep", "--depths", "1,2,3,4,5", "--schemes", "post_ln", "--out", str(tmp_path)]
    for limit, ends in ((2, ["0-1", "0-1", "0-0"]), (5, ["0-4"])):
        program(tmp_path / "scontrol", f'echo "MaxArraySize            = {limit}"')
        shown = typed(*words, "--study", f"s{limit}", "--slurm")
        scripts = [Path(line) for line in shown.stdout.splitlines()]
        arrays = [[line for line in directives(p) if line.startswith("--array")] for p in scripts]
        assert arrays == [[f"--array={end}"] for end in ends]
        assert all(f"sbatch {script}" in shown.stderr for script in scripts)
        runs = [line for p in scripts for line in p.read_text().splitlines() if line[:3] == "  p"]
        assert len(set(runs)) == 5
    program(tmp_path / "scontrol", 'echo "MaxArraySize            = 3"')
    assert typed(*words, "--submit").stdout.split() == ["1", "2"]
    assert "dependency" not in log.read_text()
    assert typed(*words, "--submit", "--workers", "1").stdout.split() == ["3", "4"]
    assert log.read_text().splitlines()[3].startswith("--parsable --dependency=afterany:3 ")
    program(tmp_path / "sbatch", 'case "$2" in *-6.sh) exit 1;; esac; echo 9')
    refused = typed(*words, "--submit")
    assert refused.exit_code == 5 and refused.stdout.split() == ["9"]
    assert "still to submit: " in refused.stderr and "/array-6.sh" in refused.stderr
    (tmp_path / "scontrol").unlink()
    assert max_array_size() == 1001


def test_jobs_of_several_runs_keep_to_max_array_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program(tmp_path / "scontrol", 'echo "MaxArraySize            = 2"')
    words = ["sweep", "--depths", "1,2,3,4,5", "--schemes", "post_ln", "--out", str(tmp_path)]
    shown = typed(*words, "--slurm", "--runs-per-job", "2")
    arrays = [directives(Path(line))[1] for line in shown.stdout.splitlines()]
    assert arrays == ["--array=0-1", "--array=0-0"]
    alone = typed(*words, "--runs-per-job", "2")
    assert alone.exit_code == 2 and "--runs-per-job: found without --slurm" in alone.stderr


def test_a_task_finds_its_folder_and_scripts_are_not_overwritten(
    tmp_path: Path,
) -> None:
    cells = [cell_of(tmp_path, run_name(Config()) + number) for number in ("", "-2")]
    names = [write_array(cells, "s", tmp_path).name for _ in range(3)]
    assert names == ["array-1.sh", "array-2.sh", "array-3.sh"]
    assert [cell.folder.exists() for cell in cells] == [False, True]


@pytest.mark.parametrize("line", ["partition=x", "--x\nrm -rf /", ""])
def test_an_unknown_option_of_sbatch_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--sbatch"):
        write_array([cell_of(tmp_path, "a")], "s", tmp_path, directives=[line])


def test_the_message_of_sbatch_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match=r"sbatch '/a b/x\.sh'") as raised:
        submit(Path("/a b/x.sh"))
    assert raised.value.exit_code == 5
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program(tmp_path / "sbatch", 'echo "17;cluster"')
    assert submit(tmp_path / "x.sh") == "17"
    program(tmp_path / "sbatch", "echo invalid partition >&2; exit 1")
    with pytest.raises(ResourceError, match="invalid partition"):
        submit(tmp_path / "x.sh")


class Node:
    """Runs a script as Slurm would, with a run that does what `does` says, and a scontrol."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, does: str, together: int = 1
    ) -> None:
        self.out, self.bin = folder / "it's a $HOME folder", folder / "bin"
        self.log = folder / "log"
        self.bin.mkdir()
        self.log.touch()
        program(self.bin / "scontrol", f'echo "$@" >> {self.log}')
        program(self.bin / "python", does)
        monkeypatch.setattr(sys, "executable", str(self.bin / "python"))
        names = ["first", "second one", "third", "fourth", "fifth"][: together + 1]
        cells = [cell_of(self.out, name) for name in names]
        self.script = write_array(cells, "s", self.out, together=together)

    def start(self, task: int = 1) -> subprocess.Popen[str]:
        environment = dict(os.environ, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID=str(task))
        environment |= {"SLURM_JOB_ID": "7", "PATH": f"{self.bin}:/usr/bin:/bin"}
        return subprocess.Popen(
            ["bash", str(self.script)], env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


# A run that saves when it is asked to end, and says so.
# (Not a loop of bash: its own exit code is at times another one when its child is hit as well.)
SAVES = f"""exec {sys.executable} -c '
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
open("{{ready}}", "w").close()
time.sleep(60)
'"""


FAILS = "trap 'exit 1' TERM; touch {ready}; while :; do sleep 0.05; done"


def test_a_task_trains_its_configuration_and_keeps_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, 'printf "%s\\n" "$@"; exit 5')
    process = node.start()
    shown, errors = process.communicate(timeout=20)
    assert process.returncode == 5, errors
    config = node.out / "s" / "slurm" / "second one.yaml"
    wanted = ["-m", "deepstack", "train", str(config), "--quiet", "--out", str(node.out)]
    assert shown.splitlines() == [*wanted, "--study", "s"]
    assert node.log.read_text() == ""
    assert shlex.quote("second one") in node.script.read_text()


def test_a_task_leaves_the_group_of_ranks_that_submitted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "3")
    node = Node(tmp_path, monkeypatch, 'echo "$RANK$WORLD_SIZE$MASTER_PORT$TORCHELASTIC_RUN_ID."')
    assert node.start().communicate(timeout=20)[0] == ".\n"


@pytest.mark.parametrize(
    ("does", "sent", "stdout", "code", "requeued"),
    [
        # The number of the task, because the job's number may belong to the whole array.
        (SAVES, signal.SIGUSR1, "saved\n", 143, "requeue 7_1\n"),
        (SAVES, signal.SIGTERM, "saved\n", 143, ""),
        (FAILS, signal.SIGUSR1, "", 1, ""),
    ],
)
def test_a_run_that_saved_before_its_time_limit_is_requeued(
    does: str, sent: int, stdout: str, code: int, requeued: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Slurm sends SIGUSR1 to the script then; to end a task, it sends SIGTERM to all of it."""
    node = Node(tmp_path, monkeypatch, does.format(ready=tmp_path / "ready"))
    process = node.start()
    until((tmp_path / "ready").exists, seconds=20)
    send = os.kill if sent == signal.SIGUSR1 else os.killpg
    send(process.pid, sent)
    assert process.communicate(timeout=20)[0] == stdout
    assert (process.returncode, node.log.read_text()) == (code, requeued)


def test_a_task_of_several_runs_skips_the_finished_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake run prints its configuration's name, and the second one fails."""
    does = 'name=$(basename "$4" .yaml); echo "$name"; [ "$name" != "second one" ] || exit 5'
    node = Node(tmp_path, monkeypatch, does, together=4)
    assert "--array=0-1" in directives(node.script)
    RunFolder(node.out / "s" / "first").write_status("done", 9)
    RunFolder(node.out / "s" / "third").write_status("interrupted", 9)
    process = node.start(task=0)
    assert process.communicate(timeout=20)[0].splitlines() == ["second one", "third", "fourth"]
    assert process.returncode == 5 and node.log.read_text() == ""
    assert node.start(task=1).communicate(timeout=20)[0] == "fifth\n"


@pytest.mark.parametrize(
    ("sent", "requeued"), [(signal.SIGUSR1, "requeue 7_0\n"), (signal.SIGTERM, "")]
)
def test_a_task_of_several_runs_starts_none_after_one_that_was_asked_to_save(
    sent: int, requeued: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, SAVES.format(ready=tmp_path / "ready"), together=3)
    process = node.start(task=0)
    until((tmp_path / "ready").exists, seconds=20)
    (os.kill if sent == signal.SIGUSR1 else os.killpg)(process.pid, sent)
    assert process.communicate(timeout=20)[0] == "saved\n"  # once
    assert (process.returncode, node.log.read_text()) == (143, requeued)


def test_a_task_that_is_ended_between_two_runs_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rm` is called once a run has ended, when no other has begun: here it sends the signal."""
    node = Node(tmp_path, monkeypatch, "echo ran", together=3)
    program(node.bin / "rm", 'kill -TERM $PPID; exec /bin/rm "$@"')
    process = node.start(task=0)
    assert (process.communicate(timeout=20)[0], process.returncode) == ("ran\n", 143)


def test_a_run_that_never_gets_anywhere_does_not_start_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, "echo started; exit 143")
    folder = RunFolder(node.out / "s" / "second one")
    for step, shown in [
        (3, ["started\n"] * (STARTS_AT_MOST - 1)),
        (4, ["started\n"] * STARTS_AT_MOST + [""]),  # it got somewhere: the count begins anew
    ]:
        folder.write_status("interrupted", step)
        assert [node.start().communicate(timeout=20)[0] for _ in shown] == shown


def test_a_sweep_writes_an_array_of_what_is_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sweep", "--slurm", "--depths", "1,2", "--schemes", "post_ln", "--study", "s"]
    words += ["--out", str(tmp_path)]
    first = typed(*words)
    script = Path(first.stdout.strip())
    assert f"sbatch {script}" in first.stderr and "--array=0-1" in directives(script)
    config = next((tmp_path / "s" / "slurm").glob("*d1*.yaml"))
    done = RunFolder(tmp_path / "s" / config.stem)
    done.write_config(config.read_text())
    done.write_status("done", 0)
    assert "--array=0-0" in directives(Path(typed(*words).stdout.strip()))
    monkeypatch.setenv("PATH", "/x")
    refused = typed(*words, "--submit")
    assert refused.exit_code == 5 and "sbatch" in refused.stderr
