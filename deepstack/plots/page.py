"""A figure laid out in inches: title, panels, legends and caption, which never overlap."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
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
    """`rows` × `columns` panels; draw into `axes`, then `finish` measures and places everything.

    One column makes a figure for one column of a paper, more make one of a whole page.
    Nothing is ever put on top of data: legends stand below the panels.
    """

    def __init__(
        self, rows: int, columns: int, *, panels: int | None = None, height: float
    ) -> None:
        self.rows, self.columns, self.height = rows, columns, height
        self.width = COLUMN if columns == 1 else PAGE
        self.figure = Figure(figsize=(self.width, 2 * height * rows))
        FigureCanvasAgg(self.figure)
        count = rows * columns if panels is None else panels
        self.axes: list[Axes] = [
            self.figure.add_axes((0.1, 0.1, 0.5, 0.5), label=f"panel {i}") for i in range(count)
        ]
        self.bar: Axes | None = None
        self._legends: dict[int, tuple[list[Handle], str | None]] = {}

    def colour_bar(self, mappable: Any, label: str) -> Axes:
        """A colour bar to the right of all panels; returns its axes."""
        self.bar = self.figure.add_axes((0.9, 0.1, 0.02, 0.5), label="colour bar")
        self.figure.colorbar(mappable, cax=self.bar, label=label)
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
        legend_title: str | None = None,
    ) -> Figure:
        """Place everything; the figure is as high as it needs to be."""
        self._wrap_value_labels()
        self._measure_axes()
        self._wrap_panel_titles()
        inner = self.width - 2 * PAD
        heads = [(line, TITLE, "bold", "black") for line in wrap(title, TITLE, inner, True)]
        heads += [(line, SUBTITLE, "normal", "black") for line in wrap(subtitle, SUBTITLE, inner)]
        feet = wrap(" · ".join(caption), CAPTION, inner)
        top = PAD + sum(size * LINE / 72 for _, size, _, _ in heads) + PAD
        below = [
            self._legend(*entry, self._legend_room(panel)) for panel, entry in self._legends.items()
        ]
        below_height = max((_height(item) for item in below), default=0.0)
        common = self._legend(list(handles), legend_title, inner) if handles else None
        common_height = _height(common) if common else 0.0
        grid = self.rows * self.height + sum(self._tops) + sum(self._bottoms)
        foot = len(feet) * CAPTION * LINE / 72
        blocks = [top, grid, below_height, common_height, foot]
        total = sum(blocks) + PAD * (2 + sum(1 for block in blocks[2:4] if block))
        self.figure.set_size_inches(self.width, total)

        at = PAD
        for line, size, weight, colour in heads:
            self._text(line, at, total, size, weight=weight, color=colour)
            at += size * LINE / 72
        at = top
        for row in range(self.rows):
            at += self._tops[row]
            for column in range(self.columns):
                if (i := row * self.columns + column) < len(self.axes):
                    x = self._left + column * (self._panel + self._gap)
                    self.axes[i].set_position(self._box(x, at, self._panel, self.height, total))
            at += self.height + self._bottoms[row]
        if self.bar is not None:
            x = self._left + self.columns * (self._panel + self._gap) - self._gap + 0.1
            span = grid - self._tops[0] - self._bottoms[-1]
            box = self._box(x, top + self._tops[0], 0.09, span, total)
            self.bar.set_position(box)
        if below:
            at += PAD
            for panel, item in zip(self._legends, below, strict=True):
                x = self._legend_start(panel % self.columns)
                item.set_bbox_to_anchor((x / self.width, 1 - at / total))
            at += below_height
        if common is not None:
            at += PAD
            common.set_bbox_to_anchor((PAD / self.width, 1 - at / total))
            at += common_height
        at += PAD
        for line in feet:
            self._text(line, at, total, CAPTION, color=GREY)
            at += CAPTION * LINE / 72
        return self.figure

    def _measure_axes(self) -> None:
        """How far labels stick out of each panel, and so how wide the panels can be."""
        for axes in self.axes:
            # As high as it will be: a label longer than its axis sticks out too.
            axes.set_position((0.2, 0.25, 0.6 / self.columns, 0.5 / self.rows))
        self.figure.draw_without_rendering()
        dpi = self.figure.dpi
        renderer = self.figure.canvas.get_renderer()  # type: ignore[attr-defined]
        over = []
        for axes in self.axes:
            tight, box = axes.get_tightbbox(renderer), axes.bbox
            assert tight is not None
            over.append(
                [
                    max(inches, 0.0) / dpi
                    for inches in (
                        box.x0 - tight.x0,
                        tight.x1 - box.x1,
                        box.y0 - tight.y0,
                        tight.y1 - box.y1,
                    )
                ]
            )
        first = [sides for i, sides in enumerate(over) if i % self.columns == 0]
        others = [sides for i, sides in enumerate(over) if i % self.columns]
        self._left = PAD + max(sides[0] for sides in first)
        right = PAD + min(max(sides[1] for sides in over), 0.2)
        self._gap = 0.12 + max((sides[0] for sides in others), default=0.0)
        bar = 0.0
        if self.bar is not None:
            self.bar.set_position((0.5, 0.2, 0.02, 0.3))
            tight = self.bar.get_tightbbox(renderer)
            assert tight is not None
            bar = 0.1 + 0.09 + (tight.x1 - self.bar.bbox.x1) / dpi
        free = self.width - self._left - right - bar - (self.columns - 1) * self._gap
        self._panel = free / self.columns
        chunks = [over[row * self.columns : (row + 1) * self.columns] for row in range(self.rows)]
        self._tops = [max(sides[3] for sides in chunk) + 0.03 for chunk in chunks]
        self._bottoms = [max(sides[2] for sides in chunk) + 0.05 for chunk in chunks]

    def _wrap_value_labels(self) -> None:
        """Labels of y axes in as many lines as their height needs."""
        rooms = [(axes, self.height) for axes in self.axes]
        rooms += [(self.bar, self.rows * self.height)] if self.bar is not None else []
        for axes, room in rooms:
            size = float(axes.yaxis.label.get_fontsize())
            axes.set_ylabel("\n".join(wrap(axes.get_ylabel(), size, room, inside=False)))

    def _wrap_panel_titles(self) -> None:
        """Break panel titles into lines that fit, and reserve the height of these lines."""
        titles = [axes.get_title(loc="left") for axes in self.axes]
        lines = [wrap(title, SUBTITLE, self._panel + 0.05) for title in titles]
        for axes, wrapped in zip(self.axes, lines, strict=True):
            axes.set_title("\n".join(wrapped))
        for row in range(self.rows):
            most = max(map(len, lines[row * self.columns : (row + 1) * self.columns]))
            self._tops[row] += max(most - 1, 0) * SUBTITLE * LINE / 72

    def _legend_start(self, column: int) -> float:
        """Return the left edge of a legend below a panel; it may extend below the tick labels."""
        return max(self._left + column * (self._panel + self._gap) - 0.3, PAD)

    def _legend_room(self, panel: int) -> float:
        """How wide it can be before it runs into the next one, or off the page."""
        column = panel % self.columns
        last = column == self.columns - 1
        end = self.width - PAD if last else self._legend_start(column + 1) - 0.08
        return end - self._legend_start(column)

    def _legend(self, handles: list[Handle], title: str | None, width: float) -> Any:
        """A legend with as many columns as fit into the width, the rows filled evenly.

        A label that is longer than the width is wrapped.
        """
        most = min(len(handles), 8)
        size = FontProperties(size=mpl.rcParams["legend.fontsize"]).get_size_in_points()
        line = mpl.rcParams["legend.handlelength"] + mpl.rcParams["legend.handletextpad"] + 0.3
        room = width - line * size / 72
        labels = ["\n".join(wrap(str(h.get_label()), size, room)) for h in handles]
        title = title and "\n".join(wrap(title, size, width))
        # From one row on: as few rows as fit, each as full as the others.
        for columns in sorted({-(-len(handles) // rows) for rows in range(1, most + 1)} | {1})[
            ::-1
        ]:
            item = self.figure.legend(
                handles=handles,
                labels=labels,
                title=title,
                ncols=columns,
                loc="upper left",
                borderaxespad=0,
                alignment="left",
                bbox_to_anchor=(0, 1),
            )
            if columns == 1 or item.get_window_extent().width / self.figure.dpi <= width:
                return item
            item.remove()
        raise AssertionError("a legend without entries")

    def _box(
        self, x: float, down: float, width: float, height: float, total: float
    ) -> tuple[float, float, float, float]:
        return (
            x / self.width,
            1 - (down + height) / total,
            width / self.width,
            height / total,
        )

    def _text(self, line: str, down: float, total: float, size: float, **style: Any) -> None:
        self.figure.text(
            PAD / self.width, 1 - down / total, line, fontsize=size, va="top", ha="left", **style
        )


def wrap(
    text: str, size: float, width: float, bold: bool = False, inside: bool = True
) -> list[str]:
    """Break at spaces so that each line fits the width in inches.

    Not at no-break ones, unless what they join is longer than a line: that is broken there, and
    `inside` of words after marks and between letters.  The middle of a text of more than LONGEST
    letters is left out: nobody reads it, and every letter takes time.
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
