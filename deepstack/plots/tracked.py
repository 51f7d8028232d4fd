"""The pictures of a run as trackers take them, and all its values with them."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from deepstack.records import Run
from deepstack.runs.tracked import scalars


def heat_map_images(run: Run) -> Iterator[tuple[str, int, bytes]]:
    """Yield (key, last step, PNG) of a heat map of each diagnostic, over layers and steps."""
    from deepstack.plots.heat_maps import HeatMap

    figures: dict[tuple[int, ...], HeatMap] = {}
    for name in run.layer_names():
        steps, values = run.layers(name)
        if len(steps) and np.isfinite(values).any():
            shape = (*steps.tolist(), values.shape[1])
            if shape not in figures:
                figures[shape] = HeatMap(run, steps, values.astype(float))
            yield f"layers/{name}", int(steps[-1]), figures[shape].png(name, values.astype(float))


def log_values(run: Run, log: Callable[..., Any], picture: Callable[[Any], Any]) -> None:
    """Log the values of each step, and the pictures with the last one."""
    from PIL import Image

    last = 0
    for last, values in scalars(run):
        log(values, step=last)
    pictures = {key: picture(Image.open(io.BytesIO(png))) for key, _, png in heat_map_images(run)}
    log(pictures, step=last)
