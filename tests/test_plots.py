"""Charts: their arithmetic, what they mark, what they write; drawn from small run folders."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from deepstack.errors import ConfigError, NothingMatchedError
from deepstack.plots import CHARTS, Chart, Options, draw
from deepstack.plots.page import Page
from deepstack.plots.series import seeds_note, split, spread
from deepstack.plots.update import power_law
from deepstack.records import EVALS_COLUMNS, STEPS_COLUMNS, RunFolder, find_runs

DEPTHS = (6, 18, 48, 100)
LABELS = {"deepnorm": "DeepNorm", "post_ln": "Post-LN", "rezero": "ReZero"}
UNRELATED = math.sqrt(2) * 8.0


def update(depth: int, step: int = 1, *, factor: float = 0.01, power: float = 0.5) -> float:
    return factor * depth**power * step


def make_run(
    root: Path,
    *,
    scheme: str = "deepnorm",
    depth: int = 6,
    seed: int = 0,
    lr: float = 1e-3,
    d_ff: int = 256,
    steps: int = 5,
    state: str = "done",
    updates: list[float] | None = None,
    normalised: bool = True,
    losses: list[float] | None = None,
    masked: float | None = 2.5,
    layers: np.ndarray | None = None,
    references: dict[str, float] | None = None,
    optimal: float | None = None,
) -> Path:
    """A run folder as training leaves it; updates[t-1] is the model update after step t."""
    folder = RunFolder(root / f"{scheme}-d{depth}-s{seed}-{lr}")
    folder.write_config(
        f"seed: {seed}\nmodel: {{scheme: {scheme}, depth: {depth}, d_model: 64, d_ff: {d_ff}}}\n"
        f"task: {{name: text}}\ntrain: {{lr: {lr}, steps: {steps}}}\n"
    )
    known = {"unigram_entropy": 3.26, "context_free_entropy": 2.98}
    folder.write_columns(
        {
            "columns": {"model_update": {"symbol": "‖ΔF‖", "unit": ""}},
            "layers": {"grad_norm": {"symbol": "‖∂L/∂θ_l‖", "unit": ""}},
            "scheme": {"name": scheme, "label": LABELS[scheme], "normalised": normalised},
            "f0_norm": 8.0,
            "references": known if references is None else references,
        }
    )
    values = updates or [update(depth, t) for t in range(1, steps + 1)]
    folder.steps_path.unlink(missing_ok=True)
    folder.evals_path.unlink(missing_ok=True)
    with folder.log("steps", STEPS_COLUMNS) as log:
        for step, value in enumerate(values, start=1):
            loss = losses[step - 1] if losses else 4.0 - 0.1 * step
            log.write((step, loss, lr, 1.0, value, value, 4 * value, value / 8))
    columns = EVALS_COLUMNS if optimal is None else (*EVALS_COLUMNS, "optimal_loss")
    with folder.log("evals", columns) as log:
        for step in (0, len(values)):
            row: dict[str, Any] = {"step": step, "loss": 2.0, "loss_masked": masked}
            log.write(row if optimal is None else row | {"optimal_loss": optimal})
    if layers is not None:
        folder.write_layers("grad_norm", layers)
        folder.write_layers("stream_norm", -layers)
        folder.write_layer_steps(list(range(1, len(layers) + 1)))
    folder.write_status(state, len(values))
    return folder.path


def make_chart(name: str, root: Path, **options: Any) -> Chart:
    return CHARTS[name](find_runs(root), options=Options(**options))


def rows(chart: Chart, **wanted: object) -> pd.DataFrame:
    found = chart.data
    for column, value in wanted.items():
        found = found[found[column] == value]
    return found


def words(chart: Chart) -> list[str]:
    """Every text of the figure: titles, labels, legends, caption."""
    import matplotlib.text

    texts = chart.figure.findobj(matplotlib.text.Text)
    return [text.get_text() for text in texts if text.get_text()]  # type: ignore[attr-defined]


# --- the fit -------------------------------------------------------------------------------


def test_the_exponent_and_its_error_are_those_of_least_squares() -> None:
    random = np.random.default_rng(0)
    x = np.array(DEPTHS, dtype=float)
    y = np.exp(0.7 * np.log(x) - 2 + 0.2 * random.normal(size=len(x)))
    coefficients, covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    fit = power_law(x.tolist(), y.tolist())
    assert fit is not None
    assert fit.exponent == pytest.approx(coefficients[0])
    assert fit.intercept == pytest.approx(coefficients[1])
    # polyfit scales its covariance by residuals / (n - 2) as well.
    assert fit.standard_error == pytest.approx(math.sqrt(covariance[0, 0]))


@pytest.mark.parametrize("count", [0, 1])
def test_no_fit_through_one_point(count: int) -> None:
    assert power_law([6.0] * count, [1.0] * count) is None
    assert power_law([6.0, 6.0], [1.0, 2.0]) is None


def test_two_points_have_an_exponent_without_an_error(tmp_path: Path) -> None:
    for depth in (6, 48):
        make_run(tmp_path / "study", depth=depth)
    chart = make_chart("update_vs_depth", tmp_path)
    (fit,) = rows(chart, kind="fit", panel="step 1").to_dict("records")
    assert fit["exponent"] == pytest.approx(0.5, abs=1e-6) and fit["n"] == 2
    assert "DeepNorm: 0.50 (2 points)" in words(chart)


def test_known_power_laws_are_found_in_both_panels(tmp_path: Path) -> None:
    for depth in DEPTHS:
        make_run(tmp_path / "study", depth=depth)
        values = [update(depth, t, factor=1e-5, power=1.25) for t in range(1, 6)]
        make_run(tmp_path / "study", scheme="post_ln", depth=depth, updates=values)
    chart = make_chart("update_vs_depth", tmp_path)
    fits = rows(chart, kind="fit")
    assert fits["panel"].tolist() == ["step 1"] * 2 + ["step 5"] * 2
    assert fits["exponent"].tolist() == pytest.approx([0.5, 1.25] * 2, abs=1e-6)
    assert fits["standard_error"].max() < 1e-6
    assert fits["n"].tolist() == [4] * 4
    assert words(chart).count("DeepNorm: 0.50 ± 0.00") == 2
    points = rows(chart, kind="point", panel="step 5", series="DeepNorm")
    assert points["x"].tolist() == list(DEPTHS)
    assert points["y"].tolist() == pytest.approx([update(d, 5) for d in DEPTHS], rel=1e-6)
    levels = rows(chart, kind="level")
    assert levels["y"].tolist() == pytest.approx([UNRELATED] * 2)


# --- marks ---------------------------------------------------------------------------------


def test_saturated_and_diverged_points_are_marked_and_left_out(tmp_path: Path) -> None:
    study = tmp_path / "study"
    for depth in DEPTHS:
        make_run(study, depth=depth)
    just_below, just_above = 0.299 * UNRELATED, 0.301 * UNRELATED
    make_run(study, depth=1000, updates=[update(1000)] * 4 + [just_above])
    make_run(study, depth=2000, updates=[update(2000)] * 4 + [math.nan], state="diverged")
    chart = make_chart("update_vs_depth", tmp_path)
    first = rows(chart, kind="point", panel="step 1").set_index("x")
    last = rows(chart, kind="point", panel="step 5").set_index("x")
    assert first["mark"].dropna().to_dict() == {2000: "diverged"}
    assert last["mark"].dropna().to_dict() == {1000: "saturated", 2000: "diverged"}
    # The diverged run is drawn where it was last finite.
    assert last.loc[2000, "y"] == pytest.approx(update(2000), rel=1e-6)
    fits = rows(chart, kind="fit").set_index("panel")
    assert fits["n"].to_dict() == {"step 1": 5, "step 5": 4}
    assert fits["exponent"].tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    assert {"saturated: above 0.3 of it", "diverged"} <= set(words(chart))

    make_run(study, depth=1000, updates=[update(1000)] * 4 + [just_below])
    last = rows(make_chart("update_vs_depth", tmp_path), kind="point", panel="step 5")
    assert last.set_index("x")["mark"].dropna().to_dict() == {2000: "diverged"}


def test_hollow_points_are_hollow(tmp_path: Path) -> None:
    for depth, value in ((6, 0.1), (18, 5.0)):
        make_run(tmp_path / "study", depth=depth, updates=[value])
    make_run(tmp_path / "study", depth=48, updates=[1.0], state="diverged")
    (axes,) = make_chart("update_vs_depth", tmp_path).figure.axes
    faces = {
        float(np.asarray(line.get_xdata())[0]): (line.get_markerfacecolor(), line.get_marker())
        for line in axes.lines
        if line.get_marker() != "None"
    }
    assert faces[6][0] != "white" and faces[18][0] == "white" and faces[48][0] == "white"
    assert faces[18][1] == faces[6][1] != faces[48][1]


def test_one_diverged_seed_takes_its_point_out_of_the_fit(tmp_path: Path) -> None:
    for depth in DEPTHS:
        for seed in range(3):
            state = "diverged" if (depth, seed) == (100, 2) else "done"
            make_run(tmp_path / "study", depth=depth, seed=seed, state=state)
    chart = make_chart("update_vs_depth", tmp_path)
    point = rows(chart, kind="point", panel="step 1", x=100).iloc[0]
    assert point["mark"] == "diverged" and point["n"] == 3
    assert rows(chart, kind="fit", panel="step 1")["n"].item() == 3


def test_schemes_without_a_last_norm_are_compared_relatively(tmp_path: Path) -> None:
    for depth in (6, 18, 48):
        make_run(tmp_path / "study", depth=depth, updates=[30.0])
        make_run(tmp_path / "study", scheme="rezero", depth=depth, updates=[80.0], normalised=False)
    chart = make_chart("update_vs_depth", tmp_path)
    points = rows(chart, kind="point")
    assert set(points["y"]) == {30.0 / 8, 80.0 / 8}
    assert rows(chart, kind="level")["y"].tolist() == pytest.approx([math.sqrt(2)])
    # Both are above √2, but nothing says that a stream without a norm is lost there.
    assert set(rows(chart, kind="point", series="DeepNorm")["mark"]) == {"saturated"}
    assert "mark" not in chart.data or rows(chart, series="ReZero")["mark"].isna().all()


# --- steps ---------------------------------------------------------------------------------


def test_the_second_panel_is_the_last_step_that_all_runs_share(tmp_path: Path) -> None:
    make_run(tmp_path / "study", depth=6, steps=9)
    for depth, count in ((18, 7), (48, 9)):
        make_run(
            tmp_path / "study",
            depth=depth,
            steps=9,
            updates=[update(depth, t) for t in range(1, count + 1)],
        )
    chart = make_chart("update_vs_depth", tmp_path)
    assert list(dict.fromkeys(chart.data["panel"])) == ["step 1", "step 7"]
    chart = make_chart("update_vs_depth", tmp_path, at_step=3)
    assert list(dict.fromkeys(chart.data["panel"])) == ["step 1", "step 3"]
    assert rows(chart, kind="point", panel="step 3")["y"].tolist() == pytest.approx(
        [update(depth, 3) for depth in (6, 18, 48)], rel=1e-6
    )
    # At step 9 one run has no row: it is left out rather than shown at another step.
    chart = make_chart("update_vs_depth", tmp_path, at_step=9)
    assert rows(chart, kind="point", panel="step 9")["x"].tolist() == [6, 48]
    with pytest.raises(NothingMatchedError, match="no run has a row for step 10"):
        make_chart("update_vs_depth", tmp_path, at_step=10)


# --- seeds and lines -----------------------------------------------------------------------


def test_bands_are_one_standard_deviation_and_say_n(tmp_path: Path) -> None:
    seeds = [0.01, 0.02, 0.06]
    for depth in (6, 18):
        for seed, value in enumerate(seeds if depth == 6 else seeds[:1]):
            make_run(tmp_path / "study", depth=depth, seed=seed, updates=[value])
    chart = make_chart("update_vs_depth", tmp_path)
    wide, narrow = rows(chart, kind="point").to_dict("records")
    assert wide["n"] == 3 and wide["y"] == pytest.approx(0.03, rel=1e-6)
    assert wide["high"] - wide["y"] == pytest.approx(np.std(seeds, ddof=1), rel=1e-5)
    assert wide["y"] - wide["low"] == pytest.approx(np.std(seeds, ddof=1), rel=1e-5)
    assert narrow["n"] == 1 and math.isnan(narrow["low"])
    assert "± 1 standard deviation, n = 1 to 3" in words(chart)
    assert seeds_note([5, 5]) == "n = 5" and seeds_note([1, 1]) == ""


def test_lines_are_what_varies_besides_depth_and_seed(tmp_path: Path) -> None:
    for depth in (6, 18):
        for lr in (1e-3, 2e-3):
            # d_ff is determined by depth: it must not tear the lines apart.
            make_run(tmp_path / "study", depth=depth, lr=lr, d_ff=depth, seed=depth)
    series, follows = split(find_runs(tmp_path))
    assert [s.label for s in series] == ["lr\u00a00.001", "lr\u00a00.002"]
    assert [s.depths for s in series] == [[6, 18], [6, 18]]
    assert follows == ["model.d_ff"]


def test_schemes_always_split(tmp_path: Path) -> None:
    make_run(tmp_path / "study", depth=6)
    make_run(tmp_path / "study", depth=18, scheme="post_ln", lr=2e-3)
    series, _ = split(find_runs(tmp_path))
    assert [s.label for s in series] == ["DeepNorm, lr\u00a00.001", "Post-LN, lr\u00a00.002"]


def test_spread_keeps_both_ends() -> None:
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread([1, 2], 4) == [1, 2]


# --- the other charts ----------------------------------------------------------------------


def test_update_vs_step_draws_every_step(tmp_path: Path) -> None:
    make_run(tmp_path / "study", depth=6, steps=30)
    make_run(tmp_path / "study", depth=18, updates=[0.1, 0.2, math.nan], state="diverged")
    chart = make_chart("update_vs_step", tmp_path)
    good = rows(chart, series="DeepNorm, N = 6")
    assert good["x"].tolist() == list(range(1, 31))
    assert good["y"].tolist() == pytest.approx([update(6, t) for t in range(1, 31)], rel=1e-6)
    bad = rows(chart, series="DeepNorm, N = 18")
    assert bad["x"].tolist() == [1, 2] and set(bad["mark"]) == {"diverged"}


@pytest.mark.parametrize(
    ("masked", "expected", "level"),
    [(2.5, [2.5, 2.5], "unigram entropy"), (None, [2.0, 2.0], "best without context")],
)
def test_each_loss_is_compared_with_what_it_can_be_compared_with(
    tmp_path: Path, masked: float | None, expected: list[float], level: str
) -> None:
    for depth in DEPTHS:
        make_run(tmp_path / "study", depth=depth, masked=masked)
    chart = make_chart("loss_vs_step", tmp_path)
    training, validation = dict.fromkeys(chart.data["panel"])
    assert rows(chart, panel=training, kind="level")["series"].tolist() == ["best without context"]
    assert rows(chart, panel=validation, kind="level")["series"].tolist() == [level]
    drawn = rows(chart, panel=validation, series="DeepNorm, N = 6")
    assert drawn["y"].tolist() == expected and drawn["x"].tolist() == [0, 5]
    final = make_chart("final_loss_vs_depth", tmp_path)
    assert rows(final, kind="point")["y"].tolist() == [expected[0]] * len(DEPTHS)
    assert rows(final, kind="level")["series"].tolist() == [level]


def test_one_run_has_losses_and_levels_in_one_panel(tmp_path: Path) -> None:
    make_run(tmp_path / "study", optimal=1.75, references={"unigram_entropy": 2.7})
    chart = make_chart("loss_vs_step", tmp_path)
    assert len(chart.figure.axes) == 1
    assert rows(chart, kind="training")["y"].tolist() == pytest.approx([3.9, 3.8, 3.7, 3.6, 3.5])
    levels = rows(chart, kind="level")
    assert dict(zip(levels["series"], levels["y"], strict=True)) == {
        "unigram entropy": 2.7,
        "Bayes optimum": 1.75,
    }


def test_only_finished_runs_have_a_final_loss(tmp_path: Path) -> None:
    for depth in DEPTHS:
        state = {48: "diverged", 100: "interrupted"}.get(depth, "done")
        make_run(tmp_path / "study", depth=depth, state=state)
    points = rows(make_chart("final_loss_vs_depth", tmp_path), kind="point").set_index("x")
    assert points.index.tolist() == [6, 18, 48]
    assert points["mark"].dropna().to_dict() == {48: "diverged"}


def test_gradient_norms_are_those_of_the_snapshots(tmp_path: Path) -> None:
    values = np.array([[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]])
    make_run(tmp_path / "study", depth=3, layers=values)
    chart = make_chart("grad_norm_by_layer", tmp_path)
    assert rows(chart, series="step 1")["y"].tolist() == [1.0, 2.0, 4.0]
    # Zero has no place on a log axis: it is left out, and the caption says so.
    assert rows(chart, series="step 2")["x"].tolist() == [1, 3]
    assert any("zeros" in text for text in words(chart))


@pytest.mark.parametrize("diagnostic", ["grad_norm", "stream_norm"])
def test_heat_map_of_any_diagnostic(tmp_path: Path, diagnostic: str) -> None:
    values = np.arange(1.0, 13.0).reshape(4, 3)
    make_run(tmp_path / "study", depth=3, layers=values)
    chart = make_chart("layer_step_heat_map", tmp_path, diagnostic=diagnostic)
    sign = 1 if diagnostic == "grad_norm" else -1
    cell = rows(chart, x=2, y=3)["value"].item()
    assert cell == sign * values[1, 2] and len(chart.data) == 12
    with pytest.raises(NothingMatchedError, match="did you mean 'grad_norm'"):
        make_chart("layer_step_heat_map", tmp_path, diagnostic="gradnorm")


def test_panels_show_the_greatest_depth_of_each_scheme(tmp_path: Path) -> None:
    for scheme in ("deepnorm", "post_ln"):
        for depth in (2, 5):
            for seed in (1, 0):
                layers = np.full((2, depth), 1.0 + seed)
                make_run(tmp_path / "s", scheme=scheme, depth=depth, seed=seed, layers=layers)
    chart = make_chart("grad_norm_by_layer", tmp_path)
    assert list(dict.fromkeys(chart.data["panel"])) == ["DeepNorm, N = 5", "Post-LN, N = 5"]
    assert set(chart.data["y"]) == {1.0}
    assert any("each at its greatest depth · seed 0" in text for text in words(chart))


# --- drawing -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results") / "study"
    for scheme in ("deepnorm", "post_ln"):
        for depth in DEPTHS:
            for seed in (0, 1):
                layers = np.exp(-np.arange(depth) / 9.0) * np.ones((4, 1))
                make_run(root, scheme=scheme, depth=depth, seed=seed, layers=layers)
    return root


def test_every_chart_is_written_in_three_forms(study: Path, tmp_path: Path) -> None:
    said: list[str] = []
    written = draw(study, out=tmp_path, say=said.append)
    assert said == []
    expected = [f"{name}.{kind}" for name in CHARTS.names() for kind in ("png", "svg", "csv")]
    assert [path.name for path in written] == expected
    assert len(CHARTS.names()) >= 6
    for path in written:
        assert path.parent == tmp_path and path.stat().st_size > 100
    for name in CHARTS.names():
        assert len(pd.read_csv(tmp_path / f"{name}.csv")) > 0


def test_the_same_runs_give_the_same_bytes_and_leave_matplotlib_alone(
    study: Path, tmp_path: Path
) -> None:
    before = dict(mpl.rcParams)
    first = draw(study, ["update_vs_depth", "layer_step_heat_map"], tmp_path / "a")
    with mpl.rc_context({"font.size": 30, "lines.linewidth": 9}):
        second = draw(study, ["update_vs_depth", "layer_step_heat_map"], tmp_path / "b")
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("name", CHARTS.names())
def test_nothing_is_cut_off_and_no_text_lies_on_another(name: str, study: Path) -> None:
    figure = make_chart(name, study).figure
    figure.set_dpi(200)
    figure.canvas.draw()
    width, height = figure.bbox.width, figure.bbox.height
    boxes = [text.get_window_extent() for text in [*figure.texts, *figure.legends]]
    boxes += [axes.get_tightbbox() for axes in figure.axes]
    boxes = [box for box in boxes if box is not None and box.width > 0]
    for box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            along = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert not (across > 3 and along > 3)


def test_widths_are_those_of_a_paper() -> None:
    assert Page(1, 1, height=1).figure.get_figwidth() == 3.3
    assert Page(1, 3, height=1).figure.get_figwidth() == 6.8


def test_charts_that_cannot_be_drawn_are_named_with_the_reason(tmp_path: Path) -> None:
    make_run(tmp_path / "study")
    said: list[str] = []
    written = draw(tmp_path / "study", say=said.append)
    assert {path.stem for path in written} == {"loss_vs_step", "update_vs_step"}
    assert all(path.parent == tmp_path / "study" / "figures" for path in written)
    assert [line.split(" is not drawn: ")[0] for line in said] == [
        "final_loss_vs_depth",
        "grad_norm_by_layer",
        "layer_step_heat_map",
        "update_vs_depth",
    ]
    assert "all have N = 6" in said[-1] and "log.layers_every" in said[1]
    with pytest.raises(NothingMatchedError, match="needs runs of two depths") as caught:
        draw(tmp_path / "study", ["update_vs_depth"])
    assert caught.value.exit_code == 7
    with pytest.raises(ConfigError, match="did you mean 'loss_vs_step'"):
        draw(tmp_path / "study", ["loss_vs_stp"])


def test_runs_without_a_step_are_no_obstacle(tmp_path: Path) -> None:
    for depth in (6, 18):
        make_run(tmp_path / "study", depth=depth)
    new = RunFolder(tmp_path / "study" / "new")
    new.write_config("seed: 0\nmodel: {scheme: deepnorm, depth: 48}\n")
    assert len(draw(tmp_path)) >= 9
    for path in (tmp_path / "study").iterdir():
        if path.name.startswith("deepnorm"):
            (path / "steps.csv").unlink()
            (path / "evals.csv").unlink()
    with pytest.raises(NothingMatchedError, match="no run has a step"):
        draw(tmp_path)


def test_published_values_are_drawn_and_listed(tmp_path: Path) -> None:
    for depth in (6, 18):
        make_run(tmp_path / "study", depth=depth)
    reference = tmp_path / "study" / "reference.csv"
    reference.write_text(
        "# digitised\nchart,x,y,label\nupdate_vs_depth,6,0.018,published\nloss_vs_step,1,3,other\n"
    )
    (tmp_path / "out").mkdir()
    draw(tmp_path, ["update_vs_depth"], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "update_vs_depth.csv")
    found = table[table["kind"] == "reference"]
    assert found[["series", "x", "y"]].values.tolist() == [["published", 6, 0.018]] * 2
    reference.write_text("chart,x,label\n")
    with pytest.raises(ConfigError, match=r"reference\.csv: no column y; expected"):
        draw(tmp_path)


def test_charts_need_no_torch_and_no_display() -> None:
    code = "import sys, deepstack.plots; print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    root = Path(__file__).parent.parent
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "set()"
