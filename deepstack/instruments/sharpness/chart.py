"""The chart of the sharpness."""

from typing import Any

from deepstack.plots import DASHES, Chart, Options, Overlay, axis_label, chart, draw_curves
from deepstack.runs import Runs

SHARPNESS, THRESHOLD = "preconditioned_sharpness", "stability_threshold"


@chart("sharpness_vs_step")
def sharpness_vs_step(runs: Runs, *, options: Options) -> Chart:
    """Sharpness of the preconditioned loss against the step, and the optimizer's threshold."""
    measured = runs.keep(
        lambda run: len(run.log("sharpness")),
        "no run has a sharpness.csv (log.sharpness_every is 0?)",
    )
    left = f"left out: {len(runs) - len(measured)} of {len(runs)} runs without log.sharpness_every"
    dashed: Any = {"ls": DASHES[1], "lw": 0.8}
    return draw_curves(
        measured,
        SHARPNESS,
        *([left] if len(measured) < len(runs) else []),
        title="Sharpness against step",
        y_label=axis_label(measured, SHARPNESS, "preconditioned sharpness"),
        options=options,
        source="sharpness",
        overlays=[Overlay(THRESHOLD, "sharpness", "level", "stability threshold", dashed)],
    )
