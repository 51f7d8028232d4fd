"""Run folders of commands: their files and states, and what a repeated sweep does."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import refusal, succeed, typed
from helpers.extensions import has, needs

import deepstack
from deepstack.records import Run, find_runs, problems
from deepstack.tools.own_trainer.cells import plan_cells
from deepstack.tools.own_trainer.launcher import CommandLauncher
from deepstack.tools.own_trainer.processes import parents
from deepstack.tools.own_trainer.study_file import load_commands

TRAINER = Path(__file__).with_name("trainer.py")
STUDY = f"""\
command: python -S {TRAINER} {{mode}} {{lr}} {{seed}}
metric: 'step (?P<step>\\d+): .*val loss ([0-9.]+)'
loss: 'iter (?P<step>\\d+): loss ([0-9.]+)'
environment: {{EXTRA: a b}}
sweep: {{grid: {{mode: [good, nan, fail], lr: [1e-3], seed: [1]}}}}
"""


def write(folder: Path, text: str = STUDY) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that has run: a run that is done, one diverged, one failed."""
    folder = tmp_path_factory.mktemp("commands")
    done = typed("sweep", write(folder), "--workers", 3, "--out", folder / "results")
    assert done.exit_code == 3, done.output
    assert "failed" in done.stderr and "next: deepstack answer" in done.stderr
    return folder


def run_of(place: Path, mode: str) -> Run:
    (run,) = (one for one in find_runs(place / "results") if one.get("mode") == mode)
    return run


def test_a_run_that_is_done_has_its_values_command_and_checksums(place: Path) -> None:
    run = run_of(place, "good")
    assert run.state == "done" and problems(run.folder) == []
    assert run.evals.to_dict("list") == {"step": [0, 10, 20], "loss": [3.11, 2.61, 2.11]}
    assert run.steps["loss"].tolist() == [3.61, 3.11, 2.61]
    assert (run.get("seed"), run.get("train.lr"), run.get("mode")) == (1, 1e-3, "good")
    trainer = run.meta["trainer"]
    files = run.path.resolve() / "files"
    record = json.loads((files / "metrics.json").read_text())
    assert trainer["arguments"][2:] == [str(TRAINER), *record["arguments"]]
    assert record["extra"] == "a b" and trainer["exit_code"] == 0
    assert list(trainer["files"]) == [str(TRAINER)]
    assert "val loss 2.1100" in (run.path / "output.txt").read_text()


def test_a_nan_is_a_result_and_an_exit_code_a_failure(place: Path) -> None:
    assert run_of(place, "nan").state == "diverged"
    failed = run_of(place, "fail")
    assert failed.state == "failed"
    error = "the command ended with exit code 3: RuntimeError: no more"
    assert failed.status["error"] == error


@pytest.mark.slow(turn=19)
def test_a_command_without_a_value_has_failed_and_a_changed_script_is_named(
    tmp_path: Path,
) -> None:
    script = tmp_path / "own.py"
    script.write_text("import sys\nprint('val' if sys.argv[1] == '0' else 'valid=', 1)\n")
    text = f"command: python -S {script} {{seed}}\nmetric: 'val ([0-9.]+)'\n"
    study = write(tmp_path, f"{text}sweep: {{grid: {{seed: [0, 1]}}}}\n")
    out = tmp_path / "results"
    first = typed("sweep", study, "--out", out)
    assert first.exit_code == 3 and "changed" not in first.stderr
    ends = {run.get("seed"): (run.state, run.status.get("error")) for run in find_runs(out)}
    error = "no line of output.txt matches the metric 'val ([0-9.]+)'; "
    error += "its last line with a number: 'valid= 1'"
    assert error in first.stderr.partition("2 of 2")[0].partition("running")[2]  # at once
    assert ends == {0: ("done", None), 1: ("failed", error)}
    script.write_text(script.read_text().replace("'valid='", "'val'"))
    again = typed("sweep", study, "--out", out)
    assert again.exit_code == 0 and str(script) in again.stderr, again.stderr
    assert {run.state for run in find_runs(out)} == {"done"}
    note = f"the runs had 2 versions of {script}, whose losses are compared here"
    for command in ("compare", "answer") if has("answer") else ("compare",):
        assert note in " ".join(typed(command, out / "study").stderr.split()), command


def test_a_changed_output_is_found(place: Path, tmp_path: Path) -> None:
    copy = tmp_path / "study" / "run"
    shutil.copytree(run_of(place, "good").path, copy)
    with open(copy / "output.txt", "a") as file:
        file.write("val loss 0.1\n")
    assert "output.txt: changed" in succeed_not("verify", copy)


def succeed_not(*words: object) -> str:
    done = typed(*words)
    assert done.exit_code, done.output
    return str(done.output)


@pytest.mark.slow(turn=61)
@needs("answer")
def test_tables_and_charts_read_the_runs(place: Path, tmp_path: Path) -> None:
    study = place / "results" / "study"
    rows = json.loads(succeed("ls", study, "--json"))
    assert sorted(row["state"] for row in rows) == ["diverged", "done", "failed"]
    compared = succeed("compare", study, "--json")
    assert "2.11" in compared
    assert "good" in succeed("answer", study, "--to", tmp_path)
    assert "loss_vs_step" in succeed("plot", "loss_vs_step", study, "--to", tmp_path)
    assert deepstack.load_runs(study)["val_loss"].min() == pytest.approx(2.11)


@pytest.mark.slow(turn=4)
@needs("answer")
def test_best_rates_of_a_command_are_stated_without_a_loss_to_compare_with(tmp_path: Path) -> None:
    """Nothing is called learnt, `--refine` is not advised, and no task has a name."""
    script = tmp_path / "own.py"
    script.write_text("import sys\nprint('val', 3 - 100 * float(sys.argv[1]))\n")
    study = write(
        tmp_path,
        f"command: python -S {script} {{lr}} {{depth}} {{seed}}\nmetric: 'val ([0-9.]+)'\n"
        "sweep: {grid: {depth: [2, 4], lr: [1e-3, 2e-3], seed: [0, 1]}}\n",
    )
    succeed("sweep", study, "--out", tmp_path / "results", "--workers", 2)
    answer = " ".join(succeed("answer", tmp_path / "results", "--to", tmp_path / "to").split())
    assert "At N = 4, own ends lowest at the rate 0.002, the highest tried." in answer
    assert "(0.002); add higher ones)" in answer
    assert not [word for word in ("learns", "--refine", "unnamed") if word in answer]


@needs("answer")
@pytest.mark.parametrize(
    "kind", ["one command", pytest.param("baseline and candidate", marks=pytest.mark.slow)]
)
def test_the_commands_of_an_answer_train_what_they_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the settings that need more runs, with the seeds that are new; in the study's folder."""
    here = tmp_path / "a folder"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "own.py").write_text(
        "import random, sys\nseed, rate, depth = map(float, sys.argv[1:4])\n"
        "sign = -1 if sys.argv[4:] else 1  # each side has its own best rate\n"
        "print('val', 9 + sign * 3 * rate - depth / 100 + random.Random(seed + rate).random())\n"
    )
    commands = (
        "command: python -S own.py {seed} {lr} {depth}\n" if kind == "one command" else
        "baseline: python -S own.py {seed} {lr} {depth}\n"
        "candidate: python -S own.py {seed} {lr} {depth} x\n"
    )  # fmt: skip
    lists = "{grid: {seed: [0, 1], lr: [1, 2], depth: [4]}}"
    write(here, f"{commands}metric: 'val ([0-9.]+)'\nsweep: {lists}\n")
    succeed("sweep", "study.yaml", "--workers", 2)
    before = {run.path.name for run in find_runs("results")}
    found = json.loads(succeed("answer", "results/study", "--json"))
    for command in found["commands"]:
        if command.startswith("deepstack sweep"):
            succeed(*shlex.split(command)[1:])
    assert {run.path.name for run in find_runs("results")} == before
    assert len(found["next_commands"]) >= 1
    for command in found["next_commands"]:
        succeed(*shlex.split(command)[1:], "--workers", 2)
    new = [run for run in find_runs("results") if run.path.name not in before]
    assert found["next"].startswith(f"{len(new)} more run")
    assert 0 < len(new) < len(before) and {run.get("model.depth") for run in new} == {4}
    monkeypatch.chdir(tmp_path)
    away = json.loads(succeed("answer", here / "results/study", "--json"))["commands"][0]
    place, _, command = away.partition(" && ")
    assert shlex.split(place) == ["cd", str(here)]
    assert shlex.split(command)[2] == str(here / "study.yaml")
    text = (here / "study.yaml").read_text()
    (here / "study.yaml").write_text(text.replace("[0, 1]", "[0, 1, 2]"))  # a longer list
    assert (
        " sweep " in json.loads(succeed("answer", here / "results/study", "--json"))["commands"][0]
    )
    for change in ("environment: {A: b}", None):  # would train another setting, or nothing
        (here / "study.yaml").write_text(f"{text}{change}\n") if change else (
            here / "study.yaml"
        ).unlink()
        gone = json.loads(succeed("answer", here / "results/study", "--json"))
        assert not [command for command in gone["commands"] if " sweep " in command], change


@needs("answer")
@pytest.mark.parametrize(
    "changes",
    [
        {"settings": 5}, {"settings": [1, {"a": 1}]}, {"settings": "seed"}, {"file": "x" * 5000},
        {"settings": {"nope.x\n": 1}}, {"folder": 5}, {"file": "/dev/zero"}, {"digest": None},
    ],
)  # fmt: skip
def test_a_study_file_that_meta_json_only_claims_gives_no_command(
    changes: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "results" / "study", tmp_path / "study")
    for run in find_runs(tmp_path):
        meta = run.folder.read_meta()
        meta["study_file"] |= changes
        run.folder.meta_path.write_text(json.dumps(meta))
    found = json.loads(succeed("answer", tmp_path / "study", "--json", "--where", "mode=good"))
    assert not [command for command in found["commands"] if " sweep " in command]


def test_lists_of_the_command_line_hold_texts_in_quotes(tmp_path: Path) -> None:
    text = f"command: {TRAINER} {{tag}}\nmetric: 'val ([0-9.]+)'\nsweep: {{grid: {{tag: [y]}}}}\n"
    file = load_commands(write(tmp_path, text), ['tag="a b","it\'s",x'])
    assert [one.values["tag"] for one in file.study.combinations()] == ["a b", "it's", "x"]


@needs("report")
def test_a_run_of_a_command_is_not_trained_again(place: Path, tmp_path: Path) -> None:
    run = run_of(place, "good")
    for command in (("rerun", run.path, "--check"), ("train", run.folder.config_path)):
        assert "is a run of a foreign command" in refusal(2, *command)
    page = tmp_path / "report.html"
    succeed("report", run.path.parent, "--to", page)
    assert "deepstack rerun" not in page.read_text(encoding="utf-8")


def test_a_repeated_sweep_runs_only_what_failed(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "copy")
    folder = tmp_path / "copy"
    before = run_of(folder, "good").path / "status.json"
    status, when = before.read_bytes(), before.stat().st_mtime_ns
    again = typed("sweep", folder / "study.yaml", "--out", folder / "results")
    assert again.exit_code == 3
    started = [line for line in again.stderr.splitlines() if line.startswith("running")]
    assert len(started) == 1 and "fail" in started[0]
    assert (before.read_bytes(), before.stat().st_mtime_ns) == (status, when)
    aside = run_of(folder, "fail").path / "aside" / "1-output.txt"
    assert "no more" in aside.read_text()


def test_another_metric_reads_the_outputs_again(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "copy")
    folder, text = tmp_path / "copy", STUDY.replace("[good, nan, fail]", "[good]")
    words = ("--out", folder / "results", "--quiet")
    path = write(folder, text.replace(".*val loss", ".*train loss"))
    succeed("sweep", path, *words)
    run = run_of(folder, "good")
    assert run.evals["loss"].tolist() == [9, 9, 9] and problems(run.folder) == []
    assert not (run.path / "aside").exists()  # nothing ran
    path = write(folder, text.replace(".*val loss", ".*test loss"))
    assert "no line of output.txt matches the metric" in refusal(2, "sweep", path, *words)
    assert run_of(folder, "good").evals["loss"].tolist() == [9, 9, 9]


def test_runs_at_a_time_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, order: dict[str, Any], gpu: str | None) -> None:
            self.gpu, self.environment = gpu, order["environment"]

        def poll(self) -> None:
            return None

    monkeypatch.setattr("deepstack.tools.own_trainer.launcher.Supervised", Fake)
    file = load_commands(write(tmp_path))
    launcher = CommandLauncher(2, "", gpus=["GPU-a", "GPU-b"])
    started = [launcher.start(cell) for cell in plan_cells(file, file.study, tmp_path)]
    seen = [one and one.environment["CUDA_VISIBLE_DEVICES"] for one in started]
    assert seen == ["GPU-a", "GPU-b", None]


@pytest.mark.slow
def test_a_limit_kills_the_command_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepstack.sweeps.pool.GRACE_SECONDS", 1.0)
    path = write(tmp_path, STUDY.replace("[good, nan, fail]", "[late]"))
    path.write_text(path.read_text().replace("{seed}", "{seed} {run}"))
    for limit in ("5", "20", "80"):  # a busy machine needs seconds to start a process
        done = typed("sweep", path, "--out", tmp_path, "--run-timeout", limit, "--retry", "failed")
        (run,) = find_runs(tmp_path)
        output = run.path / "output.txt"
        if output.exists() and "two children wait" in output.read_text():
            break
    assert done.exit_code == 3 and run.state == "failed"
    assert f"took longer than --run-timeout, {limit} s" in run.status["error"]
    assert "two children wait" in output.read_text()
    assert not [pid for pid, _ in parents() if str(run.path.resolve()) in command_line(pid)]


def command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
