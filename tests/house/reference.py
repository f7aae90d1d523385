"""Writes what `docs/reference/` says in tables, and JSON Schemas for editors, from the code.

`python -m tests.house.reference [FOLDER]` renews `docs/reference/configuration.md`,
`docs/reference/http.md` and `config/*.schema.json` in a checkout. What stands in a page outside of
the comments that mark a table is written by hand.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from gateway.config.fields import ConfigModel, TypeLabel, as_list, format_duration, format_size
from gateway.config.inventory import Inventory, NodeSpec
from gateway.config.scheduling import command_as_hook
from gateway.config.settings import Settings, is_restart_key
from gateway.config.yaml_file import keys_of, meaning_of, nested_model
from gateway.openapi import ADMIN_ERRORS, ERRORS, FIELDS, Operation, operations
from tests.config.models import models_below

PAGES = Path("docs/reference/configuration.md"), Path("docs/reference/http.md")

_UNTOLD = frozenset({"ApiKey", "Why"})  # bodies that no page has a table of

_BLOCK = re.compile(
    r"(?P<begin><!-- table by python -m tests\.house\.reference: (?P<name>[A-Za-z ]+) -->\n)"
    r".*?(?P<end><!-- end of the table -->)",
    re.DOTALL,
)


def renewed(page: str) -> str:
    """The page with new tables. Raises: KeyError, if it wants a table that there is not."""
    made = tables()
    return _BLOCK.sub(
        lambda found: f"{found['begin']}\n{made[found['name']]}\n{found['end']}", page
    )


def tables() -> dict[str, str]:
    """Every table by its name."""
    every = list(
        operations(Settings.model_validate({"ollama": True, "listen": {"caller_page": True}}))
    )
    public = [one for one in every if one.listener == "public"]
    admin = [one for one in every if one.listener == "admin"]
    written: set[type[ConfigModel]] = set()
    return {
        "keys of the inventory": "\n".join(_sections(NodeSpec, "nodes[]", written)),
        "keys of the settings": "\n".join(_sections(Settings, "", written)),
        "public paths": _table(("path", "what"), _grouped(public)),
        "admin paths": _table(
            ("path", "role", "what"),
            (
                (f"`{one.method} {one.path}`", one.role or "none needed", one.summary)
                for one in admin
            ),
        ),
        "public errors": _table(
            ("status", "code", "when", "official clients retry it"),
            ((str(row.status), f"`{row.code}`", row.when, row.retried) for row in ERRORS),
        ),
        "admin errors": _table(
            ("status", "code", "when"),
            ((str(row.status), f"`{row.code}`", row.when) for row in ADMIN_ERRORS),
        ),
        **{name: _fields(fields) for name, fields in FIELDS.items() if name not in _UNTOLD},
    }


def _grouped(served: Iterable[Operation]) -> Iterator[tuple[str, str]]:
    """Paths with their other spellings, each group with what it is."""
    groups: dict[object, list[Operation]] = {}
    for one in served:
        key: object = one.route if isinstance(one.route, str) else id(one.route)
        if one.route is None:
            key = (one.method, one.path)
        groups.setdefault(key, []).append(one)
    for group in groups.values():
        first, *others = group
        paths = [f"`{first.method} {first.path}`", *(f"`{other.path}`" for other in others)]
        key_free = "" if first.needs_key else "; needs no key"
        yield ", ".join(paths), f"{first.summary}{key_free}"


def _fields(fields: Mapping[str, tuple[str, str]]) -> str:
    def rows() -> Iterator[tuple[str, str, str]]:
        for name, (kind, meaning) in fields.items():
            null = " or null" if kind.endswith("?") else ""
            yield f"`{name}`", f"{kind.removesuffix('?')}{null}", meaning

    return _table(("field", "type", "meaning"), rows())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _sections(
    model: type[ConfigModel], path: str, written: set[type[ConfigModel]]
) -> Iterator[str]:
    """Write a section for a mapping, and one for each mapping in it that is not yet written."""
    written.add(model)
    keys = keys_of(model)
    doc = " ".join((model.__doc__ or "").split())
    title = f"### `{path}`\n\n{doc}\n" if path else "### Top level\n"
    rows = (_row(model, path, key, field) for key, field in keys.items())
    yield f"{title}\n{_table(('key', 'type', 'default', 'meaning'), rows)}"
    for key, field in keys.items():
        inner, _ = nested_model(field.annotation)
        if inner is not None and inner not in written:
            # Of several mappings: by index, or by name.
            several = {"list": "[]", "mapping of rules": ".<name>"}.get(_label(field).name, "")
            yield from _sections(inner, f"{path}.{key}{several}".lstrip("."), written)


def _row(model: type[ConfigModel], path: str, key: str, field: FieldInfo) -> tuple[str, ...]:
    meaning = meaning_of(model, key)
    if is_restart_key(f"{path}.{key}".lstrip(".")):
        meaning += " *Restart.*"
    cells = (f"`{key}`", _type(field), _default(field), meaning)
    return tuple(cell.replace("|", "\\|") for cell in cells)


def _label(field: FieldInfo) -> TypeLabel:
    found = [part for part in field.metadata if isinstance(part, TypeLabel)]
    if found:
        return found[-1]
    if bool in {field.annotation, *_parts(field.annotation)}:
        return TypeLabel("true or false")
    return next(_labels(field.annotation), TypeLabel("mapping"))


def _labels(annotation: Any) -> Iterator[TypeLabel]:
    for part in _parts(annotation):
        if isinstance(part, TypeLabel):
            yield part
        elif get_origin(part) is not None:
            yield from _labels(part)


def _parts(annotation: Any) -> Iterable[Any]:
    is_composed = get_origin(annotation) in {Annotated, Union, types.UnionType}
    return get_args(annotation) if is_composed else ()


def _type(field: FieldInfo) -> str:
    for part in (field.annotation, *_parts(field.annotation)):
        if get_origin(part) is Literal:
            return ", ".join(f"`{value}`" for value in get_args(part))
    label = _label(field)
    return label.name if label.unit in {"", "s", "bytes"} else f"{label.name} ({label.unit})"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True, validated_data={})
    label = _label(field)
    if value is None or value == "" or isinstance(value, ConfigModel):
        return "`auto`" if field.validation_alias is None and "`auto`" in label.name else "-"
    if label.unit == "s":
        return f"`{format_duration(value)}`"
    if label.unit in {"bytes", "bytes/s"}:
        return f"`{format_size(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(repr, value))}]`".replace("'", '"')
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`"


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
    for name, schema in (("nodes", nodes_schema()), ("gateway", settings_schema())):
        text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.schema.json").write_text(text, encoding="utf-8")


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
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for one in PAGES:
        (root / one).write_text(renewed((root / one).read_text(encoding="utf-8")), encoding="utf-8")
    write_schemas(root / "config")
