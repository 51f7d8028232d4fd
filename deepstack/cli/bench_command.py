"""deepstack bench CONFIG [key=value …]"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepstack.cli.options import Overrides, Plugins, load_plugins, located
from deepstack.errors import ConfigError, Interrupted

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
"""The columns of the table; the JSON has more."""


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    overrides: Overrides = [],
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each row.")] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    peers: Annotated[
        str | None, typer.Option(help="Peers, as in torch,bert (default: all that are installed).")
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="deepstack alone.")] = False,
    depths: Annotated[
        str | None, typer.Option(help="Depths to fit exponents over, as in 6,48,200,1000.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Draw the rows into this PNG, SVG or PDF.")
    ] = None,
    plugin: Plugins = [],
) -> None:
    """Time training steps of a config's stack, beside other libraries' encoders of its shape.

    Each row is a process of its own, and the rows take turns.  The peers: torch, torchscale,
    x_transformers, bert; pip install 'deepstack[bench]' brings them.
    """
    from deepstack.config import load_config

    if no_peers and peers:
        raise ConfigError("bench: found --peers and --no-peers; allowed one of them")
    settings = load_config(config, overrides)
    wanted = depths_of(depths)
    names = [] if no_peers else None if peers is None else words_of(peers)
    if chart is not None:
        from deepstack.bench.chart import refuse_chart

        refuse_chart(chart)
    load_plugins(plugin)
    from deepstack import bench as room

    try:
        with located(config, overrides):
            measured = room.bench(
                settings,
                steps=steps,
                peers=names,
                depths=wanted,
                say=lambda line: typer.echo(line, err=True),
            )
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing is kept", signal.SIGINT) from None
    command = shlex.join(["deepstack", *sys.argv[1:]])
    found = room.report(settings, measured, command, str(config))
    show(found, json)
    if chart is not None:
        room.draw_rows(found, chart)
        typer.echo(f"chart: {chart}", err=True)


def show(found: dict[str, Any], as_json: bool) -> None:
    """The whole as JSON, or its three tables."""
    import json

    from deepstack.bench import where
    from deepstack.cli.tables import emit

    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    machine = found["machine"]
    typer.echo(f"{where(machine)}, torch {machine['torch']}, {machine['date']}", err=True)
    emit([{title: row[name] for name, title in COLUMNS.items()} for row in found["rows"]], False)
    emit([{"time of a step": name, **spread} for name, spread in found["ratios"].items()], False)
    if "exponents" in found:
        fits = found["exponents"]
        said = ", ".join(str(depth) for depth in fits["depth"])
        emit(
            [
                {
                    f"in depth ({said})": name,
                    "exponent": fits[name]["exponent"],
                    "standard error": fits[name]["standard_error"],
                }
                for name in ("step_ms", "memory_mb")
            ],
            False,
        )


def words_of(text: str) -> list[str]:
    """The names in a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def depths_of(text: str | None) -> list[int]:
    """The depths in a comma-separated list, at least two, each once."""
    if text is None:
        return []
    words = words_of(text)
    if not all(word.isdecimal() and int(word) > 0 for word in words) or len(set(words)) < 2:
        raise ConfigError(
            f"--depths: found {text!r}; allowed two or more depths, as in 6,48,200,1000"
        )
    return sorted({int(word) for word in words})
