"""Options of all charts: the style of papers, scales, smoothing, formats; figures in Python."""

from pathlib import Path

import pandas as pd
import pytest
from helpers.plot_runs import make_chart, make_run, make_runs, without_layout, words
from matplotlib.figure import Figure

import deepstack
from deepstack.errors import ConfigError
from deepstack.plots import CHARTS, Options, draw, figure, plot
from deepstack.records import find_runs


def test_the_style_of_papers_moves_title_and_settings_to_a_text_file(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", scheme=("deepnorm", "post_ln"), depth=(6, 18))
    runs = find_runs(tmp_path / "s")
    options = Options(style="paper")
    chart = CHARTS["update_vs_depth"](runs, options=options)
    assert chart.figure.get_figwidth() == 3.3 and chart.figure.texts == []
    written = draw(tmp_path / "s", ["update_vs_depth"], tmp_path / "out", options=options)
    assert [path.suffix for path in written] == [".pdf", ".png", ".svg", ".csv", ".txt"]
    text = (tmp_path / "out" / "update_vs_depth.txt").read_text()
    assert text.startswith("Model update against depth. DeepNorm, Post-LN on text")
    assert "d_model 64" in text and "$" not in text
    svg = (tmp_path / "out" / "update_vs_depth.svg").read_text()
    assert "<text" in svg and "DeepNorm: 0.50" in svg
    assert b"/Type3" not in (tmp_path / "out" / "update_vs_depth.pdf").read_bytes()


def test_width_font_and_formats_are_the_users(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", depth=(6, 18))
    options = Options(width=5.0, font="DejaVu Serif")
    written = draw(tmp_path / "s", ["loss_vs_step"], tmp_path, formats=("svg",), options=options)
    assert [path.name for path in written] == ["loss_vs_step.svg"]
    chart = CHARTS["loss_vs_step"](find_runs(tmp_path / "s"), options=options)
    assert chart.figure.get_figwidth() == 5.0
    assert chart.figure.texts[0].get_fontfamily()[0] == "DejaVu Serif"
    with pytest.raises(ConfigError, match="unknown format 'gif'"):
        draw(tmp_path / "s", formats=("gif",))
    with pytest.raises(ConfigError, match="unknown font 'Nowhere'"):
        CHARTS["loss_vs_step"](find_runs(tmp_path / "s"), options=Options(font="Nowhere"))


@pytest.mark.parametrize("name", ["update_vs_step", "update_vs_depth", "final_loss_vs_depth"])
@pytest.mark.parametrize(("scale", "word"), [("lin", "linear"), ("log", "log")])
def test_scales_are_the_users(tmp_path: Path, name: str, scale: str, word: str) -> None:
    make_runs(tmp_path, depth=(6, 18), steps=30)
    chart = make_chart(name, tmp_path, x_scale=scale, y_scale=scale)
    for axes in chart.figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == (word, word)


def test_smoothing_averages_neighbouring_rows(tmp_path: Path) -> None:
    make_run(tmp_path, updates=[1.0, 4.0, 1.0, 4.0, 7.0], losses=[3.0, 0.0, 3.0, 0.0, 3.0])
    chart = make_chart("update_vs_step", tmp_path, smooth=3)
    lines = chart.data[chart.data["kind"] == "line"]
    assert lines["y"].tolist() == pytest.approx([2.5, 2.0, 3.0, 4.0, 5.5])
    assert "mean over 3 rows" in " ".join(words(chart))
    chart = make_chart("loss_vs_step", tmp_path, smooth=3)
    training = chart.data[chart.data["kind"] == "training"]
    assert training["y"].tolist() == pytest.approx([1.5, 2.0, 1.0, 2.0, 1.5])


@pytest.mark.parametrize("change", [{"x_scale": "linear"}, {"style": "papr"}, {"width": 1}])
def test_options_that_are_not_allowed_are_named(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Options(**change)  # type: ignore[arg-type]


def test_every_chart_is_a_figure_in_python_in_either_order(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", scheme=("deepnorm", "post_ln"), depth=(6, 18))
    runs = find_runs(tmp_path / "s")
    for each in (runs, runs[0], tmp_path / "s", deepstack.load_runs(tmp_path)):
        with without_layout():
            shown, same = figure(each, "update_vs_step"), figure("update_vs_step", each)
        assert isinstance(shown, Figure) and isinstance(same, Figure)
    assert shown._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    one = figure(runs, "metric", x="depth", y="val_loss", schemes="deepnorm")
    assert one.axes[0].get_xlabel() == "depth N (layers)"
    table = deepstack.load_runs(tmp_path)
    rows = figure(table[table["model.scheme"] == "post_ln"], "final_loss_vs_depth")
    labels = {text.get_text() for text in rows.legends[0].get_texts()}
    assert labels & {"DeepNorm", "Post-LN"} == {"Post-LN"}  # a filtered table's rows only
    with pytest.raises(ConfigError, match="unknown option 'widht'"):
        figure(runs, "update_vs_step", widht=3)


def test_plot_writes_files_of_folders_and_shows_runs(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", depth=(6, 18))
    for arguments in (("loss_vs_step", tmp_path / "s"), (tmp_path / "s", ["loss_vs_step"])):
        paths = plot(*arguments, out=tmp_path / "o", formats="csv")
        assert [path.name for path in paths] == ["loss_vs_step.csv"]  # type: ignore[union-attr]
    assert len(pd.read_csv(tmp_path / "o" / "loss_vs_step.csv"))
    runs = find_runs(tmp_path / "s")
    assert isinstance(deepstack.plot(runs, "loss_vs_step"), Figure)
    several = deepstack.plot(["loss_vs_step", "update_vs_depth"], runs)
    assert isinstance(several, list) and len(several) == 2
    with without_layout():
        every = plot(runs)
    assert isinstance(every, list) and len(every) > 3
