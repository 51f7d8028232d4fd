"""Times training steps beside other libraries': python -m benchmarks CONFIG [key=value …]."""

import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from deepstack.base import ConfigError
from deepstack.cli import Command, emit, emit_json, log, main, reported_errors
from deepstack.cli import options as opt
from deepstack.config import load_config

COLUMNS = {
    "name": "row",
    "step_ms": "ms a step",
    "step_ms_low": "lowest",
    "step_ms_high": "highest",
    "steps_per_s": "steps/s",
    "tokens_per_s": "tokens/s",
    "peak_memory_mb": "peak MB",
    "matmul_fraction": "of matmul limit",
    "start_s": "start s",
}
"""JSON names and titles of the table's columns; the JSON has further ones."""


class Bench(Command):
    """A program with one command, whose errors it reports."""

    def invoke(self, ctx: Any) -> Any:
        with reported_errors():
            return super().invoke(ctx)


app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)


@app.command(cls=Bench)
def bench(
    config: Path | None = typer.Argument(
        None, metavar="CONFIG", help="A YAML file, or narrow, small, medium or wide."
    ),
    overrides: opt.Overrides = [],
    steps: int = opt.option("Number of timed steps per row.", default=10, min=1),
    json: bool = opt.flag("Print one JSON object.", "--json"),
    peers: str | None = opt.option("Peers, as in torch,bert (default: all installed ones)."),
    no_peers: bool = opt.flag("Time deepstack alone.", "--no-peers"),
    depths: str | None = opt.option("Depths to fit exponents over, as in 6,48,200,1000."),
    suite: str | None = opt.option("Time the shapes of a suite instead of a config: cpu."),
    chart: Path | None = opt.option("Draw the rows into this PNG, SVG or PDF file."),
    plugin: opt.Plugins = [],
) -> None:
    """Time training steps of a config's stack beside other libraries' encoders of its shape.

    Each row runs in its own process, and the rows take turns. The peers are torch, torchscale,
    x_transformers, bert and jax; pip install '.[bench]' installs them. torch+onednn, torch+bf16,
    jax+fp32 and deepstack+shards are rows of another precision, library or number of threads.
    Examples: python -m benchmarks medium; python -m benchmarks --suite cpu --peers torch,jax
    """
    if no_peers and peers:
        raise ConfigError("bench: found --peers and --no-peers; allowed one of them")
    names = None if peers is None else [name.strip() for name in peers.split(",")]
    names = [] if no_peers else names
    if suite is not None:
        from benchmarks.peers import run_suite

        overrides = [*([str(config)] if config else []), *overrides]
        command = command_line()
        timed = run_suite(suite, overrides, steps=steps, peers=names, command=command, say=log)
        emit_json(timed) if json else emit(timed["rows"], False)
        return
    if config is None:
        raise ConfigError("bench: found no config; allowed a YAML file, or narrow, or --suite cpu")
    if config.suffix or config.exists():
        settings = load_config(config, overrides)
    else:
        from benchmarks.peers import shape_config

        settings = shape_config(str(config), overrides)
    wanted = sorted(set(opt.whole_numbers("--depths", depths))) if depths else []
    if len(wanted) == 1:
        raise ConfigError(f"--depths: found {depths}; allowed two or more depths, as in 6,48,200")
    if chart is not None:
        from benchmarks.peers import refuse_chart

        refuse_chart(chart)
    opt.load_plugins(plugin)
    from benchmarks.peers import bench as time_rows
    from benchmarks.peers import draw_rows
    from benchmarks.peers import report as make_report

    with opt.located(config, overrides):
        measured = time_rows(settings, steps=steps, peers=names, depths=wanted, say=log)
    result = make_report(settings, measured, command_line(), str(config))
    show(result, json)
    if chart is not None:
        draw_rows(result, chart)
        log(f"chart: {chart}")


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print a bench report as JSON, or as its three tables."""
    from benchmarks.peers import where

    if as_json:
        emit_json(result)
        return
    machine = result["machine"]
    log(f"{where(machine)}, torch {machine['torch']}, {machine['date']}")
    emit([{title: row[name] for name, title in COLUMNS.items()} for row in result["rows"]], False)
    emit([{"time of a step": name, **ratio} for name, ratio in result["ratios"].items()], False)
    if fits := result.get("exponents"):
        first = f"in depth ({', '.join(map(str, fits['depth']))})"
        keys = ("exponent", "standard_error")
        names = ("step_ms", "memory_mb")
        emit([{first: n, **{k.replace("_", " "): fits[n][k] for k in keys}} for n in names], False)


def command_line() -> str:
    """Return the command that the user has typed, quoted for a shell."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


if __name__ == "__main__":
    main(app)
