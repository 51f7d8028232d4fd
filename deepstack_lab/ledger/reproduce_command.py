"""The command `deepstack reproduce [ID…]`."""

from pathlib import Path
from typing import Literal

import typer

from deepstack.base import ConfigError
from deepstack.cli import command, complete_names, emit, emit_json, log, show_runs
from deepstack.cli import options as opt


@command("Tools", "deepstack reproduce DN-5 --tier cpu")
def reproduce_command(
    ids: list[str] = typer.Argument(
        [],
        metavar="ID",
        help="Entries to measure, as in C9 or DN-5 (default: all).",
        autocompletion=complete_names("claims"),
    ),
    tier: Literal["seconds", "cpu", "gpu"] = opt.option(
        "Highest cost: seconds of one thread, minutes of a CPU, or a GPU. Entries above it are "
        "read if their runs are finished.",
        default="seconds",
    ),
    recorded: bool = opt.flag(
        "Print the results that earlier calls kept in --out; measure nothing.", "--recorded"
    ),
    json: opt.Json = False,
    markdown: opt.Markdown = False,
    charts: Path | None = opt.option(
        "Draw the charts as DIR/<ID>.png; keep DIR beside the page.",
        metavar="DIR",
        file_okay=False,
    ),
    seed: int = opt.option(
        "Another number measures with other seeds, and keeps the results in ledger_seed_N/.",
        default=0,
        min=0,
    ),
    thorough: bool = opt.flag(
        "Draw 8 times as many samples in entries without runs, in 8 times the time.", "--thorough"
    ),
    workers: int | None = opt.option("Runs at a time (default: by cores, memory, GPUs).", min=1),
    out: opt.Out = Path("results"),
    quiet: opt.Quiet = False,
    plugin: opt.Plugins = [],
) -> None:
    """Measure published statements about depth again: number, interval, verdict.

    Each entry of the ledger has a source, a rule, and a null result that the rule rejects; an entry
    whose rule was changed after a run says so. A verdict reaches as far as its measurement: "not
    seen at this size" stands for "disagrees" where these stacks lie outside of the source's range.
    The command trains the runs that an entry lacks, in ordinary run
    folders below --out, and keeps the result as ledger/<ID>.json there. A repeated call continues.
    A statement that does not agree is a result too: the exit code is 0 for every verdict.
    """
    reproduce(
        ids, tier, out, recorded=recorded, json=json, markdown=markdown, charts=charts,
        seed=seed, thorough=thorough, workers=workers, quiet=quiet, plugin=plugin, keep=True,
    )  # fmt: skip


def reproduce(
    ids: list[str],
    tier: Literal["seconds", "cpu", "gpu"],
    out: Path,
    *,
    json: bool,
    markdown: bool,
    charts: Path | None,
    seed: int,
    thorough: bool,
    plugin: list[Path],
    recorded: bool = False,
    workers: int | None = None,
    quiet: bool = False,
    keep: bool = False,
) -> None:
    """Measure entries, all of them without ids, and print the results.

    recorded: read earlier results instead.
    keep: whether to write the results below `out`.
    """
    if json and markdown:
        raise ConfigError("found --json and --markdown; allowed one of them")
    import torch

    opt.load_plugins(plugin)
    from deepstack_lab.ledger import measured, report
    from deepstack_lab.ledger.claims import CLAIMS, all_claims

    chosen = [CLAIMS[name] for name in dict.fromkeys(ids)] or all_claims()
    torch.set_num_threads(1)  # faster for small matrices, and the same numbers everywhere
    results = []
    for entry in chosen:
        if recorded:
            one = measured.recorded(entry, out, seed)
        else:
            with show_runs(entry.id, quiet) as show:
                one = measured.measure(
                    entry, tier, out, seed=seed, thorough=thorough, workers=workers, show=show
                )
            if keep and one.finding:
                measured.save(one, out, report.as_json(one), seed)
            if not quiet:
                log(f"{entry.id:>5} {one.seconds:5.1f} s  {one.verdict}")
        results.append(one)
        if charts is not None and one.finding:
            report.draw(entry, one.finding, charts)
    if json:
        emit_json([report.as_json(one) for one in results])
    elif markdown:
        typer.echo(report.page(results, opt.command_line(), charts.name if charts else None))
    else:
        emit(report.rows(results), False)
