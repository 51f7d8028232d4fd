"""The values that trackers get are the values of the run."""

from pathlib import Path

import numpy as np
from helpers.plot_runs import make_run

from deepstack.plots.tracked import heat_map_images
from deepstack.records import Run, RunFolder
from deepstack.runs.tracked import layer_summaries


def test_summaries_are_of_later_steps_and_of_finite_values(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path))
    folder.write_layers({"a": np.array([[9, 9, 9], [1, np.nan, 5], [2, 4, 9]])}, [0, 4, 12])
    both = layer_summaries(Run(folder.path), after=0)
    names = [f"layers/a/{name}" for name in ("mean", "min", "max")]
    numbers = {4: (3, 1, 5), 12: (5, 2, 9)}
    assert both == [(step, dict(zip(names, n, strict=True))) for step, n in numbers.items()]
    assert layer_summaries(Run(folder.path), after=4) == both[1:]


def test_heat_maps_are_the_charts_of_diagnostics_with_values(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path))
    layers = {"a": np.ones((2, 3)), "b": np.full((2, 3), np.nan), "c": -np.ones((2, 3))}
    folder.write_layers(layers, [0, 12])
    maps = list(heat_map_images(Run(folder.path)))
    assert [(key, step) for key, step, _ in maps] == [("layers/a", 12), ("layers/c", 12)]
    assert all(png.startswith(b"\x89PNG") for _, _, png in maps)
    alone = RunFolder(make_run(tmp_path / "alone"))
    alone.write_layers({"c": layers["c"]}, [0, 12])
    assert maps[1] == next(heat_map_images(Run(alone.path))), "nothing of the picture before stays"
