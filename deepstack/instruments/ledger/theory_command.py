"""The command `deepstack theory [--claim C9]…`, an alias of `deepstack reproduce`."""

from pathlib import Path

from deepstack.cli import options as opt
from deepstack.cli.commands import command
from deepstack.cli.completion import complete_names
from deepstack.instruments.ledger.reproduce_command import reproduce


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
    """Measure the claims of tier seconds, as `reproduce` does, and keep no files.

    Each claim is an experiment of seconds on one CPU thread. A claim that disagrees is a result
    too: the exit code is 0 for every verdict.
    """
    reproduce(
        claim, "seconds", Path("results"), json=json, markdown=markdown, charts=charts, seed=seed,
        thorough=thorough, plugin=plugin,
    )  # fmt: skip
