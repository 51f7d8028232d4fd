"""Any value in the files of a run folder: commands name the run, and show the other runs."""

import json
import math
import os
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import typed
from helpers.plot_runs import make_run, without_layout

from deepstack.cli.commands import find_commands
from deepstack.cli.run_watcher import RunWatcher
from deepstack.records import RunFolder
from deepstack.records.file_values import damage_error, is_logged
from deepstack.runs import Runs
from deepstack.runs.trackers import known_trackers

ODD: list[Any] = [None, True, -1, 1e308, 10**400, 1.5, "", "x", "\x1b[31m", [], [[]], {}, {"": 0}]
RAW = ["NaN", "-Infinity", "1e999", "[" * 5000]
KEYS = {
    "meta.json": (
        "", "created", "environment", "flops", "flops.step", "data", "data.sha256", "git",
        "plugins", "extends", "parameters", "references",
    ),
    "status.json": ("", "state", "step", "error", "phase"),
    "columns.json": (
        "", "columns", "layers", "scheme", "scheme.label", "scheme.normalised", "defaults",
        "stacks", "stacks.encoder", "f0_norm", "references", "references.unigram_entropy",
    ),
}  # fmt: skip
CELLS = ["inf", "-inf", "nan", "1e308", "-1e308", "1e39", "", "x", "9" * 400, "-1", "0x1", "\x1b"]
LOGS = {
    "timing.csv": ("step,step_ms,peak_memory_mb", "5,{},100"),
    "steps.csv": (
        "step,loss,lr,grad_norm,model_update,model_update_step,model_update_fro,model_update_rel",
        "5,{0},0.001,1,{0},{0},1,1",
    ),
    "evals.csv": ("step,loss,loss_masked", "5,{0},{0}"),
}


def odd_files() -> Iterator[tuple[str, str]]:
    """Yield the name of a file and its text, for every odd value."""
    for name, keys in KEYS.items():
        for key in keys:
            for value in ODD:
                yield name, json.dumps(with_value(name, key, value))
            for raw in RAW:
                yield name, json.dumps(with_value(name, key, "RAW")).replace('"RAW"', raw)
    for name, (header, row) in LOGS.items():
        for cell in CELLS:
            yield name, f"{header}\n{row.format(cell)}\n"
        yield name, f"{header}\n{row.format(1).replace('5,', '9' * 18 + ',')}\n"


def with_value(name: str, key: str, value: object) -> Any:
    """Return the content of a file of `make_run` with another value at a dotted key."""
    if not key:
        return value
    content: dict[str, Any] = {
        "meta.json": {"flops": {"step": 10**9}},
        "status.json": {"state": "done", "step": 5, "error": None},
        "columns.json": {"scheme": {"name": "deepnorm"}, "stacks": {"encoder": 6}, "f0_norm": 8.0},
    }[name]
    *outer, last = key.split(".")
    inner = content
    for part in outer:
        inner = inner.setdefault(part, {})
    inner[last] = value
    return content


@cache
def make_study(out: Path, every: int) -> Path:
    """Make a study of two sound runs, and one run for each odd value, or every so many."""
    first, second = make_run(out, seed=0), make_run(out, seed=1)
    second.rename(out / "sound")
    files = {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()}
    for number, (name, text) in enumerate(list(odd_files())[::every]):
        folder = RunFolder(out / f"odd-{number:03d}")
        folder.path.mkdir()
        for file, data in files.items():
            if not file.startswith("."):
                (folder.path / file).write_bytes(data)
        config = json.loads(files["config.yaml"]) | {"seed": number + 2}
        folder.config_path.write_text(json.dumps(config))
        (folder.path / name).write_text(text)
        if name == "timing.csv":  # only of a running run are times shown while it works
            folder.write_status("running", 5)
            os.utime(folder.steps_path, (time.time(), time.time()))
    return out


COMMANDS = {
    "ls": ("ls", "STUDY"),
    "ls --json": ("ls", "STUDY", "--json"),
    "compare": ("compare", "STUDY"),
    "compare --transfer": ("compare", "STUDY", "--transfer"),
    "fit": ("fit", "STUDY"),
    "verify": ("verify", "STUDY"),
    "plot": ("plot", "loss_vs_step", "STUDY", "--to", "TO", "--format", "csv"),
    "plot map": ("plot", "map", "STUDY", "--x", "depth", "--y", "seed", "--value", "flops", "--to",
                 "TO", "--format", "csv"),
    "export": ("export", "STUDY", "--logs", "tensorboard", "--to", "TO"),
}  # fmt: skip
COMMANDS = {name: words for name, words in COMMANDS.items() if words[0] in find_commands()}


FEW = pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])


@FEW
@pytest.mark.parametrize("name", COMMANDS)
def test_no_value_ends_a_command(
    name: str, every: int, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    has_tracker = "tensorboard" in known_trackers() and find_spec("tensorboard") is not None
    if name == "export" and not has_tracker:
        pytest.skip("the tensorboard extra is missing")
    if name == "compare --transfer":
        pytest.importorskip("deepstack.tools.transfer")
    study = make_study(tmp_path_factory.getbasetemp() / f"odd-{every}" / "study", every)
    places = {"STUDY": str(study), "TO": str(tmp_path / "to")}
    with without_layout():
        done = typed(*(places.get(word, word) for word in COMMANDS[name]))
    shown = str(done.output)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    # of one depth and one rate there is neither a law nor a transfer
    codes = {"verify": 6, "fit": 7, "compare --transfer": 7}
    assert done.exit_code == codes.get(name, 0), shown
    assert "\x1b[31m" not in shown
    assert name not in ("ls", "ls --json", "verify") or "sound" in shown


@FEW
def test_no_value_ends_the_watching_of_runs(
    every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    study = make_study(tmp_path_factory.getbasetemp() / f"odd-{every}" / "study", every)
    rows = RunWatcher(lambda: Runs.below(study)).read()
    assert {"sound", *(path.name for path in study.iterdir())} >= {row.name for row in rows}
    assert {"done", "damaged"} <= {row.state for row in rows}


@FEW
def test_no_value_ends_the_page_of_a_server(
    every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    build_page = pytest.importorskip("deepstack.tools.report.page").build_page
    PageServer = pytest.importorskip("deepstack.tools.report.server").PageServer
    study = make_study(tmp_path_factory.getbasetemp() / f"odd-{every}" / "study", every)
    page = []
    with (
        without_layout(),
        PageServer(
            ("127.0.0.1", 0), [str(study)], lambda: build_page([str(study)], None).text
        ) as server,
    ):
        assert server.update()
        page = server.page.decode()
    assert "sound" in page and "is left out" in page


@pytest.mark.parametrize("file", ["analysis/depth/values.csv", "layers/a.npy", "steps.csv"])
def test_the_message_on_a_damaged_file_names_its_run(file: str) -> None:
    assert str(damage_error(Path("run") / file, "x")).endswith("`deepstack verify run` says more")


@pytest.mark.parametrize(
    ("log", "number", "right"),
    [("timing", -1.0, False), ("timing", 0.0, True), ("timing", math.inf, False),
     ("steps", -1.0, True), ("steps", math.nan, True), ("steps", 1e39, False)],
)  # fmt: skip
def test_times_are_finite_and_not_negative(log: str, number: float, right: bool) -> None:
    assert is_logged(Path(f"{log}.csv"), number) == right
