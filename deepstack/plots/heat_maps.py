"""Heat maps of all diagnostics of a run, drawn one after the other in one figure.

The chart layer_step_heat_map is laid out anew for each diagnostic, which takes most of its time,
and a run has about fifty of them.  Here the layout is fixed, and what is equal is drawn once.
"""

import io
from typing import Any, cast

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from deepstack.config.key import Key
from deepstack.plots.page import CAPTION, PAD, SUBTITLE, TITLE, axis_label, scale_colour_bar, wrap
from deepstack.plots.panel import draw_cells, drawable_cells, scale_of
from deepstack.plots.style import COLUMN_WIDTH, GREY, STYLE, deepstack_style
from deepstack.plots.texts import drawn
from deepstack.records import Run
from deepstack.runs.captions import sides_note, title_of
from deepstack.runs.runs import Runs

HEIGHT = 2.8  # inches, with two lines of title and one of notes
CELLS, BAR = (0.12, 0.19, 0.62, 0.63), (0.75, 0.19, 0.022, 0.63)  # left, bottom, width, height


class HeatMap:
    """A figure of values over the layers and these steps, which are then replaced by others."""

    def __init__(self, run: Run, steps: np.ndarray, values: np.ndarray) -> None:
        self.runs = Runs([run])
        with deepstack_style():
            self.figure = Figure(figsize=(COLUMN_WIDTH, HEIGHT), dpi=STYLE["savefig.dpi"])
            self.canvas = cast(Any, FigureCanvasAgg(self.figure))  # it has no types
            axes = self.figure.add_axes(CELLS)
            self.mesh = draw_cells(axes, steps, values, scale_of(values))
            left = PAD / COLUMN_WIDTH
            self.title = self.figure.text(left, 0.89, "", size=TITLE, weight="bold")
            words = drawn(title_of(self.runs, self.runs.split().series))
            self.figure.text(left, 0.84, words, size=SUBTITLE)
            self.notes = self.figure.text(left, 0.02, "", size=CAPTION, color=GREY)
            for artist in (self.mesh, self.title, self.notes):
                artist.set_animated(True)  # not drawn here
            self.canvas.draw()
            self.still = self.canvas.copy_from_bbox(self.figure.bbox)

    def png(self, name: str, values: np.ndarray) -> bytes:
        """Return the picture of a diagnostic.  values: (steps, layers), one of them finite."""
        words = Key(name).words
        notes = sides_note(self.runs)
        with deepstack_style():
            scale = scale_of(values)
            cells = drawable_cells(values, scale)
            self.mesh.set(array=cells, norm=scale)
            bar = self.figure.colorbar(self.mesh, cax=self.figure.add_axes(BAR))
            label = axis_label(self.runs, name, words)
            scale_colour_bar(bar.ax, self.mesh, label, HEIGHT * BAR[3])
            title = f"{words[0].upper()}{words[1:]} by layer and step"
            lines = wrap(title, TITLE, COLUMN_WIDTH - 2 * PAD, "bold")[:2]
            self.title.set_text("\n".join(map(drawn, lines)))
            notes += ["grey: zero or not finite"] if cells.mask.any() else []
            self.notes.set_text(" · ".join(notes))
            self.canvas.restore_region(self.still)
            for artist in (self.mesh, bar.ax, self.title, self.notes):
                self.figure.draw_artist(artist)
            bar.remove()
            buffer = io.BytesIO()
            Image.fromarray(np.asarray(self.canvas.buffer_rgba())).save(
                buffer, "png", compress_level=1
            )
        return buffer.getvalue()
