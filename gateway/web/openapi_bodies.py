"""Parameters, bodies, responses and errors of the OpenAPI document that are a path's own."""

from __future__ import annotations

from gateway.web.openapi_background import (
    BACKGROUND_CONTENT,
    BACKGROUND_QUERY,
    BACKGROUND_RESPONSES,
    BACKGROUND_STATUSES,
)
from gateway.web.openapi_batches import (
    BATCH_CONTENT,
    BATCH_QUERY,
    BATCH_RESPONSES,
    BATCH_STATUSES,
)
from gateway.web.openapi_parts import JsonSchema

MODEL: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "meta": {"type": "object"},
    },
    "required": ["id", "object", "created", "owned_by"],
}

FILE: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "file"},
        "bytes": {"type": "integer"},
        "created_at": {"type": "integer"},
        "expires_at": {"type": ["integer", "null"]},
        "filename": {"type": "string"},
        "purpose": {"type": "string"},
        "status": {"type": "string"},
        "status_details": {"type": "null"},
    },
    "required": ["id", "object", "bytes", "created_at", "filename", "purpose"],
}

_FILE: JsonSchema = {"$ref": "#/components/schemas/File"}

RESPONSES: dict[str, JsonSchema] = {
    "/v1/models": {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        },
        "required": ["object", "data"],
    },
    "/v1/models/{id}": {"$ref": "#/components/schemas/Model"},
    "/props": {
        "type": "object",
        "properties": {
            "default_generation_settings": {"type": "object"},
            "total_slots": {"type": "integer"},
            "modalities": {"type": "object"},
        },
        "required": ["default_generation_settings", "total_slots", "modalities"],
    },
    "/v1/usage": {"$ref": "#/components/schemas/CallerUsage"},
    "/v1/files": {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": _FILE},
            "first_id": {"type": ["string", "null"]},
            "last_id": {"type": ["string", "null"]},
            "has_more": {"type": "boolean"},
        },
        "required": ["object", "data", "has_more"],
    },
    "POST /v1/files": _FILE,
    "/v1/files/{id}": _FILE,
    "DELETE /v1/files/{id}": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "file"},
            "deleted": {"const": True},
        },
        "required": ["id", "object", "deleted"],
    },
    **BATCH_RESPONSES,
    **BACKGROUND_RESPONSES,
    "/admin/usage": {"$ref": "#/components/schemas/Usage"},
    "/admin/usage/arrivals": {"$ref": "#/components/schemas/Arrivals"},
    "/health": {"type": "object", "properties": {"status": {"const": "ok"}}},
    "/ready": {"type": "object", "properties": {"status": {"const": "ready"}}},
    "/admin/status": {"$ref": "#/components/schemas/Status"},
    "/admin/nodes": {
        "type": "object",
        "properties": {"nodes": {"type": "array", "items": {"$ref": "#/components/schemas/Node"}}},
        "required": ["nodes"],
    },
    "/admin/nodes/{name}": {"$ref": "#/components/schemas/Node"},
    "/admin/nodes/{name}/drain": {"$ref": "#/components/schemas/Node"},
    "/admin/nodes/{name}/resume": {"$ref": "#/components/schemas/Node"},
    "/admin/nodes/{name}/probe": {"$ref": "#/components/schemas/Node"},
    "/admin/models": {
        "type": "object",
        "properties": {
            "models": {"type": "array", "items": {"$ref": "#/components/schemas/ServedModel"}}
        },
        "required": ["models"],
    },
    "/admin/models/{name}/pause": {"$ref": "#/components/schemas/ServedModel"},
    "/admin/models/{name}/resume": {"$ref": "#/components/schemas/ServedModel"},
    "/admin/requests": {
        "type": "object",
        "properties": {
            "requests": {"type": "array", "items": {"$ref": "#/components/schemas/Request"}}
        },
        "required": ["requests"],
    },
    "/admin/requests/{id}/why": {"$ref": "#/components/schemas/Why"},
    "/admin/keys": {
        "type": "object",
        "properties": {
            "keys": {"type": "array", "items": {"$ref": "#/components/schemas/ApiKey"}},
            "warnings": {"type": "array", "items": {"type": "string"}},
            "problem": {"type": ["string", "null"]},
        },
        "required": ["keys", "warnings", "problem"],
    },
    "POST /admin/keys": {"$ref": "#/components/schemas/ApiKey"},
    "/admin/keys/import": {
        "type": "object",
        "properties": {
            "imported": {"type": "integer"},
            "keys": {"type": "array", "items": {"$ref": "#/components/schemas/ApiKey"}},
            "warnings": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["imported", "keys", "warnings"],
    },
    "/admin/keys/{name}": {"$ref": "#/components/schemas/ApiKey"},
    "/admin/keys/{name}/rotate": {"$ref": "#/components/schemas/ApiKey"},
    "/admin/config": {"$ref": "#/components/schemas/Settings"},
    "/admin/audit": {
        "type": "object",
        "properties": {
            "entries": {"type": "array", "items": {"$ref": "#/components/schemas/AuditEntry"}},
            "next": {"type": ["integer", "null"]},
        },
        "required": ["entries", "next"],
    },
}
"""Schemas of responses that the gateway makes itself, by path, or by method and path where another
method of the path has another; those that are not here are objects."""

QUERY: dict[str, dict[str, tuple[JsonSchema, str]]] = {
    "/props": {"model": ({"type": "string"}, "The model; unset: `default_model`, else all.")},
    "/v1/usage": {
        "user": ({"type": "string"}, "One of the end users of a key with `trust_user_headers`.")
    },
    "/v1/files": {
        "after": ({"type": "string"}, "The last id of the page before."),
        "limit": ({"type": "integer", "minimum": 1, "maximum": 10000}, "Most files of the page."),
        "order": ({"type": "string", "enum": ["asc", "desc"]}, "By age; `desc` by default."),
        "purpose": ({"type": "string"}, "Only files for this purpose."),
    },
    **BATCH_QUERY,
    **BACKGROUND_QUERY,
    "/admin/usage": {
        "by": (
            {"type": "string"},
            "`key`, `group`, `user`, `model`, `class`, `day` or `tier`; two of them with a comma.",
        ),
        "since": (
            {"type": "string"},
            "A date, a time of RFC 3339, or how long ago; `30d` by default.",
        ),
        "until": ({"type": "string"}, "Likewise; a date includes its day."),
        "limit": ({"type": "integer", "minimum": 1, "maximum": 10000}, "Most rows."),
        "format": ({"type": "string", "enum": ["json", "csv"]}, "`json` (default) or `csv`."),
    },
    "/admin/usage/arrivals": {
        "since": ({"type": "string"}, "As of `/admin/usage`."),
        "until": ({"type": "string"}, "Likewise."),
    },
    "/admin/live": {
        "once": ({"type": "string", "enum": ["0", "1"]}, "`1`: one snapshot, and no updates.")
    },
    "/admin/keys": {
        "revoked": ({"type": "string", "enum": ["0", "1"]}, "`1`: revoked keys as well."),
        "name": ({"type": "string"}, "Only keys of this name or id."),
    },
    "/admin/nodes/{name}/drain": {
        "deadline": (
            {"type": "number", "minimum": 0, "maximum": 604800},
            "Seconds after which running requests move to other nodes, or end.",
        )
    },
    "/admin/audit": {
        "since": ({"type": "number"}, "Only changes from then on, in seconds since 1970."),
        "until": ({"type": "number"}, "Only changes before then, in seconds since 1970."),
        "before": ({"type": "integer", "minimum": 1}, "The `next` of the page before."),
        "action": (
            {"type": "string", "pattern": "^[a-z.]{1,64}$"},
            "Only this action, or those that begin with it and a dot (`keys`).",
        ),
        "target": ({"type": "string", "pattern": "^[!-~]{1,200}$"}, "Only what was done to this."),
        "limit": ({"type": "integer", "minimum": 1, "maximum": 1000}, "Entries of a page."),
    },
    "/openapi.json": {
        "listener": (
            {"type": "string", "enum": ["public", "admin"]},
            "The document of this listener alone.",
        )
    },
}

_TEXT: JsonSchema = {"type": "string"}

_EVENTS: JsonSchema = {"text/event-stream": {"schema": _TEXT}}

OTHER_CONTENT: dict[str, JsonSchema] = {
    "/v1/files/{id}/content": {"application/octet-stream": {"schema": {}}},
    **BATCH_CONTENT,
    **BACKGROUND_CONTENT,
    "/": {"text/html": {"schema": _TEXT}, "text/plain": {"schema": _TEXT}},
    "/dashboard/{file}": {
        "text/css": {"schema": _TEXT},
        "text/html": {"schema": _TEXT},
        "text/javascript": {"schema": _TEXT},
        "image/svg+xml": {"schema": _TEXT},
    },
    "/admin/live": _EVENTS,
    "/admin/chat": _EVENTS,
}
"""Responses that are no JSON, by path."""

FORMS: dict[str, JsonSchema] = {
    "POST /v1/files": {
        "type": "object",
        "properties": {
            "purpose": {"type": "string", "enum": ["batch", "user_data"]},
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
        },
        "required": ["purpose", "file"],
    },
}
"""Bodies of the public listener's own paths, by method and path."""

_KEY_RIGHTS = (
    "`name`, `class`, `max_class`, `models`, `group`, `limits`, `user_limits`, `expires`, "
    "`trust_user_headers`: as in an entry of the settings' `keys`"
)

BODIES: dict[tuple[str, str], JsonSchema] = {
    ("POST", "/admin/chat"): {
        "type": "object",
        "description": "As `/v1/chat/completions` takes it; it is always streamed.",
        "properties": {"messages": {"type": "array"}, "model": {"type": "string"}},
        "required": ["messages"],
        "examples": [{"messages": [{"role": "user", "content": "Hello"}]}],
    },
    ("POST", "/admin/keys"): {
        "type": "object",
        "description": (
            f"{_KEY_RIGHTS}; with `id` and `sha256` a key that exists, else a new one is made."
        ),
        "examples": [{"name": "alice", "class": "premium", "limits": {"rpm": 60}}],
    },
    ("POST", "/admin/keys/import"): {
        "type": "object",
        "properties": {
            "keys": {
                "type": "array",
                "items": {"type": "object"},
                "minItems": 1,
                "maxItems": 10_000,
                "description": f"{_KEY_RIGHTS}; each with `id` and `sha256`.",
            }
        },
        "required": ["keys"],
    },
    ("PATCH", "/admin/keys/{name}"): {
        "type": "object",
        "description": f"A JSON merge patch (RFC 7396): {_KEY_RIGHTS}; null takes one away.",
        "examples": [{"max_class": "premium", "expires": None}],
    },
    ("POST", "/admin/keys/{name}/rotate"): {
        "type": "object",
        "properties": {
            "grace": {
                "description": "How long the old secret works, such as `24h`; 24 hours if unset."
            },
            "sha256": {"description": "Of the new secret; unset: one is made."},
        },
        "examples": [{"grace": "1h"}],
    },
}
"""Bodies of the admin API, by method and path."""

_KEY_STATUSES = frozenset({404, 409, 501, 503})

STATUSES: dict[str, frozenset[int]] = {
    "/ready": frozenset({503}),
    "/v1/files": frozenset({501}),
    "POST /v1/files": frozenset({415, 501, 507}),
    "/v1/files/{id}": frozenset({501}),
    "/v1/files/{id}/content": frozenset({501}),
    "DELETE /v1/files/{id}": frozenset({409, 501}),
    **BATCH_STATUSES,
    **BACKGROUND_STATUSES,
    "/admin/nodes/{name}": frozenset({404}),
    "/admin/nodes/{name}/drain": frozenset({404}),
    "/admin/nodes/{name}/resume": frozenset({404}),
    "/admin/nodes/{name}/probe": frozenset({404}),
    "/admin/models/{name}/pause": frozenset({400, 404}),
    "/admin/models/{name}/resume": frozenset({404}),
    "/admin/requests/{id}": frozenset({404}),
    "/admin/requests/{id}/why": frozenset({404}),
    "/dashboard/{file}": frozenset({404}),
    "/admin/chat": frozenset({404, 422, 501, 502, 503, 504}),
    "/admin/reload": frozenset({422}),
    "/admin/audit": frozenset({503}),
    "/admin/usage": frozenset({501, 503}),
    "/admin/usage/arrivals": frozenset({501, 503}),
    "/admin/keys": _KEY_STATUSES - {404},
    "/admin/keys/import": _KEY_STATUSES - {404},
    "/admin/keys/{name}": _KEY_STATUSES,
    "/admin/keys/{name}/rotate": _KEY_STATUSES,
}
"""Errors of a path besides those of every path."""
