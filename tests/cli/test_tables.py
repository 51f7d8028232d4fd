"""Tables fit the terminal: a row's name and the answer are never left out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import QUICK
from helpers.command_line import TINY, typed
from helpers.plot_runs import make_runs
from rich.cells import cell_len

from deepstack.cli.table import Layout, lay_out

WIDTHS = (60, 80, 100, 140)
ROWS: list[dict[str, Any]] = [
    {"name": "stream_of_the_last_layer", "count": 3, "note": "A sentence of words.", "x": 0.5},
    {"name": "b", "count": 12_000, "note": "A sentence that is longer than it.", "x": None},
]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two studies over scheme, depth and rate."""
    root = tmp_path_factory.mktemp("results")

    def loss(scheme: str, depth: int, lr: float) -> float:
        return 2.5 + (lr - 2e-3) ** 2 * 1e4 + depth**-0.7 + len(scheme) / 1e3

    for name, schemes in (("a_study_of_rates", ("deepnorm", "post_ln")), ("another", ("pre_ln",))):
        grid: Any = {"scheme": schemes, "depth": (6, 12, 24, 48, 96), "lr": (1e-3, 2e-3, 4e-3)}
        make_runs(root / name, **grid, masked=loss)
    return root


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Get the rows, the answer and the first columns that commands lay out."""
    calls: list[tuple[Any, ...]] = []

    def record(rows: Any, width: Any, answer: Any, first: Any) -> Layout:
        calls.append((rows, answer, first))
        return lay_out(rows, width, answer, first)

    monkeypatch.setattr("deepstack.cli.output.lay_out", record)
    return calls


def run(laid_out: list[tuple[Any, ...]], answer: Sequence[str], *words: object) -> None:
    """Run a command and check its table at each width."""
    done = typed(*words)
    assert done.exit_code == 0, done.stderr
    rows, needed, first = laid_out[-1]
    several = len({row.get("study") for row in rows}) > 1
    names = [key for key in rows[0] if key != "study" or several][:1]
    for width in WIDTHS:
        lines = lay_out(rows, width, needed, first).lines
        text = " ".join(" ".join(lines).split())
        for title in (*names, *answer):
            assert title in text, (words, width, title, lines[:4])
        for row in rows:
            assert all(word in text for word in str(row[names[0]]).split()), (words, row)
        longest = max(map(cell_len, text.split()))
        widest = max(lines, key=cell_len)
        assert cell_len(widest) <= max(width, longest + 40), (words, width, widest)


@pytest.mark.parametrize("width", [20, *WIDTHS])
def test_rows_are_a_table_or_blocks(width: int) -> None:
    layout = lay_out(ROWS, width, ["x"])
    text = "\n".join(layout.lines)
    assert ROWS[0]["name"] in text and "0.5" in text
    if width == 20:
        assert not layout.omitted and "count  12,000" in text and "longer" in text
    else:
        assert max(map(cell_len, layout.lines)) <= width
    whole = lay_out(ROWS, width)
    assert not whole.omitted and "12,000" in "\n".join(whole.lines)
    assert lay_out(ROWS, None).lines[1].split() == ["name", "count", "note", "x"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_wide_letters_count_two_cells_and_fold(width: int) -> None:
    name, note = "深层网络训练稳定性研究 " * 4 + "数据" * 30, "学习 abc " * 20
    layout = lay_out([{"setting": name, "note": note, "x": 0.5}], width, ["x"])
    assert max(map(cell_len, layout.lines)) <= width
    letters = "".join("".join(layout.lines).split())
    assert all(letters.count(one) == name.count(one) for one in "深数据研")


def test_the_study_is_named_where_there_are_several() -> None:
    row = {"setting": "A" * 20, "val_loss": 2.5} | dict.fromkeys("bcdefg", 1.0)
    rows = [{"study": study} | row for study in "xy"]
    text = "\n".join(lay_out(rows, 40, ["val_loss"]).lines)
    assert "study" in text and "setting" in text and "val_loss" in text
    same = lay_out([one | {"study": "x"} for one in rows], 40, ["val_loss"], ["b"])
    assert "study" in same.omitted and "val_loss" in "\n".join(same.lines)


def commands(study: Path) -> Iterator[tuple[list[object], tuple[str, ...]]]:
    """Commands that print a table of runs, and the columns of their answers."""
    one = study / "a_study_of_rates"
    yield ["ls", study], ("state", "val_loss_masked")
    yield ["compare", study, "--best", "lr"], ("study", "val_loss", "train.lr", "edge")
    yield ["compare", one, "--best", "lr", "--against", "post_ln"], ("difference", "diff_low")
    yield ["compare", one, "--transfer"], ("depth", "best_lr", "exponent")
    for kind in ("settings", "diagnostics"):
        yield ["list", kind], ("description",)


@pytest.mark.slow
def test_tables_of_runs_and_lists_have_names_and_answers(study: Path, laid_out: Any) -> None:
    for words, answer in commands(study):
        run(laid_out, answer, *words)
    run(laid_out, (), "verify", study)
    run(laid_out, (), "fit", study)
    for kind in ("schemes", "tasks", "charts", "configs"):
        run(laid_out, (), "list", kind)


@pytest.mark.slow
def test_tables_of_measurements_have_names_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, laid_out: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [word for word in TINY if not word.startswith(("model.depth", "train.steps"))]
    answer = ["depth", "gradient_exponent"]
    run(laid_out, answer, "signal", QUICK, *tiny, "--depths", "2,3", "-q")
    run(laid_out, ["value"], "check", QUICK, *TINY)
