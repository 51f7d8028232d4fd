"""The keys of a study's file beside a configuration's: `sweep` and its grid."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from deepstack.config.schema import Config
from deepstack.config.section import Section

MAX_RUNS, MAX_AXES, MAX_RULES = 10_000, 32, 100

Where = dict[str, list[Any]]
"""A partial cell: dotted key -> the values of which a cell has one."""

Values = Annotated[list[Any], Field(min_length=1)]
Lists = Annotated[dict[str, Values], Field(min_length=2, max_length=MAX_AXES)]
Settings = Annotated[dict[str, Any], Field(min_length=1)]


class SweepOverride(Section):
    """Settings for the cells that match."""

    where: Annotated[Settings, Field(validate_default=True)] = {}
    """A key with a value, or with a list: any of them."""
    set: Annotated[Settings, Field(validate_default=True)] = {}
    """Dotted keys with their values in these cells."""


class Sweep(Section):
    """Makes the file a study: one run for every combination of the values."""

    grid: Annotated[dict[str, Values], Field(max_length=MAX_AXES)] = {}
    """A dotted key with its values: `model.depth: [6, 48]`."""
    zip: Lists | Annotated[list[Lists], Field(max_length=MAX_AXES)] = []
    """Lists that go together: one group of keys, or a list of groups."""
    exclude: Annotated[list[Settings], Field(max_length=MAX_RULES)] = []
    """Partial cells; every cell that matches one is left out."""
    overrides: Annotated[list[SweepOverride], Field(max_length=MAX_RULES)] = []
    """Settings for the cells that match; of several the last wins."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_parts(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class StudyFile(Config):
    """A configuration, or a study with `sweep:`.  Every key has a default."""

    extends: str | None = None
    """An example (`deepstack list configs`) whose settings count where the file has none."""
    sweep: Sweep = Sweep()
