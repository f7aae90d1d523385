"""What the OpenAPI document says of paths, headers, bodies and errors.

`description.yaml` has what can't be read off the code; bodies are those of the code's Structs. The
tables of `docs/reference/http.md` show the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
import yaml

from gateway.admin.batches import OwnedBatch
from gateway.admin.nodes import NodeObject, PlacementObject, ServedModelObject
from gateway.admin.status import StatusObject
from gateway.admin.why import (
    ComparedNode,
    ExplainedRequest,
    RequestObject,
    TimelineObject,
    ToldGrant,
    ToldQueueing,
    ToldRefusal,
    WhyObject,
)
from gateway.callers.ended import EndedRow, OwnRow
from gateway.config.settings import Settings
from gateway.request.body import ParsedBody
from gateway.watch.audit import AuditEntry
from gateway.web.batches import BatchFigures, BatchObject
from gateway.web.files import FileObject
from gateway.web.message_batches import MessageBatchObject
from gateway.web.site import ModelObject

JsonSchema = dict[str, Any]
Fields = Mapping[str, tuple[str, str]]  # type and meaning, by name
# Of a query or a head: schemas with their meaning as `description`, by name.
Parameters = dict[str, JsonSchema]


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One path, or one of its methods, as `description.yaml` has it."""

    summary: str = ""  # empty: the route table has it
    answer: JsonSchema | None = None
    """The body of status 200, if it is JSON; None: an object of any fields."""
    statuses: frozenset[int] = frozenset()  # of errors besides those of every path
    query: Parameters = {}
    body: JsonSchema | None = None  # that of the request, if it is JSON
    form: JsonSchema | None = None  # that of the request, if it is a form
    content: JsonSchema | None = None  # where the answer is not only JSON, by media type
    headers: Parameters = {}
    """Those of the request that the gateway reads, besides keys."""


class ErrorRow(NamedTuple):
    """One error of a listener."""

    status: int
    code: str
    when: str
    retried: str = "no"  # whether official clients send the request again by themselves


def _with_references(value: Any) -> Any:
    """The value with whole `$ref`s in place of the names of schemas."""
    if isinstance(value, list):
        return [_with_references(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _ref(value["$ref"])
    return {name: _with_references(one) for name, one in value.items()}


def _ref(name: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{name}"}


def _split(head: str) -> tuple[str, str]:
    """`name (more)` in two."""
    name, _, more = head.removesuffix(")").partition(" (")
    return name, more


def _errors(told: Mapping[int, Mapping[str, str]]) -> tuple[ErrorRow, ...]:
    return tuple(
        ErrorRow(status, code, when, retried or "no")
        for status, rows in told.items()
        for head, when in rows.items()
        for code, retried in [_split(head)]
    )


_TOLD: Any = _with_references(
    yaml.load(
        files("gateway.openapi").joinpath("description.yaml").read_bytes(),
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # noqa: S506 - both are safe
    )
)
REQUEST_HEADERS: Parameters = _TOLD["request_headers"]
RESPONSE_HEADERS: Parameters = _TOLD["response_headers"]
ERROR_HEADERS: Parameters = _TOLD["error_headers"]
STATUS_HEADERS: Mapping[int, Parameters] = _TOLD["headers_of_status"]
ERRORS, ADMIN_ERRORS = _errors(_TOLD["errors"]), _errors(_TOLD["admin_errors"])
ERROR_SCHEMAS: dict[str, JsonSchema] = _TOLD["error_schemas"]
SECURITY_SCHEMES: JsonSchema = _TOLD["security_schemes"]
API_SUMMARIES: Mapping[str, str] = _TOLD["summaries"]
SITE_PATHS = msgspec.convert(_TOLD["site"], dict[str, Described])


def admin_path(method: str, path: str) -> Described:
    """What is said of one method of a path of the admin listener."""
    of_method = _TOLD["admin_methods"].get(f"{method} {path}", {})
    return msgspec.convert(_TOLD["admin"].get(path, {}) | of_method, Described)


def described_fields(*kinds: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Type and meaning of the fields of a body that is made as one of these Structs, by name."""
    fields = {}
    for kind in kinds:
        for field in msgspec.structs.fields(kind):
            types = _value_schema(field.type)["type"]
            name = types if isinstance(types, str) else f"{types[0]}?"
            [meaning] = getattr(field.type, "__metadata__", ("",))
            fields[field.encode_name] = (name, meaning)
    return fields


def _value_schema(kind: Any) -> JsonSchema:
    """As msgspec has it, in the short form of this document, with the meaning that it has here."""
    schema = msgspec.json.schema(kind)
    for name in ("items", "additionalProperties", "$defs"):
        schema.pop(name, None)
    if "anyOf" in schema:
        schema["type"] = [one["type"] for one in schema.pop("anyOf")]
    elif "type" not in schema and len(schema.get("enum", ())) == 1:
        [schema["const"]] = schema.pop("enum")
    for meaning in getattr(kind, "__metadata__", ()):
        if isinstance(meaning, str):
            schema["description"] = _sentence(meaning)
    return schema


def _sentence(meaning: str) -> str:
    return meaning[:1].upper() + meaning[1:] + "."


def routed_body() -> JsonSchema:
    """The schema of a JSON body, as far as the gateway reads it: by `ParsedBody`."""
    properties = {}
    for one in msgspec.structs.fields(ParsedBody):
        kind, [meaning] = one.type.__origin__, one.type.__metadata__
        schema = {} if kind is msgspec.Raw else msgspec.json.schema(kind)
        properties[one.name] = {**schema, "description": _sentence(meaning)}
    return {
        "type": "object",
        "description": (
            "The fields that the gateway reads. All others are passed on as they are, and so are "
            "those without a type here: the node checks them."
        ),
        "properties": properties,
    }


def struct_schema(
    kind: type[msgspec.Struct], optional: Collection[str] = (), **properties: JsonSchema
) -> JsonSchema:
    """The schema of a body that is made as this Struct; only the `optional` fields may be missing.

    `properties` replace those of the Struct.
    """
    required = []
    for field in msgspec.structs.fields(kind):
        if field.name not in properties:
            nested = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
            properties[field.name] = (
                struct_schema(field.type) if nested else _value_schema(field.type)
            )
        may_be_unset = field.default is msgspec.UNSET
        if field.name not in optional and not may_be_unset:
            required.append(field.name)
    return {"type": "object", "properties": properties, "required": required}


def settings_schemas() -> dict[str, JsonSchema]:
    """The schemas of the settings as `/admin/config` shows them, by name."""
    schema = Settings.model_json_schema(
        mode="serialization", by_alias=True, ref_template="#/components/schemas/{model}"
    )
    definitions: dict[str, JsonSchema] = schema.pop("$defs")
    for name in ("KeySpec", "AdminKeySpec"):
        definitions[name]["properties"]["sha256"].pop("pattern", None)  # It is masked.
    return {**definitions, "Settings": schema}


# Type and meaning of the fields of described bodies, by the names of their schemas; `?`: or null.
FIELDS: dict[str, Fields] = {
    "Status": described_fields(StatusObject),
    "Node": described_fields(NodeObject),
    "ServedModel": described_fields(ServedModelObject),
    "Placement": described_fields(PlacementObject),
    "Request": described_fields(RequestObject),
    "Timeline": described_fields(TimelineObject),
    "EndedRequest": described_fields(EndedRow),
    "OwnRequest": described_fields(OwnRow),
    "Why": described_fields(WhyObject),
    "ExplainedRequest": described_fields(ExplainedRequest),
    "Decision": described_fields(ToldQueueing, ToldRefusal, ToldGrant),
    "ComparedNode": described_fields(ComparedNode),
    "AuditEntry": described_fields(AuditEntry) | {"at": ("string", "time, UTC")},
    **{
        name: {(pair := _split(head))[0]: (pair[1], meaning) for head, meaning in told.items()}
        for name, told in _TOLD["fields"].items()
    },
}


def fields_schema(fields: Fields, optional: Collection[str] = ()) -> JsonSchema:
    """The schema of an object with these fields, of which only the `optional` may be missing."""
    properties = {}
    for name, (kind, meaning) in fields.items():
        base = kind.removesuffix("?")
        types = {"type": [base, "null"] if kind.endswith("?") else base}
        properties[name] = {
            **({} if base == "any" else types),
            "description": _sentence(meaning),
        }
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


# Fields that described bodies may lack. It depends on a decision's kind which others it has.
_OPTIONAL: dict[str, Collection[str]] = {
    "ApiKey": {"key", "last_used_at", "standing", "users", "warnings"},
    "KeyGroup": {"warnings"},
    "Decision": FIELDS["Decision"].keys() - {"kind", "at", "seconds", "summary"},
}

# Schemas of bodies, by name.
SCHEMAS: dict[str, JsonSchema] = {
    "Model": struct_schema(ModelObject),
    "File": struct_schema(FileObject, optional=("expires_at", "status", "status_details")),
    "BatchProgress": struct_schema(BatchFigures),
    "Batch": struct_schema(
        BatchObject,
        optional=(
            *("model", "errors", "output_file_id", "error_file_id", "in_progress_at"),
            *("expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
            *("cancelling_at", "cancelled_at", "usage", "metadata", "llama_gateway"),
        ),
        llama_gateway=_ref("BatchProgress"),
    ),
    "OwnedBatch": struct_schema(OwnedBatch, llama_gateway=_ref("BatchProgress")),
    "MessageBatch": struct_schema(
        MessageBatchObject, optional=("llama_gateway",), llama_gateway=_ref("BatchProgress")
    ),
    **{name: fields_schema(fields, _OPTIONAL.get(name, ())) for name, fields in FIELDS.items()},
}
for _name, _field, _items in (
    ("Why", "requests", _ref("ExplainedRequest")),
    ("ExplainedRequest", "decisions", _ref("Decision")),
    ("ExplainedRequest", "parts", {"type": "string"}),
    ("Decision", "nodes", _ref("ComparedNode")),
):
    SCHEMAS[_name]["properties"][_field]["items"] = _items
