"""A figure with title, panels, legends and caption, on matplotlib's constrained layout."""

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox

from deepstack.plots.style import COLUMN_WIDTH, GREY, PAGE_WIDTH, STYLE, log_axis
from deepstack.plots.texts import coded, drawn, is_typeset, strip, typeset
from deepstack.records import Run

Handle = Line2D | Patch
TextLine = tuple[str, float, str, str]  # text, size, weight, colour

PAD = 0.06  # inches around everything and between blocks
LINE = 1.25  # distance of lines of text, in font sizes
TITLE, SUBTITLE, CAPTION = 8.0, 7.0, 6.0  # points
LONGEST = 1000  # letters of a title, a label or a caption


class ChartFigure(Figure):
    """A figure that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()


class Page:
    """`rows` × `columns` panels; draw into `axes`, then call `finish` for texts and legends.

    One column makes a figure for one column of a paper, more make one of a whole page, unless
    `width` (inches) is given.

    texts: whether the figure has title, subtitle and caption. matplotlib's constrained layout
        places the panels; legends stand below them.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        panels: int | None = None,
        height: float,
        width: float | None = None,
        texts: bool = True,
    ) -> None:
        self.rows, self.columns, self.height, self.texts = rows, columns, height, texts
        self.width = width or (COLUMN_WIDTH if columns == 1 else PAGE_WIDTH)
        self.figure: Figure = ChartFigure(figsize=(self.width, rows * (height + 0.5)))
        FigureCanvasAgg(self.figure)
        cells = self.figure.add_gridspec(rows, columns)
        self.axes: list[Axes] = [
            self.figure.add_subplot(cells[divmod(i, columns)], label=f"panel {i}")
            for i in range(panels or rows * columns)
        ]

    def colour_bar(self, mappable: Any, label: str) -> None:
        """Add a colour bar to the right of all panels."""
        bar = self.figure.colorbar(mappable, ax=self.axes, aspect=25, pad=0.01).ax
        bar.set(label="colour bar")
        scale_colour_bar(bar, mappable, label, self.rows * self.height)

    def finish(
        self,
        title: str,
        subtitle: str,
        caption: Sequence[str],
        handles: Sequence[Handle] = (),
        legend_title: str | None = None,
        settings: str = "",
    ) -> Figure:
        """Add texts and legend; the figure is as high as panels of the wanted height need.

        settings: the end of the caption, on a separate line if both do not fit into one.
        """
        inner = self.width - 2 * PAD
        if not self.texts:
            title, subtitle, caption, settings = "", "", (), ""
        heads = [(line, TITLE, "bold", "black") for line in wrap(title, TITLE, inner, "bold")]
        heads += [(line, SUBTITLE, "normal", "black") for line in wrap(subtitle, SUBTITLE, inner)]
        dot = "\u00a0· "  # no line begins with the dot
        lines = wrap(dot.join(filter(None, [*caption, settings])), CAPTION, inner)
        if len(lines) > 1:
            lines = [
                *wrap(dot.join(caption), CAPTION, inner),
                *wrap(settings, CAPTION, inner)[:1],
            ]
        feet = [(line, CAPTION, "normal", GREY) for line in lines]
        self._label_once()
        head, foot = PAD + _text_height(heads), PAD * (1 + bool(feet)) + _text_height(feet)
        below = foot
        if handles:
            legend = self._legend(handles, inner, legend_title)
            below += legend.get_window_extent().height / self.figure.dpi + PAD
        total = head + self.rows * (self.height + 0.5) + below
        for _ in range(2):  # the first time shows how much height the texts beside panels take
            self.figure.set_size_inches(self.width, total)
            rect = (0, below / total, 1, 1 - (head + below) / total)
            ConstrainedLayoutEngine(rect=rect, w_pad=0.05, h_pad=0.04, wspace=0, hspace=0).execute(
                self.figure
            )
            missing = self.height - self.axes[0].get_position().height * total
            total = round(total + self.rows * missing, 4)
        for axes in self.figure.axes:  # the layout's last digits differ from call to call
            axes.set_position(Bbox(np.round(axes.get_position().get_points(), 6)))
        total = float(self.figure.get_figheight())
        if handles:
            legend.set_bbox_to_anchor((PAD / self.width, (below - PAD) / total))
        self._write(heads, total - PAD)
        self._write(feet, foot - PAD)
        return self.figure

    def _label_once(self) -> None:
        """Wrap titles and labels, and keep a label that neighbours share at the outer one only."""
        width = (self.width - 0.55) / self.columns - 0.1
        for i, axes in reversed(list(enumerate(self.axes))):
            title = wrap(axes.get_title(loc="left"), SUBTITLE, width)
            axes.set_title("\n".join(map(drawn, title)))
            before = self.axes[i - 1]
            if i % self.columns and before.get_ylabel() == axes.get_ylabel():
                axes.set_ylabel("")
                axes.tick_params(labelleft=before.get_ylim() != axes.get_ylim())
            wrap_label(axes, self.height)
        for axes, lower in zip(self.axes, self.axes[self.columns :], strict=False):
            axes.set_xlabel("" if axes.get_xlabel() == lower.get_xlabel() else axes.get_xlabel())
        for axes in self.axes:
            axes.set_xlabel(drawn(axes.get_xlabel()))

    def _legend(self, handles: Sequence[Handle], width: float, title: str | None) -> Legend:
        """Return a legend with as many columns as fit into the width, the rows filled evenly.

        A label that is longer than the width is wrapped.
        """
        size = STYLE["legend.fontsize"]
        line = (STYLE["legend.handlelength"] + STYLE["legend.handletextpad"] + 1.5) * size / 72
        texts = [wrap(str(each.get_label()), size, width - line) for each in handles]
        # matplotlib leaves out a label that begins with an underscore.
        labels = ["\n".join(map(drawn, lines)) for lines in texts]
        labels = [f"\u00a0{label}" if label.startswith("_") else label for label in labels]
        heading = "\n".join(map(drawn, wrap(title or "", size, width))) or None
        rows = range(1, len(handles) + 1)
        for columns in sorted({-(-len(handles) // n) for n in rows}, reverse=True):
            legend = self.figure.legend(
                handles=list(handles),
                labels=labels,
                ncols=columns,
                title=heading,
                alignment="left",
                bbox_to_anchor=(0, 1),
                loc="upper left",
                borderaxespad=0,
            )
            if columns == 1 or legend.get_window_extent().width / self.figure.dpi <= width:
                break
            legend.remove()
        return legend

    def _write(self, lines: Sequence[TextLine], y: float) -> None:
        """Write lines (text, size, weight, colour) from `y` inches downwards."""
        total = float(self.figure.get_figheight())
        for text, size, weight, colour in lines:
            style: Any = {"fontsize": size, "weight": weight, "color": colour, "va": "top"}
            self.figure.text(PAD / self.width, y / total, drawn(text), **style)
            y -= size * LINE / 72


def scale_colour_bar(bar: Axes, mappable: Any, label: str, inches: float) -> None:
    """Give the axes of a colour bar of this length a label, and readable ticks."""
    bar.set(ylabel=label)
    bar.grid(False)
    if isinstance(mappable.norm, LogNorm):
        log_axis(bar, "y", *mappable.get_clim())
    wrap_label(bar, inches)


def wrap_label(axes: Axes, inches: float) -> None:
    """Break the label of a y axis of this length between words."""
    lines = wrap(axes.get_ylabel(), STYLE["axes.labelsize"], inches, break_long_words=False)
    axes.set_ylabel("\n".join(map(drawn, lines)))


def _text_height(lines: Sequence[TextLine]) -> float:
    return sum(size * LINE / 72 for _, size, _, _ in lines)


def wrap(text: str, size: float, width: float, weight: str = "normal", **options: Any) -> list[str]:
    """Break at spaces, and inside longer words, so that lines in a font size fit the inches.

    It does not break at a no-break space.  The middle of a text of more than LONGEST letters is
    left out.

    options: of `textwrap.wrap`.
    """
    text = coded(text).replace("\n", " ")
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"
    lines: list[str] = []
    share = min(width / (text_width(text, size, weight) or width), 1)  # of the text in one line
    for letters in range(max(int(len(text) * share), 1), 0, -1):
        lines = textwrap.wrap(text, letters, break_on_hyphens=False, **options)
        if all(text_width(line, size, weight) <= width for line in lines):
            break
    return lines


def text_width(text: str, size: float, weight: str) -> float:
    """Return the inches of a line of text in the figure's font."""
    font = FontProperties(size=size, weight=weight)
    is_math = is_typeset(text)
    shown = drawn(text) if is_math else strip(text)
    return float(text_to_path.get_text_width_height_descent(shown, font, is_math)[0]) / 72


def axis_label(
    runs: Sequence[Run], name: str, words: str, sections: Sequence[str] = ("columns", "layers")
) -> str:
    """Return words with the symbol and unit that the runs state: `model update ‖ΔF‖`.

    sections: of columns.json, in the order in which the name is looked up.
    """
    for run in runs:
        for section in sections:
            entry = run.columns.get(section, {}).get(name)
            if isinstance(entry, dict):
                unit = f" ({entry['unit']})" if entry.get("unit") else ""
                return f"{words} {typeset(str(entry.get('symbol', '')))}".rstrip() + unit
    return words
