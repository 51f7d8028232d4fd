"""The command `deepstack init [FILE]`."""

import json
from pathlib import Path

import typer

from deepstack import config as conf
from deepstack.cli.completion import complete_config
from deepstack.cli.options import flag, option
from deepstack.cli.output import emit_json
from deepstack.config.load import example
from deepstack.errors import ConfigError


def init_command(
    file: Path | None = typer.Argument(
        None,
        metavar="FILE",
        help="The YAML file to write (default: experiment.yaml, or NAME.yaml with --from).",
    ),
    source: str | None = option(
        "Copy an example instead: deepstack list configs.",
        "--from",
        metavar="NAME",
        autocompletion=complete_config,
    ),
    schema: bool = flag("Print the JSON schema for editors; write nothing.", "--schema"),
) -> None:
    """Write a starting config with every setting, its default and its meaning."""
    if schema:
        emit_json(conf.json_schema())
        return
    text = None if source is None else example(source).read_text(encoding="utf-8")
    file = file or Path("experiment.yaml" if source is None else f"{source}.yaml")
    if file.exists():
        raise ConfigError(f"{file} exists already; give another name: deepstack init mine.yaml")
    beside = file.with_name("deepstack.schema.json")
    try:
        beside.write_text(json.dumps(conf.json_schema(), indent=2) + "\n", encoding="utf-8")
        if text is None:
            text = conf.annotated_defaults(beside.name)
        else:
            text = f"# yaml-language-server: $schema={beside.name}\n{text}"
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    typer.echo(file)
