"""The command `deepstack calibrate CONFIG`."""

from collections.abc import Sequence
from pathlib import Path

from deepstack import config as conf
from deepstack.cli import command, emit, emit_json, log, log_figures, show_runs
from deepstack.cli import options as opt
from deepstack.records import followed, replace

ANSWER = ("role", "exponent", "low", "high")
SHOWN = ("exponent", "low", "high", "curvature", "smallest", "largest", "linearity")


@command("Tools", "deepstack calibrate quick --depths 6,12,24")
def calibrate_command(
    config: opt.ConfigFile,
    overrides: opt.Overrides = [],
    depths: str = opt.option("Depths to measure, as in 6,12,24,48,96.", default="6,12,24,48,96"),
    seeds: str | None = opt.option(
        "Seeds at each depth, as in 0,1,2 (default: three from the config's seed on)."
    ),
    steps: str = opt.option("Steps at which the update is measured, as in 1,10.", default="1,10"),
    lr: float | None = opt.option(
        "Learning rate of the measurement (default: a hundredth of train.lr)."
    ),
    alone: bool = opt.flag("Also train each role alone, for steps after the first.", "--alone"),
    check: bool = opt.option(
        "Also measure the corrected config; --no-check saves a third.", default=True
    ),
    interpolate: int | None = opt.option(
        "Write a config for this depth, with train.lr_factors interpolated between the "
        "measured depths in place of one exponent a role.",
        min=1,
        metavar="DEPTH",
    ),
    to: Path | None = opt.option("The YAML file to write (default: in --out)."),
    workers: int | None = opt.option("Runs at a time.", min=1),
    out: opt.Out = Path("results"),
    study: str | None = opt.option("Name of the studies under --out."),
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    json: opt.Json = False,
) -> None:
    """Measure how each role's update grows with depth; write a config whose update does not.

    A row for each step and role: ‖ΔF_role‖ grows as N^exponent; low to high is its 95 % interval
    over seeds; curvature is the coefficient of (log N)²; linearity is the update at half the rate
    over that at the full one (0.5: linear).
    """
    settings = conf.load_config(config, overrides)
    name = conf.study_name(settings, config, study, "_calibration")
    opt.load_plugins(plugin)
    from deepstack.tools.calibrate.calibrate import calibrate

    with opt.located(config, overrides), show_runs("calibrating", quiet) as show:
        measured = calibrate(
            settings,
            depths=opt.whole_numbers("--depths", depths),
            seeds=3 if seeds is None else opt.listed_seeds(seeds, quiet),
            steps=opt.whole_numbers("--steps", steps),
            lr=lr,
            alone=alone,
            check=check,
            study=name,
            out=out,
            workers=workers,
            show=show,
        )
    target = to or out / f"{name}.yaml"
    corrected = measured.corrected if interpolate is None else measured.interpolated(interpolate)
    replace(followed(target.parent) / target.name, conf.to_yaml(corrected).encode())
    after = {(row.step, row.role): {"after": row.exponent} for row in measured.rows_after}
    rows = [row._asdict() | after.get((row.step, row.role), {}) for row in measured.rows]
    emit_json({"rows": rows}) if json else emit(rows, False, answer=ANSWER, first=SHOWN)
    if measured.unmoved:
        log(
            f"no exponent for {', '.join(measured.unmoved)}: their change alone does not move F; "
            "their rates stay equal at all depths"
        )
    if not quiet:
        from deepstack.plots import Options, draw

        for runs in filter(None, (measured.before, measured.second, measured.after)):
            folder, options = runs[0].path.parent, Options(at_step=min(measured.steps))
            log_figures(draw(folder, ["update_by_role"], options=options))
        for line in meaning_of(corrected, measured.depths):
            log(line)
        log(f"config: {target}")


def meaning_of(corrected: conf.Config, depths: Sequence[int]) -> list[str]:
    """Return the depth at which the written rate counts, and the depths that were not measured.

    corrected: the config that is written.
    depths: those measured.
    """
    train, depth = corrected.train, corrected.model.depth
    text = f"train.lr {train.lr:g} counts at N = {train.base_depth} (train.base_depth)"
    if depth != train.base_depth:
        text += f"; if it was chosen at N = {depth}, repeat this with train.base_depth={depth}"
    lines = [text]
    outside = {n for n in (depth, train.base_depth) if not min(depths) <= n <= max(depths)}
    for n in sorted(outside):
        lines.append(
            f"N = {n} lies outside the measured depths, {min(depths)} to {max(depths)}: its "
            "factors are extrapolated"
        )
    return lines
