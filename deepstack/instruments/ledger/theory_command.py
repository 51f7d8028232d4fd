"""The command `deepstack theory [--claim C9]…`."""

import time
from pathlib import Path

import typer

from deepstack.base.errors import ConfigError
from deepstack.cli import options as opt
from deepstack.cli.commands import command
from deepstack.cli.completion import complete_names
from deepstack.cli.output import emit, emit_json, log


@command("Instruments", "deepstack theory --claim C9")
def theory_command(
    claim: list[str] = opt.option(
        "A claim to measure, as in C9; repeatable (default: all).",
        default=[],
        autocompletion=complete_names("instruments/ledger/claims", "claim"),
    ),
    json: opt.Json = False,
    markdown: opt.Markdown = False,
    charts: Path | None = opt.option(
        "Draw the charts as DIR/<claim>.png; keep DIR beside the page.",
        metavar="DIR",
        file_okay=False,
    ),
    seed: int = opt.option("Random seed.", default=0, min=0),
    thorough: bool = opt.flag("Draw 8 times as many samples, in 8 times the time.", "--thorough"),
    plugin: opt.Plugins = [],
) -> None:
    """Measure the claims of the source documents: predicted, measured, verdict.

    Each claim is an experiment of seconds on one CPU thread. A claim that does not hold is a result
    too: the exit code is 0 for every verdict.
    """
    if json and markdown:
        raise ConfigError("theory: found --json and --markdown; allowed one of them")
    import torch

    opt.load_plugins(plugin)
    from deepstack.instruments.ledger import report as reporting
    from deepstack.instruments.ledger.claims import CLAIMS, all_claims

    chosen = [CLAIMS[name] for name in dict.fromkeys(claim)] or all_claims()
    torch.set_num_threads(1)  # faster for small matrices, and the same numbers everywhere
    findings = []
    for one in chosen:
        began = time.perf_counter()
        finding = one.measure(seed, thorough)
        findings.append((one, finding))
        if charts is not None:
            reporting.draw(one, finding, charts)
        log(f"{one.id:>4} {time.perf_counter() - began:5.1f} s  {finding.verdict}")
    if json:
        emit_json(reporting.as_json(findings))
    elif markdown:
        typer.echo(reporting.page(findings, opt.command_line(), charts.name if charts else None))
    else:
        emit(reporting.rows(findings), False)
