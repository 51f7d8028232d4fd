"""The command `deepstack signal CONFIG [key=a,b …]`."""

from pathlib import Path

import typer

from deepstack import config as conf
from deepstack.cli import command, emit, emit_json, log_figures, show_runs
from deepstack.cli import options as opt

SHOWN = (
    "setting", "depth", "side", "variance_last", "cosine_last", "angle_exponent",
    "gradient_exponent", "jacobian_ratio",
)  # fmt: skip
ANSWER = ("depth", "side", "variance_last", "gradient_exponent")


@command("Tools", "deepstack signal quick model.scheme=post_ln,deepnorm --depths 6,96")
def signal_command(
    config: opt.ConfigFile,
    overrides: list[str] = typer.Argument(
        [], metavar="KEY=A,B", help="Settings to change; several values make a grid, as in sweep."
    ),
    depths: str | None = opt.option("Depths to measure, as in 6,96,1000."),
    seeds: str | None = opt.option(
        "Seeds of each stack, as in 0,1,2 (default: three from the config's seed on)."
    ),
    workers: int | None = opt.option("Runs at a time.", min=1),
    out: opt.Out = Path("results"),
    study: opt.StudyName = None,
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    json: opt.Json = False,
) -> None:
    """Measure variance, token correlation and gradients of every layer before training.

    A row for each setting and depth, means over seeds. An exponent is a growth rate per layer. The
    angle exponent describes 1 − cosine between tokens; below 0, tokens become equal. The gradient
    exponent counts toward the input; above 0, gradients explode.
    """
    described = conf.load_study(config, overrides)
    name = conf.study_name(described.base, config, study, "_signal")
    opt.load_plugins(plugin)
    from deepstack.tools.signal.signal import signal

    with opt.located(config, overrides), show_runs("measuring", quiet) as show:
        measured = signal(
            described,
            depths=None if depths is None else opt.whole_numbers("--depths", depths),
            seeds=3 if seeds is None else opt.listed_seeds(seeds, quiet),
            study=name,
            out=out,
            workers=workers,
            show=show,
        )
    emit_json({"rows": measured.rows}) if json else emit(
        measured.rows, False, answer=ANSWER, first=SHOWN
    )
    if not quiet:
        from deepstack.plots import draw

        log_figures(draw(out / name, ["signal_by_layer"]))
