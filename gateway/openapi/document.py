"""The OpenAPI document of both listeners, made from their route tables.

The tables of the HTTP reference are made from the same operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gateway import __version__, errors
from gateway.admin.app import ADMIN_ROUTES, AdminRoute
from gateway.config.listeners import AdminSettings, ListenSettings
from gateway.config.settings import Settings
from gateway.openapi import bodies
from gateway.openapi.bodies import Described, JsonSchema, Parameters
from gateway.request.routes import Route, api_of_path, pages_of, routes_of
from gateway.watch.metrics import CONTENT_TYPE
from gateway.web.site import site_routes_of

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
        key = next(key for key in keys if key in bodies.SITE_PATHS)
        described = bodies.SITE_PATHS[key]
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
            bodies.API_SUMMARIES[page.path],
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
        bodies.API_SUMMARIES[shown],
        parameters=_named_parameters("header", bodies.REQUEST_HEADERS),
        body=body,
        content=content,
        headers=bodies.RESPONSE_HEADERS,
        statuses=_ROUTED_STATUSES,
        route=route,
    )


def _admin(route: AdminRoute) -> Operation:
    path = _shown(route.path)
    described = bodies.admin_path(route.method, path)
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
            "securitySchemes": bodies.SECURITY_SCHEMES,
            "responses": _error_responses(served),
            "schemas": {
                **bodies.ERROR_SCHEMAS,
                "RoutedBody": bodies.routed_body(),
                **bodies.SCHEMAS,
                **bodies.settings_schemas(),
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
    configured: tuple[tuple[ListenerName, ListenSettings | AdminSettings], ...] = (
        ("public", settings.listen),
        ("admin", settings.admin),
    )
    for name, one in configured:
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
    shown["responses"] = {"200": success, **_errors(operation)}
    return shown


def _dialect(operation: Operation) -> str:
    name = api_of_path(operation.path).name
    return {"messages": "AnthropicError", "ollama": "OllamaError"}.get(name, "Error")


def _errors(operation: Operation) -> dict[str, JsonSchema]:
    prefix = f"{operation.listener}{_dialect(operation)}"
    return {
        str(status): {"$ref": f"#/components/responses/{prefix}{status}"}
        for status in sorted(operation.statuses)
    }


def _error_responses(all_operations: Iterable[Operation]) -> dict[str, JsonSchema]:
    """The responses that `_errors` refers to."""
    found: dict[str, JsonSchema] = {}
    for operation in all_operations:
        table = bodies.ERRORS if operation.listener == "public" else bodies.ADMIN_ERRORS
        dialect = _dialect(operation)
        for status in operation.statuses:
            name = f"{operation.listener}{dialect}{status}"
            if name in found:
                continue
            headers = bodies.ERROR_HEADERS | bodies.STATUS_HEADERS.get(status, {})
            content = {"schema": {"$ref": f"#/components/schemas/{dialect}"}}
            causes = [f"`{row.code}`: {row.when}" for row in table if row.status == status]
            found[name] = {
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
