"""The base of all sections of a configuration: strict, frozen, with shared types and checks."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deepstack.allowed import IDENTIFIER
from deepstack.errors import FrozenError
from deepstack.yaml_reader import refuse_forbidden

LONGEST_NAME = 64

Identifier = Annotated[str, Field(pattern=IDENTIFIER, max_length=LONGEST_NAME)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True)]


def _readable(value: Any) -> Any:
    # YAML cannot hold such a character, so the run's config.yaml could not be read back
    if isinstance(value, str) and (refusal := refuse_forbidden(value)):
        raise PydanticCustomError("relation", refusal)
    return value


Scalar = Annotated[bool | int | float | str, AfterValidator(_readable)]


def as_tuple(value: Any) -> Any:
    # YAML knows lists only; the models are immutable and hold tuples
    return tuple(value) if isinstance(value, list) else value


def as_dict(value: Any) -> Any:
    # `model:` with only comments below it is an empty section
    return {} if value is None else value


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenError(
            f"{name} = {value!r}: a configuration is frozen; make another: "
            "deepstack.config.with_overrides(config, {'model.depth': 48})"
        )

    _fill_empty = model_validator(mode="before")(as_dict)


def unused_without(**rules: dict[str, tuple[str, ...]]) -> Any:
    """Return a validator that refuses settings which other settings make meaningless.

    rules: for each field, another key of its section and the values under which the field is used.
    Under any other value only the field's default is allowed.
    """

    def check(section: type[BaseModel], value: Any, info: Any) -> Any:
        usual = section.model_fields[info.field_name].default
        shown, no_more = value, "null" if usual is None else usual
        if isinstance(value, BaseModel):
            shown = ", ".join(f"{k}={v}" for k, v in value if v != getattr(usual, k))
            no_more = "none of it"
        for key, allowed in rules[info.field_name].items():
            other = info.data.get(key.rpartition(".")[2])
            if value != usual and other not in (None, *allowed):
                text = f"found {shown}, unused under {key}={other}; allowed {no_more}, or {key}="
                raise PydanticCustomError("relation", text + " or ".join(allowed))
        return value

    return field_validator(*rules)(classmethod(check))


def unused_at_zero(**keys: str) -> Any:
    """Return a validator that allows fields only their default if another key is 0 or null.

    keys: for each field, the other key of its section.
    """

    def check(section: type[BaseModel], value: Any, info: Any) -> Any:
        key, usual = keys[info.field_name], section.model_fields[info.field_name].default
        other = info.data.get(key.rpartition(".")[2], True)
        if value != usual and (other is None or other == 0):
            shown, other, usual = (json.dumps(v).strip('"') for v in (value, other, usual))
            text = f"found {shown}, unused under {key}={other}; allowed {usual}, or another {key}"
            raise PydanticCustomError("relation", text)
        return value

    return field_validator(*keys)(classmethod(check))


def divisor_of(field: str, *keys: str) -> Any:
    """Return a validator that allows a field only divisors of the settings at some keys."""

    def check(section: type[BaseModel], value: Any, info: Any) -> Any:
        for key in keys:
            total = info.data.get(key.rpartition(".")[2])
            if value and total and total % value:
                divisors = [str(n) for n in range(1, min(total, 1024) + 1) if total % n == 0]
                text = f"found {value}; allowed a divisor of {key} = {total}: "
                text += ", ".join(divisors)
                raise PydanticCustomError("relation", text)
        return value

    return field_validator(field)(classmethod(check))
