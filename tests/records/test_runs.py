"""A run folder as its readers see it: locks, states, rows, what varies."""

import errno
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import typed
from helpers.record_runs import HOLDER, make_run, python
from helpers.terminals import terminal

import deepstack
from deepstack.base.errors import LockedError, NothingMatchedError, ResourceError
from deepstack.records import STEPS_COLUMNS, Run, RunFolder, find_runs, problems, run_rows, varying

# --- the lock ------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["fork"]], ids=len)
def test_a_held_folder_is_refused_by_the_name_of_the_holder(
    words: list[str], tmp_path: Path
) -> None:
    """A child that the holder has forked does not keep the lock."""
    folder = make_run(tmp_path / "run")
    process = python(HOLDER, folder.path, *words)
    ready = process.stdout.readline()
    before = {path: path.stat().st_mtime_ns for path in folder.path.iterdir()}
    started = time.monotonic()
    with pytest.raises(LockedError, match=f"in use by process {process.pid} on ") as caught:
        with folder.lock():
            pass
    assert time.monotonic() - started < 2 and caught.value.exit_code == 5
    assert {path: path.stat().st_mtime_ns for path in folder.path.iterdir()} == before
    assert len(Run(folder.path).steps) == 3  # it can be read all the while
    process.kill()
    process.wait()
    started = time.monotonic()
    with folder.lock():
        assert time.monotonic() - started < 0.1
    if words:
        os.kill(int(ready), signal.SIGKILL)
    process.stdout.close()


def test_a_run_is_running_only_while_a_process_holds_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", state="running")
    assert Run(folder.path).status["state"] == "running"
    with pytest.raises(KeyError), folder.lock():
        assert Run(folder.path).state == "running"
        with pytest.raises(LockedError, match=f"process {os.getpid()} "), folder.lock():
            pass
        raise KeyError
    assert Run(folder.path).state == "interrupted" and folder.holder() is None


@pytest.mark.parametrize(
    "name", [".lock", "steps.csv", "log.txt", "checkpoint", "tensorboard", "layers/a.npy"]
)
def test_a_link_in_a_run_folder_is_not_written_through(name: str, tmp_path: Path) -> None:
    folder, dear = make_run(tmp_path / "run"), tmp_path / "dear"
    dear.write_text("mine")
    link = folder.path / name
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(dear)
    with pytest.raises(ResourceError, match=f"{name} is a link"), folder.lock():
        pass
    assert folder.holder() is None and dear.read_text() == "mine"


@pytest.mark.parametrize("name", ["status.json", "config.yaml", "meta.json"])
def test_a_terabyte_of_a_small_file_is_refused(name: str, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", state="interrupted").path
    (path / name).touch()
    os.truncate(path / name, 10**12)
    text = " ".join(problems(RunFolder(path)))
    assert name in text and "1,000,000,000,000 bytes" in text
    assert typed("ls", tmp_path).exit_code == 0


def test_pipes_in_a_run_folder_block_no_command(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    os.mkfifo(folder.lock_path)
    folder.steps_path.unlink()
    os.mkfifo(folder.steps_path)
    assert folder.holder() is None
    with pytest.raises(ResourceError, match="is not a file"), folder.lock():
        pass
    for read in (folder.last_row, lambda: Run(folder.path).steps):
        with pytest.raises(ResourceError, match="something that is not a file"):
            read()


# --- reading back --------------------------------------------------------------------------


def test_torn_rows_are_never_seen(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    whole = folder.steps_path.read_bytes()
    for cut in range(len(whole)):
        folder.steps_path.write_bytes(whole[:cut])
        steps = Run(folder.path).steps
        assert list(steps.columns) == list(STEPS_COLUMNS)
        rows = [(1, 3.0), (2, 2.0), (3, 1.0)][: max(whole[:cut].count(b"\n") - 1, 0)]
        assert [*zip(steps["step"], steps["loss"], strict=True)] == rows


def test_a_tampered_folder_is_named_and_takes_little_memory(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    bomb = "a: &a [1, 1]\n" + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in pairwise("abcdefgh"))
    for path, name, texts in (
        (folder.config_path, "flat_config", (bomb, "[" * 100_000, "a: {" * 5000)),
        (folder.meta_path, "meta", ('{"a":' * 100_000, "[1]", "\x00")),
    ):
        for text in texts:
            path.write_text(text)
            with pytest.raises(ResourceError, match=path.name):
                getattr(Run(folder.path), name)


def test_a_row_that_lacks_cells_is_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.steps_path.write_text(re.sub("\n2,.*", "\n2,2.0", folder.steps_path.read_text()))
    assert "a row has not 8 cells" in str(Run(folder.path).damage())
    assert "steps.csv: unreadable" in problems(folder)[0]


def test_layers_are_what_the_steps_file_names(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    values = np.arange(15).reshape(3, 5)
    folder.write_layers({"grad_norm": values[:2]}, [1, 2])
    whole = (folder.layers_dir / "steps.npy").read_bytes()
    (folder.layers_dir / "steps.npy").unlink()
    assert Run(folder.path).layer_names() == []
    # The next snapshot has reached the values but not the steps yet.
    folder.write_layers({"grad_norm": values}, [1, 2, 3])
    (folder.layers_dir / "steps.npy").write_bytes(whole)
    steps, found = Run(folder.path).layers("grad_norm")
    assert steps.tolist() == [1, 2] and found.dtype == np.float32
    assert found.tolist() == values[:2].tolist()
    assert Run(folder.path).layer_names() == ["grad_norm"]
    np.save(folder.layers_dir / "bad.npy", np.array([{}]), allow_pickle=True)
    for name, error in (("other", KeyError), ("bad", ResourceError)):
        with pytest.raises(error, match=name):
            Run(folder.path).layers(name)
    assert Run(folder.path).damage() is None
    assert "bad.npy" in str(Run(folder.path).damage(layers=True))


def test_runs_are_found_at_three_heights_in_human_order(tmp_path: Path) -> None:
    for name in ("a/deepnorm-d48", "a/deepnorm-d6", "b/x", "b/.hidden"):
        make_run(tmp_path / name)
    (tmp_path / "a" / "plots").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["deepnorm-d6", "deepnorm-d48", "x"]
    for path in (tmp_path / "b", tmp_path / "b" / "x"):
        assert [(run.study, run.name) for run in find_runs(path)] == [("b", "x")]
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(NothingMatchedError):
            find_runs(nothing)


def test_keys_vary_if_runs_differ_in_them(tmp_path: Path) -> None:
    configs = [
        "{name: a, seed: 0, model: {depth: 6, eps: 1}, task: {name: text}, runtime: {threads: 1}}",
        "{name: b, seed: 0, model: {depth: 48}, task: {name: text, rate: 0.5}, runtime: {}}",
    ]
    runs = [Run(make_run(tmp_path / str(i), text).path) for i, text in enumerate(configs)]
    # An old config that does not know a key had its default; a task's own key may be set or not.
    assert varying(runs) == ["model.depth", "task.rate"]
    assert varying(runs[:1]) == [] and varying([]) == []


def test_a_table_has_what_varies_inside_a_study(tmp_path: Path) -> None:
    for path, model, rate in (
        ("one/a", "{scheme: admin, scheme_options: {start: x}}", 1),
        ("one/b", "{scheme: rezero, scheme_options: {gain: 1}}", 1),
        ("two/a", "{scheme: rezero, scheme_options: {gain: 2}}", 2),
        ("two/b", "{scheme: rezero, scheme_options: {gain: 3}}", 2),
    ):
        make_run(tmp_path / path, f"model: {model}\ntask: {{name: text, rate: {rate}}}\n")
    row = run_rows(find_runs(tmp_path))[0]
    assert [name for name in row if "." in name] == ["model.scheme", "model.scheme_options.gain"]


@pytest.mark.slow(turn=29)
def test_a_narrow_terminal_gets_whole_names_and_numbers(tmp_path: Path) -> None:
    name = "hyper_connections-d1000-s0-4c53e0"
    make_run(tmp_path / name, "seed: 1234\nmodel: {scheme: x}\ntrain: {lr: 0.01}\n")
    make_run(tmp_path / "other", "seed: 5678\nmodel: {scheme: x}\ntrain: {lr: 0.02}\n")
    for width in (20, 60, 200):
        with terminal() as (file, read):
            found = subprocess.run(
                [sys.executable, "-m", "deepstack", "ls", str(tmp_path)],
                stdout=file,
                stderr=subprocess.PIPE,
                env=os.environ | {"TERM": "xterm", "COLUMNS": str(width)},
                text=True,
            )
            lines = re.sub(r"\x1b\[[0-9;]*m", "", "".join(iter(read, ""))).splitlines()
        (row,) = (line for line in lines if name in line)
        assert ("0.3" in row) == (width >= 100)  # ‖ΔF‖ has no place beside the name and the loss
        assert any("loss" in line.split() for line in lines)
        # A table of 60 omits columns; at 20 each run is a block with all of its values.
        assert ("step_ms" in found.stderr and "--json" in found.stderr) == (width == 60)
        assert any(line.split() == ["train.lr", "0.01"] for line in lines) == (width == 20)
        assert max(map(len, lines)) <= max(width, len(name) + 20)
    piped = typed("ls", tmp_path)
    assert "1,234" in piped.stdout and "step_ms" in piped.stdout and piped.stderr == ""


@pytest.mark.parametrize(
    ("name", "old", "new", "state"),
    [
        ("steps.csv", "\n2,", "\nx,", "done"),
        ("steps.csv", "loss", "los", "done"),
        ("steps.csv", r"\n3,.*", "", "damaged"),
        ("steps.csv", r"[^\0]*", "", "damaged"),
        ("status.json", r"[^\0]*", "", "damaged"),
        ("config.yaml", r"[^\0]*", "", "done"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_read(
    name: str, old: str, new: str, state: str, tmp_path: Path
) -> None:
    """The state alone tells damage of status.json, or of the end of steps.csv."""
    for run in ("a", "b", "c"):
        make_run(tmp_path / "study" / run, f"model: {{depth: {ord(run)}}}\n")
    file = tmp_path / "study" / "b" / name
    file.write_text(re.sub(old, new, file.read_text(), count=1))
    rows = run_rows(find_runs(tmp_path))
    assert [row["state"] for row in rows] == ["done", "damaged", "done"]
    assert [row["model.depth"] for row in rows[::2]] == [97, 99] and rows[1]["loss"] is None
    found = typed("ls", tmp_path)
    assert found.exit_code == 0
    (line,) = found.stderr.splitlines()
    assert line.startswith("run b is damaged: ")
    assert line.endswith(f"`deepstack verify {file.parent}` says more")
    assert Run(file.parent).state == state


@pytest.mark.parametrize("name", ["config.yaml", "evals.csv"])
def test_a_run_that_has_lost_a_file_is_named_and_left_out(name: str, tmp_path: Path) -> None:
    for run in ("a", "b", "c"):
        folder = make_run(tmp_path / "study" / run, f"model: {{depth: {ord(run)}}}\n")
        folder.write_meta({"created": "2026-01-01T00:00:00Z"})
        with folder.log("evals", ("step", "loss")) as log:
            log.write({"step": 3, "loss": 2.0})
        (folder.path / "checksums.json").write_text('{"evals.csv": "0"}')
    lost = tmp_path / "study" / "b" / name
    lost.unlink()
    found = typed("ls", tmp_path)
    assert found.exit_code == 0 and f"run b is damaged: {lost}: is " in found.stderr
    (rest,) = {tuple(deepstack.load_runs(tmp_path / "study", where="state=done")["run"])}
    assert rest == ("a", "c")
    assert f"run b is left out: {lost}: is " in typed("compare", tmp_path).stderr


# --- the ends of the logs, which `ls` reads -------------------------------------------------------


ROW = "{},1.5,1e-04,5.3733234,0.0056823366,0.0056823366,0.01620405,0.0020255118\n"


def long_run(path: Path, steps: int) -> RunFolder:
    folder = make_run(path, f"seed: {steps}\nmodel: {{depth: 6}}\n", rows=0)
    with open(folder.steps_path, "a") as file:
        file.writelines(map(ROW.format, range(1, steps + 1)))
    folder.write_status("done", steps)
    return folder


def bytes_read() -> int:
    """Bytes that this process has read so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def test_fifty_megabytes_of_steps_are_not_read(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "s" / "long", 700_000)
    assert folder.steps_path.stat().st_size > 50_000_000
    typed("ls", tmp_path, "--json")  # the imports
    before = bytes_read()
    found = typed("ls", tmp_path, "--json")
    assert bytes_read() - before < 200_000
    (row,) = json.loads(found.stdout)
    assert (row["step"], row["loss"], row["state"]) == (700_000, 1.5, "done")


def test_ls_needs_neither_pandas_nor_numpy(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / "run")
    code = """
import sys; from deepstack.cli import app
try: app(['ls', sys.argv[1]])
except SystemExit: print({'pandas', 'numpy', 'torch'} & set(sys.modules))
"""
    process = python(code, tmp_path)
    assert process.communicate(timeout=60)[0].splitlines()[-1] == "set()"


def test_the_time_of_a_step_is_the_median_of_the_latest(tmp_path: Path) -> None:
    """A resumed run times steps again."""
    steps = 500
    folder = long_run(tmp_path / "s" / "run", steps)
    rows = [(step, 10.0 + step % 7) for step in range(1, steps + 1)]
    again = [(step, 90.0) for step in range(steps // 2, steps + 1)]
    text = "".join(f"{step},{ms},100.0\n" for step, ms in rows + again)
    folder.timing_path.write_text(f"step,step_ms,peak_memory_mb\n{text}7,1")
    (row,) = run_rows(find_runs(tmp_path))
    assert row["step_ms"] == statistics.median(dict(rows + again).values())
    assert row["step_ms"] == Run(folder.path).timing["step_ms"].median()


@pytest.mark.parametrize(
    "end", ["4,x,1,1,1,1,1,1\n", "4,1,1\n", "four,1,1,1,1,1,1,1\n", "4" + ",1" * 2_000 + "\n"]
)
def test_a_bad_last_row_is_damage(end: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "s" / "run", state="interrupted")
    folder.steps_path.write_text(folder.steps_path.read_text() + end)
    (row,) = run_rows([Run(folder.path)])
    assert row["state"] == "damaged" and row["loss"] is None
    assert "is not a table of numbers" in typed("ls", tmp_path).stderr


def test_the_last_values_equal_the_whole_logs(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "s" / "run", 400)
    with open(folder.steps_path, "a") as file:
        file.write("401,2.5,,,inf,nan,1,1\n402,9.")  # an empty cell; a torn row
    folder.write_status("interrupted", 401)
    (row,) = run_rows([Run(folder.path)])
    last = Run(folder.path).steps.iloc[-1]
    assert (row["step"], row["loss"]) == (401, 2.5) == (last["step"], last["loss"])
    assert row["grad_norm"] != row["grad_norm"] and row["model_update"] == float("inf")


def test_a_lock_that_a_full_disk_refuses_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    with (
        pytest.raises(ResourceError, match="No space left"),
        RunFolder(tmp_path / "a" / "b").lock(),
    ):
        pass
    assert not list(tmp_path.iterdir())
