"""Every chart draws the numbers of its CSV: the artists are read back from the figure."""

import io
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.plot_runs import make_run, make_runs, without_layout, write_analyses
from helpers.sampling import some
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from deepstack.plots import CHARTS, Chart, Options
from deepstack.plots.files import csv_bytes
from deepstack.plots.style import GREY
from deepstack.records import Run, RunFolder, find_runs
from deepstack.runs.outcomes import OUTCOME_WORDS


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two schemes, three depths, two learning rates, two seeds; no two values are equal."""
    root = tmp_path_factory.mktemp("study")
    random = np.random.default_rng(0)
    for scheme, depth, lr, seed in product(
        ("deepnorm", "post_ln"), (3, 5, 8), (1e-3, 3e-3), (0, 1)
    ):
        diverges = (scheme, depth, lr, seed) == ("post_ln", 8, 3e-3, 1)
        growth = np.sort(random.uniform(0.01, 0.5, 5)) * depth**0.5
        more = (0.5 + 200 * lr) * (scheme == "post_ln")
        path = make_run(
            root, scheme=scheme, depth=depth, lr=lr, seed=seed,
            updates=growth.tolist(), losses=(4 - growth).tolist(),
            masked=float(random.uniform(2, 3)) + more, solved=float(random.uniform(1, 8)),
            layers=np.ones((5, depth)), state="diverged" if diverges else "done",
        )  # fmt: skip
        folder = RunFolder(path)
        values = {n: np.exp(random.normal(size=(5, depth))) for n in folder.layer_names()}
        folder.write_layers(values, [1, 2, 3, 4, 5])
        share = float(random.uniform(0.3, 1))
        numbers = {"effective_depth": share * depth, "effective_depth_ratio": share}
        write_analyses(folder, depth, used=share, **numbers)
    return find_runs(root)


def close(one: Any, two: Any) -> np.ndarray:
    """Return which points of two lists agree up to the 10th digit, (points, points)."""
    first, second = (np.array(points, dtype=float).reshape(-1, 2) for points in (one, two))
    return np.isclose(first[:, None], second[None], rtol=1e-8, atol=0).all(axis=2)


def same(drawn: Any, rows: Any) -> bool:
    """Whether two lists of points are the same but for order and repetitions."""
    equal = close(drawn, rows)
    return bool(equal.any(axis=0).all() and equal.any(axis=1).all())


def points_of(line: Line2D) -> np.ndarray:
    """The finite points of a line, (points, 2)."""
    points = np.column_stack([np.asarray(v, float) for v in line.get_data()])
    return points[np.isfinite(points).all(axis=1)]


def flat(text: str) -> str:
    """A text without line breaks, spaces and the marks of subscripts."""
    return re.sub(r"[\s${}]", "", text)


def legend(chart: Chart) -> dict[str, str]:
    """The colour of every entry of the legends, by the words in front of a colon."""
    return {
        text.get_text().split(":")[0].replace("\n", " "): to_hex(
            handle.get_facecolor() if isinstance(handle, Patch) else handle.get_color()
        )
        for each in chart.figure.findobj(Legend)
        if isinstance(each, Legend)
        for handle, text in zip(each.legend_handles, each.get_texts(), strict=True)
        if isinstance(handle, Patch | Line2D)
    }


def panels(chart: Chart) -> list[tuple[Axes, pd.DataFrame]]:
    """The axes of each panel and its rows of the CSV."""
    rows = pd.read_csv(io.BytesIO(csv_bytes(chart)))
    rows = rows.reindex(columns=rows.columns.union(["panel", "x", "y", "low", "high"]))
    parts: dict[int, list[pd.DataFrame]] = {}
    every = [axes for axes in chart.figure.axes if axes.get_label() != "colour bar"]
    for name, index, kinds, _ in chart.panels:
        here = rows["panel"].isna() if name == "" else rows["panel"] == name
        shown = rows["kind"].isin([*kinds, "level", "reference", "frontier"])
        parts.setdefault(index, []).append(rows[here & shown])
        title = flat(every[index].get_title(loc="left"))
        assert title in flat(name) or title.startswith(("both,", "ratio,")), title
    assert sorted(parts) == list(range(len(every)))
    return [(every[index], pd.concat(part)) for index, part in parts.items()]


def check_curves(chart: Chart) -> None:
    """Lines, bands and levels of every panel, and the colours that the legend gives them."""
    colours = {label: colour for label, colour in legend(chart).items() if colour != GREY.lower()}
    named = 0
    for axes, rows in panels(chart):
        if (rows["kind"] == "share").all():
            named += check_shares(axes, rows, colours)
            continue
        assert not axes.xaxis_inverted() and not axes.yaxis_inverted()
        across = axes.get_yaxis_transform("grid")  # of a line at one height
        lines = [line for line in axes.lines if line.get_transform() != across]
        levels = {li.get_ydata()[0] for li in axes.lines if li not in lines}
        spans = [
            patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches
        ]
        levels |= {edge for span in spans for edge in (span.y0, span.y1)}
        wanted = set(rows[rows["x"].isna()]["y"].dropna())
        assert sorted(levels) == pytest.approx(sorted(wanted)) or (not wanted and levels <= {1.0})
        drawn = rows[rows["x"].notna() & rows["y"].notna()].replace("best", "point")
        assert len(drawn) and same(np.concatenate(list(map(points_of, lines))), drawn[["x", "y"]])
        parts = list(drawn.groupby(["series", "kind"]))
        for line in lines:
            points = points_of(line)
            series = {
                of for (of, _), part in parts if close(points, part[["x", "y"]]).any(axis=1).all()
            }
            assert series, f"a line joins points of several series: {points}"
            for label in colours if len(series) == 1 else ():
                if f", {label}, " in f", {str(*series)}, ":  # the series, or a part of its name
                    assert to_hex(line.get_markeredgecolor()) == colours[label], (label, series)
                    named += "published" not in series
        kinds = (PolyCollection, LineCollection)
        areas = [area for area in axes.collections if isinstance(area, kinds)]
        bands = [path.vertices for area in areas for path in area.get_paths()]
        # The right-hand side of the theorem is a dotted line without a band.
        banded = rows[rows["low"].notna() & (rows["panel"] != "right-hand side")]
        ends = [banded[["x", end]].to_numpy() for end in ("low", "high")]
        assert same(np.concatenate([*bands, np.empty((0, 2))]), np.concatenate(ends))
    assert named  # some line has a colour of the legend


def check_shares(axes: Axes, rows: pd.DataFrame, colours: dict[str, str]) -> bool:
    """One area above the other, in the order of the CSV, each in its colour of the legend."""
    below = dict.fromkeys(rows["x"], 0.0)
    roles = list(dict.fromkeys(rows["series"]))
    assert len(roles) > 1 and len(axes.collections) == len(roles)
    for area, role in zip(axes.collections, roles, strict=True):
        part = rows[rows["series"] == role]
        above = {x: below[x] + y for x, y in zip(part["x"], part["y"], strict=True)}
        (path,) = area.get_paths()
        assert same(path.vertices, [*below.items(), *above.items()])
        assert to_hex(area.get_facecolor()[0]) == colours[role.replace("_", " ")]
        below = above
    assert axes.get_ylim() == (0, 1) and list(below.values()) == pytest.approx([1] * len(below))
    return True


def check_best_rates(chart: Chart) -> None:
    """The ring is around the best learning rate, or the least loss of a parabola."""
    check_curves(chart)
    for axes, rows in panels(chart):
        rings = [points_of(line) for line in axes.lines if line.get_markersize() == 9]
        best = rows[rows["kind"].isin(["best", "minimum"])]
        assert same(np.concatenate(rings) if rings else [], best[["x", "y"]])


def check_heat_map(chart: Chart) -> None:
    """Each cell's centre, through the labels of both axes, gives its row of the CSV."""
    for axes, rows in panels(chart):
        (mesh,) = [artist for artist in axes.collections if isinstance(artist, QuadMesh)]
        corners = mesh.get_coordinates()
        x, y = np.moveaxis((corners[:-1, :-1] + corners[1:, 1:]) / 2, 2, 0)
        columns, layers = sorted(set(rows["x"])), sorted(set(rows["y"]))
        for at, label in ticks(axes, "x").items():
            assert float(label) == columns[int(at)]
        first = round(y.min())  # the place of the lowest row
        for at, label in ticks(axes, "y").items():
            assert float(label) == layers[int(at) - first]
        assert not axes.yaxis_inverted() and not axes.xaxis_inverted()
        values = np.ma.getdata(mesh.get_array()).reshape(x.shape)
        drawn = {
            (columns[round(i)], layers[round(j) - first]): value
            for i, j, value in zip(x.flat, y.flat, values.flat, strict=True)
        }
        wanted = {(row.x, row.y): row.value for row in rows.itertuples()}
        assert drawn == pytest.approx(wanted, rel=1e-8, nan_ok=True)
        assert len(set(drawn.values())) > 3


def ticks(axes: Axes, which: str) -> dict[float, str]:
    """The words at the ticks of an axis, by their place."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    at = axis.get_ticklocs().tolist()
    return dict(zip(at, map(flat, axis.get_major_formatter().format_ticks(at)), strict=True))


def check_map(chart: Chart) -> None:
    """Each box, through the labels of both axes, gives its row of the CSV; so does the edge."""
    of_words = legend(chart)
    kinds = {of_words.get(word): kind for kind, word in OUTCOME_WORDS.items()}
    for axes, rows in panels(chart):
        columns, lines = ticks(axes, "x"), ticks(axes, "y")
        boxes = {}
        for box in axes.patches:
            assert isinstance(box, Rectangle)
            column = columns[round(box.get_x() + box.get_width() / 2)]
            line = lines[round(box.get_y() + box.get_height() / 2, 2)]
            boxes[column, line, kinds[to_hex(box.get_facecolor())]] = box.get_width()
        cells, edge = rows[rows["kind"] != "frontier"], rows[rows["kind"] == "frontier"]
        names = cells["y"].map("{:g}".format) if len(edge) else cells["series"].map(flat)
        shares = cells["n"] / cells.groupby([cells["x"], names])["n"].transform("sum")
        keys = zip(cells["x"].map("{:g}".format), names, cells["kind"], strict=True)
        wanted = dict(zip(keys, shares * max(boxes.values()), strict=True))
        assert boxes == pytest.approx(wanted)
        assert axes.yaxis_inverted() and not axes.xaxis_inverted()
        steps = map(points_of, axes.lines)
        drawn = {(columns[float(np.mean(p[:, 0]))], lines[p[0, 1] + 0.5]) for p in steps}
        assert drawn == {(f"{x:g}", f"{y:g}") for x, y in edge[["x", "y"]].dropna().to_numpy()}


OTHERS: dict[str, Callable[[Chart], None]] = {
    "effects": check_heat_map,
    "layer_similarity": check_heat_map,
    "layer_step_heat_map": check_heat_map,
    "iso_flop": check_best_rates,
    "loss_vs_lr": check_best_rates,
    "outcomes": check_map,
    "frontier": check_map,
}


@pytest.mark.parametrize("name", some(CHARTS.names(), 6, 1))
def test_a_chart_draws_the_numbers_of_its_csv(name: str, runs: list[Run], tmp_path: Path) -> None:
    if name == "law_fit":  # a law needs losses that fall with depth
        make_runs(
            tmp_path, depth=(2, 4, 8, 16, 32), seed=(0, 1, 2),
            masked=lambda depth, seed: 1.5 + (1 + 0.01 * seed) / depth,
        )  # fmt: skip
        runs = find_runs(tmp_path)
    published = pd.DataFrame([{"chart": name, "x": 4, "y": 1.25, "label": "published"}])
    with without_layout():
        chart = CHARTS[name](runs, options=Options(reference=published))
    OTHERS.get(name, check_curves)(chart)
