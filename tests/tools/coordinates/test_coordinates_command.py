"""`deepstack coordinates`, `deepstack.coordinates`, `assert_coordinates`; docs/coordinates.md."""

import json
import re
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.command_line import refusal, succeed, typed
from helpers.pages import shown, without_numbers

import deepstack
from deepstack.base.errors import ConfigError

SMALL = ["--widths", "16,64", "--depths", "2,8", "--seeds", "0,1,2"]
MIXER = (ROOT / "experiments/planted_coordinate_faults/models/mixer.py").read_text(encoding="utf-8")
WRONG = MIXER.replace("std=linear.in_features**-0.5", "std=0.2")


def written(folder: Path, text: str) -> Path:
    path = folder / "build.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_right_model_exits_0_with_a_table_and_a_figure(tmp_path: Path) -> None:
    path, out = written(tmp_path, MIXER), tmp_path / "results"
    done = typed("coordinates", path, *SMALL, "--out", out)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    titles = "module over size branch change_1 change_3 change_10 own_1 own_3 own_10 breaks"
    assert lines[1].split() == titles.split()
    assert any(re.match(r" first\.channel_mixing\.0 +width +[−0.\d]+ ±", line) for line in lines)
    assert "build.py keeps CompleteP" in done.stderr
    files = {file.suffix for file in (out / "build_coordinates").iterdir()}
    assert files == {".png", ".pdf", ".svg", ".csv", ".txt"}


def test_a_wrong_model_exits_6_with_the_module_and_the_cause(tmp_path: Path) -> None:
    path, out = written(tmp_path, "print('loaded')\n" + WRONG), tmp_path / "results"
    done = typed("coordinates", path, *SMALL, "--json", "--quiet", "--out", out)
    assert done.exit_code == 6 and not out.exists()
    found = json.loads(done.stdout)  # the file's own output goes to stderr
    assert found["holds"] is False
    assert found["first"]["module"] == "first.channel_mixing.0"
    assert found["first"]["cause"] == "initial scale"
    assert found["first"]["row"]["exponent"] == pytest.approx(0.5, abs=0.1)
    lines = [line.strip() for line in done.stderr.splitlines()]
    assert lines[-5].endswith("modules") and "build.py breaks CompleteP" in lines[-5]
    assert re.fullmatch(r"first module +first\.channel_mixing\.0", lines[-4])
    assert re.match(r"found +size at the start ∝ width\^0\.\d+ \(.*\); allowed 0$", lines[-3])
    assert lines[-2].startswith("usual cause   initial scale: start a matrix with")


@pytest.mark.slow(turn=6)
def test_a_figure_that_cannot_be_written_hides_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text, code, verdict in ((WRONG, 6, "breaks CompleteP"), (MIXER, 5, "keeps CompleteP")):
        path = written(tmp_path, text)
        done = typed("coordinates", path, *SMALL, "--steps", "1", "--out", tmp_path / "file")
        assert done.exit_code == code and f"build.py {verdict}" in done.stderr
        assert str(tmp_path / "file") in done.stderr.replace("\n", "")


@pytest.mark.parametrize(
    ("sizes", "axis"), [("width, 2", "depth"), ("16, depth", "width"), ("16, 2", "width")]
)
def test_a_model_that_ignores_an_axis_is_refused(sizes: str, axis: str, tmp_path: Path) -> None:
    text = f"{MIXER}\nmake = build\ndef build(width, depth, seed): return make({sizes}, seed)\n"
    done = typed("coordinates", written(tmp_path, text), *SMALL, "--steps", "1")
    assert done.exit_code == 2 and f"build(width, depth, seed) ignores {axis}:" in done.stderr


MASKED = """
import torch
from torch import nn

class Mask(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.eye(*x.shape[-2:], dtype=torch.bool), -float("inf"))

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.mask, self.last = nn.Linear(8, width), Mask(), nn.Linear(width, 4)

    def forward(self, x):
        hidden = self.mask(self.first(x)).clamp(min=-5)
        return self.last(hidden * FACTOR)

def build(width, depth, seed):
    torch.manual_seed(seed)
    return Net(width)

def batch(seed):
    torch.manual_seed(seed)
    return torch.randn(8, 8), torch.randn(8, 4)

def optimizer(model, width, depth):
    return torch.optim.Adam([{"params": model.first.parameters(), "lr": 1e-3},
                             {"params": model.last.parameters(), "lr": 1e-3 * 16 / width}])
"""


def test_masked_outputs_count_as_little_as_masked_logits(tmp_path: Path) -> None:
    words = ["--widths", "16,64", "--depths", "2", "--seeds", "0,1,2", "--rule", "mup", "--json"]
    path = written(tmp_path, MASKED.replace("FACTOR", "1"))
    done = typed("coordinates", path, *words, "--steps", "1", "--quiet")
    assert done.exit_code in (0, 6), done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["quantity"] for row in rows if row["module"] == "mask"} == {"size", "change"}


@pytest.mark.slow(turn=20)
def test_functions_and_a_test_helper_do_the_same(tmp_path: Path) -> None:
    there: dict[str, object] = {}
    exec(WRONG, there)
    sizes = {"widths": (16, 64), "depths": (2,), "seeds": 3, "rule": "mup"}
    functions = {"batch": there["batch"], "optimizer": there["optimizer"]}
    with pytest.raises(AssertionError, match=r"(?s)build breaks µP.*usual cause +initial scale"):
        deepstack.assert_coordinates(there["build"], **functions, **sizes)
    exec(MIXER, there)
    functions = {"batch": there["batch"], "optimizer": there["optimizer"]}
    check = deepstack.assert_coordinates(there["build"], **functions, **sizes)
    assert check.holds and check.first is None and check.counts["outside"] == 0
    assert {row.over for row in check.rows} == {"width"}


START = "import torch\nfrom torch import nn\n"
BUILD = "def build(width, depth, seed):\n    return nn.Linear(3, width)\n"
BATCH = "def batch(seed):\n    return torch.randn(2, 3), torch.randn(2, 5)\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BATCH, "build is missing; type:\n    def build(width, depth, seed):"),
        (BATCH + BUILD.replace("build", "bulid"), "build is missing; rename 'bulid', or type:"),
        (BUILD, "batch is missing; type:\n    def batch(seed):"),
        (
            BATCH + BUILD.replace("width, depth, seed", "w, d"),
            "build has (w, d); type:\n    def bui",
        ),
        (
            BATCH.replace("seed", "") + BUILD,
            "batch has (); type:\n    def batch(seed):",
        ),
        (
            BATCH + BUILD + "def optimizer(model):\n    pass\n",
            "optimizer has (model); type:\n    def optimizer(model, width, depth):",
        ),
        (
            BATCH + BUILD + "def loss(model, x, y):\n    pass\n",
            "loss has (model, x, y); type:\n    def loss(model, batch):",
        ),
        (BATCH + "build = 3\n", "build is int; type:\n    def build(width, depth, seed):"),
        (BATCH + BUILD.replace("nn.Linear(3, width)", "3"), "returned int; allowed a torch.nn.Mod"),
        (BATCH + BUILD.replace("width)", "wide)"), "build.py:6: NameError: name 'wide' is not"),
        (
            BATCH + BUILD,
            "loss is missing, and the batch does not tell it: found an output (2, 16) ",
        ),
        (
            BATCH + BUILD + "def loss(model, batch):\n    return model(batch[0])\n",
            "loss(model, batch) returned (2, 16); allowed a tensor with one number",
        ),
        (
            BATCH + BUILD + "def loss(model, batch):\n    return model(batch[0]).sum() / 0\n",
            "inf before training",
        ),
        (
            BATCH.replace("5", "16") + BUILD + "def optimizer(model, width, depth):\n    pass\n",
            "optimizer(model, 16, 2) returned NoneType; allowed a torch.optim.Optimizer",
        ),
        (BATCH + BUILD + "import sys\nsys.exit(0)\n", "build.py:8: sys.exit(0) ends Python"),
    ],
)
def test_a_wrong_file_exits_2_with_the_line_to_type(text: str, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, START + text)
    message = refusal(2, "coordinates", path, *SMALL, "--out", tmp_path / "results")
    assert "build.py:" in message and words in message.replace(str(tmp_path) + "/", "")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": "completp"}, "did you mean 'completep'?"),
        ({"seeds": 2}, "seeds: found 2; allowed 3 or more"),
        ({"widths": (32,), "depths": (4,)}, "allowed two widths or more"),
        ({"widths": (32,), "rule": "mup"}, "µP is a rule for width alone"),
        ({"depths": (0, 4)}, "depths: found [0, 4]; allowed whole numbers from 1 on"),
        ({"steps": ()}, "steps: found []; allowed whole numbers from 1 on"),
        ({"tolerance": float("nan")}, "tolerance: found nan; allowed a finite number from 0 on"),
        ({"tolerance": -1.0}, "tolerance: found -1; allowed a finite number from 0 on"),
    ],
)
def test_sizes_that_give_no_exponent_are_refused(
    options: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path, START + BATCH + BUILD)
    with pytest.raises(ConfigError, match=re.escape(words)):
        deepstack.coordinates(path, **options)


def test_what_is_not_compared_is_named(tmp_path: Path) -> None:
    """A frozen module, and a module of the deeper model alone; and Adam, without an optimizer."""
    text = """
class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.frozen = nn.Linear(3, width).requires_grad_(False)
        self.deep = nn.Linear(width, width) if depth > 2 else None
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.frozen(x)
        return self.head(self.deep(x) if self.deep else x)


def build(width, depth, seed):
    return Net(width, depth)
"""
    path = written(tmp_path, START + BATCH + text)
    done = typed("coordinates", path, "--widths", "16,32", "--depths", "2,4", "--quiet")
    assert "no change: no trained parameter moves it: frozen\n" in done.stderr
    assert "not in all of the models: deep\n" in done.stderr
    assert "build.py has no optimizer: Adam with the rate 0.001 for all parameters" in done.stderr


def test_the_help_names_the_rules() -> None:
    assert "completep" in succeed("coordinates", "--help")


def verdicts(table: str) -> set[tuple[str, str, str]]:
    """Return module, axis and the quantity that breaks the rule, of rows of a printed table."""
    rows = re.findall(r"^ (\S.*?) +(width|depth) .*?\d *(\b[a-z]*)$", table, re.MULTILINE)
    return set(rows)


@pytest.mark.slow
def test_the_example_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    """All models of the page, of which it shows some rows; its numbers depend on the processor."""
    page = "coordinates.md"
    wrong, right = shown(page, "build.py"), shown(page, "optimizer")
    right = wrong.partition("def optimizer")[0] + right
    for code, text, title in ((6, wrong, "build.txt"), (0, right, "right.txt")):
        done = typed("coordinates", written(tmp_path, text), "--out", tmp_path / "results")
        assert done.exit_code == code
        rows, message = shown(page, title).rstrip().split("\n\n")
        printed = done.stderr[done.stderr.index("build.py ") :]
        assert without_numbers(printed) == without_numbers(message)
        assert len(verdicts(rows)) == 8 and verdicts(rows) <= verdicts(done.stdout)
