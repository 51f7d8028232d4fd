"""The base of all sections of a configuration: strict, frozen, with shared types and checks."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deepstack.base.allowed import IDENTIFIER
from deepstack.base.yaml_reader import refuse_forbidden

LONGEST_NAME = 64

Identifier = Annotated[str, Field(pattern=IDENTIFIER, max_length=LONGEST_NAME)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True)]
Interval = Annotated[int, Field(ge=0, le=1_000_000_000)] | Literal["log"]
"""Steps between two measurements; 'log': 0, 1, 2, 3, 5, 8, …; 0: never."""


def _readable(value: Any) -> Any:
    # YAML cannot hold such a character, so the run's config.yaml could not be read back
    if isinstance(value, str) and (refusal := refuse_forbidden(value)):
        raise PydanticCustomError("relation", refusal)
    return value


Scalar = Annotated[bool | int | float | str, AfterValidator(_readable)]


def _in_torch(value: Any) -> Any:
    # people say gpu, torch says cuda
    return "cuda" if value == "gpu" else value


Device = Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(_in_torch)]


def as_tuple(value: Any) -> Any:
    # YAML knows lists only; the models are immutable and hold tuples
    return tuple(value) if isinstance(value, list) else value


def as_dict(value: Any) -> Any:
    # `model:` with only comments below it is an empty section
    return {} if value is None else value


Options = Annotated[dict[Identifier, Scalar | None], BeforeValidator(as_dict)]
"""The options of the definition that another setting names."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    _fill_empty = model_validator(mode="before")(as_dict)


def unused_without(**rules: dict[str, tuple[str, ...]]) -> Any:
    """Return a validator that refuses settings which other settings make meaningless.

    rules: for each field, other keys of its section and the values under which the field is used;
        no values mean all but 0 and null.  Under any other value only the field's default is
        allowed.
    """

    def check(section: type[Section], value: Any, info: Any) -> Any:
        usual = section.model_fields[info.field_name].default
        for key, allowed in rules[info.field_name].items():
            name = key.rpartition(".")[2]
            if value == usual or name not in info.data:
                continue
            other = info.data[name]
            if other not in allowed if allowed else not other:
                wanted = f"{key}={' or '.join(allowed)}" if allowed else f"another {key}"
                shown, setting, default = map(_json, (value, other, usual))
                text = (
                    f"found {shown}, unused under {key}={setting}; allowed {default}, or {wanted}"
                )
                raise PydanticCustomError("relation", text)
        return value

    return field_validator(*rules)(classmethod(check))


def _json(value: Any) -> str:
    return json.dumps(value, default=BaseModel.model_dump).strip('"')


def divisor_of(field: str, *keys: str, unless: str = "") -> Any:
    """Return a validator that allows a field only divisors of the settings at some keys.

    unless: a field that replaces these settings if it is given.
    """

    def check(value: Any, info: Any) -> Any:
        for key in keys:
            total = info.data.get(key.rpartition(".")[2])
            if value and total and total % value and info.data.get(unless) is None:
                near = max(one for one in range(1, value + 1) if total % one == 0)
                text = f"found {value}; allowed a divisor of {key} = {total}, such as {near}"
                raise PydanticCustomError("relation", text)
        return value

    return field_validator(field)(check)
