"""Charts: their arithmetic, marks and files; drawn from small run folders."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.plot_runs import DEPTHS, make_chart, make_run, make_runs, rows, update, words
from scipy.stats import linregress

from deepstack.base.errors import NothingMatchedError, ResourceError
from deepstack.plots import draw
from deepstack.records import RunFolder, find_runs
from deepstack.runs import Runs
from deepstack.runs.captions import caption_of, depth_words, settings_line, title_of
from deepstack.runs.fit import power_law, power_law_of_seeds
from deepstack.runs.series import choose_series
from deepstack.runs.settings import evenly_spaced, left_out_note

UNRELATED = math.sqrt(2) * 8.0

# --- the fit -------------------------------------------------------------------------------


def test_the_exponent_and_its_error_equal_least_squares() -> None:
    random = np.random.default_rng(0)
    x = np.array(DEPTHS, dtype=float)
    y = np.exp(0.7 * np.log(x) - 2 + 0.2 * random.normal(size=len(x)))
    line = linregress(np.log(x), np.log(y))
    fit = power_law(x.tolist(), y.tolist())
    assert fit is not None
    assert (fit.exponent, fit.intercept) == pytest.approx((line.slope, line.intercept))
    assert fit.standard_error == pytest.approx(line.stderr)


def test_the_error_over_seeds_is_of_their_exponents() -> None:
    """Seeds that differ in slope and not in how they scatter about a line."""
    exponents = {0: 0.4, 1: 0.5, 2: 0.9}
    values = [{seed: 2 * x**power for seed, power in exponents.items()} for x in DEPTHS]
    fit = power_law_of_seeds(DEPTHS, values)
    assert fit is not None and (fit.n, fit.seeds) == (len(DEPTHS), 3)
    assert fit.exponent == pytest.approx(0.6) and fit.intercept == pytest.approx(math.log(2))
    assert fit.standard_error == pytest.approx(np.std([0.4, 0.5, 0.9], ddof=1) / math.sqrt(3))
    del values[-1][2], values[0][1]  # one whole seed is left: the line through the means
    means = [float(np.mean(list(at.values()))) for at in values]
    assert power_law_of_seeds(DEPTHS, values) == power_law(DEPTHS, means)
    assert power_law_of_seeds([], []) is None
    assert power_law_of_seeds([6], [{0: 1.0, 1: 2.0}]) is None
    assert power_law([], []) is None and power_law([6.0, 6.0], [1.0, 2.0]) is None


def test_a_chart_leaves_out_runs_whose_files_it_cannot_read(tmp_path: Path) -> None:
    paths = make_runs(tmp_path / "study", seed=(0, 1, 2), layers=np.ones((2, 6)))
    (paths[0] / "layers" / "grad_norm.npy").write_bytes(b"no array")
    messages: list[str] = []
    options: Any = {"out": tmp_path / "out", "say": messages.append, "formats": ("csv",)}
    draw(tmp_path, ["loss_vs_step"], **options)
    assert not messages  # the chart reads no layers
    draw(tmp_path, ["loss_vs_step", "layer_step_heat_map"], **options)
    (line,) = messages
    assert line.startswith(f"run {paths[0].name} is left out: ") and "verify" in line
    table = pd.read_csv(tmp_path / "out" / "loss_vs_step.csv")
    assert set(table["n"].dropna()) == {2}  # both charts show the same runs
    for path in paths:
        (path / "status.json").write_text("")
    with pytest.raises(ResourceError, match=f"run {paths[1].name} is left out"):
        draw(tmp_path, ["loss_vs_step"], **options)


def test_known_power_laws_are_found_in_both_panels(tmp_path: Path) -> None:
    make_runs(tmp_path / "study", depth=DEPTHS)

    def of_post_ln(depth: int, seed: int) -> list[float]:
        power = 1.15 + 0.2 * seed
        return [update(depth, t, factor=1e-5, power=power) for t in range(1, 6)]

    make_runs(
        tmp_path / "study", scheme="post_ln", depth=DEPTHS, seed=(0, 1, 2), updates=of_post_ln
    )
    chart = make_chart("update_vs_depth", tmp_path)
    fits = rows(chart, kind="fit")
    assert fits["panel"].tolist() == ["step 1"] * 2 + ["step 5"] * 2
    assert fits["exponent"].tolist() == pytest.approx([0.5, 1.35] * 2, abs=1e-6)
    errors = [0, 0.2 / math.sqrt(3)]
    assert fits["standard_error"].tolist() == pytest.approx(errors * 2, abs=1e-6)
    assert fits["n"].tolist() == [4] * 4 and fits["seeds"].tolist() == [1, 3] * 2
    assert "exponent of N, ± standard error over 3 seeds: step 1, step 5" in words(chart)
    assert words(chart).count("DeepNorm: 0.50 (4 points), 0.50 (4 points)") == 1
    assert words(chart).count("Post-LN: 1.35 ± 0.12, 1.35 ± 0.12") == 1
    points = rows(chart, kind="point", panel="step 5", series="DeepNorm")
    assert points["x"].tolist() == list(DEPTHS)
    assert points["y"].tolist() == pytest.approx([update(d, 5) for d in DEPTHS], rel=1e-6)
    levels = rows(chart, kind="level")
    assert levels["y"].tolist() == pytest.approx([UNRELATED] * 2)


# --- marks ---------------------------------------------------------------------------------


def marks(root: Path) -> dict[tuple[str, int], str]:
    """The marks of the points of update_vs_depth, by panel and depth."""
    points = rows(make_chart("update_vs_depth", root), kind="point")
    return points.set_index(["panel", "x"])["mark"].dropna().to_dict()


def test_saturated_and_diverged_points_are_marked_and_left_out(tmp_path: Path) -> None:
    just_below, just_above = 0.299 * UNRELATED, 0.301 * UNRELATED
    make_runs(tmp_path, depth=DEPTHS)
    make_run(tmp_path, depth=1000, updates=[update(1000)] * 4 + [just_above])
    make_run(tmp_path, depth=2000, updates=[update(2000)] * 4 + [math.nan], state="diverged")
    # None had diverged at step 1.
    assert marks(tmp_path) == {("step 5", 1000): "saturated", ("step 5", 2000): "diverged"}
    chart = make_chart("update_vs_depth", tmp_path)
    # The diverged run is drawn where it was last finite.
    (lost,) = rows(chart, panel="step 5", x=2000)["y"]
    assert lost == pytest.approx(update(2000), rel=1e-6)
    fits = rows(chart, kind="fit").set_index("panel")
    assert fits["n"].to_dict() == {"step 1": 6, "step 5": 4}
    assert fits["exponent"].tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    assert "saturated: above 0.3 of unrelated states" in words(chart)
    assert "all seeds diverged: last finite value" in words(chart)
    drawn = [line for line in chart.figure.axes[1].lines if line.get_marker() != "None"]
    good, saturated, diverged = (
        next(line for line in drawn if np.asarray(line.get_xdata())[0] == x)
        for x in (6, 1000, 2000)
    )
    assert good.get_markerfacecolor() != "white"
    assert saturated.get_markerfacecolor() == diverged.get_markerfacecolor() == "white"
    assert good.get_marker() == saturated.get_marker() != diverged.get_marker()

    make_run(tmp_path, depth=1000, updates=[update(1000)] * 4 + [just_below])
    # A seed that never had a value marks its point.
    make_run(tmp_path, depth=6, seed=1, updates=[math.nan], state="diverged")
    assert marks(tmp_path) == {
        ("step 1", 6): "some diverged", ("step 5", 6): "some diverged", ("step 5", 2000): "diverged"
    }  # fmt: skip


def test_schemes_without_a_last_norm_are_compared_relatively(tmp_path: Path) -> None:
    study, depths = tmp_path / "study", (6, 18, 48)
    make_runs(study, depth=depths, updates=[30.0])
    make_runs(study, scheme="rezero", depth=depths, updates=[80.0], normalised=False)
    chart = make_chart("update_vs_depth", tmp_path)
    points = rows(chart, kind="point")
    assert set(points["y"]) == {30.0 / 8, 80.0 / 8}
    assert "model update ‖ΔF‖/‖F$_{0}$‖" in words(chart)
    assert rows(chart, kind="level")["y"].tolist() == pytest.approx([math.sqrt(2)])
    # Both are above √2, but nothing says that a stream without a norm is lost there.
    assert set(rows(chart, kind="point", series="DeepNorm")["mark"]) == {"saturated"}
    assert "mark" not in chart.data or rows(chart, series="ReZero")["mark"].isna().all()


# --- steps ---------------------------------------------------------------------------------


def test_the_second_panel_is_the_last_step_that_all_runs_share(tmp_path: Path) -> None:
    make_runs(
        tmp_path / "study", depth=(6, 18, 48), steps=9,
        updates=lambda depth: [update(depth, t) for t in range(1, 8 if depth == 18 else 10)],
    )  # fmt: skip
    for at_step, last in ((None, 7), (3, 3), (9, 9)):
        chart = make_chart("update_vs_depth", tmp_path, at_step=at_step)
        assert list(chart.data["panel"].unique()) == ["step 1", f"step {last}"]
        points = rows(chart, kind="point", panel=f"step {last}")
        # At step 9 one run has no row: it is left out rather than shown at another step.
        depths = [6, 48] if last == 9 else [6, 18, 48]
        assert points["x"].tolist() == depths
        assert points["y"].tolist() == pytest.approx([update(n, last) for n in depths], rel=1e-6)
    with pytest.raises(NothingMatchedError, match="no run has a row for step 10"):
        make_chart("update_vs_depth", tmp_path, at_step=10)


# --- seeds and lines -----------------------------------------------------------------------


def test_lines_are_what_varies_besides_depth_and_seed(tmp_path: Path) -> None:
    for depth in (6, 18):
        make_runs(tmp_path / "study", depth=depth, lr=(0.001, 0.002), d_ff=depth, seed=depth)
    series, depth_settings = Runs.below(tmp_path).split()
    assert [s.label for s in series] == ["lr\u00a00.001", "lr\u00a00.002"]
    assert [s.depths for s in series] == [[6, 18], [6, 18]]
    assert depth_settings == ["model.d_ff"]
    make_run(tmp_path / "schemes")  # schemes always split
    make_run(tmp_path / "schemes", depth=18, scheme="post_ln", lr=2e-3)
    series = Runs.below(tmp_path / "schemes").series()
    assert [s.label for s in series] == ["DeepNorm, lr\u00a00.001", "Post-LN, lr\u00a00.002"]


def test_other_data_are_no_other_seed(tmp_path: Path) -> None:
    for lr, (depth, digest) in enumerate(((6, "2d9ce6d7"), (6, "127aac50"), (18, "127aac50"))):
        path = make_run(tmp_path, depth=depth, lr=lr, config={"train.lr": 1e-3})
        RunFolder(path).write_meta({"data": {"sha256": digest}})
    series, depth_settings = Runs.below(tmp_path).split()
    assert [s.label for s in series] == ["data\u00a0127aac", "data\u00a02d9ce6"]
    assert [s.depths for s in series] == [[6, 18], [6]] and depth_settings == []


def test_a_rate_that_follows_from_scheme_and_width_is_no_part_of_a_label(tmp_path: Path) -> None:
    """Depth chooses the width, and width and scheme the rate: no rate holds for a whole line."""
    rates = {("pre_ln", 6): 1e-3, ("pre_ln", 18): 2e-3, ("rezero", 6): 1e-3, ("rezero", 18): 4e-3}
    for (scheme, depth), lr in rates.items():
        width = {"model.d_model": 128 // depth}
        make_run(tmp_path, scheme=scheme, depth=depth, lr=lr, config=width)
    runs = Runs.below(tmp_path)
    series, depth_settings = runs.split()
    assert [(s.label, s.depths) for s in series] == [("Pre-LN", [6, 18]), ("ReZero", [6, 18])]
    assert depth_settings == ["model.d_model", "train.lr"]
    assert (
        settings_line(runs, depth_settings).replace("\u00a0", " ").endswith("lr by N and setting")
    )


HYPER = {"model.scheme_options.streams": 4, "model.scheme_options.dynamic": True}


def test_an_option_is_stated_where_it_was_set(tmp_path: Path) -> None:
    """Other schemes have no such option, which makes no default of it worth saying."""

    def labels(name: str, *streams: int, defaults: dict[str, Any] | None = HYPER) -> list[str]:
        make_run(tmp_path / name)
        make_runs(
            tmp_path / name, scheme="hyper_connections", lr=streams, defaults=defaults,
            config=lambda lr: HYPER | {"model.scheme_options.streams": lr, "train.lr": 1e-3},
        )  # fmt: skip
        return [series.label for series in Runs.below(tmp_path / name).series()]

    assert labels("defaults", 4) == ["DeepNorm", "Hyper-connections"]
    assert labels("unknown", 4, defaults=None) == ["DeepNorm", "Hyper-connections"]
    assert labels("set", 2) == ["DeepNorm", "Hyper-connections, streams\u00a02"]
    for name, defaults in (("several", HYPER), ("unknowns", None)):
        assert labels(name, 2, 4, defaults=defaults) == [
            "DeepNorm", "Hyper-connections, streams\u00a02", "Hyper-connections, streams\u00a04"
        ]  # fmt: skip


def test_a_caption_says_what_was_set_and_nothing_of_what_varies(tmp_path: Path) -> None:
    def caption(root: Path) -> str:
        return " · ".join(caption_of(Runs.below(root))).replace("\u00a0", " ")

    for lr, size in ((1e-3, 4), (2e-3, 8)):
        more = {"train.batch_size": size, "task.seq_len": 20, "model.dropout": size / 10}
        make_run(tmp_path / "vary", lr=lr, config=more, steps=300)
    assert caption(tmp_path / "vary") == "d_model 64 · d_ff 256 · seq_len 20"
    settings = {
        "model.activation": "gelu", "model.dropout": 0.3, "model.norm.kind": "rms",
        "model.init.distribution": "kaiming_normal", "model.scheme_options.streams": 2,
        "model.scheme_options.dynamic": True, "train.momentum": 0.95, "train.weight_decay": 0.1,
        "train.batch_size": 4, "task.seq_len": 20, "task.path": "/somewhere/my.txt",
        "train.clip": None, "train.eps": 1e-8, "train.eval_every": 3,
        "log.probe_sequences": 2, "runtime.threads": 3,
    }  # fmt: skip
    make_run(tmp_path / "set", config=settings, defaults=HYPER | {"task.path": None}, steps=300)
    assert caption(tmp_path / "set") == (
        "d_model 64 · d_ff 256 · activation gelu · dropout 0.3 · norm kind rms · init distribution "
        "kaiming_normal · streams 2 · seq_len 20 · path my.txt · lr 0.001 · momentum 0.95 · "
        "weight_decay 0.1 · batch_size 4 · clip none"
    )


def test_two_stacks_are_named_with_both_depths(tmp_path: Path) -> None:
    both = {"model.family": "encoder_decoder"}
    make_run(tmp_path, depth=20, config=both | {"model.decoder_depth": 5})
    assert depth_words(find_runs(tmp_path)) == ["20 + 5"]
    make_run(tmp_path, depth=6, config=both | {"model.decoder_depth": None})
    runs = Runs.below(tmp_path)
    title = title_of(runs, runs.series()).replace("\u00a0", " ")
    assert title.startswith("DeepNorm on text, N = 6 + 6 to 20 + 5")


def test_series_that_others_are_compared_with_stay(tmp_path: Path) -> None:
    """Whatever their place in the alphabet; the omitted ones are named."""
    names = ("admin", "b2t", "deepnorm", "keel", "peri_ln", "post_ln", "pre_ln", "rezero")
    make_runs(tmp_path, scheme=names, layers=np.ones((2, 6)))
    series = Runs.below(tmp_path).series()
    kept, notes = choose_series(series, 4)
    assert [s.label for s in kept] == ["Admin", "DeepNorm", "Post-LN", "Pre-LN"]
    assert notes == ["left out: B2T; KEEL; Peri-LN; ReZero"]
    assert choose_series(series, 8) == (list(series), [])
    assert len(choose_series(series, 2)[0]) == 2 and len(choose_series(series, 3)[0]) == 3
    assert left_out_note([str(i) for i in range(20)])[0].endswith("; 11 and 8 more")
    assert evenly_spaced(range(10), 4) == [0, 3, 6, 9]


def test_a_panel_without_a_fit_has_no_column_of_exponents(tmp_path: Path) -> None:
    make_runs(tmp_path, depth=(6, 18, 48), updates=lambda depth: [0.01 * depth, 10.0])
    chart = make_chart("update_vs_depth", tmp_path)
    assert "DeepNorm: 1.00 (3 points)" in words(chart) and "–" not in " ".join(words(chart))
    assert "no exponent for step 2" in chart.caption
