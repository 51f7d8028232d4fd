"""Texts of charts come from files and run folders: every one is drawn letter by letter."""

import io
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import typed
from helpers.extensions import needs
from helpers.plot_runs import caption, make_chart, make_run, make_runs, rows, without_layout, words
from helpers.sampling import some

from deepstack.plots import Options, draw, figure
from deepstack.plots.files import render
from deepstack.plots.reference import read_reference
from deepstack.plots.style import axis_number, deepstack_style
from deepstack.plots.texts import drawn, is_typeset, typeset
from deepstack.records import Run, RunFolder, find_runs

HOSTILE = (
    "a$b$c.txt", r"$\frac{1}{", r"\$5\$", "back\\", "_hidden", "{brace} & #hash ~tilde^ 100 %",
    "数据集 ñ", "\u202eright to left", "tab\tline\nend", "\ue000_{x}\ue001 \ue000", "\U00020000 𝒟",
    "x_{$}", "", "nan",
)  # fmt: skip


@needs("report")
@pytest.mark.parametrize("name", some(HOSTILE, 8))
def test_a_hostile_name_is_drawn_without_a_warning(tmp_path: Path, name: str) -> None:
    """As the label of a scheme, a value, a symbol, a task and a published label."""
    from deepstack.tools.report.figures import describe_figure

    for depth in (6, 18):
        for i, value in enumerate((name, "other")):
            path = make_run(
                tmp_path / "study", depth=depth, lr=1e-3 * (i + 1), updates=[0.01 * depth, 0.1],
                config={"task.name": value, "task.path": f"/data/{value}", "model.note": value},
            )  # fmt: skip
            columns = Run(path).columns | {"scheme": {"label": name}}
            columns["columns"] = {"model_update": {"symbol": name, "unit": name}}
            RunFolder(path).write_columns(columns)
    label = '"' + name.replace('"', '""') + '"'
    reference = tmp_path / "study" / "reference.csv"
    reference.write_text(f"chart,x,y,label\nupdate_vs_depth,6,0.1,{label}\n", "utf-8")
    runs = find_runs(tmp_path / "study")
    options = Options(reference=read_reference([tmp_path / "study"], runs))
    chart = make_chart("update_vs_depth", tmp_path, reference=options.reference)
    assert rows(chart, kind="reference")["series"].unique().tolist() == [name]
    render(chart, "svg")
    describe_figure(chart)
    render(make_chart("outcomes", tmp_path), "png")
    with without_layout():
        figure(runs, "metric", x="task.path", y="val_loss").savefig(io.BytesIO(), format="png")


@needs("report")
def test_dollar_signs_are_letters_and_indices_are_typeset(tmp_path: Path) -> None:
    from deepstack.tools.report.figures import describe_figure

    make_runs(
        tmp_path, config=({"task.path": "a$b$c"}, {"task.path": "d"}), depth=(6, 18),
        lr=lambda config, depth: 1e-3 if config["task.path"] == "d" else 2e-3,
    )  # fmt: skip
    chart = make_chart("update_vs_depth", tmp_path)
    assert any(r"a\$b\$c" in text for text in words(chart)) and "a$b$c" not in caption(chart)
    assert any("‖F$_{0}$‖" in text for text in words(chart))
    assert any("a$b$c" in series for series in chart.data["series"])  # as it is
    labels = [panel["title"] for panel in describe_figure(chart)["panels"]]
    assert labels == ["step 1", "step 5"]
    with deepstack_style():
        assert drawn(typeset("‖ΔF_{role}‖")) == "‖ΔF$_{role}$‖"
        assert drawn(typeset("q_i/√d_head, θ_l,t")) == "q$_{i}$/√d$_{head}$, θ$_{l}$,t"
        assert drawn(axis_number(2e-5)) == "2·$10^{-5}$"
        assert not is_typeset(typeset(r"x_{\frac}")) and not is_typeset("10^{2}, x_0")


@pytest.mark.slow(turn=56)
def test_letters_without_a_glyph_are_codes_and_one_line_says_so(tmp_path: Path) -> None:
    config = ({"task.path": "数据"}, {"task.path": "数字"})
    rates = {"数据": 1e-3, "数字": 2e-3}
    make_runs(
        tmp_path / "study", config=config, depth=(6, 18),
        lr=lambda config, depth: rates[config["task.path"]],
    )  # fmt: skip
    said: list[str] = []
    with without_layout():
        draw(tmp_path / "study", ["update_vs_depth", "outcomes"], say=said.append, formats=["svg"])
    note = "DejaVu Sans lacks 3 letters, shown as codes such as \\u5b57; --font takes another"
    assert said == [note]
    chart = make_chart("update_vs_depth", tmp_path)
    assert note in caption(chart) and "\\u6570\\u636e" in caption(chart)
    assert note in chart.caption
    shown = typed("plot", "update_vs_depth", tmp_path / "study", "--format", "svg")
    assert note in shown.stderr.replace("\n", " ") and "Warning" not in shown.stderr


def test_labels_of_published_values_are_texts(tmp_path: Path) -> None:
    labels = ["None", "NA", "2003.04880", "007", "a # b", "1e3", "true", "nan"]
    lines = [f"update_vs_depth,6,0.1,{label}" for label in labels]
    make_runs(tmp_path / "study", depth=(6, 18))
    reference = tmp_path / "study" / "reference.csv"
    reference.write_text("\n".join(["# a comment", "chart,x,y,label", "", *lines]), "utf-8")
    table: Any = read_reference([tmp_path / "study"], find_runs(tmp_path))
    assert table["label"].tolist() == labels and table["x"].tolist() == [6.0] * len(labels)
    chart = make_chart("update_vs_depth", tmp_path, reference=table)
    shown = rows(chart, kind="reference", panel="step 1")["series"]
    assert shown.tolist() == labels
