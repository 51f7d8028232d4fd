"""The command `deepstack conform FILE --scheme NAME`."""

from json import dumps
from pathlib import Path
from typing import Any

import typer

from deepstack.base import ConfigError, DifferenceError
from deepstack.cli import command, complete_names, emit, emit_json, log
from deepstack.cli import options as opt
from deepstack.records import replace


@command("Tools", "deepstack conform my_block.py --scheme deepnorm")
def conform_command(
    file: Path | None = typer.Argument(
        None, metavar="FILE", help="A Python file with build and PARAMETERS, or residual."
    ),
    overrides: list[str] = typer.Argument(
        [], metavar="KEY=VALUE", help="Settings of the reference, as in model.norm.kind=rms."
    ),
    scheme: str | None = opt.option(
        "The scheme to compare with: deepstack list schemes.",
        autocompletion=complete_names("schemes"),
    ),
    checks: str = opt.option("The comparisons to make.", default="forward,gradients,start,update"),
    tolerance: float = opt.option(
        "Largest relative difference; about 1e-5 for a block in single precision.", default=1e-9
    ),
    set_name: str | None = opt.option(
        "A dated set of checks and tolerances, as in 2026-12; the same in later versions.", "--set"
    ),
    badge: Path | None = opt.option(
        "Also write the result of the set as a badge for shields.io.", metavar="FILE.json"
    ),
    template: bool = opt.flag(
        "Print a file to fill in, with the scheme's parameters.", "--template"
    ),
    plugin: opt.Plugins = [],
    json: opt.Json = False,
) -> None:
    """Compare a PyTorch block with the reference of a scheme; name the first disagreement.

    With equal weights: forward pass and gradients at 2, 7 and 20 layers, the start of every
    parameter, and the first step of SGD and Adam. It exits 0, or 6 if they differ.
    """
    opt.load_plugins(plugin)
    from deepstack.tools.conform.conform import examine
    from deepstack.tools.conform.sets import SETS, badge_of
    from deepstack.tools.conform.template import template_of

    if scheme is None:
        name = file or "my_block.py"
        raise ConfigError(
            f"conform: --scheme is missing; type deepstack conform {name} --scheme deepnorm, or "
            "another scheme of deepstack list schemes"
        )
    if file is not None and "=" in file.name and not file.exists():  # a setting without a file
        file, overrides = None, [str(file), *overrides]
    settings = settings_of(overrides)
    if template:
        typer.echo(template_of(scheme, settings))
        return
    if file is None:
        raise ConfigError("conform: FILE is missing; --template prints one to fill in")
    if badge is not None and set_name is None:
        raise ConfigError(f"conform: --badge needs --set, which dates it: {', '.join(SETS)}")
    chosen = tuple(word.strip() for word in checks.split(","))
    report = examine(
        file, scheme, settings=settings, checks=chosen, tolerance=tolerance, set_name=set_name
    )
    if badge is not None:
        replace(badge, f"{dumps(badge_of(report), indent=2)}\n".encode())
    if json:
        difference = report.difference
        emit_json(
            {
                "agrees": difference is None,
                "difference": None if difference is None else vars(difference),
                "set": report.numbers.title or None,
                "scheme": report.scheme,
                "passed": report.passed,
                "checks": len(report.rows),
                "rows": report.rows,
                "layout": report.layout,
                "notes": report.notes,
                "seconds": report.seconds,
            }
        )
    else:
        emit(report.summary(), False)
    for note in report.notes:
        log(f"not compared: {note}")
    if title := report.numbers.title:
        rest = "" if report.difference is None else "; the first difference ends the set"
        log(f"{report.count_text} of {title} agree{rest}")
    if report.difference is not None:
        raise DifferenceError(report.text)
    log(f"{report.text} ({report.seconds:.0f} s)")


def settings_of(overrides: list[str]) -> dict[str, Any]:
    """Return the settings of the reference by key; raise ConfigError for other words."""
    from deepstack.config import Problem, parse_override

    settings = {}
    for text in overrides:
        try:
            path, node = parse_override(text)
        except Problem as problem:
            raise ConfigError(
                f"conform: {problem.text}; of the reference, as in model.norm.kind=rms"
            ) from problem
        settings[".".join(path)] = node.value
    return settings
