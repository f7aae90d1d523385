"""Writes the reference of both files, and JSON Schemas for editors, from the models.

`python -m gateway.config.reference [FOLDER]` renews `docs/reference/configuration.md` and
`config/*.schema.json` in a checkout.
"""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from gateway.config.fields import ConfigModel, TypeLabel, as_list, format_duration, format_size
from gateway.config.inventory import Inventory, NodeSpec
from gateway.config.scheduling import command_as_hook
from gateway.config.settings import Settings, is_restart_key
from gateway.config.yaml_file import keys_of, meaning_of, models_below, nested_model

_HEAD = """\
# Configuration

<!-- Written by `python -m gateway.config.reference`. Change the models, not this page. -->

Two YAML files. `config/nodes.yaml` says which nodes there are; `config/gateway.yaml` says how the
gateway behaves, and may be missing. `llama-gateway check` (with the flags of `serve`) tells whether
`serve` would start with them, and reports every mistake with its file, line, key and remedy:

```text
config/nodes.yaml:9: nodes[1].slot: unknown key (did you mean slots? ...)
```

**A change takes effect** when the file is saved, on SIGHUP, and on `POST /admin/reload`. A file
with a mistake changes nothing: the gateway keeps the settings that it has, logs the problems and
shows them in `GET /admin/status`. Keys marked *restart* are read only when the gateway starts.

**Precedence.** A flag beats the environment, which beats the file.

| variable | stands for |
| --- | --- |
| `LLAMA_GATEWAY_NODES` | path of the inventory |
| `LLAMA_GATEWAY_CONFIG` | path of the settings |
| `LLAMA_GATEWAY_HOST`, `LLAMA_GATEWAY_PORT` | `listen.host`, `listen.port` |
| `LLAMA_GATEWAY_ADMIN_HOST`, `LLAMA_GATEWAY_ADMIN_PORT` | `admin.host`, `admin.port` |
| `LLAMA_GATEWAY_ADMIN_KEY_FILE` | `admin.key_file` |

## Symptoms and keys

| symptom | where to look |
| --- | --- |
| clients get 429 `queue_full` | `queue.max`; more nodes or slots |
| clients get 503 `queue_timeout` | `queue.max_wait`, `classes`; more nodes or slots |
| clients get 503 `no_node` | `llama-gateway nodes` tells why; `retries.wait_for_node` |
| clients get 502 `node_failed` | the nodes' logs; `retries.attempts`, `retries.budget` |
| clients get 504 `node_timeout` | `timeouts`: `first_byte` for long prompts, `silence`, `total` |
| clients get 413, 431 or 408 | `limits.body_bytes`, `limits.header_bytes`, `limits.body_timeout` |
| clients get 404 `model_not_found` | `model` of the nodes, `models`, `default_model` |
| a node flaps between up and down | `health.timeout`, `health.fall` |
| a node is `ejected` | `health.failures`, `health.open`; `POST /admin/nodes/NAME/probe` |
| a node should get no more requests | `enabled: false`, or `llama-gateway nodes drain NAME` |
| every client has the same address | `listen.trusted_proxies` |
| a load balancer cuts silent streams | `heartbeat` |
| a restart cuts responses short | `shutdown.grace`, `shutdown.delay` |

## How values are written

| value | form |
| --- | --- |
| variables | `${VAR}` or `${VAR:-default}` in a value, see below |
| durations | a number of seconds, or `250ms`, `30s`, `5m`, `1h30m` |
| sizes | a number of bytes, or `64KiB`, `500kB`, `1 GiB` |
| true and false | `true`, `false`; `on`, `off`, `yes`, `no` too |
| texts that look like numbers | in quotes: `{numa: "0"}` |
| nothing | a key without a value counts as unset |
| paths | relative ones start in the folder of the file that names them |
| repetition | anchors, aliases and `<<` work; a duplicate key is an error |

**Variables.** `${VAR}` must be set; `${VAR:-default}` may be missing or empty. They work in values,
not in keys, and are replaced after the YAML was parsed, so that a variable can't add YAML. A
value that is wholly one reference becomes a number or a boolean where it looks like one. Inside of
`{...}` and `[...]` put quotes around it: `{connect: "${CONNECT:-3}"}`. `!!str ${VAR}`
keeps it a text. `$$` is a dollar sign.

Both sample files name a JSON Schema, so that editors complete keys and mark mistakes.
"""

_NODES = """\
## Inventory: `config/nodes.yaml`

`nodes` is the list of nodes; `nodes: []` is allowed, a missing key is not. `defaults` holds any
keys but `name` and `url`, for every node without its own; mappings such as `timeouts`
and `labels` are merged key by key.
"""

_SETTINGS = """\
## Settings: `config/gateway.yaml`

Every key has a default.
"""


def reference_page() -> str:
    """Return the page as Markdown."""
    written: set[type[ConfigModel]] = set()
    nodes, settings = _sections(NodeSpec, "nodes[]", written), _sections(Settings, "", written)
    parts = [_HEAD, _NODES, *nodes, _SETTINGS, *settings]
    return "\n".join(parts)


def _sections(
    model: type[ConfigModel], path: str, written: set[type[ConfigModel]]
) -> Iterator[str]:
    """Write a section for a mapping, and one for each mapping in it that is not yet written."""
    written.add(model)
    keys = keys_of(model)
    doc = " ".join((model.__doc__ or "").split())
    title = f"### `{path}`\n\n{doc}\n" if path else "### Top level\n"
    rows = [_row(model, path, key, field) for key, field in keys.items()]
    yield "\n".join(
        [title, "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    )
    for key, field in keys.items():
        inner = nested_model(field.annotation)
        if inner is not None and inner not in written:
            # Of several mappings: by index, or by name.
            several = {"list": "[]", "mapping of rules": ".<name>"}.get(_label(field).name, "")
            yield from _sections(inner, f"{path}.{key}{several}".lstrip("."), written)


def _row(model: type[ConfigModel], path: str, key: str, field: FieldInfo) -> str:
    meaning = meaning_of(model, key)
    if is_restart_key(f"{path}.{key}".lstrip(".")):
        meaning += " *Restart.*"
    cells = (f"`{key}`", _type(field), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
    page = root / "docs/reference/configuration.md"
    for folder in (page.parent, root / "config"):
        folder.mkdir(parents=True, exist_ok=True)
    page.write_text(reference_page(), encoding="utf-8")
    write_schemas(root / "config")
