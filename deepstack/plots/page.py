"""A figure with title, panels, legends and caption, on matplotlib's constrained layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path

from deepstack.plots.style import COLUMN, GREY, PAGE

Handle = Line2D | Patch

PAD = 0.06  # inches around everything and between blocks
LINE = 1.25  # distance of lines of text, in font sizes
TITLE, SUBTITLE, CAPTION = 8.0, 7.0, 6.0  # points
LONGEST = 1000  # letters of a title, a label or a caption
# Where a line may end, from best to worst: spaces, no-break ones, marks, anywhere.
BREAKS = tuple(map(re.compile, ("(?<= )", "(?<=\u00a0)", r"(?<=[/_.,:;\-])", "(?<=.)")))


class Page:
    """`rows` × `columns` panels; draw into `axes`, then call `finish` for texts and legends.

    One column makes a figure for one column of a paper, more make one of a whole page.
    matplotlib's constrained layout places the panels; legends stand below them.
    """

    def __init__(
        self, rows: int, columns: int, *, panels: int | None = None, height: float
    ) -> None:
        self.rows, self.columns, self.height = rows, columns, height
        self.width = COLUMN if columns == 1 else PAGE
        self.figure = Figure(figsize=(self.width, rows * (height + 0.5)), layout="constrained")
        FigureCanvasAgg(self.figure)
        cells = self.figure.add_gridspec(rows, columns)
        count = rows * columns if panels is None else panels
        self.axes: list[Axes] = [
            self.figure.add_subplot(cells[divmod(i, columns)], label=f"panel {i}")
            for i in range(count)
        ]
        self.bar: Axes | None = None
        self._legends: dict[int, tuple[list[Handle], str | None]] = {}

    def colour_bar(self, mappable: Any, label: str) -> Axes:
        """Add a colour bar to the right of all panels and return its axes."""
        bar = self.figure.colorbar(mappable, ax=self.axes, label=label, aspect=25, pad=0.01)
        self.bar = bar.ax
        self.bar.set_label("colour bar")
        return self.bar

    def legend_below(self, panel: int, handles: list[Handle], title: str | None = None) -> None:
        """Put a legend below one panel."""
        self._legends[panel] = (handles, title)

    def outer_labels_only(self, *, same_y: bool = True) -> None:
        """Label y axes on the left only, and their ticks too if `same_y`; x axes at the bottom."""
        for i, axes in enumerate(self.axes):
            if i % self.columns:
                axes.set_ylabel("")
                axes.tick_params(labelleft=not same_y)
            if i + self.columns < len(self.axes):
                axes.set_xlabel("")

    def finish(
        self,
        title: str,
        subtitle: str,
        caption: Sequence[str],
        handles: Sequence[Handle] = (),
    ) -> Figure:
        """Add texts and legends; the figure is as high as panels of the wanted height need."""
        inner = self.width - 2 * PAD
        heads = [(line, TITLE, "bold", "black") for line in wrap(title, TITLE, inner, True)]
        heads += [(line, SUBTITLE, "normal", "black") for line in wrap(subtitle, SUBTITLE, inner)]
        feet = [
            (line, CAPTION, "normal", GREY) for line in wrap(" · ".join(caption), CAPTION, inner)
        ]
        top = PAD + _text_height(heads)
        self._wrap_value_labels()
        names = [axes.get_title(loc="left") for axes in self.axes]
        for axes in self.axes:
            axes.set_title("")  # a long title would narrow its panel
        panels = self._place_panels(0.0, 0.0, self.rows * (self.height + 0.5))
        for axes, name in zip(self.axes, names, strict=True):
            width = axes.get_position().width * self.width + 0.05
            axes.set_title("\n".join(wrap(name, SUBTITLE, width)))
        below = {
            panel: self._legend(*entry, self._legend_width(panel))
            for panel, entry in self._legends.items()
        }
        common = self._legend(list(handles), None, inner) if handles else None
        foot = 2 * PAD + _text_height(feet)
        foot = common_top = foot + (_height(common) + PAD if common is not None else 0.0)
        foot += max(map(_height, below.values())) + PAD if below else 0.0
        total = self._place_panels(top, foot, top + panels + foot)
        self._place_panels(top, foot, total)
        self.figure.set_layout_engine("none")  # keep this layout at every resolution
        for panel, legend in below.items():
            x = self._legend_start(panel) / self.width
            legend.set_bbox_to_anchor((x, (foot - PAD) / total))
        if common is not None:
            common.set_bbox_to_anchor((PAD / self.width, (common_top - PAD) / total))
        self._write(heads, total - PAD)
        self._write(feet, PAD + _text_height(feet))
        return self.figure

    def _place_panels(self, top: float, foot: float, total: float) -> float:
        """Place panels between `top` and `foot` in a figure of `total` inches.

        Returns the total at which panels have the wanted height: titles and labels keep theirs.
        """
        self.figure.set_size_inches(self.width, total)
        rect = (0, foot / total, 1, 1 - (top + foot) / total)
        engine = ConstrainedLayoutEngine(rect=rect, w_pad=0.05, h_pad=0.04, wspace=0, hspace=0)
        engine.execute(self.figure)
        return total + self.rows * (self.height - self.axes[0].get_position().height * total)

    def _wrap_value_labels(self) -> None:
        """Break labels of y axes into as many lines as their height needs."""
        heights = [(axes, self.height) for axes in self.axes]
        heights += [(self.bar, self.rows * self.height)] if self.bar is not None else []
        for axes, height in heights:
            size = float(axes.yaxis.label.get_fontsize())
            axes.set_ylabel("\n".join(wrap(axes.get_ylabel(), size, height, inside=False)))

    def _legend_start(self, panel: int) -> float:
        """Return the left edge of a legend below a panel; it may extend below the tick labels."""
        return max(self.axes[panel].get_position().x0 * self.width - 0.3, PAD)

    def _legend_width(self, panel: int) -> float:
        """Return how wide a legend can be before it meets the next one or the figure's edge."""
        last = panel % self.columns == self.columns - 1
        end = self.width - PAD if last else self._legend_start(panel + 1) - 0.08
        return end - self._legend_start(panel)

    def _legend(self, handles: list[Handle], title: str | None, width: float) -> Legend:
        """Return a legend with as many columns as fit into the width, the rows filled evenly.

        A label that is longer than the width is wrapped.
        """
        most = min(len(handles), 8)
        size = FontProperties(size=mpl.rcParams["legend.fontsize"]).get_size_in_points()
        line = mpl.rcParams["legend.handlelength"] + mpl.rcParams["legend.handletextpad"] + 0.3
        label_width = width - line * size / 72
        labels = ["\n".join(wrap(str(h.get_label()), size, label_width)) for h in handles]
        title = title and "\n".join(wrap(title, size, width))
        # From one row on: as few rows as fit, each as full as the others.
        for columns in sorted({-(-len(handles) // rows) for rows in range(1, most + 1)} | {1})[
            ::-1
        ]:
            legend = self.figure.legend(
                handles=handles,
                labels=labels,
                title=title,
                ncols=columns,
                loc="upper left",
                borderaxespad=0,
                alignment="left",
                bbox_to_anchor=(0, 1),
            )
            if columns == 1 or legend.get_window_extent().width / self.figure.dpi <= width:
                break
            legend.remove()
        return legend

    def _write(self, lines: Sequence[tuple[str, float, str, str]], y: float) -> None:
        """Write lines (text, size, weight, colour) from `y` inches downwards."""
        total = float(self.figure.get_figheight())
        for text, size, weight, colour in lines:
            style: Any = {"fontsize": size, "weight": weight, "color": colour, "va": "top"}
            self.figure.text(PAD / self.width, y / total, text, **style)
            y -= size * LINE / 72


def _text_height(lines: Sequence[tuple[str, float, str, str]]) -> float:
    return sum(size * LINE / 72 for _, size, _, _ in lines)


def wrap(
    text: str, size: float, width: float, bold: bool = False, inside: bool = True
) -> list[str]:
    """Break at spaces so that each line fits the width in inches.

    A no-break space is broken only in a part that is longer than a line.  `inside`: such a part is
    also broken after marks and between letters.  The middle of a text of more than LONGEST letters
    is left out, because every letter takes time.
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"
    font = FontProperties(size=size, weight="bold" if bold else "normal")

    def fits(line: str) -> bool:
        # Outlines are measured, so that the width is the same at every resolution.
        points = text_to_path.get_text_width_height_descent(line, font, "$" in line)[0]
        return bool(points / 72 <= width)

    def joined(parts: Sequence[str], breaks: Sequence[re.Pattern[str]]) -> list[str]:
        lines: list[str] = []
        for part in parts:
            if lines and fits((lines[-1] + part).rstrip()):
                lines[-1] += part
            elif fits(part.rstrip()) or not breaks or ("$" in part and len(breaks) < 3):
                lines.append(part)
            else:
                lines += joined(breaks[0].split(part), breaks[1:])
        return lines

    lines = joined(BREAKS[0].split(text), BREAKS[1:] if inside else [])
    return [line.strip(" \u00a0") for line in lines if line.strip(" \u00a0")]


def _height(legend: Any) -> float:
    return float(legend.get_window_extent().height / legend.figure.dpi)


def typeset(symbol: str) -> str:
    """Indices of a symbol as subscripts: ‖F_0‖_F, θ_{t−1}."""
    return re.sub(r"_(?:\{([^}]*)\}|(\w))", lambda m: f"$_{{{m[1] or m[2]}}}$", symbol)
