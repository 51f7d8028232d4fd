"""Logs of a run: the same bytes after any interruption, and files that cannot be read."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from helpers.record_runs import make_run

from deepstack.base.errors import DifferenceError, ResourceError
from deepstack.base.text import float32_text
from deepstack.records import TIMING_COLUMNS, AppendLog, Run, RunFolder, extent, trouble


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
def test_float32_text(value: object, text: str) -> None:
    assert float32_text(value) == text


def test_float32_text_reads_back_as_the_same_float32_and_is_short() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32)
    for number in filter(np.isfinite, bits.view(np.float32)):
        text = float32_text(number)
        assert np.float32(text) == number
        digits = len(text.lstrip("-").split("e")[0].replace(".", "").strip("0"))
        if digits > 1:
            assert np.float32(f"{number:.{digits - 2}e}") != number


# --- the append-only log -------------------------------------------------------------------

ROWS = [(step, 1.0 / step, 0.1 * step) for step in range(1, 21)]
COLUMNS = ("step", "loss", "lr")


def write_rows(
    path: Path, rows: list[tuple[float, ...]], replay_from: int = -1, tolerance: float = 0.0
) -> None:
    with AppendLog(path, COLUMNS, replay_from, tolerance=tolerance) as log:
        for row in rows:
            log.write(dict(zip(COLUMNS, row, strict=True)))


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


@pytest.mark.parametrize("torn", [0, 3])
def test_a_different_row_stops_the_replay_and_shows_both(
    tmp_path: Path, reference: bytes, torn: int
) -> None:
    path, before = tmp_path / "steps.csv", reference[: len(reference) - torn]
    path.write_bytes(before)
    with pytest.raises(DifferenceError, match=r"20,0\.05,(?s:.*)20,0\.75,2\.0") as caught:
        write_rows(path, [(20, 0.75, 2.0)], 19)
    assert caught.value.exit_code == 6 and path.read_bytes() == before
    with pytest.raises(DifferenceError, match=r"now: +step,loss$"):
        AppendLog(path, ("step", "loss"), 5)


def test_checksum_covers_exactly_the_rows_up_to_a_step(tmp_path: Path, reference: bytes) -> None:
    path = tmp_path / "steps.csv"
    write_rows(path, ROWS[:9])
    before = extent(path, 7)
    upto = reference[: reference.index(b"\n8,") + 1]
    assert before == (len(upto), hashlib.sha256(upto).hexdigest(), 7)
    path.write_bytes(reference)
    assert extent(path, 7) == before


def test_sparse_rows_and_step_zero(tmp_path: Path) -> None:
    path = tmp_path / "evals.csv"
    rows: list[tuple[float, ...]] = [(0, 5.0, 1.0), (50, 4.0, 1.0), (100, 3.0, 1.0)]
    for first, replay_from in ((0, -1), (2, 70), (0, -1)):
        write_rows(path, rows[first:], replay_from)
        assert path.read_bytes() == b"step,loss,lr\n0,5.0,1.0\n50,4.0,1.0\n100,3.0,1.0\n"


def test_within_a_tolerance_the_row_on_disk_stays(tmp_path: Path, reference: bytes) -> None:
    path = tmp_path / "steps.csv"
    path.write_bytes(reference[:-3])
    rows = [(step, loss * 1.0001, lr) for step, loss, lr in ROWS[10:]]
    write_rows(path, rows, 10, tolerance=1e-3)
    # The torn row cannot be completed from other digits, so it is the new one, whole.
    assert path.read_bytes().splitlines()[:-1] == reference.splitlines()[:-1]
    assert path.read_bytes().splitlines()[-1].startswith(b"20,0.050005")
    for row in ((20, 0.06, 2.0), (20.01, 0.05, 2.0)):
        with pytest.raises(DifferenceError):
            write_rows(path, [row], 19, tolerance=1e-3)


def test_the_tolerance_is_relative_for_small_numbers_too(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    write_rows(path, [(1, 2.0, 1e-6)])
    write_rows(path, [(1, 2.0, 1.0005e-6)], 0, tolerance=1e-3)
    with pytest.raises(DifferenceError):
        write_rows(path, [(1, 2.0, 2e-6)], 0, tolerance=1e-3)


def test_timing_is_appended_and_the_last_of_a_step_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for first in (1, 2):
        with folder.log("timing", TIMING_COLUMNS) as log:
            for step in (first, first + 1):
                log.write({"step": step, "step_ms": 10.0 * first})
        with open(folder.timing_path, "ab") as file:
            file.write(b"9,12")
    timing = Run(folder.path).timing
    assert [*zip(timing["step"], timing["step_ms"], strict=True)] == [(1, 10), (2, 20), (3, 20)]


def test_errors_of_the_system_name_file_and_cause(tmp_path: Path) -> None:
    for error, message in (
        (OSError(28, "No space"), r"f: No space \(\d+ MB free\)$"),
        (PermissionError(13, "Permission denied"), "f: Permission denied$"),
    ):
        with pytest.raises(ResourceError, match=message), trouble(tmp_path / "f"):
            raise error


# --- files that are replaced ---------------------------------------------------------------


def test_status_has_known_states_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'finished' is none of running, done"):
        RunFolder(tmp_path).write_status("finished", 3)
    with pytest.raises(ValueError, match="JSON"):
        RunFolder(tmp_path).write_status("diverged", 3, value=float("nan"))
    assert not (tmp_path / "status.json").exists()
