"""The command `deepstack fit DIR… --law depth|width|compute`."""

from __future__ import annotations

from typing import Literal

from deepstack.cli.options import Folders, Json, Last, Markdown, Where, option
from deepstack.cli.progress import show_work
from deepstack.cli.tables import emit, study_rows


def fit_command(
    directories: Folders = ["results"],
    law: Literal["depth", "width", "compute"] = option(
        "x of the law: depth, width d_model, or training FLOPs.", default="depth"
    ),
    where: Where = [],
    last: Last = None,
    markdown: Markdown = False,
    json: Json = False,
) -> None:
    """Fit L = E + c x^(-a) to final validation losses; print a, E and c with 95 % intervals.

    A row for each setting with four values of x or more. Intervals hold 95 % of bootstrap samples
    of the seeds, or of the points with one seed. residual: root mean square, in nats.
    """
    from deepstack.analysis.scaling_law import law_table

    with show_work("fitting"):
        rows = study_rows(
            directories, where, last, lambda runs: law_table(runs, law), f"no law of {law}"
        )
    emit(rows, json, markdown=markdown)
