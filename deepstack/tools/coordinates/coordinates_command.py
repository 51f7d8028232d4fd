"""The command `deepstack coordinates FILE`."""

import sys
from contextlib import redirect_stdout
from pathlib import Path

import typer

from deepstack.base import DifferenceError, ResourceError
from deepstack.cli import command, emit, emit_json, log, log_figures, show_work
from deepstack.cli import options as opt

ANSWER = ("module", "over", "breaks")


@command("Tools", "deepstack coordinates build.py --widths 32,64,128 --depths 4,16,64")
def coordinates_command(
    file: Path = typer.Argument(
        ..., metavar="FILE", help="A Python file with build, batch, and optimizer and loss."
    ),
    widths: str = opt.option(
        "Widths at the least depth; one leaves them out.", default="32,64,128"
    ),
    depths: str = opt.option("Depths at the least width; one leaves them out.", default="4,16,64"),
    rule: str = opt.option("The rule: mup, completep or depth-mup.", default="completep"),
    seeds: str = opt.option("Seeds of each model.", default="0,1,2,3,4"),
    steps: str = opt.option("Steps after which changes are measured.", default="1,3,10"),
    tolerance: float = opt.option(
        "Distance from the allowed exponents outside of which a whole interval must lie.",
        default=0.25,
    ),
    out: opt.Out = Path("results"),
    quiet: opt.Quiet = False,
    json: opt.Json = False,
) -> None:
    """Check µP, CompleteP or depth-µP in your PyTorch model; name the first wrong module.

    A row for each module: exponents in width and in depth of its output's size and of its change
    after some steps, with half of their 95 % intervals over seeds. It exits 0, or 6 if a module
    breaks the rule, with the usual cause (docs/coordinates.md).
    """
    from deepstack.tools.coordinates.check import coordinates

    with show_work("training", quiet) as work, redirect_stdout(sys.stderr):
        check = coordinates(
            file,
            widths=opt.whole_numbers("--widths", widths),
            depths=opt.whole_numbers("--depths", depths),
            rule=rule,
            seeds=opt.listed_seeds(seeds, quiet),
            steps=opt.whole_numbers("--steps", steps),
            tolerance=tolerance,
            show=lambda text, done, total: work.show(text, done, total),
        )
    emit_json(check.as_json()) if json else emit(check.table(), False, answer=ANSWER)
    for line in (*check.notes, *(f"{why}: {', '.join(n)}" for why, n in check.left_out.items())):
        log(line)
    unwritten = None
    if not quiet:
        from deepstack.plots import save
        from deepstack.tools.coordinates.figure import draw

        try:
            log_figures(save(draw(check), out / f"{file.stem}_coordinates", "coordinates"))
        except (OSError, ResourceError) as error:  # the verdict counts more than its figure
            unwritten = error
    if not check.holds:
        if unwritten:
            log(f"no figure: {unwritten}")
        raise DifferenceError(check.text)
    log(f"{check.text} ({check.seconds:.0f} s)")
    if unwritten:
        raise unwritten
