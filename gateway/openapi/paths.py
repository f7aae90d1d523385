"""What the OpenAPI document says of each path that the gateway answers by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gateway.openapi.bodies import (
    FIELDS,
    TEXT,
    JsonSchema,
    fields_schema,
    object_schema,
    struct_schema,
)
from gateway.web.batches import BatchFigures, BatchObject
from gateway.web.files import FileObject
from gateway.web.message_batches import MessageBatchObject
from gateway.web.site import ModelObject

# Of a query or a head: schema and meaning, by name.
Parameters = Mapping[str, tuple[JsonSchema, str]]


class Described(NamedTuple):
    """One path, or one of its methods."""

    summary: str = ""  # empty: the route table has it
    answer: JsonSchema | None = None
    """The body of status 200, if it is JSON; None: an object of any fields."""
    statuses: frozenset[int] = frozenset()  # of errors besides those of every path
    query: Parameters = {}  # noqa: RUF012 - immutable
    body: JsonSchema | None = None  # that of the request, if it is JSON
    form: JsonSchema | None = None  # that of the request, if it is a form
    content: JsonSchema | None = None  # where the answer is not only JSON, by media type
    headers: Parameters = {}  # noqa: RUF012 - immutable
    """Those of the request that the gateway reads, besides keys."""


def _ref(name: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


def _errors(*statuses: int) -> frozenset[int]:
    return frozenset(statuses)


_INTEGER: JsonSchema = {"type": "integer"}
_NULLABLE: JsonSchema = {"type": ["string", "null"]}
_ANY_OBJECT: JsonSchema = {"type": "object"}
_EVENTS: JsonSchema = {"text/event-stream": {"schema": TEXT}}
_LINES: JsonSchema = {"application/x-jsonl": {"schema": TEXT}}

_EDGES: dict[str, JsonSchema] = {
    "first_id": _NULLABLE,
    "last_id": _NULLABLE,
    "has_more": {"type": "boolean"},
}

_LISTED: JsonSchema = {"const": "list"}


def _page(items: JsonSchema) -> JsonSchema:
    return object_schema(("first_id", "last_id"), object=_LISTED, data=_list(items), **_EDGES)


def _deleted(of: JsonSchema) -> JsonSchema:
    return {"type": "object", "properties": {"id": TEXT, "object": of, "deleted": {"const": True}}}


def _at_most(most: int) -> JsonSchema:
    return {"type": "integer", "minimum": 1, "maximum": most}


def _one_of(*words: str) -> JsonSchema:
    return {"type": "string", "enum": list(words)}


# Fields that described bodies may lack. It depends on a decision's kind which others it has.
_OPTIONAL: dict[str, Collection[str]] = {
    "ApiKey": {"key", "warnings"},
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
    "MessageBatch": struct_schema(
        MessageBatchObject, optional=("llama_gateway",), llama_gateway=_ref("BatchProgress")
    ),
    **{name: fields_schema(fields, _OPTIONAL.get(name, ())) for name, fields in FIELDS.items()},
}
for _name, _field, _items in (
    ("Why", "requests", _ref("ExplainedRequest")),
    ("ExplainedRequest", "decisions", _ref("Decision")),
    ("ExplainedRequest", "parts", TEXT),
    ("Decision", "nodes", _ref("ComparedNode")),
):
    SCHEMAS[_name]["properties"][_field]["items"] = _items

_FILE, _BATCH, _MESSAGE_BATCH = _ref("File"), _ref("Batch"), _ref("MessageBatch")
_NO_STORE = _errors(501)

_WINDOW: JsonSchema = {
    "type": "string",
    "description": "Such as `24h`, `90m` or `2d`, within `batches.windows`.",
    "examples": ["24h"],
}

_WEBHOOK: JsonSchema = {
    "type": "string",
    "description": "Where its end is told, of those that the settings allow.",
}

_IDEMPOTENCY: Parameters = {
    "Idempotency-Key": (
        {"type": "string", "minLength": 1, "maxLength": 255},
        "The same request again gives the batch that there is; with another request, 422.",
    )
}

_EXPIRY_SECONDS: JsonSchema = {"type": "integer", "minimum": 3600, "maximum": 2592000}
_AFTER = "The last id of the page before."
_KEPT = _errors(404, 501, 503)

# The public listener's own paths, by method and path.
SITE_PATHS: dict[str, Described] = {
    "GET /v1/models": Described(
        "the models that this key may use, aliases too, their nodes up or down; with an "
        "`anthropic-version` header in Anthropic's form; 503 until the first probes are done",
        object_schema(object=_LISTED, data=_list(_ref("Model"))),
    ),
    "GET /v1/models/{id}": Described("one of them", _ref("Model")),
    "GET /props": Described(
        "context size and slots, for clients that ask a llama.cpp server; no path, no template",
        object_schema(
            default_generation_settings=_ANY_OBJECT, total_slots=_INTEGER, modalities=_ANY_OBJECT
        ),
        query={"model": (TEXT, "The model; unset: `default_model`, else all.")},
    ),
    "GET /v1/usage": Described(
        "the caller's own figures of today and this month, its limits, and what is left of them",
        _ref("CallerUsage"),
        query={"user": (TEXT, "One of the end users of a key with `trust_user_headers`.")},
    ),
    "GET /v1/files": Described(
        "the key's files, the newest first",
        _page(_FILE),
        _NO_STORE,
        query={
            "after": (TEXT, _AFTER),
            "limit": (_at_most(10000), "Most files of the page."),
            "order": (_one_of("asc", "desc"), "By age; `desc` by default."),
            "purpose": (TEXT, "Only files for this purpose."),
        },
    ),
    "POST /v1/files": Described(
        "upload a file: a form with `purpose` (`batch` or `user_data`), the `file`, and, if it "
        "shall go before `batches.keep` is over, `expires_after`",
        _FILE,
        _errors(415, 501, 507),
        form={
            "type": "object",
            "properties": {
                "purpose": _one_of("batch", "user_data"),
                "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": _EXPIRY_SECONDS,
            },
            "required": ["purpose", "file"],
        },
    ),
    "GET /v1/files/{id}": Described("one file", _FILE, _NO_STORE),
    "GET /v1/files/{id}/content": Described(
        "its bytes", statuses=_NO_STORE, content={"application/octet-stream": {"schema": {}}}
    ),
    "DELETE /v1/files/{id}": Described(
        "delete it; while an unfinished batch reads it, 409",
        object_schema(id=TEXT, object={"const": "file"}, deleted={"const": True}),
        _errors(409, 501),
    ),
    "GET /v1/batches": Described(
        "the key's [batches](../batches.md), the newest first",
        _page(_BATCH),
        _NO_STORE,
        query={"after": (TEXT, _AFTER), "limit": (_at_most(100), "Most batches of the page.")},
    ),
    "POST /v1/batches": Described(
        "run every line of a file; the lines have results within the window",
        _BATCH,
        _errors(422, 501),
        body={
            **object_schema(
                ("completion_window", "metadata", "output_expires_after", "webhook_url"),
                input_file_id=TEXT,
                endpoint={"type": "string", "description": "The `url` of all lines."},
                completion_window=_WINDOW,
                metadata={
                    "type": ["object", "null"],
                    "maxProperties": 16,
                    "additionalProperties": {"type": "string", "maxLength": 512},
                },
                output_expires_after={
                    **object_schema(anchor={"const": "created_at"}, seconds=_EXPIRY_SECONDS),
                    "type": ["object", "null"],
                },
                webhook_url=_WEBHOOK,
            ),
            "additionalProperties": False,
        },
        headers=_IDEMPOTENCY,
    ),
    "GET /v1/batches/{id}": Described("one batch, with its counts so far", _BATCH, _NO_STORE),
    "POST /v1/batches/{id}/cancel": Described(
        "run no more of its lines; those that have results keep them; 409 if it has ended "
        "otherwise",
        _BATCH,
        _errors(409, 501),
    ),
    "POST /v1/batches/{id}/pause": Described(
        "begin no more of its lines for now; its time goes on", _BATCH, _errors(409, 501)
    ),
    "POST /v1/batches/{id}/resume": Described("go on with them", _BATCH, _errors(409, 501)),
    "GET /v1/batches/{id}/output": Described(
        "its lines with a response, also before the end", statuses=_NO_STORE, content=_LINES
    ),
    "GET /v1/batches/{id}/errors": Described(
        "its lines with an error, also before the end", statuses=_NO_STORE, content=_LINES
    ),
    "GET /v1/messages/batches": Described(
        "the key's message batches, the newest first",
        object_schema(data=_list(_MESSAGE_BATCH), **_EDGES),
        _NO_STORE,
        query={
            "after_id": (TEXT, _AFTER),
            "before_id": (TEXT, "The first id of the page behind; not both."),
            "limit": (_at_most(1000), "Most batches of the page."),
        },
    ),
    "POST /v1/messages/batches": Described(
        "run many messages, as Anthropic's API has it",
        _MESSAGE_BATCH,
        _errors(415, 422, 501, 507),
        body={
            **object_schema(
                ("completion_window", "webhook_url"),
                requests={
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        **object_schema(
                            custom_id={"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                            params=_ANY_OBJECT,
                        ),
                        "additionalProperties": False,
                    },
                },
                completion_window=_WINDOW,
                webhook_url=_WEBHOOK,
            ),
            "additionalProperties": False,
        },
        headers=_IDEMPOTENCY,
    ),
    "GET /v1/messages/batches/{id}": Described(
        "one message batch, with its counts so far", _MESSAGE_BATCH, _NO_STORE
    ),
    "DELETE /v1/messages/batches/{id}": Described(
        "delete it and its results; 400 before the end",
        object_schema(id=TEXT, type={"const": "message_batch_deleted"}),
        _NO_STORE,
    ),
    "GET /v1/messages/batches/{id}/results": Described(
        "its results; before the end with `?partial=true`",
        statuses=_NO_STORE,
        query={"partial": (_one_of("true"), "Those that there are before the end.")},
        content=_LINES,
    ),
    "POST /v1/messages/batches/{id}/cancel": Described(
        "run no more of its requests", _MESSAGE_BATCH, _NO_STORE
    ),
    "POST /v1/messages/batches/{id}/pause": Described(
        "begin no more of its requests for now", _MESSAGE_BATCH, _errors(409, 501)
    ),
    "POST /v1/messages/batches/{id}/resume": Described(
        "go on with them", _MESSAGE_BATCH, _errors(409, 501)
    ),
    "GET /v1/responses/{id}": Described(
        "a [stored response](../background.md) as it is now; with `stream=true` its events",
        statuses=_KEPT | {400},
        query={
            "stream": ({"type": "boolean"}, "Answer with the events."),
            "starting_after": (
                {"type": "integer", "minimum": 0},
                "The `sequence_number` behind which they begin; all of them without it.",
            ),
        },
        content={"application/json": {"schema": _ANY_OBJECT}, **_EVENTS},
    ),
    "DELETE /v1/responses/{id}": Described(
        "end it, and remove all that is kept of it", _deleted(TEXT), _KEPT
    ),
    "POST /v1/responses/{id}/cancel": Described("end it, if it has not ended", _ANY_OBJECT, _KEPT),
    "GET /v1/responses/{id}/input_items": Described(
        "the conversation that it was asked with",
        _ANY_OBJECT,
        _KEPT | {400},
        query={
            "limit": (_at_most(100), "Items of a page; 20."),
            "order": ({"enum": ["asc", "desc"]}, "`desc` without it."),
            "after": (TEXT, _AFTER),
        },
    ),
    "GET /v1/background/{id}": Described(
        "a request with `Prefer: respond-async`: 202 while it waits or runs, then its response "
        "as it was, with `X-Gateway-Replay`",
        _ANY_OBJECT,
        _KEPT,
    ),
    "DELETE /v1/background/{id}": Described(
        "end it, and remove all that is kept of it", _deleted(TEXT), _KEPT
    ),
    "GET /health": Described(
        "200 while the process lives", {"type": "object", "properties": {"status": {"const": "ok"}}}
    ),
    "GET /ready": Described(
        "200 while some node can take or queue work, else 503",
        {"type": "object", "properties": {"status": {"const": "ready"}}},
        _errors(503),
    ),
}

_KEY_RIGHTS = (
    "`name`, `class`, `max_class`, `models`, `group`, `limits`, `user_limits`, `expires`, "
    "`trust_user_headers`: as in an entry of the settings' `keys`"
)

_NODE, _SERVED_MODEL, _API_KEY = _ref("Node"), _ref("ServedModel"), _ref("ApiKey")
_WARNINGS = _list(TEXT)
_NODE_OF_THE_PATH = Described(answer=_NODE, statuses=_errors(404))
_USAGE_ERRORS = _errors(501, 503)
_KEY_ERRORS = _errors(404, 409, 501, 503)
_NEW_KEY_ERRORS = _KEY_ERRORS - {404}

# The admin listener's paths, all methods alike but for `ADMIN_METHODS`.
ADMIN_PATHS: dict[str, Described] = {
    "/": Described(content={"text/html": {"schema": TEXT}, "text/plain": {"schema": TEXT}}),
    "/dashboard/{file}": Described(
        statuses=_errors(404),
        content={
            kind: {"schema": TEXT}
            for kind in ("text/css", "text/html", "text/javascript", "image/svg+xml")
        },
    ),
    "/health": Described(answer=SITE_PATHS["GET /health"].answer),
    "/ready": Described(answer=SITE_PATHS["GET /ready"].answer, statuses=_errors(503)),
    "/openapi.json": Described(
        query={"listener": (_one_of("public", "admin"), "The document of this listener alone.")}
    ),
    "/admin/status": Described(answer=_ref("Status")),
    "/admin/live": Described(
        query={"once": (_one_of("0", "1"), "`1`: one snapshot, and no updates.")}, content=_EVENTS
    ),
    "/admin/nodes": Described(answer=object_schema(nodes=_list(_NODE))),
    "/admin/nodes/{name}": _NODE_OF_THE_PATH,
    "/admin/nodes/{name}/resume": _NODE_OF_THE_PATH,
    "/admin/nodes/{name}/probe": _NODE_OF_THE_PATH,
    "/admin/nodes/{name}/drain": _NODE_OF_THE_PATH._replace(
        query={
            "deadline": (
                {"type": "number", "minimum": 0, "maximum": 604800},
                "Seconds after which running requests move to other nodes, or end.",
            )
        }
    ),
    "/admin/models": Described(answer=object_schema(models=_list(_SERVED_MODEL))),
    "/admin/models/{name}/pause": Described(answer=_SERVED_MODEL, statuses=_errors(400, 404)),
    "/admin/models/{name}/resume": Described(answer=_SERVED_MODEL, statuses=_errors(404)),
    "/admin/placements": Described(
        answer=object_schema(placements=_list(_ref("Placement")), hosts=_ANY_OBJECT)
    ),
    "/admin/requests": Described(answer=object_schema(requests=_list(_ref("Request")))),
    "/admin/requests/{id}": Described(statuses=_errors(404)),
    "/admin/requests/{id}/why": Described(answer=_ref("Why"), statuses=_errors(404)),
    "/admin/chat": Described(
        statuses=_errors(404, 422, 501, 502, 503, 504),
        body={
            "type": "object",
            "description": "As `/v1/chat/completions` takes it; it is always streamed.",
            "properties": {"messages": {"type": "array"}, "model": TEXT},
            "required": ["messages"],
            "examples": [{"messages": [{"role": "user", "content": "Hello"}]}],
        },
        content=_EVENTS,
    ),
    "/admin/reload": Described(statuses=_errors(422)),
    "/admin/config": Described(answer=_ref("Settings")),
    "/admin/usage": Described(
        answer=_ref("Usage"),
        statuses=_USAGE_ERRORS,
        query={
            "by": (
                TEXT,
                (
                    "`key`, `group`, `user`, `model`, `class`, `day` or `tier`; two of them with a "
                    "comma."
                ),
            ),
            "since": (TEXT, "A date, a time of RFC 3339, or how long ago; `30d` by default."),
            "until": (TEXT, "Likewise; a date includes its day."),
            "limit": (_at_most(10000), "Most rows."),
            "format": (_one_of("json", "csv"), "`json` (default) or `csv`."),
        },
    ),
    "/admin/usage/arrivals": Described(
        answer=_ref("Arrivals"),
        statuses=_USAGE_ERRORS,
        query={"since": (TEXT, "As of `/admin/usage`."), "until": (TEXT, "Likewise.")},
    ),
    "/admin/keys": Described(
        answer=object_schema(keys=_list(_API_KEY), warnings=_WARNINGS, problem=_NULLABLE),
        statuses=_NEW_KEY_ERRORS,
        query={
            "revoked": (_one_of("0", "1"), "`1`: revoked keys as well."),
            "name": (TEXT, "Only keys of this name or id."),
        },
    ),
    "/admin/keys/import": Described(
        answer=object_schema(imported=_INTEGER, keys=_list(_API_KEY), warnings=_WARNINGS),
        statuses=_NEW_KEY_ERRORS,
        body=object_schema(
            keys={
                "type": "array",
                "items": _ANY_OBJECT,
                "minItems": 1,
                "maxItems": 10_000,
                "description": f"{_KEY_RIGHTS}; each with `id` and `sha256`.",
            }
        ),
    ),
    "/admin/keys/{name}": Described(answer=_API_KEY, statuses=_KEY_ERRORS),
    "/admin/keys/{name}/rotate": Described(
        answer=_API_KEY,
        statuses=_KEY_ERRORS,
        body={
            "type": "object",
            "properties": {
                "grace": {
                    "description": "How long the old secret works, such as `24h`; 24 hours if "
                    "unset."
                },
                "sha256": {"description": "Of the new secret; unset: one is made."},
            },
            "examples": [{"grace": "1h"}],
        },
    ),
    "/admin/audit": Described(
        answer=object_schema(entries=_list(_ref("AuditEntry")), next={"type": ["integer", "null"]}),
        statuses=_errors(503),
        query={
            "since": ({"type": "number"}, "Only changes from then on, in seconds since 1970."),
            "until": ({"type": "number"}, "Only changes before then, in seconds since 1970."),
            "before": ({"type": "integer", "minimum": 1}, "The `next` of the page before."),
            "action": (
                {"type": "string", "pattern": "^[a-z.]{1,64}$"},
                "Only this action, or those that begin with it and a dot (`keys`).",
            ),
            "target": (
                {"type": "string", "pattern": "^[!-~]{1,200}$"},
                "Only what was done to this.",
            ),
            "limit": (_at_most(1000), "Entries of a page."),
        },
    ),
}

# What is different of one method of a path: fields of its `Described`.
ADMIN_METHODS: dict[str, dict[str, Any]] = {
    "POST /admin/placements": {
        "answer": _ref("Placement"),
        "statuses": _errors(400, 404, 409),
        "body": {
            "type": "object",
            "properties": {
                "order": _one_of("load", "unload", "pin", "unpin"),
                "model": TEXT,
                "node": TEXT,
            },
            "required": ["order", "model", "node"],
            "examples": [{"order": "pin", "model": "mistral-7b", "node": "epyc-a"}],
        },
    },
    "POST /admin/keys": {
        "answer": _API_KEY,
        "body": {
            "type": "object",
            "description": (
                f"{_KEY_RIGHTS}; with `id` and `sha256` a key that exists, else a new one is made."
            ),
            "examples": [{"name": "alice", "class": "premium", "limits": {"rpm": 60}}],
        },
    },
    "PATCH /admin/keys/{name}": {
        "body": {
            "type": "object",
            "description": f"A JSON merge patch (RFC 7396): {_KEY_RIGHTS}; null takes one away.",
            "examples": [{"max_class": "premium", "expires": None}],
        }
    },
}
