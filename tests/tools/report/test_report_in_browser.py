"""The page of a report in headless Chromium: tables, charts, themes, phones, hostile text."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.browser import CHROMIUM, Browser, open_browser
from helpers.plot_runs import make_runs, without_layout
from matplotlib.figure import Figure

import deepstack.tools.report.page as page_module
from deepstack.plots import Chart, Options
from deepstack.records import Run, RunFolder
from deepstack.runs import Runs
from deepstack.tools.report.page import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
EVIL = "<img src=x onerror=window.owned=1></script><script>window.owned=1</script>\"'&{{7*7}}\u202e"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three schemes at two depths with two seeds; one run diverged."""
    root = tmp_path_factory.mktemp("study") / "mine"
    layers = np.exp(np.linspace(-3, 1, 12)).reshape(2, 6)
    schemes, gone = ("deepnorm", "post_ln", "pre_ln"), ("post_ln", 48, 1)

    def loss(scheme: str, depth: int, seed: int) -> float:
        i = schemes.index(scheme)
        return 2.0 + 0.2 * i + 0.001 * depth + 0.01 * seed * (i + 1)

    make_runs(
        root, scheme=schemes, depth=(6, 48), seed=(0, 1), masked=loss,
        state=lambda scheme, depth, seed: "diverged" if (scheme, depth, seed) == gone else "done",
        layers=lambda scheme, depth, seed: layers if depth == 6 else None,
    )  # fmt: skip
    with without_layout():
        return report(root).as_uri()


LOSS_LEVELS = ["training loss without context (expected)", "best without context"]
COMPARED = "[...document.querySelectorAll('table')].find(t => t.textContent.includes('ms a step'))"
CELLS = f"[...({COMPARED}).tBodies[0].rows].filter(r => !r.hidden).map(r => r.cells[%d].innerText)"


def show(browser: Browser, name: str) -> str:
    """Bring a chart into view and return the expression of its element, once it is drawn."""
    figure = f"document.getElementById('s1-{name}')"
    browser.run(f"{figure}.scrollIntoView({{behavior: 'instant'}})")
    browser.wait_for(f"{figure}.querySelector('.panel .u-over') !== null")
    return figure


def show_all(browser: Browser, address: str) -> dict[str, str]:
    """Open a page and return the expressions of its charts; nothing reports an error."""
    browser.errors.clear()
    browser.open(address)
    names = browser.run("[...document.querySelectorAll('figure')].map(f => f.id.slice(3))")
    figures = {name: show(browser, name) for name in names}
    assert browser.errors == []
    return figures


def test_a_column_sorts_both_ways_by_mouse_and_keyboard(browser: Browser, page: str) -> None:
    browser.open(page)
    heads = browser.run(f"[...({COMPARED}).tHead.rows[0].cells].map(c => c.innerText)")
    at = heads.index("validation loss")
    button = f"({COMPARED}).tHead.rows[0].cells[{at}].querySelector('button')"
    browser.run(f"{button}.click()")
    losses = browser.run(CELLS % at)
    assert losses == sorted(losses, key=float) and len(losses) == 6
    browser.run(f"{button}.focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", code="Enter")
    assert browser.run(CELLS % at) == losses[::-1]
    assert browser.run(f"{button}.parentElement.getAttribute('aria-sort')") == "descending"
    browser.run(f"({COMPARED}).tHead.rows[0].cells[1].querySelector('button').click()")
    assert browser.run(CELLS % 1) == ["6"] * 3 + ["48"] * 3  # numbers, not letters


def test_a_filter_has_words_conditions_and_choices(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.press("/")
    assert browser.run("document.activeElement.type") == "search"
    search = f"({COMPARED}).parentElement.previousElementSibling.querySelector('input')"
    for words, settings in {
        "pre-ln": ["Pre-LN"] * 2, "n>6 norm": ["DeepNorm"], "val<2.1": ["DeepNorm"] * 2,
        "diverged": ["Post-LN"], "no such words": [],
    }.items():  # fmt: skip
        browser.run(f"{search}.value = {words!r}; {search}.dispatchEvent(new Event('input'))")
        assert browser.run(CELLS % 0) == settings, words
        count = browser.run(f"{search}.parentElement.querySelector('output').textContent")
        assert count == f"{len(settings)} of 6 rows"
    browser.run("sessionStorage.clear()")
    browser.open(page)
    choice = f"({COMPARED}).parentElement.previousElementSibling.querySelector('select')"
    browser.run(f"{choice}.value = '=Post-LN'; {choice}.dispatchEvent(new Event('change'))")
    assert browser.run(CELLS % 0) == ["Post-LN"] * 2


def test_the_mouse_and_the_keyboard_show_values_of_a_chart(browser: Browser, page: str) -> None:
    browser.open(page)
    figure = show(browser, "final_loss_vs_depth")
    tips = f"{figure}.querySelector('.tip:not([hidden])')"
    box = browser.run(f"{figure}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    browser.move(box["right"] - 15, box["y"] + 60)
    tip = browser.wait_for(f"{tips}?.innerText")
    assert tip.startswith("depth N (layers) 48") and "DeepNorm 2.053" in tip and "n = 2" in tip
    browser.move(box["x"] + box["width"] / 2, box["y"] - 40)
    browser.wait_for(f"{tips} === null")
    browser.run(f"{figure}.querySelector('.u-over').focus()")
    browser.press("ArrowRight")
    tip = browser.wait_for(f"{tips}?.innerText")
    assert tip.startswith("depth N (layers) 6") and "DeepNorm 2.011" in tip
    assert browser.run(f"{figure}.querySelector('[aria-live]').textContent") != ""
    browser.press("Escape")
    assert browser.run(f"{tips} === null")


def test_series_and_scales_of_a_chart_change(browser: Browser, page: str) -> None:
    browser.open(page)
    figure = show(browser, "update_vs_depth")
    panel = f"{figure}.querySelector('.panel')"
    curves = f"{panel}.chart.series.slice(1).filter(s => s.show).length"
    assert browser.run(curves) == 3
    picture = f"{panel}.querySelector('canvas').toDataURL()"
    before = browser.run(picture)
    button = f"{figure}.querySelectorAll('.legend button')[1]"
    browser.run(f"{button}.click()")
    assert browser.run(curves) == 2
    assert browser.run(f"{button}.getAttribute('aria-pressed')") == "false"
    browser.wait_for(f"{picture} !== {before!r}")
    browser.run(f"[...{figure}.querySelectorAll('.legend button')].at(-1).click()")  # all series
    assert browser.run(curves) == 3
    before, limits = browser.run(picture), browser.run(f"{panel}.chart.scales.y.min")
    browser.run(f"{figure}.querySelector('.scale-y').click()")
    assert browser.run(f"{figure}.querySelector('.scale-y').textContent") == "y: linear"
    browser.wait_for(f"{picture} !== {before!r} && {panel}.chart.scales.y.min < {limits}")
    browser.run(f"{figure}.querySelector('.paper').click()")
    assert browser.run(f"{figure}.querySelector('img').checkVisibility()")
    assert not browser.run(f"{figure}.querySelector('.panels').checkVisibility()")


def test_a_drag_and_keys_zoom(browser: Browser, page: str) -> None:
    browser.open(page)
    figure = show(browser, "update_vs_step")
    over = f"{figure}.querySelector('.u-over')"
    x = f"(({{min, max}}) => [min, max])({figure}.querySelector('.panel').chart.scales.x)"
    low, high = browser.run(x)
    box = browser.run(f"{over}.getBoundingClientRect().toJSON()")
    for kind, share in (("mousePressed", 0.2), ("mouseMoved", 0.7), ("mouseReleased", 0.7)):
        browser.call(
            "Input.dispatchMouseEvent", type=kind, x=box["x"] + share * box["width"],
            y=box["y"] + 20, button="left", buttons=1, clickCount=1,
        )  # fmt: skip
    zoomed = browser.wait_for(f"{x}[1] < {high} && {x}")
    assert zoomed == pytest.approx([low + s * (high - low) for s in (0.2, 0.7)], rel=0.02)
    browser.run(f"{over}.focus()")
    browser.press("0")
    assert browser.wait_for(f"{x}[1] === {high} && {x}") == [low, high]
    browser.press("+")
    near = browser.wait_for(f"{x}[1] < {high} && {x}")
    assert near[1] - near[0] == pytest.approx((high - low) / 2)
    browser.press("-")
    assert browser.wait_for(f"{x}[1] === {high} && {x}") == [low, high]


SPY = """
    window.painted = [];
    for (const act of ["fill", "stroke", "fillText"]) {
      const paint = CanvasRenderingContext2D.prototype[act];
      CanvasRenderingContext2D.prototype[act] = function (...values) {
        painted.push({act, canvas: this.canvas, alpha: this.globalAlpha, colour: this.fillStyle,
          dash: this.getLineDash().map((d) => d.toFixed(2)).join(" "), text: String(values[0])});
        return paint.apply(this, values);
      };
    }"""


def test_validation_losses_are_points_and_the_legend_names_every_line(
    browser: Browser, page: str
) -> None:
    """As in the printed figure: circles with bars, no line and no band between two of them."""
    spy = browser.call("Page.addScriptToEvaluateOnNewDocument", source=SPY)["identifier"]
    browser.open(page)
    figure = show(browser, "loss_vs_step")
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=spy)
    panel = f"{figure}.querySelector('.panel')"  # DeepNorm, two depths, two seeds
    curves = browser.run(f"{panel}.chart.curves.map(c => [c.kind, c.dash, c.hollow, c.bars])")
    assert (
        sorted(curves, key=str)
        == [["training", "", False, False]] * 2 + [["validation", None, True, True]] * 2
    )
    widths = browser.run(f"{panel}.chart.series.slice(1).map(s => s.width > 0)")
    assert widths == [curve[1] is not None for curve in curves]
    painted = f"painted.filter(p => p.canvas === {panel}.querySelector('canvas'))"
    count = f"{painted}.filter(p => %s).length"
    assert browser.run(count % "p.act === 'fill' && p.alpha < 0.5") == 2  # bands
    assert browser.run(count % "p.act === 'fill' && p.colour === '#ffffff'") == 4  # circles
    texts = browser.run(f"{painted}.filter(p => p.act === 'fillText').map(p => p.text)")
    assert set(LOSS_LEVELS) & set(texts)
    legend = browser.run(f"[...{figure}.querySelectorAll('.legend > span')].map(s => s.innerText)")
    assert legend == ["training", "validation", *LOSS_LEVELS]
    dashes = f"[...{figure}.querySelectorAll('.legend .level line')]"
    words = ".split(' ').map(d => Number(d).toFixed(2)).join(' ')"
    named = browser.run(f"{dashes}.map(l => l.getAttribute('stroke-dasharray'){words})")
    drawn = browser.run(f"{painted}.filter(p => p.act === 'stroke').map(p => p.dash)")
    assert len(set(named)) == 2 and set(named) <= set(drawn)


def test_the_best_rate_of_a_depth_is_a_point_of_its_line(browser: Browser, tmp_path: Path) -> None:
    make_runs(
        tmp_path / "s", depth=(6, 48), lr=(1e-3, 1e-2, 1e-1),
        masked=lambda depth, lr: 2.0 + (lr != 1e-2) + 0.01 * depth,
    )  # fmt: skip
    figures = show_all(browser, report(tmp_path / "s").as_uri())
    lines = browser.run(
        f"{figures['loss_vs_lr']}.querySelector('.panel').chart.curves.map(c => "
        "[c.dash !== null, ...c.points.map(row => row.kind)])"
    )
    assert lines == [[True, "point", "best", "point"]] * 2


def test_a_line_has_a_gap_where_a_value_is_missing(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gappy(runs: Runs, *, options: Options) -> Chart:
        figure = Figure()
        figure.subplots().set_yscale("log")
        values = {"x": [1, 2, 3, 4], "y": [1.0, np.nan, 0.0, 2.0]}
        return Chart(figure, pd.DataFrame({"series": "a", "kind": "line", **values}), "Gappy")

    monkeypatch.setattr(page_module, "FIRST", ("gappy",))
    monkeypatch.setattr(page_module, "CHARTS", {"gappy": gappy})
    make_runs(tmp_path / "s")
    figure = show_all(browser, report(tmp_path / "s").as_uri())["gappy"]
    assert browser.run(f"{figure}.querySelector('.panel').chart.data[1]") == [1, None, None, 2]
    browser.run(f"{figure}.querySelector('.scale-y').click()")
    assert browser.run(f"{figure}.querySelector('.panel').chart.data[1]") == [1, None, 0, 2]


def test_every_chart_is_drawn_without_an_error(browser: Browser, page: str) -> None:
    figures = show_all(browser, page)
    assert len(figures) > 5 and {"layer_step_heat_map", "outcomes"} <= set(figures)
    for name, figure in figures.items():
        assert browser.run(f"{figure}.querySelector('img').hidden"), name
        assert "NaN" not in browser.run(f"{figure}.querySelector('.panels').innerHTML"), name


def test_dark_mode_follows_the_system_and_the_button(browser: Browser, page: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.open(page, dark=True)
    assert browser.run(colour) == "rgb(22, 24, 27)"
    browser.open(page)
    assert browser.run(colour) == "rgb(255, 255, 255)"
    browser.run("document.getElementById('theme').click()")
    assert browser.run(colour) == "rgb(22, 24, 27)"
    browser.press("d")
    assert browser.run(colour) == "rgb(255, 255, 255)"
    browser.run("localStorage.clear()")


def test_a_phone_scrolls_in_one_direction_and_a_finger_shows_values(
    browser: Browser, page: str
) -> None:
    browser.open(page, width=390)
    figure = show(browser, "update_vs_depth")
    box = browser.run(f"{figure}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    browser.call("Input.synthesizeTapGesture", x=box["right"] - 15, y=box["y"] + 20)
    tip = browser.wait_for(f"{figure}.querySelector('.tip:not([hidden])')?.innerText")
    assert tip.startswith("depth N (layers) 48")
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("document.getElementById('bar').getBoundingClientRect().top") == 0


def test_paper_gets_the_printed_figures(browser: Browser, page: str) -> None:
    browser.open(page)
    figure = show(browser, "update_vs_depth")
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run(f"{figure}.querySelector('img').checkVisibility()")
    for selector in (".panels", ".tools", "#bar"):
        assert not browser.run(f"document.querySelector({selector!r}).checkVisibility()")
    browser.call("Emulation.setEmulatedMedia", media="")


def test_texts_of_a_run_folder_stay_texts(browser: Browser, tmp_path: Path) -> None:
    for path in make_runs(
        tmp_path / "<b>x", scheme=("deepnorm", "post_ln"), seed=(0, 1), config={"task.name": EVIL}
    ):
        folder = RunFolder(path)
        folder.write_columns(Run(path).columns | {"scheme": {"label": f"{path.name} {EVIL}"}})
        folder.write_meta({"environment": {EVIL: EVIL}, "git": {"commit": EVIL}})
    with without_layout():
        show_all(browser, report(tmp_path).as_uri())
    assert browser.run("window.owned === undefined")
    assert browser.run("document.querySelectorAll('img[onerror], b:not(.tip b)').length") == 0
    legend = browser.run("document.querySelector('#s1-update_vs_step .legend').innerText")
    assert "<img src=x" in legend and "\\u202e" in legend and "\u202e" not in legend
