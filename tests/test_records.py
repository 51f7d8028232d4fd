"""Run folders: what is on disk after anything, and what is read back."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from deepstack.errors import (
    DifferenceError,
    LockedError,
    NothingMatchedError,
    ResourceError,
)
from deepstack.records import (
    STEPS_COLUMNS,
    AppendLog,
    Run,
    RunFolder,
    find_runs,
    number_text,
    runs_table,
    varying,
)

REPOSITORY = Path(__file__).parent.parent
ROWS = [(step, 1.0 / step, 0.1 * step) for step in range(1, 21)]
COLUMNS = ("step", "loss", "lr")


def python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def make_run(
    path: Path, config: str = "model: {depth: 6}\n", state: str = "done", rows: int = 3
) -> RunFolder:
    folder = RunFolder(path)
    folder.write_config(config)
    with folder.log("steps", STEPS_COLUMNS) as log:
        for step in range(1, rows + 1):
            log.write({"step": step, "loss": 4.0 - step, "model_update": 0.1 * step})
    folder.write_status(state, rows)
    return folder


# --- numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (7, "7"),
        (np.int64(-7), "-7"),
        (True, "1"),
        (0.1, "0.1"),
        (np.float32(0.1), "0.1"),
        (1e-5, "1e-05"),
        (float("nan"), "nan"),
        (-float("nan"), "nan"),
        (float("inf"), "inf"),
        (-1e300, "-inf"),
        (-0.0, "-0.0"),
        (16777217.0, "1.6777216e+07"),
    ],
)
def test_number_text(value: object, text: str) -> None:
    assert number_text(value) == text


def test_number_text_reads_back_as_the_same_float32_and_is_short() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32)
    for number in bits.view(np.float32):
        text = number_text(number)
        if np.isfinite(number):
            assert np.float32(text) == number
            digits = text.lstrip("-").split("e")[0].replace(".", "").strip("0")
            assert len(digits) <= 9
            if len(digits) > 1 and "e" in text:
                shorter = f"{number:.{len(digits) - 2}e}"
                assert np.float32(shorter) != number


# --- the append-only log -------------------------------------------------------------------


def write_rows(path: Path, rows: list[tuple[float, ...]], replay_from: int = -1) -> AppendLog:
    log = AppendLog(path, COLUMNS).open(replay_from)
    for row in rows:
        log.write(row)
    log.close()
    return log


@pytest.fixture
def reference(tmp_path: Path) -> bytes:
    write_rows(tmp_path / "reference.csv", ROWS)
    return (tmp_path / "reference.csv").read_bytes()


def test_resume_after_a_cut_at_every_byte_gives_the_same_file(
    tmp_path: Path, reference: bytes
) -> None:
    path = tmp_path / "steps.csv"
    for cut in range(len(reference) + 1):
        path.write_bytes(reference[:cut])
        whole_rows = reference[:cut].count(b"\n") - 1
        checkpoint = max(whole_rows - 2, -1)
        write_rows(path, [row for row in ROWS if row[0] > checkpoint], checkpoint)
        assert path.read_bytes() == reference, cut


def test_every_write_leaves_a_prefix(tmp_path: Path, reference: bytes) -> None:
    path = tmp_path / "steps.csv"
    path.write_bytes(reference[:-5])
    log = AppendLog(path, COLUMNS).open(replay_from=4)
    sizes = [path.stat().st_size]
    for row in ROWS[4:]:
        log.write(row)
        assert reference.startswith(path.read_bytes())
        sizes.append(path.stat().st_size)
    assert sizes == sorted(sizes)
    assert log.remaining == b""
    log.close()


@pytest.mark.parametrize("torn", [0, 3])
def test_a_different_row_stops_the_replay_and_shows_both(
    tmp_path: Path, reference: bytes, torn: int
) -> None:
    path = tmp_path / "steps.csv"
    path.write_bytes(reference[: len(reference) - torn])
    log = AppendLog(path, COLUMNS).open(replay_from=19)
    with pytest.raises(DifferenceError) as caught:
        log.write((20, 0.75, 2.0))
    assert "20,0.05," in str(caught.value) and "20,0.75,2.0" in str(caught.value)
    assert caught.value.exit_code == 6
    assert path.read_bytes() == reference[: len(reference) - torn]


def test_a_flipped_bit_behind_the_checkpoint_is_noticed(tmp_path: Path, reference: bytes) -> None:
    path = tmp_path / "steps.csv"
    start = reference.index(b"\n11,") + 1
    for position in range(start, len(reference), 7):
        changed = bytearray(reference)
        changed[position] ^= 4
        path.write_bytes(changed)
        with pytest.raises(DifferenceError):
            write_rows(path, ROWS[10:], replay_from=10)


def test_other_columns_are_a_difference(tmp_path: Path, reference: bytes) -> None:
    path = tmp_path / "steps.csv"
    path.write_bytes(reference)
    with pytest.raises(DifferenceError, match=r"now: +step,loss$"):
        AppendLog(path, ("step", "loss")).open(5)


def test_checksum_covers_exactly_the_rows_up_to_a_step(tmp_path: Path, reference: bytes) -> None:
    path = tmp_path / "steps.csv"
    write_rows(path, ROWS[:9])
    log = AppendLog(path, COLUMNS)
    before = log.sha256_upto(7)
    assert log.offset_after(7) == reference.index(b"\n8,") + 1
    path.write_bytes(reference)
    assert log.sha256_upto(7) == before
    path.write_bytes(reference[: log.offset_after(7) - 1])
    assert log.sha256_upto(7) != before
    path.write_bytes(reference.replace(b"\n3,", b"\n2,", 1))
    assert log.sha256_upto(7) != before


def test_sparse_rows_and_step_zero(tmp_path: Path) -> None:
    path = tmp_path / "evals.csv"
    rows = [(0, 5.0, 1.0), (50, 4.0, 1.0), (100, 3.0, 1.0)]
    write_rows(path, rows)
    whole = path.read_bytes()
    log = AppendLog(path, COLUMNS).open(replay_from=70)
    assert log.remaining == b"100,3.0,1.0\n"
    log.write(rows[2])
    log.close()
    write_rows(path, rows)
    assert path.read_bytes() == whole


def test_steps_only_go_up(tmp_path: Path) -> None:
    with AppendLog(tmp_path / "steps.csv", COLUMNS).open() as log:
        log.write((3, 1.0, 1.0))
        with pytest.raises(ValueError, match="step 3 after step 3"):
            log.write((3, 1.0, 1.0))
        with pytest.raises(ValueError, match="no column other"):
            log.write({"step": 4, "other": 1.0})


def test_within_a_tolerance_the_row_on_disk_stays(tmp_path: Path, reference: bytes) -> None:
    path = tmp_path / "steps.csv"
    path.write_bytes(reference[:-3])
    log = AppendLog(path, COLUMNS, tolerance=1e-3).open(replay_from=10)
    for step, loss, lr in ROWS[10:]:
        log.write((step, loss * 1.0001, lr))
    log.close()
    assert log.tolerated == 9
    # The torn row cannot be completed from other digits, so it is the new one, whole.
    assert path.read_bytes().splitlines()[:-1] == reference.splitlines()[:-1]
    assert path.read_bytes().splitlines()[-1].startswith(b"20,0.050005")
    with pytest.raises(DifferenceError):
        AppendLog(path, COLUMNS, tolerance=1e-3).open(19).write((20, 0.06, 2.0))


def test_timing_is_appended_and_the_last_of_a_step_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for first in (1, 2):
        with folder.log("timing", ("step", "step_ms", "peak_memory_mb")) as log:
            for step in (first, first + 1):
                log.write((step, 10.0 * first, None))
        with open(folder.timing_path, "ab") as file:
            file.write(b"9,12")
    timing = Run(folder.path).timing
    assert timing["step"].tolist() == [1, 2, 3]
    assert timing["step_ms"].tolist() == [10.0, 20.0, 20.0]


WRITER = """
import sys
from deepstack.records import RunFolder
folder, rows = RunFolder(sys.argv[1]), int(sys.argv[2])
with folder.lock():
    done = int(folder.read_status().get("step", 0))
    with folder.log("steps", ("step", "loss", "lr")).open(replay_from=done) as log:
        for step in range(done + 1, rows + 1):
            log.write((step, 1.0 / step, 0.1 * step))
            if step % 10 == 0:
                log.flush()
                folder.write_status("running", step, sha256=log.sha256_upto(step))
        folder.write_status("done", rows)
"""


def test_killed_again_and_again_the_log_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    rows = 600
    with python(WRITER, tmp_path / "whole", rows) as process:
        assert process.wait(timeout=60) == 0
    expected = (tmp_path / "whole" / "steps.csv").read_bytes()
    assert expected.count(b"\n") == rows + 1

    path = tmp_path / "killed"
    wait = np.random.default_rng(1)
    kills = 0
    for _ in range(60):
        process = python(WRITER, path, rows)
        started = time.monotonic()
        while not (path / "steps.csv").exists() and time.monotonic() - started < 20:
            time.sleep(0.005)
        before = (path / "steps.csv").stat().st_size
        patience = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < patience:
            if (path / "steps.csv").stat().st_size > before:
                break
        time.sleep(float(wait.uniform(0, 0.01)))
        process.kill()
        process.communicate()
        on_disk = (path / "steps.csv").read_bytes()
        assert expected.startswith(on_disk)
        if process.returncode == 0:
            break
        kills += 1
        if kills == 5:
            with python(WRITER, path, rows) as last:
                assert last.wait(timeout=60) == 0
            break
    assert kills >= 1
    assert (path / "steps.csv").read_bytes() == expected
    assert RunFolder(path).read_status()["state"] == "done"


def test_a_full_disk_is_a_resource_error_and_leaves_a_prefix(
    tmp_path: Path, reference: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.csv"
    log = AppendLog(path, COLUMNS).open()
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if path.stat().st_size > 100:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:7])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ResourceError, match=r"steps\.csv: No space left on device \(\d+ MB free\)"):
        for row in ROWS:
            log.write(row)
    monkeypatch.undo()
    log.close()
    assert reference.startswith(path.read_bytes())
    write_rows(path, ROWS)
    assert path.read_bytes() == reference


# --- files that are replaced ---------------------------------------------------------------


def test_a_failed_replace_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run")

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ResourceError, match="Input/output error"):
        folder.write_status("failed", 3)
    assert folder.read_status()["state"] == "done"
    assert [path.name for path in folder.path.iterdir() if path.name.endswith(".new")] == []


def test_replacing_syncs_the_file_then_renames_then_syncs_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run")
    calls: list[str] = []
    sync, rename = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    def record_rename(*paths: str) -> None:
        calls.append("rename")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    folder.write_status("done", 4)
    assert calls == ["file", "rename", "folder"]


REWRITER = """
import sys
from deepstack.records import RunFolder
folder = RunFolder(sys.argv[1])
step = 0
while True:
    step += 1
    folder.write_status("running", step, padding="x" * 20000)
"""


def test_a_reader_never_sees_half_a_file_and_a_kill_leaves_a_whole_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    process = python(REWRITER, folder.path)
    seen = set()
    end = time.monotonic() + 10
    while time.monotonic() < end and len(seen) < 30:
        status = folder.read_status()
        if status:
            assert len(status["padding"]) == 20000
            seen.add(status["step"])
    process.kill()
    process.communicate()
    assert len(seen) >= 3
    assert folder.read_status()["step"] >= max(seen)


@pytest.mark.parametrize("text", ["{", "[1]", '{"state": "done"', "\x00"])
def test_a_broken_status_names_the_file(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run")
    folder.status_path.write_text(text)
    with pytest.raises(ResourceError, match=r"status\.json: "):
        folder.read_status()


def test_status_has_known_states_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'finished' is none of running, done"):
        RunFolder(tmp_path).write_status("finished", 3)
    with pytest.raises(ValueError, match="JSON"):
        RunFolder(tmp_path).write_status("diverged", 3, value=float("nan"))
    assert not (tmp_path / "status.json").exists()


# --- the lock ------------------------------------------------------------------------------

HOLDER = """
import sys, time
from deepstack.records import RunFolder
with RunFolder(sys.argv[1]).lock():
    if sys.argv[2] == "fork":
        import os
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(60)
            os._exit(0)
    else:
        print("locked", flush=True)
    time.sleep(60)
"""


def test_a_held_folder_is_refused_in_two_seconds_naming_the_holder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    process = python(HOLDER, folder.path, "alone")
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    before = {path.name: path.stat().st_mtime_ns for path in folder.path.iterdir()}
    started = time.monotonic()
    with pytest.raises(LockedError, match=f"in use by process {process.pid} on ") as caught:
        with folder.lock():
            pass
    assert time.monotonic() - started < 2
    assert caught.value.exit_code == 5
    assert {path.name: path.stat().st_mtime_ns for path in folder.path.iterdir()} == before
    # Reading goes on all the while.
    assert len(Run(folder.path).steps) == 3
    process.send_signal(signal.SIGKILL)
    process.communicate()
    started = time.monotonic()
    with folder.lock():
        assert time.monotonic() - started < 0.1


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    process = python(HOLDER, folder.path, "fork")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        with folder.lock():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_the_lock_is_free_after_its_context_and_after_an_exception(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    with pytest.raises(KeyError), folder.lock():
        with pytest.raises(LockedError, match=f"process {os.getpid()} "), folder.lock():
            pass
        raise KeyError
    with folder.lock():
        assert (folder.holder() or {})["pid"] == os.getpid()
    assert folder.holder() is None


def test_running_means_that_someone_works_on_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", state="running")
    assert Run(folder.path).state == "interrupted"
    assert Run(folder.path).status["state"] == "running"
    with folder.lock():
        assert Run(folder.path).state == "running"


# --- reading back --------------------------------------------------------------------------


def test_torn_rows_are_never_seen(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    whole = folder.steps_path.read_bytes()
    for cut in range(len(whole)):
        folder.steps_path.write_bytes(whole[:cut])
        steps = Run(folder.path).steps
        assert steps["step"].tolist() == [1, 2, 3][: max(whole[:cut].count(b"\n") - 1, 0)]
        assert list(steps.columns) == list(STEPS_COLUMNS)
        assert steps["loss"].tolist() == [3.0, 2.0, 1.0][: len(steps)]


def test_values_come_back_as_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.log("steps", STEPS_COLUMNS) as log:
        log.write((1, 0.1, 1e-5, float("inf"), float("nan"), None, 1e30, 3))
    row = Run(folder.path).steps.iloc[0]
    assert np.float32(row["loss"]) == np.float32(0.1) and row["lr"] == pytest.approx(1e-5, 1e-9)
    assert row["grad_norm"] == np.inf and np.isnan(row["model_update"])
    assert np.isnan(row["model_update_step"]) and row["model_update_rel"] == 3.0


def test_config_numbers_are_read_as_yaml_1_2(tmp_path: Path) -> None:
    text = "train: {lr: 3e-4, eps: 1e-08, clip: null, steps: 010}\nlog: {layers_every: on}\n"
    run = Run(make_run(tmp_path / "run", text + "runtime: {banks: true}\nname: 1.5.2\n").path)
    assert run.get("train.lr") == 3e-4 and run.get("train.eps") == 1e-8
    assert run.get("train.clip") is None and run.get("train.steps") == 10
    assert run.get("log.layers_every") == "on" and run.get("runtime.banks") is True
    assert run.get("name") == "1.5.2" and run.get("model.depth", 4) == 4


def test_layers_are_what_the_steps_file_names(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    values = np.arange(15).reshape(3, 5)
    folder.write_layers("grad_norm", values[:2])
    assert Run(folder.path).layer_names() == []
    folder.write_layer_steps([1, 2])
    # The next snapshot has reached the values but not the steps yet.
    folder.write_layers("grad_norm", values)
    steps, found = Run(folder.path).layers("grad_norm")
    assert steps.tolist() == [1, 2] and found.dtype == np.float32
    assert found.tolist() == values[:2].tolist()
    assert Run(folder.path).layer_names() == ["grad_norm"]
    with pytest.raises(KeyError):
        Run(folder.path).layers("other")
    np.save(folder.layers_dir / "bad.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ResourceError, match=r"bad\.npy"):
        Run(folder.path).layers("bad")


def test_checkpoints_are_counted_by_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("100", "20", ".30.new", "x"):
        (folder.checkpoint_dir / name).mkdir(parents=True)
    assert folder.checkpoints() == [20, 100]
    assert folder.checkpoint_path(20) == tmp_path / "checkpoint" / "20"


def test_runs_are_found_at_three_heights_in_human_order(tmp_path: Path) -> None:
    for name in ("a/deepnorm-d48", "a/deepnorm-d6", "b/x", "b/.hidden"):
        make_run(tmp_path / name)
    (tmp_path / "a" / "plots").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["deepnorm-d6", "deepnorm-d48", "x"]
    assert [run.study for run in find_runs(tmp_path / "b")] == ["b"]
    assert [run.name for run in find_runs(tmp_path / "b" / "x")] == ["x"]
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(NothingMatchedError):
            find_runs(nothing)


def test_what_varies(tmp_path: Path) -> None:
    configs = [
        "{name: a, seed: 0, model: {depth: 6, eps: 1}, task: {name: text}, runtime: {threads: 1}}",
        "{name: b, seed: 0, model: {depth: 48}, task: {name: text, rate: 0.5}, runtime: {}}",
    ]
    runs = [Run(make_run(tmp_path / str(i), text).path) for i, text in enumerate(configs)]
    # An old config that does not know a key had its default; a task's own key may be set or not.
    assert varying(runs) == ["model.depth", "task.rate"]
    assert varying(runs[:1]) == [] and varying([]) == []


def test_runs_table(tmp_path: Path) -> None:
    for depth in (6, 48):
        folder = make_run(tmp_path / "study" / f"d{depth}", f"model: {{depth: {depth}}}\n")
        with folder.log("evals", ("step", "loss", "loss_masked", "bits_per_token")) as log:
            log.write({"step": 3, "loss": 2.0})
    make_run(tmp_path / "study" / "new", "model: {depth: 48}\n", rows=0, state="running")
    table = runs_table(find_runs(tmp_path))
    assert table["run"].tolist() == ["d6", "d48", "new"]
    assert table["model.depth"].tolist() == [6, 48, 48]
    assert table["state"].tolist() == ["done", "done", "interrupted"]
    assert table["step"].tolist() == [3, 3, 0]
    assert table["val_loss"].tolist()[:2] == [2.0, 2.0] and table["val_loss"].isna()[2]
    assert table["model_update"][0] == pytest.approx(0.3)
    json.loads(table.to_json(orient="records"))


def test_records_import_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, deepstack.records; print({'torch', 'pandas', 'matplotlib'} & set(sys.modules))"
    )
    process = python(code)
    assert process.communicate()[0].strip() == "set()"
    assert process.returncode == 0
