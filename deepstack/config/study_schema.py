"""The JSON schema that editors read, of configurations and of sweeps."""

from __future__ import annotations

from typing import Any

from deepstack.config.schema import Config


def json_schema() -> dict[str, Any]:
    """The JSON schema of configurations and studies, for completion and checks in editors."""
    schema = Config.model_json_schema()
    schema["properties"]["sweep"] = _sweep()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _sweep() -> dict[str, Any]:
    values = {"type": "array", "minItems": 1}
    zipped = {
        "type": "object",
        "description": "Keys whose values go together, as many each.",
        "minProperties": 2,
        "additionalProperties": values,
    }
    cell = {"type": "object", "minProperties": 1}
    override = {
        "type": "object",
        "properties": {
            "where": cell | {"description": "A key with a value, or with a list: any of them."},
            "set": cell | {"description": "Dotted keys with their values in these cells."},
        },
        "required": ["where", "set"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "description": "Makes the file a study: one run for every combination of the values.",
        "properties": {
            "grid": {
                "type": "object",
                "description": "A dotted key with its values: `model.depth: [6, 48]`.",
                "additionalProperties": values | {"uniqueItems": True},
            },
            "zip": {
                "description": "Lists that go together: one group of keys, or a list of groups.",
                "anyOf": [zipped, {"type": "array", "items": zipped}],
            },
            "exclude": {
                "type": "array",
                "description": "Partial cells; every cell that matches one is left out.",
                "items": cell,
            },
            "overrides": {
                "type": "array",
                "description": "Settings for the cells that match; of several the last wins.",
                "items": override,
            },
        },
        "additionalProperties": False,
    }
