"""The command `deepstack answer STUDY`."""

from pathlib import Path
from typing import Any

import typer

from deepstack.base import ConfigError, unknown
from deepstack.cli import (
    command,
    emit,
    emit_json,
    log,
    rows_of_studies,
    show_work,
    studies_below,
    terminal_width,
)
from deepstack.cli import options as opt
from deepstack.records import followed, writable


@command("Tools", "deepstack answer results/depth_sweep")
def answer_command(
    study: Path = typer.Argument(
        Path("results"),
        metavar="STUDY",
        help="A study or a run; for a results folder with several studies, the list of them.",
    ),
    question: str = opt.option("The question, which the page begins with.", default=""),
    format: str = opt.option(
        "terminal, or a file: html, markdown or latex.", default="terminal", metavar="FORMAT"
    ),
    to: Path | None = opt.option("Folder for the page and the figure (default: answer/ in STUDY)."),
    where: opt.Where = [],
    last: opt.Last = None,
    plugin: opt.Plugins = [],
    json: opt.Json = False,
) -> None:
    """Answer a study in one sentence, with interval, figure, table, commands and sources.

    The sentence depends on the settings that vary. It states a difference only if the 95 % interval
    excludes 0, and names the runs that would decide an open question.
    """
    opt.load_plugins(plugin)
    from deepstack.tools.answer.answer import FORMATS, NAME, answer

    if format not in FORMATS:
        raise ConfigError(unknown("--format", format, FORMATS))
    selection: dict[str, Any] = {"where": where, "last": last}
    with show_work("reading runs"):
        studies = studies_below(study, where, last)
    if len(studies) > 1:
        emit(rows_of_studies(studies, NAME), json, answer=["command"])
        log(f"{study} has {len(studies)} studies; answer takes one")
        return
    with show_work("reading runs"):
        page = answer(study, question, **selection)
    if json:
        emit_json(page.as_dict())
        return
    folder = writable(study / NAME) if to is None else followed(to)
    path = page.save(folder, format)
    if path is None:
        width = terminal_width()
        typer.echo(page.page("terminal", str(folder / NAME), width))
    else:
        typer.echo(path)
    for line in page.left_out:
        log(line)
