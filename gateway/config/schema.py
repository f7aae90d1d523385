"""Writes JSON Schemas of both files, for editors: `python -m gateway.config.schema`."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from gateway.config.autoscaling import command_as_hook
from gateway.config.fields import ConfigModel, as_list
from gateway.config.inventory import Inventory
from gateway.config.settings import Settings
from gateway.config.validation import keys_of, models_below

JsonSchema = dict[str, Any]

# `${VAR}` may stand wherever a value may.
_REFERENCE: JsonSchema = {
    "type": "string",
    "pattern": r"\$\{",
    "description": "${VAR} or ${VAR:-default}",
}

_TO_REFERENCE: JsonSchema = {"$ref": "#/$defs/Reference"}

# Bounds that pydantic leaves under its own names where a validator precedes them.
_BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def nodes_schema() -> JsonSchema:
    """Return the schema of `config/nodes.yaml`."""
    schema = _schema_of(Inventory, "Inventory of llama-gateway")
    defaults = copy.deepcopy(schema["$defs"]["NodeSpec"])
    for key in defaults.pop("required"):
        del defaults["properties"][key]
    defaults["description"] = "Keys for every node without its own."
    schema["$defs"]["Defaults"] = defaults
    to_defaults = {"anyOf": [{"$ref": "#/$defs/Defaults"}, {"type": "null"}]}
    schema["properties"] = {"defaults": to_defaults, **schema["properties"]}
    return schema


def settings_schema() -> JsonSchema:
    """Return the schema of `config/gateway.yaml`."""
    return _schema_of(Settings, "Settings of llama-gateway")


def write_schemas(folder: Path) -> None:
    """Write `nodes.schema.json` and `gateway.schema.json` into a folder."""
    for name, schema in (
        ("nodes.schema.json", nodes_schema()),
        ("gateway.schema.json", settings_schema()),
    ):
        text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def _schema_of(model: type[ConfigModel], title: str) -> JsonSchema:
    written = model.model_json_schema(mode="validation", by_alias=True)
    definitions: dict[str, JsonSchema] = written.pop("$defs")
    for one in models_below(model):
        schema = written if one is model else definitions[one.__name__]
        _use_file_keys(one, schema)
    definitions["Reference"] = _REFERENCE
    schema_version = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": schema_version, **written, "title": title, "$defs": definitions}


def _use_file_keys(model: type[ConfigModel], schema: JsonSchema) -> None:
    """Turn the schema of a model's fields into that of the keys that the file uses."""
    schema.pop("title")
    required = schema.get("required", ())
    keys = keys_of(model)
    schema["properties"] = {
        key: _property(keys[key], value, required=key in required)
        for key, value in schema["properties"].items()
        if key in keys
    }


def _property(field: FieldInfo, schema: JsonSchema, *, required: bool) -> JsonSchema:
    described = {"description": schema.pop("description", "")}
    default = schema.pop("default", None)
    if default is not None and not isinstance(default, (dict, list)) and default != "":
        described["default"] = default
    schema.pop("title", None)
    choices = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    choices = [_bounded(choice) for choice in choices if choice != {"type": "null"}]
    if _has_validator(field, command_as_hook):
        choices.append({"type": "array", "items": {"type": "string"}, "minItems": 1})
    if _has_validator(field, as_list):
        choices = [choice["items"] for choice in choices if "items" in choice] + choices
    if not any(_allows_any_text(choice) for choice in choices):
        choices.append(_TO_REFERENCE)
    if not required:
        # `queue:` with nothing below it means the same as no `queue:`.
        choices.append({"type": "null"})
    if len(choices) == 1:
        return {**described, **choices[0]}
    return {**described, "anyOf": choices}


def _bounded(schema: JsonSchema) -> JsonSchema:
    """Name bounds as JSON Schema does, and allow `${VAR}` for items and values."""
    named = {_BOUNDS.get(key, key): value for key, value in schema.items()}
    for inner in ("items", "additionalProperties"):
        value = named.get(inner)
        if isinstance(value, dict) and not _allows_any_text(value) and "$ref" not in value:
            named[inner] = {"anyOf": [value, _TO_REFERENCE]}
        elif inner == "additionalProperties" and isinstance(value, dict) and "$ref" in value:
            named[inner] = {"anyOf": [value, {"type": "null"}]}
    return named


def _allows_any_text(schema: JsonSchema) -> bool:
    """Return whether any text is valid, and so a reference."""
    return schema.get("type") == "string" and not {"pattern", "enum", "const"} & schema.keys()


def _has_validator(field: FieldInfo, validator: Callable[[object], object]) -> bool:
    return any(
        isinstance(part, BeforeValidator) and part.func is validator for part in field.metadata
    )


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1] if len(sys.argv) > 1 else "config"))
