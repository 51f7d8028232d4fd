"""docs/plugins.md: every block is a file that works, from the command line and from Python."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import QUICK, ROOT
from helpers.command_line import TINY, succeed, typed

import deepstack
from deepstack.plugins import load_plugins
from deepstack.records import Run

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
TOKENS, MINE, MEMORY, BOUNDED, PARITY, SEEN, OBSERVER = re.findall(
    r"```python\n(.*?)```", PAGE, re.DOTALL
)
BLOCKS = {
    "model.scheme=mine": MINE, "model.scheme=memory": MEMORY, "model.scheme=bounded": BOUNDED,
    "task.name=parity": PARITY,
}  # fmt: skip


def test_the_task_reads_its_own_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "my.npy", np.arange(500) % 7)
    file = tmp_path / "my_task.py"
    file.write_text(TOKENS)
    words = [QUICK, *TINY, "model.family=decoder", "task.name=my_tokens"]
    words += [f"task.path={tmp_path / 'my.npy'}", "--plugin", file, "-q", "--out", tmp_path]
    run = Run(succeed("train", *words))
    assert run.meta["data"]["name"] == "my.npy"
    task = deepstack.tasks.task_of(deepstack.load_config(run.path / "config.yaml"))
    batch = task.train_batch(1, 50)
    assert ((batch.inputs + 1) % 7 == batch.targets).all() and batch.inputs.max() == 6
    np.save(tmp_path / "my.npy", np.arange(500) % 5)
    assert succeed("train", *words) == f"{run.path}-2"  # other data: another run


@pytest.mark.parametrize("word", BLOCKS)
def test_a_block_is_trained_made_again_and_exported(word: str, tmp_path: Path) -> None:
    file = tmp_path / f"{word.partition('=')[2]}_file.py"
    file.write_text(BLOCKS[word])
    words = QUICK, *TINY, word, "--plugin", file
    succeed("check", *words)
    run = succeed("train", *words, "-q", "--out", tmp_path)
    succeed("verify", run)
    succeed("plot", "loss_vs_step", run, "--format", "csv")
    succeed("rerun", run, "--check", "--plugin", file)
    succeed("export", run, "--to", tmp_path / "x", "--plugin", file)


def test_the_scheme_s_numbers_are_what_the_page_says(tmp_path: Path) -> None:
    file = tmp_path / "numbers.py"
    file.write_text(MINE.replace("add_per_sublayer", "of_each"))  # its earlier name
    rows = json.loads(succeed("list", "schemes", "--plugin", file, "--depth", 4, "--json"))
    (row,) = (row for row in rows if row["name"] == "mine")
    assert row["gains"]["v"] == 0.5 and row["equation"].startswith("x <- LN(x + g * G(x))")
    options = ["model.scheme=mine", "model.scheme_options.start=0.25"]
    facts = json.loads(succeed("check", QUICK, *TINY, *options, "--json"))[0]
    assert facts["parameters scheme"] == 2 * 2 * 8
    config = deepstack.load_config(QUICK, [*TINY, *options])
    scheme = deepstack.build_model(config, vocab_size=5).model.schemes[0]
    assert [g.tolist() for g in scheme.each("g")] == [[0.25] * 8] * 2
    assert type(scheme).optim("scheme", 4).lr == 0.1


def test_the_diagnostic_and_the_chart(tmp_path: Path) -> None:
    file = tmp_path / "seen.py"
    file.write_text(SEEN)
    load_plugins([file])
    run = deepstack.train(deepstack.load_config(QUICK, TINY), out=tmp_path)
    found = np.load(run.path / "layers" / "stream_kurtosis.npy")
    assert found.shape[1] == 2 and (found > 1).all()
    succeed("plot", "last_loss", run.path, "--format", "csv")


def test_the_observer_hears_every_run(tmp_path: Path) -> None:
    file = tmp_path / "events.py"
    file.write_text(OBSERVER)
    words = QUICK, *TINY, "--plugin", file, "-q", "--out", tmp_path
    events = Path(succeed("train", *words)).with_suffix(".events").read_text().splitlines()
    assert [json.loads(line)["step"] for line in events] == [0, 2]
    # A mistake ends the run with the line of the file.
    broken = tmp_path / "broken.py"
    broken.write_text(OBSERVER.replace("events_file", "broken").replace('"loss"]', '"lsos"]'))
    failed = typed("train", *words, "seed=1", "--plugin", broken)
    assert failed.exit_code == 1 and "broken.py:" in failed.stderr and "lsos" in failed.stderr
