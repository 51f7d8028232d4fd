"""Describe in words the values that a type annotation allows, by its JSON schema."""

from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from deepstack.base.text import limit_text

Schema = dict[str, Any]

RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
IDENTIFIER = r"^[A-Za-z][A-Za-z0-9_]*$"
MOST_KEYS = 8  # of a section that a message names
PATTERNS = {
    RUN_NAME: "letters, digits, '.', '_' and '-', not starting with '.' or '-'",
    IDENTIFIER: "a word of letters, digits and '_'",
}
"""Patterns of names, in words."""


def schema_of(annotation: Any) -> Schema:
    """Return the JSON schema of an annotation, without references."""
    schema = TypeAdapter(annotation).json_schema()
    return dict(_inline(schema, schema.pop("$defs", {})))


def alternatives(schema: Schema) -> Iterator[Schema]:
    """Yield the members of a union, or the schema itself."""
    for option in schema.get("anyOf", ()):
        yield from alternatives(option)
    if "anyOf" not in schema:
        yield schema


def literals(schema: Schema) -> list[Any]:
    """Return the values that a Literal lists, else []."""
    return list(schema.get("enum", ())) or [schema[key] for key in ("const",) if key in schema]


def describe(schema: Schema) -> str:
    """Return a schema in words: 'a number above 0 or null', 'a list of: q, k, v'."""
    options = list(alternatives(schema))
    kinds = {option.get("type") for option in options}
    if {"string", "number", "boolean"} <= kinds:
        listed = ", or a list of these" if "array" in kinds else ""
        return f"text, a number, true or false{listed}"
    return " or ".join(dict.fromkeys(map(_describe_one, options)))


def _describe_one(option: Schema) -> str:
    if choices := literals(option):
        return ", ".join(map(str, choices))
    kind = option.get("type")
    if kind in ("integer", "number"):
        return ("an integer" if kind == "integer" else "a number") + _range(option)
    if kind == "array":
        if not (inner := option.get("prefixItems", [option.get("items")])[0]):
            return "a list of values"
        each = describe(inner)
        count = option.get("maxItems")
        if count is not None and count == option.get("minItems"):
            return f"a list of {count} values, each {each}"
        return f"a list of: {each}"
    if kind == "object":
        names = option.get("properties") or option.get("propertyNames", {}).get("enum")
        shown = [*names][:MOST_KEYS] if names else []
        more = ["…"] if len(names or ()) > MOST_KEYS else []
        return f"a section with the keys {', '.join(shown + more)}" if names else "a section"
    if kind == "string" and option.get("pattern") in PATTERNS:
        longest = f" (at most {option['maxLength']})" if "maxLength" in option else ""
        return PATTERNS[option["pattern"]] + longest
    text = "non-empty text" if option.get("minLength") else "text"
    return {"boolean": "true or false", "null": "null", "string": text}.get(str(kind), "a value")


def _range(option: Schema) -> str:
    """Return the limits of a number: ' from 0 to below 1', ' above 0', ' from 1 on'."""
    words = {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "to" if "minimum" in option else "up to",
        "exclusiveMaximum": "to below",
    }
    limits = [key for key in words if key in option]
    text = "".join(f" {words[key]} {limit_text(option[key])}" for key in limits)
    return text + (" on" if limits == ["minimum"] else "")


def _inline(schema: Any, definitions: Schema) -> Any:
    if isinstance(schema, list):
        return [_inline(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if len(schema.get("allOf", ())) == 1:  # a reference with a default, in pydantic before 2.9
        schema = schema["allOf"][0]
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    return {key: _inline(each, definitions) for key, each in schema.items()}
