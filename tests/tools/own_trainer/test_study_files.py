"""The file of a study of commands: names in braces, arguments without a shell, mistakes."""

from pathlib import Path

import pytest
from helpers.command_line import refusal, succeed
from helpers.extensions import needs

from deepstack.base.errors import ConfigError
from deepstack.tools.own_trainer.command import split_command
from deepstack.tools.own_trainer.command_file import CommandFile
from deepstack.tools.own_trainer.study_file import load_commands

COMMAND = "command: python train.py --n-layer {depth} --lr {lr} --seed {seed}\n"
METRIC = "metric: 'val loss ([0-9.]+)'\n"
GRID = "sweep: {grid: {depth: [6, 12], lr: [1e-3, 3e-3], seed: [0, 1]}}\n"


def load(tmp_path: Path, text: str, *settings: str) -> CommandFile:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    return load_commands(path, settings)


def message(tmp_path: Path, text: str, *settings: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *settings)
    return str(error.value).replace(f"{tmp_path}/", "")


def test_a_grid_has_the_settings_that_its_names_mean(tmp_path: Path) -> None:
    text = COMMAND.replace("{depth}", "{n_layer}").replace("train.py", "train.py --drop {drop}")
    grid = "sweep: {grid: {n_layer: [6], lr: [1e-3, 3e-3], drop: [0.1, 0.2], seed: [0, 1]}}\n"
    study = load(tmp_path, text + METRIC + grid).study
    assert study.keys == ["model.depth", "train.lr", "drop", "seed"] and study.size == 8


def test_a_value_is_one_argument_whatever_it_holds() -> None:
    value = "a b; touch /tmp/x $(id) \"'`|"
    command = split_command("python -c 'print(1)' --text={text} {text} --set '{{1}}'")
    assert command.names == ["text"]
    words = ["python", "-c", "print(1)", f"--text={value}", value, "--set", "{1}"]
    assert command.arguments({"text": value}) == words


def test_numbers_and_truth_are_written_as_a_trainer_reads_them() -> None:
    command = split_command(["t", "{a}", "{b}", "{c}"])
    assert command.arguments({"a": 1e-3, "b": True, "c": 12}) == ["t", "0.001", "true", "12"]


def test_lists_of_a_zip_go_together(tmp_path: Path) -> None:
    grid = "sweep: {grid: {seed: [0, 1]}, zip: {depth: [6, 12], lr: [1e-3, 5e-4]}}\n"
    study = load(tmp_path, COMMAND + METRIC + grid).study
    cells = [tuple(one.values.values()) for one in study.combinations()]
    assert cells == [(0, 6, 1e-3), (0, 12, 5e-4), (1, 6, 1e-3), (1, 12, 5e-4)]


def test_the_command_line_replaces_lists(tmp_path: Path) -> None:
    study = load(tmp_path, COMMAND + METRIC + GRID, "lr=1e-2", "seed=0,1,2", "model.depth=3").study
    assert study.grid == {"model.depth": [3], "train.lr": [0.01], "seed": [0, 1, 2]}


SIDES = "baseline: python a.py {lr}\ncandidate: python b.py {lr}\n"


def test_the_command_line_chooses_one_side_of_a_comparison(tmp_path: Path) -> None:
    text = SIDES + METRIC + "sweep: {grid: {lr: [1, 2]}}\n"
    assert load(tmp_path, text).study.grid["model.scheme"] == ["baseline", "candidate"]
    assert load(tmp_path, text, "scheme=baseline").study.grid["model.scheme"] == ["baseline"]
    wrong = message(tmp_path, text, "model.scheme=candidat")
    assert "unknown command 'candidat'; did you mean 'candidate'?" in wrong
    path = tmp_path / "study.yaml"
    path.write_text(SIDES.replace("{lr}", "{seed}") + METRIC + "sweep: {grid: {seed: [0]}}\n")
    alone = refusal(2, "sweep", path, "scheme=baseline", "--until", "decided", "--out", tmp_path)
    assert "--until: found baseline alone; allowed baseline and candidate" in alone


MISTAKES = {
    "a name without a list": (
        COMMAND + METRIC + GRID.replace("lr:", "rate:"),
        "study.yaml:3:32: sweep.rate: the command has no {rate}: unknown name 'rate'",
    ),
    "a mistyped name": (
        COMMAND.replace("{depth}", "{dpeth}") + METRIC + GRID,
        "unknown name 'depth'; did you mean 'dpeth'?",
    ),
    "no list at all": (COMMAND + METRIC, "{depth} has no list in sweep: unknown name 'depth'"),
    "a mistyped key": (
        COMMAND + METRIC.replace("metric", "metrics") + GRID,
        "study.yaml:2:1: metrics: found the unknown key 'metrics'; did you mean 'metric'?",
    ),
    "no metric": (COMMAND + GRID, "metric: found no metric; allowed a pattern"),
    "a pattern without a group": (
        COMMAND + "metric: 'val loss [0-9.]+'\n" + GRID,
        "study.yaml:2:9: metric: found 0 groups; allowed one for the value",
    ),
    "a pattern with a bracket too many": (
        COMMAND + "metric: 'val loss ([0-9.]+'\n" + GRID,
        "metric: found what is no regular expression",
    ),
    "a file outside of {run}": (
        COMMAND + "metric: {file: ../m.json, key: loss}\n" + GRID,
        "found the file '../m.json'; allowed one below {run}",
    ),
    "a loss without a step": (
        COMMAND + METRIC + "loss: 'loss ([0-9.]+)'\n" + GRID,
        "loss: found a pattern without a step",
    ),
    "a shell's sign": (
        COMMAND.replace("\n", " | tee log\n") + METRIC + GRID,
        "command: found '|', and no shell runs the command; put it into a script",
    ),
    "a variable before the command": (
        COMMAND.replace("python", "OMP_NUM_THREADS=1 python") + METRIC + GRID,
        "write environment: {OMP_NUM_THREADS: '1'}",
    ),
    "a brace alone": (
        COMMAND.replace("{lr}", "{lr") + METRIC + GRID,
        "found '{' in '{lr' without a name",
    ),
    "a baseline alone": (
        COMMAND.replace("command", "baseline") + METRIC + GRID,
        "baseline: candidate is missing; found baseline; allowed command, or baseline and "
        "candidate",
    ),
    "a name that one of two commands lacks": (
        COMMAND.replace("command", "baseline")
        + "candidate: python new.py --lr {lr} --seed {seed}\n"
        + METRIC
        + GRID,
        "the command of candidate has no {depth}",
    ),
    "two names of one setting": (
        COMMAND.replace("{lr}", "{lr} {learning_rate}")
        + METRIC
        + GRID.replace("lr:", "learning_rate: [1], lr:"),
        "found {lr} and {learning_rate}, which mean train.lr",
    ),
    "a word as a depth": (
        COMMAND + METRIC + GRID.replace("[6, 12]", "[six]"),
        "sweep.depth: found 'six'; allowed whole numbers",
    ),
    "a name of run folders": (
        COMMAND.replace("{lr}", "{log}") + METRIC + GRID.replace("lr:", "log:"),
        "sweep.log: found the name 'log', which run folders use; allowed another",
    ),
    "lists of two lengths in a zip": (
        COMMAND + METRIC + "sweep: {grid: {seed: [0]}, zip: {depth: [6, 12], lr: [1e-3]}}\n",
        "sweep.zip.lr: found 1 values; allowed 2, as depth has",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_names_its_place_and_the_correction(case: str, tmp_path: Path) -> None:
    text, expected = MISTAKES[case]
    assert expected in message(tmp_path, text)


def test_a_name_on_the_command_line_is_checked(tmp_path: Path) -> None:
    text = message(tmp_path, COMMAND + METRIC + GRID, "dpeth=6,12")
    assert "unknown name 'dpeth'; did you mean 'depth'?" in text


def test_the_plan_shows_each_command(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(COMMAND + METRIC + GRID)
    plan = succeed("sweep", path, "--dry-run", "--json", "--out", tmp_path / "results")
    assert '"python train.py --n-layer 12 --lr 0.003 --seed 1"' in plan
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "option",
    [("--memory", "0.5"), pytest.param(("--refine", "train.lr"), marks=needs("refine"))],
)
def test_options_without_an_effect_are_refused(option: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(COMMAND + METRIC + GRID)
    text = refusal(2, "sweep", path, *option, "--out", tmp_path)
    assert f"{option[0]}: found a study of commands" in text


def test_a_program_that_is_missing_is_named_before_a_run(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(COMMAND.replace("python", "pyhton-of-mine") + METRIC + GRID)
    assert "the program 'pyhton-of-mine'" in refusal(2, "sweep", path, "--out", tmp_path)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_command_for_one_run_names_the_one_for_the_study(command: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(COMMAND + METRIC + GRID)
    text = refusal(2, command, path)
    assert text == f"deepstack: {path}: found a study of commands; use: deepstack sweep {path}\n"


def test_jobs_are_called_workers() -> None:
    assert "did you mean --workers?" in refusal(2, "sweep", "--jobs", 2)


def test_a_mistyped_key_of_a_study_of_commands_is_named(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(COMMAND.replace("command:", "comand:") + METRIC + GRID)
    text = refusal(2, "sweep", path)
    assert "unknown key 'comand'; did you mean 'command', of a study of commands?" in text
    path.write_text("model: {depth: 2}\ncomand: 3\n")
    assert "study of commands" not in refusal(2, "sweep", path)
