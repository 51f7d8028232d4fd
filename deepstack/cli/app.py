"""Defines the command line application and prints its errors."""

import atexit
import gc
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import deepstack
from deepstack.base import torchrun
from deepstack.base.ending import flush_stdout, one_line_endings, print_traceback
from deepstack.base.errors import ConfigError, DeepstackError, Interrupted
from deepstack.base.plugins import bug_in
from deepstack.base.registry import nearest
from deepstack.cli.commands import HEADINGS, Described, find_commands
from deepstack.cli.cursor import cut_word_at_equals
from deepstack.cli.streams import log, printable_streams

_CONTINUE = "an interrupted run continues when its train or sweep command is repeated"
_STEPS = "training is measured in steps: train.steps=VALUE"
COMMANDS_ELSEWHERE = {
    "run": "did you mean 'train' (one run), 'sweep' (a grid) or 'rerun' (a recorded run)?",
    **dict.fromkeys(("resume", "continue"), _CONTINUE),
    **dict.fromkeys(("show", "status", "runs"), "did you mean 'ls'?"),
    **dict.fromkeys(("delete", "remove"), "did you mean 'rm'?"),
    **dict.fromkeys(("claim", "claims", "theory"), "did you mean 'reproduce'?"),
    "refine": "did you mean 'sweep --refine'?",
    "tag": "did you mean 'note RUN --tag WORD'?",
    "watch": "did you mean 'ls --watch'?",
    "serve": "did you mean 'report --serve'?",
    "diff": "did you mean 'compare RUN RUN --diff'?",
    "transfer": "did you mean 'compare --transfer'?",
    "probe": "it is a function for your own training loop: deepstack.probe",
    "bench": "it is a tool of the source tree: python -m benchmarks",
}
OPTIONS_ELSEWHERE = {
    **dict.fromkeys(("resume", "continue", "ckpt"), _CONTINUE),
    **dict.fromkeys(("epochs", "epoch", "max_epochs"), _STEPS),
    "host": "the page is for this machine alone; from another: ssh -L 8765:127.0.0.1:8765 HOST",
}
"""Words of other programs, and the text to type here."""
SYNONYMS = {"out": "to", "tag": "where tag=WORD", "jobs": "workers"}
"""Options of some commands, and the options of other commands that do the same."""


@contextmanager
def reported_errors() -> Iterator[None]:
    """Print the errors of a command in a few lines on stderr and set the exit code.

    A bug in deepstack keeps its traceback; a bug in a plugin shows the plugin's line.
    """
    try:
        yield
    except DeepstackError as error:
        common = isinstance(error, ConfigError | Interrupted)  # all ranks raise it
        speaker = torchrun.speaker() if common else ""
        if str(error) and speaker is not None:
            log(f"deepstack: {speaker}{error}")
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        # The reader of stdout has closed it, as `| head` does; the work itself is done.
        flush_stdout()
        raise typer.Exit(0) from None
    except Exception as error:
        if suggest := CORRECTIONS.get(type(error).__name__):
            suggest(error)
            raise
        if (bug := bug_in(error)) is None:
            raise
        log(f"deepstack: {bug}")
        raise typer.Exit(DeepstackError.exit_code) from None


class Commands(dict[str, Any]):
    """The commands of typer by name; the first use of one imports its module."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(find_commands()))

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            self[name] = command_of(name, find_commands()[name])
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default


class CommandGroup(TyperGroup):
    """The group of all commands, which reports their errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"commands": Commands()})

    def main(self, *args: Any, **kwargs: Any) -> Any:
        cut_word_at_equals()
        with printable_streams():
            return super().main(*args, **kwargs)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0].lower()
        if word not in find_commands() and not ctx.resilient_parsing:  # set by a completion
            if hint := COMMANDS_ELSEWHERE.get(word) or hint_for_no_command(args):
                ctx.fail(f"No such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        described = find_commands().items()
        for heading in HEADINGS:
            commands = [(name, one) for name, one in described if one.heading == heading]
            rows = [(name, one.summary) for name, one in commands]
            if rows:  # no instrument may be left
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        with reported_errors():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command whose help lists options below the heading of their group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {"Arguments": []}
        for one in self.get_params(ctx):
            heading = "Arguments" if one.param_type_name == "argument" else "Options"
            heading = getattr(one, "rich_help_panel", None) or heading
            if (row := one.get_help_record(ctx)) is not None:
                groups.setdefault(heading, []).append(row)
        for heading in sorted(groups, key="Options".__eq__):  # the ungrouped ones last
            if groups[heading]:
                with formatter.section(heading):
                    formatter.write_dl(groups[heading])


def hint_for_no_command(words: Sequence[str]) -> str:
    """Return the text to type for a configuration or a folder in place of a command, or ''."""
    from deepstack.config.load import example_paths

    path = Path(words[0])
    if path.is_dir():
        return f"it is a folder: deepstack ls {shlex.join(words)}"
    file = path if path.is_file() else example_paths().get(words[0])
    if file is None or file.suffix not in (".yaml", ".yml"):
        return ""
    is_sweep = "\nsweep:" in f"\n{file.read_text(encoding='utf-8', errors='replace')}"
    return (
        f"it is a configuration: deepstack {'sweep' if is_sweep else 'train'} {shlex.join(words)}"
    )


def name_missing(error: Any) -> None:
    """Add the allowed words, or the command's example, to the message of a missing argument."""
    if error.param is not None and error.param.metavar == "KIND":
        from deepstack.cli.listing import listings

        error.message = f"One of: {', '.join(listings())}, as in: deepstack list schemes"
    elif error.ctx is not None and (example := (error.ctx.command.epilog or "")):
        error.message = f"For example: {example.removeprefix('Example: ')}"


def suggest_for_extra_words(error: Any) -> None:
    """Add the text to type to the message of words that a command does not take."""
    match = re.search(r"unexpected extra argument\S* \((\S*).*\)", error.message)
    options = {one.name for one in error.ctx.command.params} if match else set()
    if match and "where" in options and "=" in match[1]:
        error.message += f"; to select runs: --where {shlex.quote(match[1])}"
    elif "text" in options:
        error.message += '; put the text in quotes: note RUN "TEXT"'
    elif match and "study" in options and "question" in options:
        error.message += "; one study at a time: deepstack answer STUDY; studies side by side: "
        error.message += "deepstack compare STUDY STUDY"
    elif "directory" in options:
        error.message += "; allowed one folder, and the folder above several has the runs of all"


def suggest_option(error: Any) -> None:
    """Add the nearest option or setting to the message of an unknown option.

    For example, `--seed 1` suggests `seed=VALUE`.
    """
    from deepstack.config.keys import setting_keys

    word = error.option_name.lstrip("-").replace("-", "_")
    parameters = error.ctx.command.params
    options = [text[2:] for one in parameters for text in one.opts if text.startswith("--")]
    synonym = SYNONYMS.get(word, "")
    near = synonym if synonym.split(" ")[0] in options else nearest(word, options)
    settings = [key for key in setting_keys() if word in (key, key.rpartition(".")[2])]
    takes_settings = any(one.name in ("overrides", "words") for one in parameters)
    if word in OPTIONS_ELSEWHERE:
        hint = OPTIONS_ELSEWHERE[word]
    elif settings and takes_settings and not (near and near.startswith(word)):
        hint = f"did you mean {settings[0]}=VALUE?"
    elif near:
        hint = f"did you mean --{near}?"
    else:
        return
    error.possibilities = None
    error.message = f"No such option: {error.option_name}; {hint}"


def name_value(error: Any) -> None:
    """Write the found and the allowed value into the message, without the words of pydantic."""
    from deepstack.base.allowed import describe

    error.message = error.message.removeprefix("Value error, ")
    kind = getattr(getattr(error.param, "type_descriptor", None), "annotation", None)
    cause = error.__cause__
    if not hasattr(cause, "errors"):
        return
    found = cause.errors()[0]["input"]
    if near := nearest(str(found), map(str, get_args(kind))):
        error.message = f"{error.message.rstrip('.')}; did you mean {near!r}?"
    if kind not in (int, float):
        return
    limits = {"minimum": error.param.min, "maximum": error.param.max}
    schema = {key: limit for key, limit in limits.items() if limit is not None}
    schema["type"] = "integer" if kind is int else "number"
    error.message = f"found {found!r}; allowed {describe(schema)}"


CORRECTIONS = {
    "NoSuchOption": suggest_option,
    "UsageError": suggest_for_extra_words,
    "BadParameter": name_value,
    "MissingParameter": name_missing,
}
"""The functions that improve an error's message, by its class, which is private to typer."""

STYLE: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    context_settings={"color": True},  # else click drops escape sequences instead of showing them
    help="Run depth-scaling studies of Transformers: one YAML file describes a stack; deepstack "
    "trains it and measures how far its function moves from its start.",
    **STYLE,
)


def command_of(name: str, described: Described) -> Any:
    """Return the command of typer; this imports the command's module."""
    alone = typer.Typer(add_completion=False, **STYLE)
    settings: dict[str, Any] = {"short_help": described.summary, "cls": Command}
    settings["epilog"] = f"Example: {described.example}"
    alone.command(name, **settings)(described.function)
    return get_command(alone)


@app.callback(invoke_without_command=True)
def version(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(f"deepstack {deepstack.__version__}")
        raise typer.Exit()
    if ctx.invoked_subcommand not in ("train", "rerun"):
        torchrun.forget_launch()  # no other command trains one run together with other processes
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit()


def leave_objects() -> None:
    """Let the system free all memory at once at exit, where no one waits for single objects.

    The garbage collector would walk over all objects of torch.  Triton reports its own objects as
    leaked unless they are freed one by one.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


def main(application: typer.Typer = app) -> None:
    """Run the `deepstack` command, or another application."""
    atexit.register(leave_objects)
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # escape characters outside of a stream's encoding
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # a fork may have replaced a file by a terminal
                stream.reconfigure(errors="backslashreplace")
    # Figures become files. A notebook's kernel names its own backend, which need not exist here.
    os.environ["MPLBACKEND"] = "agg"
    try:
        with one_line_endings():
            application()
    except Exception:
        sys.excepthook = print_traceback  # typer has set its own
        raise


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr (`>&-` closes one).

    Otherwise the next opened file would get its number, and the output of a library would go into
    a log. Python would also print to stdout in place of the missing stderr. Required by
    test_closed_and_full_streams_stop_and_change_nothing.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
