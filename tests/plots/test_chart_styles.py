"""Colours of schemes, shades of settings, chosen schemes and panels, and error bars."""

from pathlib import Path

import numpy as np
import pytest
from helpers.plot_runs import caption, make_chart, make_runs, words
from matplotlib.collections import LineCollection

from deepstack.errors import ConfigError
from deepstack.plots import Options
from deepstack.plots.drawing import Drawing
from deepstack.plots.style import ORDER, scheme_style
from deepstack.records import find_runs
from deepstack.schemes import SCHEMES


def test_every_scheme_has_its_own_colour_and_marker_and_its_own_colour_and_line() -> None:
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


def test_a_scheme_looks_the_same_in_every_study_and_a_second_setting_is_a_shade(
    tmp_path: Path,
) -> None:
    make_runs(tmp_path / "a", scheme=("deepnorm", "post_ln", "rezero"))
    make_runs(tmp_path / "b", scheme=("post_ln", "keel"))
    for study in ("a", "b"):
        drawing = Drawing(find_runs(tmp_path / study), Options())
        styles = {s.label: style for s, style in drawing.styles.items()}
        assert styles["Post-LN"] == scheme_style("post_ln")
    make_runs(tmp_path / "c", scheme=("post_ln", "pre_ln"), lr=(1e-3, 2e-3, 3e-3))
    drawing = Drawing(find_runs(tmp_path / "c"), Options())
    colours = [style["color"] for style in drawing.styles.values()]
    assert len(set(colours)) == 6
    assert [style["marker"] for style in drawing.styles.values()] == ["s"] * 3 + ["^"] * 3
    middle = {scheme_style(name)["color"].lower() for name in ("post_ln", "pre_ln")}
    assert {colours[1], colours[4]} == middle


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
        panels = set(make_chart("update_vs_step", tmp_path, panels=by).data["panel"])
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
    for axes in crowded:  # every line has six error bars with markers
        assert all(isinstance(area, LineCollection) for area in axes.collections)
        assert [len(bars.get_paths()) for bars in axes.collections] == [6] * len(names)
        shapes = [line.get_marker() for line in axes.lines if line.get_marker() != "None"]
        assert len(shapes) == len(names)
    compute = make_chart("loss_vs_compute", tmp_path, panels="depth").figure
    shapes = [line.get_marker() for line in compute.axes[0].lines]
    legend = [line.get_marker() for line in compute.legends[0].get_lines()]
    assert shapes == legend[: len(names)]  # the marker of each scheme


def test_a_chart_has_at_most_fifteen_panels_unless_schemes_are_named(tmp_path: Path) -> None:
    names = tuple(ORDER[:17])
    make_runs(tmp_path, scheme=names, depth=(6, 18), layers=lambda depth, **_: np.ones((2, depth)))
    for name in ("update_vs_step", "layer_step_heat_map"):
        chart = make_chart(name, tmp_path)
        shown = set(chart.data["panel"])
        assert len(shown) == 15 and {"Post-LN", "Pre-LN"} <= {s.split(",")[0] for s in shown}
        assert "left out: " in caption(chart)
        assert len(set(make_chart(name, tmp_path, schemes=names).data["panel"])) == 17
