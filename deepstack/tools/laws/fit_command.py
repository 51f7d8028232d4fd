"""The command `deepstack fit DIR… --law depth|width|compute|loops`."""

from functools import partial
from pathlib import Path
from typing import Literal

from deepstack.base import ConfigError
from deepstack.cli import (
    Folders,
    Json,
    Last,
    Markdown,
    Where,
    command,
    emit,
    log_figures,
    option,
    show_work,
    study_rows,
)


@command("Tools", "deepstack fit results/law --law compute")
def fit_command(
    directories: Folders = ["results"],
    law: Literal["depth", "width", "compute", "loops"] = option(
        "x of the law: depth, width d_model, or training FLOPs; loops: the worth of "
        "repeated layers.",
        default="depth",
    ),
    to: Path | None = option("Draw losses and laws into this folder.", "--to", metavar="FOLDER"),
    where: Where = [],
    last: Last = None,
    markdown: Markdown = False,
    json: Json = False,
) -> None:
    """Fit L = E + c x^(-a) to final validation losses; print a, E and c with 95 % intervals.

    A row for each setting with four values of x or more. Intervals are over seeds, from three seeds
    on. residual: root mean square, in nats.

    --law loops prints phi: layers that are run r times (model.unique_layers) have the loss of r^phi
    times as many layers that are run once.
    """
    if law == "loops":
        if to is not None:
            raise ConfigError("--to: found with --law loops, which has no chart; leave it out")
        from deepstack.tools.laws.loops import loop_table as law_table
    else:
        from deepstack.tools.laws.laws import law_table as table_of

        law_table = partial(table_of, law=law)

    with show_work("fitting"):
        rows = study_rows(directories, where, last, law_table, f"no law of {law}")
    emit(rows, json, markdown=markdown)
    if to is not None:
        from deepstack.plots import draw
        from deepstack.tools.laws.chart import draw_law

        charts = {"law_fit": partial(draw_law, law=law)}
        log_figures(draw(directories, charts, to, where=where, last=last))
