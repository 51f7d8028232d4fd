"""The command `deepstack signal CONFIG [key=a,b …]`."""

from __future__ import annotations

import json as jsonlib
import shlex
from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli import options as opt
from deepstack.cli.streams import log

SHOWN = (
    "setting", "depth", "side", "variance_last", "cosine_last", "angle_exponent",
    "gradient_exponent", "jacobian_ratio",
)  # fmt: skip


def signal_command(
    config: opt.ConfigFile,
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=A,B", help="Settings to change; several values make a grid, as in sweep."
        ),
    ] = [],
    depths: str | None = opt.option("Depths to measure, as in 6,96,1000."),
    seeds: int = opt.option("Number of seeds of each stack.", default=3, min=1),
    workers: int | None = opt.option("Runs at a time.", min=1),
    out: opt.Out = Path("results"),
    study: opt.StudyName = None,
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    json: opt.Json = False,
) -> None:
    """Measure variance, token correlation and gradients of every layer before training.

    A row for each setting and depth, means over seeds. An exponent is a growth rate per layer. The
    angle exponent is that of 1 − cosine between tokens; below 0, tokens become equal. The gradient
    exponent counts toward the input; above 0, gradients explode.
    """
    from deepstack import config as conf

    described = conf.load_study(config, overrides)
    name = f"{conf.study_name(described.base, config)}_signal" if study is None else study
    name = conf.checked_study(name)
    opt.load_plugins(plugin)
    from rich.console import Console

    from deepstack.cli.refine import progress_line, whole_numbers
    from deepstack.cli.tables import emit
    from deepstack.sweeps import signal

    chosen = None if depths is None else whole_numbers("--depths", depths)
    with (
        opt.located(config, overrides),
        Console(stderr=True, quiet=quiet).status("measuring") as status,
    ):
        measured = signal(
            described,
            depths=chosen,
            seeds=seeds,
            study=name,
            out=out,
            workers=workers,
            show=lambda progress: status.update(progress_line(progress)),
        )
    if json:
        typer.echo(jsonlib.dumps({"rows": measured.rows}, indent=2))
    else:
        emit(measured.rows, False, first=SHOWN)
    if not quiet:
        from deepstack.plots import draw

        for path in draw(out / name, ["signal_by_layer"]):
            if path.suffix == ".png":
                log(f"figure: {path}")
        opt.note(
            f"a map: deepstack plot map {shlex.quote(str(out / name))} --x KEY --y KEY "
            "--value stream_grad --layers growth"
        )
