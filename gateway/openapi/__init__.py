"""The OpenAPI document of both listeners, made from their route tables.

`description.yaml` has what can't be read off the code; bodies are those of the code's Structs. The
tables of the HTTP reference are made from the same operations.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from gateway import __version__, errors
from gateway.admin.app import ADMIN_ROUTES, AdminRoute
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
from gateway.request.routes import Route, api_of_path, pages_of, routes_of
from gateway.watch.audit import AuditEntry
from gateway.watch.metrics import CONTENT_TYPE
from gateway.web.batches import BatchFigures, BatchObject
from gateway.web.files import FileObject
from gateway.web.message_batches import MessageBatchObject
from gateway.web.site import ModelObject, site_routes_of

ListenerName = Literal["public", "admin"]
LISTENERS: tuple[ListenerName, ...] = ("public", "admin")


@dataclass(slots=True)
class Operation:
    """One method of one path of one listener."""

    listener: ListenerName
    method: str
    path: str
    summary: str
    needs_key: bool = True
    role: str | None = None
    parameters: list[JsonSchema] = field(default_factory=list)
    body: JsonSchema | None = None
    content: JsonSchema = field(default_factory=dict)  # of status 200, by media type
    headers: Parameters = field(default_factory=dict)  # of status 200
    statuses: frozenset[int] = frozenset()  # of the errors
    route: object = None  # the entry of the route table, which several paths may share


_HTTP_STATUSES = frozenset({400, 408, 413, 429, 431, 500})  # errors that every path may answer with
_SITE_STATUSES = _HTTP_STATUSES | {401, 403, 404, 503}
_ROUTED_STATUSES = _SITE_STATUSES | {409, 415, 422, 501, 502, 504}
_ADMIN_STATUSES = _HTTP_STATUSES | {401, 403}

_ANY: JsonSchema = {"description": "The node's response."}


def operations(settings: Settings) -> Iterator[Operation]:
    """Every method of every path of both listeners."""
    for path, route in routes_of(settings).items():
        yield _routed(path, route)
    for one in site_routes_of(settings):
        path = _shown(one.path)
        # Some have other spellings.
        spellings = (path, f"/v1{path}", path.removeprefix("/v1"))
        keys = (f"{one.method} {spelling}" for spelling in spellings)
        key = next(key for key in keys if key in SITE_PATHS)
        described = SITE_PATHS[key]
        statuses = _SITE_STATUSES if one.needs_key else _HTTP_STATUSES
        yield Operation(
            "public",
            one.method,
            path,
            described.summary,
            needs_key=one.needs_key,
            parameters=_parameters(path, described),
            body=_body(described),
            content=described.content or _json(described.answer),
            statuses=statuses | described.statuses,
            route=key,
        )
    for page in pages_of(settings):
        text = page.path == "/"
        yield Operation(
            "public",
            page.method,
            page.path,
            API_SUMMARIES[page.path],
            needs_key=page.needs_models,
            body=_json(None) if page.method == "POST" else None,
            content={"text/plain": {"schema": {"type": "string"}}} if text else _json(None),
            statuses=_SITE_STATUSES if page.needs_models else _HTTP_STATUSES,
        )
    for admin in ADMIN_ROUTES:
        yield _admin(admin)


def _json(schema: JsonSchema | None) -> JsonSchema:
    return {"application/json": {"schema": {"type": "object"} if schema is None else schema}}


def _body(described: Described) -> JsonSchema | None:
    """That of the request; None: it has none."""
    if described.form is not None:
        return {"multipart/form-data": {"schema": described.form}}
    return None if described.body is None else _json(described.body)


def _routed(path: str, route: Route) -> Operation:
    api = route.api
    shown = route.path
    if route.multipart:
        form = {
            "type": "object",
            "properties": {
                "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                "model": {"type": "string"},
            },
            "required": ["file"],
        }
        body = {"multipart/form-data": {"schema": form}}
    elif api.translates and path.startswith("/api/"):
        body = _json(None)
    else:
        body = _json({"$ref": "#/components/schemas/RoutedBody"})
    content = _json(_ANY)
    if route.generates:
        # Programs differ in whether a stream's schema is that of its text or of one event.
        content[api.stream_content_type.decode()] = {"schema": {}}
    return Operation(
        "public",
        "POST",
        path,
        API_SUMMARIES[shown],
        parameters=_named_parameters("header", REQUEST_HEADERS),
        body=body,
        content=content,
        headers=RESPONSE_HEADERS,
        statuses=_ROUTED_STATUSES,
        route=route,
    )


def _admin(route: AdminRoute) -> Operation:
    path = _shown(route.path)
    of_method = _TOLD["admin_methods"].get(f"{route.method} {path}", {})
    described = msgspec.convert(_TOLD["admin"].get(path, {}) | of_method, Described)
    if path in ("/metrics", "/metrics/nodes"):
        content: JsonSchema = {CONTENT_TYPE.partition(";")[0]: {"schema": {"type": "string"}}}
    else:
        content = described.content or _json(described.answer)
        if "format" in described.query:
            content = {**content, "text/csv": {"schema": {"type": "string"}}}
    return Operation(
        "admin",
        route.method,
        path,
        route.summary,
        needs_key=route.role is not None,
        role=None if route.role is None else route.role.label,
        parameters=_parameters(path, described),
        body=_body(described),
        content=content,
        statuses=_ADMIN_STATUSES | described.statuses,
    )


def _shown(path: str) -> str:
    """A path of Starlette's in OpenAPI's form."""
    return path.replace(":path}", "}")


def _parameters(path: str, described: Described) -> list[JsonSchema]:
    schema = {"type": "string", "minLength": 1}
    return [
        *(
            {"name": name, "in": "path", "schema": schema, "required": True}
            for name in re.findall(r"\{(\w+)\}", path)
        ),
        *_named_parameters("query", described.query),
        *_named_parameters("header", described.headers),
    ]


def _named_parameters(place: str, parameters: Parameters) -> list[JsonSchema]:
    return [{"name": name, "in": place, **_beside(one)} for name, one in parameters.items()]


def _beside(told: JsonSchema) -> JsonSchema:
    """The meaning of a parameter or a header beside its schema, and not within."""
    schema = {key: value for key, value in told.items() if key != "description"}
    return {"description": told["description"], "schema": schema}


def openapi_json(
    settings: Settings,
    listener: str | None = None,
    *,
    needs_key: bool = True,
    needs_admin_key: bool = True,
) -> bytes:
    """The document of both listeners, or of one, as JSON.

    `needs_key`, `needs_admin_key`: whether callers of the public and the admin listener need one.
    Raises: GatewayError 400, if there is no such listener.
    """
    listeners = [name for name in LISTENERS if listener in {None, name}]
    if not listeners:
        raise errors.invalid_request("'listener' must be 'public' or 'admin'.", "listener")
    optional = {"public": not needs_key, "admin": not needs_admin_key}
    servers = _servers(settings)
    paths: dict[str, JsonSchema] = {}
    served = [one for one in operations(settings) if one.listener in listeners]
    for operation in served:
        name = operation.listener
        item = paths.setdefault(operation.path, {"servers": []})
        if servers[name] not in item["servers"]:
            item["servers"].append(servers[name])
        shown = _operation(operation, optional=optional[name])
        method = operation.method.lower()
        item[method] = _merged(item[method], shown) if method in item else shown
    if listener is not None:
        for item in paths.values():
            del item["servers"]
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "llama-gateway",
            "version": __version__,
            "description": (
                "An OpenAI-compatible gateway in front of many llama.cpp servers. Each path says "
                "by its servers and tags on which listener it is."
            ),
        },
        "servers": [servers[name] for name in listeners],
        "tags": [{"name": name, "description": f"The {name} listener."} for name in listeners],
        "paths": paths,
        "components": {
            "securitySchemes": SECURITY_SCHEMES,
            "responses": _error_responses(served),
            "schemas": {
                **ERROR_SCHEMAS,
                "RoutedBody": routed_body(),
                **SCHEMAS,
                **settings_schemas(),
            },
        },
    }
    return msgspec.json.encode(document)


_SECURITY: dict[ListenerName, list[JsonSchema]] = {
    "public": [{"bearerKey": []}, {"xApiKey": []}, {"apiKey": []}],
    "admin": [{"adminKey": []}],
}


def _servers(settings: Settings) -> dict[ListenerName, JsonSchema]:
    servers: dict[ListenerName, JsonSchema] = {}
    for name in LISTENERS:
        one = settings.listen if name == "public" else settings.admin
        everywhere = one.host in {"", "0.0.0.0", "::"}
        host = "localhost" if everywhere else f"[{one.host}]" if ":" in one.host else one.host
        url = f"{'https' if one.tls else 'http'}://{host}:{one.port}"
        servers[name] = {"url": url, "description": f"The {name} listener."}
    return servers


def _operation(operation: Operation, *, optional: bool) -> JsonSchema:
    security = _SECURITY[operation.listener] if operation.needs_key else []
    if optional and security:
        security = [*security, {}]
    words = re.findall(r"\w+", operation.path) or ["root"]
    summary = operation.summary
    shown: JsonSchema = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": summary[:1].upper() + summary[1:],
        "tags": [operation.listener],
        "security": security,
    }
    if operation.role is not None:
        shown["x-role"] = operation.role
        shown["description"] = f"Needs the role `{operation.role}`, or a higher one."
    if operation.parameters:
        shown["parameters"] = operation.parameters
    if operation.body is not None:
        shown["requestBody"] = {"required": True, "content": operation.body}
    success: JsonSchema = {"description": "Done.", "content": operation.content}
    if operation.headers:
        success["headers"] = {name: _beside(one) for name, one in operation.headers.items()}
    refer = f"#/components/responses/{operation.listener}{_dialect(operation)}"
    failures = {str(one): {"$ref": f"{refer}{one}"} for one in sorted(operation.statuses)}
    shown["responses"] = {"200": success, **failures}
    return shown


def _dialect(operation: Operation) -> str:
    name = api_of_path(operation.path).name
    return {"messages": "AnthropicError", "ollama": "OllamaError"}.get(name, "Error")


def _error_responses(all_operations: Iterable[Operation]) -> dict[str, JsonSchema]:
    """The responses of errors that these refer to."""
    found: dict[str, JsonSchema] = {}
    kinds = {(op.listener, _dialect(op), status) for op in all_operations for status in op.statuses}
    for listener, dialect, status in kinds:
        table = ERRORS if listener == "public" else ADMIN_ERRORS
        headers = ERROR_HEADERS | STATUS_HEADERS.get(status, {})
        content = {"schema": {"$ref": f"#/components/schemas/{dialect}"}}
        causes = [f"`{row.code}`: {row.when}" for row in table if row.status == status]
        found[f"{listener}{dialect}{status}"] = {
            "description": "; ".join(causes) or "What the node has answered.",
            "content": {"application/json": content},
            "headers": {name: _beside(one) for name, one in headers.items()},
        }
    return dict(sorted(found.items()))


def _merged(one: JsonSchema, other: JsonSchema) -> JsonSchema:
    """One operation for a path that both listeners have."""
    return {
        **one,
        "tags": [*one["tags"], *other["tags"]],
        "responses": {**other["responses"], **one["responses"]},
        "parameters": [*one.get("parameters", []), *other.get("parameters", [])],
    }


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


def _error_rows(told: Mapping[int, Mapping[str, str]]) -> tuple[ErrorRow, ...]:
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
ERRORS, ADMIN_ERRORS = _error_rows(_TOLD["errors"]), _error_rows(_TOLD["admin_errors"])
ERROR_SCHEMAS: dict[str, JsonSchema] = _TOLD["error_schemas"]
SECURITY_SCHEMES: JsonSchema = _TOLD["security_schemes"]
API_SUMMARIES: Mapping[str, str] = _TOLD["summaries"]
SITE_PATHS = msgspec.convert(_TOLD["site"], dict[str, Described])


def described_fields(*kinds: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Type and meaning of the fields of a body that is made as one of these Structs, by name."""
    fields = {}
    for kind in kinds:
        for one in msgspec.structs.fields(kind):
            types = _value_schema(one.type)["type"]
            name = types if isinstance(types, str) else f"{types[0]}?"
            [meaning] = getattr(one.type, "__metadata__", ("",))
            fields[one.encode_name] = (name, meaning)
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
    for one in msgspec.structs.fields(kind):
        if one.name not in properties:
            nested = isinstance(one.type, type) and issubclass(one.type, msgspec.Struct)
            properties[one.name] = struct_schema(one.type) if nested else _value_schema(one.type)
        may_be_unset = one.default is msgspec.UNSET
        if one.name not in optional and not may_be_unset:
            required.append(one.name)
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
        types = {} if base == "any" else {"type": [base, "null"] if kind.endswith("?") else base}
        properties[name] = {**types, "description": _sentence(meaning)}
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
