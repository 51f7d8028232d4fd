"""The names of the files of a chart."""

import re

from deepstack.plots.chart import ChartFunction, Options


def file_name(name: str, function: ChartFunction, options: Options) -> str:
    """Return the name of a chart's files: its own, or the user's words besides.

    `metric_val_loss_vs_depth_by_scheme`, `map_val_loss_over_depth_and_lr`,
    `scatter_val_loss_vs_update_first`.  The style `paper` names
    files after what they show alone: `val_loss_vs_depth_by_scheme`, `update_vs_depth_at_step_10`
    for a chart with an option that changes its values.
    """
    is_paper, words = options.style == "paper", getattr(function, "keywords", {})
    parts = [] if is_paper and name in ("metric", "map", "scatter") and words else [name]
    if name in ("metric", "scatter") and words:
        parts += [words["y"], "vs", words["x"]]
        parts += ["by", words["by"]] if words.get("by") else []
    elif name == "map" and words:
        parts += [words["value"], "over", words["x"], "and", words["y"]]
    parts += ["layers", words["layers"]] if words.get("layers") else []
    if is_paper:
        parts += [] if options.diagnostic == Options().diagnostic else [options.diagnostic]
        parts += [] if options.at_step is None else ["at_step", str(options.at_step)]
        parts += options.schemes
    return re.sub(r"[^\w-]+", "_", "_".join(map(str, parts)))  # LaTeX reads a dot as an ending
