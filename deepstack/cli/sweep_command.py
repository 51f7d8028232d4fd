"""The command `deepstack sweep [CONFIG] [key=a,b …]`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import typer

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.cli import options as opt
from deepstack.cli.added_options import LauncherOption, SweepOption, SweepOrder, with_added
from deepstack.cli.commands import command
from deepstack.cli.completion import complete_config_or_setting, complete_names
from deepstack.cli.study_kinds import StudyKind, naming_mistyped_signs
from deepstack.config.explain import in_thousands
from deepstack.config.load import example, example_or_file

BUILT_IN = "depth_sweep"
grid, resources = (partial(opt.option, panel=heading) for heading in ("Grid", "Resources"))


@command("Runs", "deepstack sweep --depths 6,48 --seeds 0,1,2", place=2)
@with_added(SweepOption, before="out")
@with_added(LauncherOption, before="out")
def sweep_command(
    words: list[str] = typer.Argument(
        [],
        metavar="CONFIG|KEY=A,B",
        help="YAML file or example of a run or sweep (default: the built-in depth study), then "
        "settings; several values make a grid.",
        autocompletion=complete_config_or_setting,
    ),
    depths: str | None = grid("Values of model.depth, as in 6,48,200,1000."),
    schemes: str | None = grid(
        "Values of model.scheme, as in post_ln,deepnorm.",
        autocompletion=complete_names("schemes"),
    ),
    seeds: str | None = grid("Values of seed, as in 0,1,2."),
    widths: str | None = grid("Values of model.d_model, as in 32,64."),
    params: str | None = grid(
        "Values of model.parameters instead of model.d_model, as in 786k,3M: at each depth the "
        "width nearest to so many in the layers' matrices."
    ),
    flops: str | None = grid("Values of train.flops instead of train.steps, as in 1e12,1e13."),
    workers: int | None = resources(
        "Runs at a time (default: by cores, memory, GPUs).", min=1, max=conf.MAX_RUNS
    ),
    memory: str | None = resources(
        "Memory for all runs together: 8GB, or a share of the free memory (default: 0.9)."
    ),
    dry_run: bool = opt.flag("Print the plan; run nothing.", "--dry-run"),
    retry: str | None = opt.option(
        "Run failed, out_of_memory or all of these again; several with commas."
    ),
    max_hours: float | None = resources(
        "Then start no further run, save running ones and exit 3; repeat to continue.", min=0
    ),
    run_timeout: float | None = resources(
        "Wall-clock seconds for each start of a run; then it saves within 30 s or is "
        "killed, and counts as failed.",
        min=0,
    ),
    out: opt.Out = Path("results"),
    study: opt.StudyName = None,
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    json: opt.Json = False,
    **added: Any,
) -> None:
    """Train a grid of runs, several at once; print a table of scheme by depth.

    Finished runs are skipped, and failed ones without --retry. Interrupted runs continue.
    """
    refuse_several(["--widths", "--params"] if widths and params else [])
    launchers = LauncherOption.chosen(added)
    refuse_several([one.flag for one in launchers])
    taken = [word for one in launchers for word in one.own_words(words)]
    settings = [word for word in words if word not in taken]
    options = {"--depths": depths, "--schemes": schemes, "--seeds": seeds}
    options |= {"--widths": widths, "--params": params, "--flops": flops}
    refuse_spaces(options, settings)
    if settings and "=" not in settings[0]:
        path = example_or_file(Path(settings.pop(0)))
    else:
        path = example(BUILT_IN)
    lists = {"model.depth": depths, "model.scheme": schemes, "seed": seeds}
    lists |= {"model.d_model": widths, "train.flops": flops}
    lists |= {"model.parameters": params and whole_thousands(params)}
    settings += [f"{key}={values}" for key, values in lists.items() if values is not None]
    if seeds and seeds.isdecimal():
        opt.listed_seeds(seeds, quiet)
    kind = StudyKind.of(path, settings)
    if kind:
        described = kind.load()
    else:
        with naming_mistyped_signs(path):
            described = conf.load_study(path, settings)
    if not quiet:
        opt.note_empty(path)
    name = conf.study_name(described.base, path, study)
    opt.load_plugins(plugin)
    order = SweepOrder(described, name, out, workers, max_hours, dry_run, quiet, json)
    tasks = SweepOption.chosen(added)
    refuse_several([f"--{one.name}" for one in tasks])
    for name, needed in (SweepOption.idle(added) | LauncherOption.idle(added)).items():
        others = " or ".join(f"--{one}" for one in needed)
        raise ConfigError(f"--{name.replace('_', '-')}: found without {others}, which it needs")

    from deepstack import sweeps
    from deepstack.cli.sweep_training import SweepTraining

    launcher = launchers[0] if launchers else None
    retried = sweeps.retry_states(retry)
    training = SweepTraining(order, path, settings, retried, memory, run_timeout, launcher)
    if kind:
        without = {one.flag: one for one in launchers} | {"--memory": memory, "--plugin": plugin}
        kind.refuse(tasks, [flag for flag, value in without.items() if value])
        training = kind.training(training)
    if tasks:
        with opt.located(path, settings):
            tasks[0].run(order, training)
    elif progress := training.train(described):
        training.finish(progress)
    if kind:
        kind.end(training, tasks)


def refuse_several(flags: list[str]) -> None:
    """Raise ConfigError for more than one of options that exclude each other."""
    if len(flags) > 1:
        raise ConfigError(f"found {' and '.join(flags)}; allowed one of them")


def whole_thousands(values: str) -> str:
    """Return a list of numbers such as 786k,3M with their digits: 786000,3000000."""
    numbers = ((word, in_thousands(word.strip())) for word in values.split(","))
    return ",".join(word if number is None else f"{number:.0f}" for word, number in numbers)


def refuse_spaces(options: dict[str, str | None], words: list[str]) -> None:
    """Raise ConfigError if a list is divided by spaces, so that its end is another word."""
    for flag, values in options.items():
        rest = [word for word in words if is_part_of(values, word)]
        if values and rest:
            meant = ",".join([values.rstrip(", "), *(word.strip(",") for word in rest)])
            raise ConfigError(
                f"{flag}: found {values!r} and the word {rest[0]!r}; allowed a list without "
                f"spaces: {flag} {meant}"
            )


def is_part_of(values: str | None, word: str) -> bool:
    """Return whether a word is the rest of a list: after a comma, or a number after a number."""
    if values is None or "=" in word or example_or_file(Path(word)).exists():
        return False
    numbers = values.replace(",", "").isdecimal() and word.replace(",", "").isdecimal()
    return values.endswith(",") or numbers
