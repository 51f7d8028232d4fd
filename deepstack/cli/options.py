"""Options that several commands share."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from deepstack.base import plugins
from deepstack.base.errors import ConfigError, PluginError
from deepstack.cli.completion import (
    complete_config,
    complete_key,
    complete_names,
    complete_setting,
    complete_sort,
    complete_where,
)
from deepstack.cli.streams import log
from deepstack.config import locate
from deepstack.config.left_over import name_left_over
from deepstack.config.load import example_or_file, is_empty


def option(
    help: str, *names: str, default: Any = None, panel: str | None = None, **more: Any
) -> Any:
    """Return an option of a command as the default of its parameter.  panel: its heading."""
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **more)


flag = partial(option, default=False)
selection = partial(typer.Option, rich_help_panel="Selection of runs")

Out = Annotated[Path, typer.Option("--out", help="Folder for all results.")]
StudyName = Annotated[str | None, typer.Option(help="Folder of the runs under --out.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")]
Latex = Annotated[
    bool,
    typer.Option("--latex", help="Print LaTeX with booktabs, for a paper, instead of a table."),
]
Plugins = Annotated[
    list[Path],
    typer.Option("--plugin", help="A Python file with your schemes, tasks, …; repeatable."),
]
ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, a run's config.yaml, or an example: deepstack list configs.",
        callback=example_or_file,
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings to change, as in model.depth=48.",
        autocompletion=complete_setting,
    ),
]
AllowEnvChange = Annotated[
    bool,
    typer.Option(
        "--allow-env-change", help="Resume a run that started in a different environment."
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Folders = Annotated[
    list[str], typer.Argument(metavar="DIR", help="Results folders, studies or runs.")
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="A baseline, or a scheme's name: print val_loss minus the val_loss of the baseline's "
        "run with the same other settings, seed by seed.",
    ),
]
Best = Annotated[
    list[str],
    selection(
        metavar="KEY",
        autocompletion=complete_key,
        help="For each setting and depth, use only the best value of KEY, such as train.lr; "
        "repeatable. Step charts show the best learning rate; `--best none` shows all.",
    ),
]
Where = Annotated[
    list[str],
    selection(
        metavar="KEY=A,B",
        autocompletion=complete_where,
        help="Only runs with these values, as in depth=6,48, lr<0.01, state!=failed, "
        "outcome=trained or tag=good; repeatable.",
    ),
]
Sort = Annotated[
    str | None,
    selection(
        metavar="COLUMN",
        autocompletion=complete_sort,
        help="Order by a column or setting; descending with -COLUMN.",
    ),
]
Last = Annotated[
    int | None,
    selection(min=1, help="Only so many runs, those created last."),
]
AtStep = Annotated[
    int | None,
    typer.Option(
        "--at-step",
        min=1,
        help="Step for charts of update, attribution and bound against depth "
        "(default: the last shared one).",
    ),
]
Diagnostic = Annotated[
    str | None,
    typer.Option(
        help="Diagnostic for layer_step_heat_map and last_layer_vs_step.",
        autocompletion=complete_names("diagnostics", interval="every layer"),
    ),
]


def whole_numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a comma-separated list.  Raises ConfigError for anything else."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: found {text!r}; allowed whole numbers, as in 6,12") from None


def listed_seeds(text: str, quiet: bool) -> list[int]:
    """Return the seeds that --seeds lists, as in 0,1,2; log a line on a number alone.

    Raises ConfigError for anything else.
    """
    seeds = whole_numbers("--seeds", text)
    if min(seeds) < 0:
        raise ConfigError(f"--seeds: found {text!r}; allowed seeds from 0 on, as in 0,1,2")
    if len(seeds) == 1 and seeds[0] > 1 and not quiet:
        several = ",".join(map(str, range(min(seeds[0], 3))))
        log(f"--seeds {text} trains seed {text} only; for several seeds: --seeds {several}")
    return seeds


def load_plugins(paths: list[Path]) -> None:
    """Load the files given with --plugin, with their output on stderr; import torch only then.

    A run's own copies of them may be loaded without --plugin from now on.
    """
    with redirect_stdout(sys.stderr):
        plugins.load_plugins(paths)
    if paths:
        from deepstack.records.given_plugins import remember

        remember(plugin.sha256 for plugin in plugins.LOADED.values())


def command_line() -> str:
    """Return the command that the user has typed, quoted for a shell."""
    return shlex.join(["deepstack", *sys.argv[1:]])


def note_empty(config: Path) -> None:
    """Log a line if a configuration file has no setting."""
    if is_empty(config):
        log(f"{config} has no settings: all but those on the command line have their defaults")


@contextmanager
def located(config: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Add file and line to errors of packages that know only the key of a setting."""
    try:
        yield
    except ConfigError as error:
        if error.key is None or isinstance(error, PluginError):
            raise
        text = name_left_over(config, overrides, error.key, str(error))
        text = text or f"{locate(config, overrides, error.key)}: {error}"
        raise ConfigError(text) from None
