"""The command `deepstack calibrate CONFIG`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepstack.cli.options import (
    ConfigFile,
    Json,
    Out,
    Overrides,
    Plugins,
    Quiet,
    load_plugins,
    located,
    note,
)
from deepstack.cli.streams import log

if TYPE_CHECKING:
    from deepstack.sweeps import Calibration

SHOWN = ("exponent", "low", "high", "curvature", "smallest", "largest", "linearity")


def calibrate_command(
    config: ConfigFile,
    overrides: Overrides = [],
    depths: Annotated[
        str, typer.Option(help="Depths to measure, as in 6,12,24,48,96.")
    ] = "6,12,24,48,96",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds at each depth.")] = 3,
    steps: Annotated[
        str, typer.Option(help="Steps at which the update is measured, as in 1,10.")
    ] = "1,10",
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of the measurement (default: a hundredth of train.lr)."),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Also measure the corrected config; --no-check saves a third.")
    ] = True,
    interpolate: Annotated[
        int | None,
        typer.Option(
            "--interpolate",
            min=1,
            metavar="DEPTH",
            help="Write a config for this depth, with train.lr_factors interpolated between the "
            "measured depths in place of one exponent a role.",
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="The YAML file to write (default: in --out).")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time.")] = None,
    out: Out = Path("results"),
    study: Annotated[str | None, typer.Option(help="Name of the studies under --out.")] = None,
    plugin: Plugins = [],
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure how each role's update grows with depth; write a config whose update does not.

    A row for each step and role: ‖ΔF_role‖ grows as N^exponent; low to high is its 95 % interval
    over seeds; curvature is the coefficient of (log N)²; linearity is the update at half the rate
    over that at the full one (0.5: linear).
    """
    from deepstack import config as conf

    settings = conf.load_config(config, overrides)
    name = f"{conf.study_name(settings, config)}_calibration" if study is None else study
    name = conf.checked_study(name)
    load_plugins(plugin)
    from rich.console import Console

    from deepstack.cli.refine import progress_line, whole_numbers
    from deepstack.cli.tables import emit
    from deepstack.sweeps import calibrate

    with (
        located(config, overrides),
        Console(stderr=True, quiet=quiet).status("calibrating") as status,
    ):
        measured = calibrate(
            settings,
            depths=whole_numbers("--depths", depths),
            seeds=seeds,
            steps=whole_numbers("--steps", steps),
            lr=lr,
            check=check,
            study=name,
            out=out,
            workers=workers,
            show=lambda progress: status.update(progress_line(progress)),
        )
    target = to or out / f"{name}.yaml"
    corrected = measured.corrected if interpolate is None else measured.interpolated(interpolate)
    target.write_text(conf.to_yaml(corrected), encoding="utf-8")
    rows = rows_of(measured)
    if json:
        typer.echo(jsonlib.dumps({"rows": rows}, indent=2))
    else:
        emit(rows, False, first=SHOWN)
    if unmoved := unmoved_roles(measured):
        note(
            f"no exponent for {', '.join(unmoved)}: their change alone does not move F; their "
            "rates stay equal at all depths"
        )
    if not quiet:
        figures = draw_figures(measured)
        for line in (*figures, f"config: {target}"):
            log(line)


def rows_of(measured: Calibration) -> list[dict[str, Any]]:
    """Return the rows of the table; `after` is the exponent of the corrected configuration."""
    after = {(row.step, row.role): row for row in measured.rows_after}
    rows = []
    for row in measured.rows:
        values = row._asdict()
        if after:
            values["after"] = after[row.step, row.role].exponent
        rows.append(values)
    return rows


def unmoved_roles(measured: Calibration) -> list[str]:
    """Return the roles without an exponent, but for the head, which is no part of F."""
    from deepstack.analysis.calibration import TOGETHER

    known = {*measured.exponents, TOGETHER, "head"}
    return [role for role in dict.fromkeys(row.role for row in measured.rows) if role not in known]


def draw_figures(measured: Calibration) -> list[str]:
    """Draw ‖ΔF‖ by role against depth, before and after; return a line for each PNG."""
    from deepstack.plots import draw

    lines = []
    for runs in (measured.before, measured.after):
        if runs:
            paths = draw(runs[0].path.parent, ["update_by_role"], at_step=min(measured.steps))
            lines += [f"figure: {path}" for path in paths if path.suffix == ".png"]
    return lines
