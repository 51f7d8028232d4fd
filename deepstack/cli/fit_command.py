"""The command `deepstack fit DIR… --law depth|width|compute`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deepstack.cli.options import Folders, Json, Last, Markdown, Where, note
from deepstack.cli.progress import show_work
from deepstack.cli.streams import log


def fit_command(
    directories: Folders = ["results"],
    law: Annotated[
        Literal["depth", "width", "compute"],
        typer.Option(help="x of the law: depth, width d_model, or training FLOPs."),
    ] = "depth",
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="Draw losses and laws into this folder."),
    ] = None,
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
    from deepstack.analysis.studies import find_studies
    from deepstack.cli.tables import emit
    from deepstack.errors import NothingMatchedError

    rows: list[dict[str, Any]] = []
    with show_work("fitting"):
        studies, skipped = find_studies(directories, where=where, last=last)
        for study, runs in studies.items():
            before = {"study": study.name} if len(studies) > 1 else {}
            try:
                fitted, notes = law_table(runs, law)
            except NothingMatchedError as error:
                fitted, notes = [], [str(error)]
            rows += [before | row for row in fitted]
            skipped += [": ".join([*before.values(), line]) for line in notes]
    if not rows:
        raise NothingMatchedError("\n".join([f"no law of {law}", *skipped]))
    for line in skipped:
        note(line)
    emit(rows, json, markdown=markdown)
    if to is not None:
        from deepstack.plots.files import draw
        from deepstack.plots.law import draw_law

        functions = {"law_fit": partial(draw_law, law=law)}
        for path in draw(directories, functions=functions, out=to, where=where, last=last):
            log(f"figure: {path}")
