"""The command `deepstack init [FILE]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deepstack.errors import ConfigError


def init_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file to write.")] = Path(
        "experiment.yaml"
    ),
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema for editors; write nothing.")
    ] = False,
) -> None:
    """Write a starting config with every setting, its default and its meaning."""
    from deepstack import config as conf
    from deepstack.cli.tables import emit_json

    if schema:
        emit_json(conf.json_schema())
        return
    if file.exists():
        raise ConfigError(f"{file} exists already; give another name: deepstack init mine.yaml")
    beside = file.with_name("deepstack.schema.json")
    try:
        beside.write_text(json.dumps(conf.json_schema(), indent=2) + "\n", encoding="utf-8")
        file.write_text(conf.annotated_defaults(beside.name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    typer.echo(file)
