"""Options of all charts: style, scales, smoothing, formats, schemes, panels; figures in Python."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.plot_runs import caption, make_chart, make_run, make_runs, rows, without_layout, words
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.cli.plot_command import joined_notes
from deepstack.plots import Options, draw, figure, plot, save
from deepstack.plots.curves import thinned, top_near_start
from deepstack.plots.drawing import Drawing
from deepstack.plots.style import ORDER, scheme_style
from deepstack.records import find_runs
from deepstack.runs import Runs
from deepstack.schemes import SCHEMES


def test_the_style_of_papers_moves_title_and_settings_to_a_text_file(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", scheme=("deepnorm", "post_ln"), depth=(6, 18))
    chart = make_chart("update_vs_depth", tmp_path, style="paper")
    assert chart.figure.get_figwidth() == 3.3 and chart.figure.texts == []
    options = Options(style="paper")
    written = draw(tmp_path / "s", ["update_vs_depth"], tmp_path / "out", options=options)
    assert [path.suffix for path in written] == [".pdf", ".png", ".svg", ".csv", ".txt"]
    text = (tmp_path / "out" / "update_vs_depth.txt").read_text()
    assert text.startswith("Model update against depth. DeepNorm, Post-LN on text")
    assert "d_model 64" in text and "$" not in text
    svg = (tmp_path / "out" / "update_vs_depth.svg").read_text()
    assert "<text" in svg and "DeepNorm: 0.50" in svg


def test_settings_are_one_line_under_the_figure_and_all_in_a_text_file(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", scheme=("deepnorm", "post_ln"), depth=(6, 18), seed=(0, 1))
    chart = make_chart("outcomes", tmp_path)
    shown = [text.get_text().replace("\u00a0", " ") for text in chart.figure.texts]
    below = "\n".join(shown[2:])  # after title and subtitle
    assert "d_model 64 · " in below and " steps · lr " in below and "d_ff" not in below
    assert len(below.splitlines()) <= 2 and "learnt: " not in below
    assert "a box is divided among its 2 seeds" in chart.caption
    assert "d_ff 256" in chart.caption and "learnt: the 95 % interval of its final" in chart.caption
    save(chart, tmp_path, "x", ("png", "csv"))
    assert (tmp_path / "x.txt").read_text() == chart.caption
    save(chart, tmp_path, "y", ("csv",))
    assert not (tmp_path / "y.txt").exists()


def test_figures_of_a_paper_are_named_after_what_they_show(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", scheme=("deepnorm", "post_ln"), depth=(6, 18))
    axes = {"x": "model.depth", "y": "val_loss", "by": "scheme"}
    for style, name in (
        ("paper", "val_loss_vs_model_depth_by_scheme"),
        ("default", "metric_val_loss_vs_model_depth_by_scheme"),
    ):  # fmt: skip
        paths = plot(tmp_path / "s", "metric", style=style, formats="svg", **axes)
        assert [path.stem for path in paths] == [name] * len(paths), style
    paths = plot(tmp_path / "s", "update_vs_depth", style="paper", formats="csv", at_step=3)
    assert paths[0].name == "update_vs_depth_at_step_3.csv"


def test_width_font_and_formats_are_the_users(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", depth=(6, 18))
    written = draw(tmp_path / "s", ["loss_vs_step"], tmp_path, formats=("svg",))
    assert [path.name for path in written] == ["loss_vs_step.svg", "loss_vs_step.txt"]
    figure = make_chart("loss_vs_step", tmp_path, width=5.0, font="DejaVu Serif").figure
    assert figure.get_figwidth() == 5.0
    assert figure.texts[0].get_fontfamily()[0] == "DejaVu Serif"
    with pytest.raises(ConfigError, match="unknown --format 'gif'"):
        draw(tmp_path / "s", formats=("gif",))
    with pytest.raises(ConfigError, match="unknown font 'Nowhere'"):
        make_chart("loss_vs_step", tmp_path, font="Nowhere")


@pytest.mark.parametrize("name", ["update_vs_step", "update_vs_depth", "final_loss_vs_depth"])
@pytest.mark.parametrize(("scale", "word"), [("lin", "linear"), ("log", "log")])
def test_scales_are_the_users(tmp_path: Path, name: str, scale: str, word: str) -> None:
    make_runs(tmp_path, depth=(6, 18), steps=30)
    chart = make_chart(name, tmp_path, x_scale=scale, y_scale=scale)
    for axes in chart.figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == (word, word)


def test_smoothing_averages_neighbouring_rows(tmp_path: Path) -> None:
    make_run(tmp_path, updates=[1.0, 4.0, 1.0, 4.0, 7.0], losses=[3.0, 0.0, 3.0, 0.0, 3.0])
    for name, kind, values in (
        ("update_vs_step", "line", [2.5, 2.0, 3.0, 4.0, 5.5]),
        ("loss_vs_step", "training", [1.5, 2.0, 1.0, 2.0, 1.5]),
    ):
        chart = make_chart(name, tmp_path, smooth=3)
        assert rows(chart, kind=kind)["y"].tolist() == pytest.approx(values)
        assert "mean over 3 rows" in caption(chart)


@pytest.mark.parametrize("change", [{"x_scale": "linear"}, {"style": "papr"}, {"width": 1}])
def test_options_that_are_not_allowed_are_named(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Options(**change)  # type: ignore[arg-type]


@pytest.mark.slow(turn=59)
def test_every_chart_is_a_figure_in_python_in_either_order(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", scheme=("deepnorm", "post_ln"), depth=(6, 18))
    runs = find_runs(tmp_path / "s")
    for each in (runs, runs[0], tmp_path / "s", deepstack.load_runs(tmp_path)):
        with without_layout():
            shown, same = figure(each, "update_vs_step"), figure("update_vs_step", each)
        assert isinstance(shown, Figure) and isinstance(same, Figure)
    assert shown._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    for names in ("deepnorm,post_ln", "post_ln,deepnorm"):
        one = figure(runs, "metric", x="depth", y="val_loss", schemes=names)
        assert one.axes[0].get_xlabel() == "depth N (layers)"
        labels = [text.get_text() for text in one.legends[0].get_texts()[:2]]
        assert labels == [SCHEMES[name].label for name in names.split(",")]
    table = deepstack.load_runs(tmp_path)
    filtered = figure(table[table["model.scheme"] == "post_ln"], "final_loss_vs_depth")
    labels = [text.get_text() for text in filtered.legends[0].get_texts()]
    assert "Post-LN" in labels and "DeepNorm" not in labels  # a filtered table's rows only
    with pytest.raises(ConfigError, match="unknown option 'widht'"):
        figure(runs, "update_vs_step", widht=3)


def test_plot_writes_files_of_folders_and_shows_runs(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", depth=(6, 18))
    for arguments in (("loss_vs_step", tmp_path / "s"), (tmp_path / "s", ["loss_vs_step"])):
        paths = plot(*arguments, out=tmp_path / "o", formats="csv")
        assert paths == [tmp_path / "o" / "loss_vs_step.csv"]
    runs = find_runs(tmp_path / "s")
    assert isinstance(deepstack.plot(runs, "loss_vs_step"), Figure)
    for names, least in ((["loss_vs_step", "update_vs_depth"], 2), (None, 4)):
        with without_layout():
            several = plot(runs, names)
        assert isinstance(several, list) and len(several) >= least


@pytest.mark.parametrize("name", ["frontier", "metric"])
def test_an_axis_of_names_stays_one_under_a_logarithmic_scale(tmp_path: Path, name: str) -> None:
    make_runs(tmp_path / "s", scheme=("deepnorm", "post_ln"), depth=(6, 18), lr=(1e-3, 1e-2))
    words = {"x": "scheme", "y": "val_loss"} if name == "metric" else {}
    plain, log = (
        figure(tmp_path / "s", name, **words, x_scale=scale).axes[0] for scale in (None, "log")
    )
    assert log.get_xscale() == "linear" and log.get_xlim() == plain.get_xlim()


# --- colours, panels and error bars ----------------------------------------------------------


def test_schemes_differ_in_colour_and_marker_and_in_colour_and_line() -> None:
    styles = {name: scheme_style(name) for name in (*SCHEMES, "scheme_of_a_plugin", "another")}
    assert set(ORDER) <= set(SCHEMES)
    assert len({(s["color"], s["marker"]) for s in styles.values()}) == len(styles)
    lines = {(styles[name]["color"], styles[name]["linestyle"]) for name in ORDER}
    assert len(lines) == len(ORDER)
    best_known = "post_ln pre_ln deepnorm rezero admin sub_ln sandwich_ln peri_ln fixup ds_init"
    newer = "keel b2t complete_p depth_mup residual hybrid_norm mix_ln ln_scaling"
    for names in (best_known.split(), newer.split(), ["keel", "rezero"], ["b2t", "peri_ln"],
                  ["complete_p", "depth_mup", "post_ln"]):  # fmt: skip
        assert len({styles[name]["color"] for name in names}) == len(names), names


def test_a_scheme_has_one_style_and_its_settings_are_shades(tmp_path: Path) -> None:
    make_runs(tmp_path / "a", scheme=("deepnorm", "post_ln", "rezero"))
    make_runs(tmp_path / "b", scheme=("post_ln", "keel"))
    for study in ("a", "b"):
        drawing = Drawing(Runs.below(tmp_path / study), Options())
        styles = {s.label: style for s, style in drawing.styles.items()}
        assert styles["Post-LN"] == scheme_style("post_ln")
    make_runs(tmp_path / "c", scheme=("post_ln", "pre_ln"), lr=(1e-3, 2e-3, 3e-3))
    styles = [*Drawing(Runs.below(tmp_path / "c"), Options()).styles.values()]
    assert len({style["color"] for style in styles}) == 6
    assert [style["marker"] for style in styles] == ["s"] * 3 + ["^"] * 3
    middle = [scheme_style(name)["color"].lower() for name in ("post_ln", "pre_ln")]
    assert [styles[1]["color"], styles[4]["color"]] == middle


def test_the_user_chooses_schemes_their_order_and_the_panels(tmp_path: Path) -> None:
    make_runs(tmp_path, scheme=("deepnorm", "post_ln", "pre_ln"), depth=(6, 18), lr=(1e-3, 2e-3))
    chart = make_chart("update_vs_depth", tmp_path, schemes=("pre_ln", "deepnorm"))
    assert list(dict.fromkeys(s.split(",")[0] for s in chart.data["series"])) == [
        "Pre-LN", "DeepNorm", "unrelated states"
    ]  # fmt: skip
    chart = make_chart("update_vs_depth", tmp_path, panels="lr")
    names = [f"lr\u00a0{lr}: step {step}" for lr in (0.001, 0.002) for step in (1, 5)]
    assert list(dict.fromkeys(chart.data["panel"])) == names
    for by, count, name in (
        (None, 6, "Pre-LN, lr\u00a00.001"), ("depth", 2, "N = 18"), ("scheme", 6, "Pre-LN, N = 18")
    ):  # fmt: skip
        panels = set(make_chart("update_vs_step", tmp_path, panels=by, rates="all").data["panel"])
        assert len(panels) == count and name in panels
    with pytest.raises(ConfigError, match="did you mean 'deepnorm'"):
        make_chart("update_vs_depth", tmp_path, schemes=("deepnrm",))


def test_points_have_error_bars_and_curves_have_bands(tmp_path: Path) -> None:
    names = ("admin", "deepnorm", "fixup", "post_ln", "pre_ln", "rezero")

    def updates(scheme: str, seed: int, depth: int) -> list[float]:
        return [(1 + names.index(scheme) + 0.1 * seed) * 0.01 * t for t in range(1, 31)]

    make_runs(tmp_path, scheme=names, seed=(0, 1), depth=(6, 18), updates=updates)
    axes = make_chart("update_vs_depth", tmp_path).figure.axes[0]
    bars = [area for area in axes.collections if isinstance(area, LineCollection)]
    assert len(bars) == len(axes.collections) == len(names)
    at = [bar.get_transform().transform(bar.get_segments()[0])[0, 0] for bar in bars]
    assert (np.diff(at) > 0.9 * axes.figure.dpi / 72).all()  # no bar hides another one
    curves = make_chart("loss_vs_step", tmp_path)
    assert len(curves.figure.axes) == len(names) == len(set(curves.data["panel"]))
    for axes in curves.figure.axes:  # a band a depth, and bars of its validation losses
        kinds = [isinstance(area, LineCollection) for area in axes.collections]
        assert kinds.count(False) == kinds.count(True) == 2
    assert {"N = 6", "N = 18", "training loss"} <= set(words(curves))
    crowded = make_chart("update_vs_step", tmp_path, panels="depth").figure.axes
    assert len(crowded) == 2
    for axes in crowded:  # every line has six error bars
        assert all(isinstance(area, LineCollection) for area in axes.collections)
        assert [len(bars.get_paths()) for bars in axes.collections] == [6] * len(names)


@pytest.mark.slow
def test_a_chart_has_at_most_fifteen_panels_unless_schemes_are_named(tmp_path: Path) -> None:
    names = tuple(ORDER[:17])
    make_runs(tmp_path, scheme=names, depth=(6, 18), layers=lambda depth, **_: np.ones((2, depth)))
    for name in ("update_vs_step", "layer_step_heat_map"):
        chart = make_chart(name, tmp_path)
        shown = set(chart.data["panel"])
        assert len(shown) == 15 and {"Post-LN", "Pre-LN"} <= {s.split(",")[0] for s in shown}
        assert "left out: " in caption(chart)
        assert len(set(make_chart(name, tmp_path, schemes=names).data["panel"])) == 17


def test_charts_that_runs_do_not_allow_share_a_line() -> None:
    notes = ["a is not drawn: x", "run r is left out: y", "b is not drawn: z"]
    others, line = joined_notes(notes)
    assert others == notes[1] and line.endswith("reasons): a, b") and "2 charts" in line
    assert joined_notes(notes[:2]) == notes[:2]


def test_a_thinned_curve_keeps_its_last_row() -> None:
    rows = pd.DataFrame({"curve": [0] * 6 + [1] * 5, "x": [*range(6), *range(5)]})
    assert thinned(rows, 4)["x"].tolist() == [0, 4, 5, 0, 4]


def test_the_view_reaches_the_highest_start_of_the_curves() -> None:
    low, high = (pd.DataFrame({"curve": 0, "y": y}) for y in ([3.0, 1.0], [4.0, 9.0]))
    assert 4.0 < top_near_start([low, high]) == top_near_start([high, low]) < 9.0
