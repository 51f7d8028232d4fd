"""The command `deepstack init [FILE]`."""

import json
from pathlib import Path

import typer

from deepstack import config as conf
from deepstack.base.errors import ConfigError, ResourceError
from deepstack.cli.commands import command
from deepstack.cli.completion import complete_config
from deepstack.cli.listing import definition_kinds, names_of
from deepstack.cli.options import flag, option
from deepstack.cli.output import emit_json
from deepstack.config.load import example
from deepstack.records.files import replace_all
from deepstack.records.opened import followed


@command("Runs", "deepstack init mine.yaml --from quick", place=4)
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
    kinds = definition_kinds().items()
    for_editors = conf.json_schema({key: names_of(kind) for key, kind in kinds})
    if schema:
        emit_json(for_editors)
        return
    text = None if source is None else example(source).read_text(encoding="utf-8")
    file = file or Path("experiment.yaml" if source is None else f"{source}.yaml")
    if file.exists():
        raise ConfigError(f"{file} exists already; give another name: deepstack init mine.yaml")
    schema_name = "deepstack.schema.json"
    schema_text = json.dumps(for_editors, indent=2) + "\n"
    if text is None:
        text = conf.annotated_defaults(schema_name)
    else:
        text = f"# yaml-language-server: $schema={schema_name}\n{text}"
    contents = [(schema_name, schema_text.encode()), (file.name, text.encode())]
    try:
        replace_all(followed(file.parent), contents)
    except ResourceError as error:
        raise ConfigError(str(error)) from error
    typer.echo(file)
