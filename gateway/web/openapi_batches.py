"""Parts of the OpenAPI document that are about batches."""

from __future__ import annotations

from gateway.web.openapi_parts import JsonSchema, fields_schema

_TIME: JsonSchema = {"type": ["integer", "null"], "description": "Unix seconds."}

_TEXT_TIME: JsonSchema = {"type": ["string", "null"], "format": "date-time"}

_NULLABLE: JsonSchema = {"type": ["string", "null"]}

OWN_FIELDS = {
    "waiting": ("integer?", "lines that wait; null in lists, as all that only its lines tell"),
    "running": ("integer?", "lines that run now"),
    "cancelled": ("integer", "lines that will never run, because it was cancelled"),
    "expired": ("integer", "lines that will never run, because its time is over"),
    "tokens_per_second": ("number?", "tokens of results, over the last minutes"),
    "expected_end": ("integer?", "when it ends at this pace, in Unix seconds"),
    "cost": ("number", "what its results have cost"),
    "expected_cost": ("number?", "what all its lines will cost; null: no price is known"),
    "paused": ("object?", "since when (`at`) and why (`reason`) it is paused; null: it is not"),
}
"""What the gateway tells of a batch besides: fields of `llama_gateway`, with type and meaning."""

BATCH: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "batch"},
        "endpoint": {"type": "string"},
        "model": _NULLABLE,
        "errors": {"type": ["object", "null"]},
        "input_file_id": _NULLABLE,
        "completion_window": {"type": "string"},
        "status": {
            "type": "string",
            "enum": [
                *("validating", "in_progress", "finalizing", "completed", "failed", "expired"),
                *("cancelling", "cancelled"),
            ],
        },
        "output_file_id": _NULLABLE,
        "error_file_id": _NULLABLE,
        "created_at": {"type": "integer"},
        "in_progress_at": _TIME,
        "expires_at": _TIME,
        "finalizing_at": _TIME,
        "completed_at": _TIME,
        "failed_at": _TIME,
        "expired_at": _TIME,
        "cancelling_at": _TIME,
        "cancelled_at": _TIME,
        "request_counts": {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in ("total", "completed", "failed")},
            "required": ["total", "completed", "failed"],
        },
        "usage": {"type": "object"},
        "metadata": {"type": ["object", "null"]},
        "llama_gateway": {"$ref": "#/components/schemas/BatchProgress"},
    },
    "required": [
        *("id", "object", "endpoint", "input_file_id", "completion_window", "status"),
        *("created_at", "request_counts"),
    ],
}

_COUNTS = ("processing", "succeeded", "errored", "canceled", "expired")

MESSAGE_BATCH: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "message_batch"},
        "processing_status": {"type": "string", "enum": ["in_progress", "canceling", "ended"]},
        "request_counts": {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in _COUNTS},
            "required": list(_COUNTS),
        },
        "created_at": {"type": "string", "format": "date-time"},
        "expires_at": {"type": "string", "format": "date-time"},
        "ended_at": _TEXT_TIME,
        "cancel_initiated_at": _TEXT_TIME,
        "archived_at": {"type": "null"},
        "results_url": _NULLABLE,
        "llama_gateway": {"$ref": "#/components/schemas/BatchProgress"},
    },
    "required": [
        *("id", "type", "processing_status", "request_counts", "created_at", "expires_at"),
        *("ended_at", "cancel_initiated_at", "archived_at", "results_url"),
    ],
}

BATCH_SCHEMAS: dict[str, JsonSchema] = {
    "Batch": BATCH,
    "MessageBatch": MESSAGE_BATCH,
    "BatchProgress": fields_schema(OWN_FIELDS),
}
"""Schemas of the document, by name."""

_BATCH: JsonSchema = {"$ref": "#/components/schemas/Batch"}

_MESSAGE_BATCH: JsonSchema = {"$ref": "#/components/schemas/MessageBatch"}

BATCH_SUMMARIES = {
    "/v1/batches": "the key's [batches](../batches.md), the newest first",
    "POST /v1/batches": "run every line of a file; the lines have results within the window",
    "/v1/batches/{id}": "one batch, with its counts so far",
    "POST /v1/batches/{id}/cancel": (
        "run no more of its lines; those that have results keep them; 409 if it has ended otherwise"
    ),
    "POST /v1/batches/{id}/pause": "begin no more of its lines for now; its time goes on",
    "POST /v1/batches/{id}/resume": "go on with them",
    "/v1/batches/{id}/output": "its lines with a response, also before the end",
    "/v1/batches/{id}/errors": "its lines with an error, also before the end",
    "/v1/messages/batches": "the key's message batches, the newest first",
    "POST /v1/messages/batches": "run many messages, as Anthropic's API has it",
    "/v1/messages/batches/{id}": "one message batch, with its counts so far",
    "DELETE /v1/messages/batches/{id}": "delete it and its results; 400 before the end",
    "/v1/messages/batches/{id}/results": "its results; before the end with `?partial=true`",
    "POST /v1/messages/batches/{id}/cancel": "run no more of its requests",
    "POST /v1/messages/batches/{id}/pause": "begin no more of its requests for now",
    "POST /v1/messages/batches/{id}/resume": "go on with them",
}
"""What each path is."""

BATCH_RESPONSES: dict[str, JsonSchema] = {
    "/v1/batches": {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": _BATCH},
            "first_id": _NULLABLE,
            "last_id": _NULLABLE,
            "has_more": {"type": "boolean"},
        },
        "required": ["object", "data", "has_more"],
    },
    "POST /v1/batches": _BATCH,
    "/v1/batches/{id}": _BATCH,
    **{f"POST /v1/batches/{{id}}/{verb}": _BATCH for verb in ("cancel", "pause", "resume")},
    "/v1/messages/batches": {
        "type": "object",
        "properties": {
            "data": {"type": "array", "items": _MESSAGE_BATCH},
            "has_more": {"type": "boolean"},
            "first_id": _NULLABLE,
            "last_id": _NULLABLE,
        },
        "required": ["data", "has_more", "first_id", "last_id"],
    },
    "POST /v1/messages/batches": _MESSAGE_BATCH,
    "/v1/messages/batches/{id}": _MESSAGE_BATCH,
    "DELETE /v1/messages/batches/{id}": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "type": {"const": "message_batch_deleted"}},
        "required": ["id", "type"],
    },
    **{
        f"POST /v1/messages/batches/{{id}}/{verb}": _MESSAGE_BATCH
        for verb in ("cancel", "pause", "resume")
    },
}

_PAGE: tuple[JsonSchema, str] = (
    {"type": "integer", "minimum": 1, "maximum": 100},
    "Most batches of the page.",
)

BATCH_QUERY: dict[str, dict[str, tuple[JsonSchema, str]]] = {
    "/v1/batches": {
        "after": ({"type": "string"}, "The last id of the page before."),
        "limit": _PAGE,
    },
    "/v1/messages/batches": {
        "after_id": ({"type": "string"}, "The last id of the page before."),
        "before_id": ({"type": "string"}, "The first id of the page behind; not both."),
        "limit": ({**_PAGE[0], "maximum": 1000}, _PAGE[1]),
    },
    "/v1/messages/batches/{id}/results": {
        "partial": ({"type": "string", "enum": ["true"]}, "Those that there are before the end."),
    },
}

_LINES: JsonSchema = {"application/x-jsonl": {"schema": {"type": "string"}}}

BATCH_CONTENT: dict[str, JsonSchema] = {
    "/v1/batches/{id}/output": _LINES,
    "/v1/batches/{id}/errors": _LINES,
    "/v1/messages/batches/{id}/results": _LINES,
}
"""Responses that are no JSON."""

_WINDOW: JsonSchema = {
    "type": "string",
    "description": "Such as `24h`, `90m` or `2d`, within `batches.windows`.",
    "examples": ["24h"],
}

_WEBHOOK: JsonSchema = {
    "type": "string",
    "description": "Where its end is told, of those that the settings allow.",
}

BATCH_BODIES: dict[str, JsonSchema] = {
    "POST /v1/batches": {
        "type": "object",
        "properties": {
            "input_file_id": {"type": "string"},
            "endpoint": {"type": "string", "description": "The `url` of all lines."},
            "completion_window": _WINDOW,
            "metadata": {
                "type": ["object", "null"],
                "maxProperties": 16,
                "additionalProperties": {"type": "string", "maxLength": 512},
            },
            "output_expires_after": {
                "type": ["object", "null"],
                "properties": {
                    "anchor": {"const": "created_at"},
                    "seconds": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                },
                "required": ["anchor", "seconds"],
            },
            "webhook_url": _WEBHOOK,
        },
        "required": ["input_file_id", "endpoint"],
        "additionalProperties": False,
    },
    "POST /v1/messages/batches": {
        "type": "object",
        "properties": {
            "requests": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "custom_id": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                        "params": {"type": "object"},
                    },
                    "required": ["custom_id", "params"],
                    "additionalProperties": False,
                },
            },
            "completion_window": _WINDOW,
            "webhook_url": _WEBHOOK,
        },
        "required": ["requests"],
        "additionalProperties": False,
    },
}
"""Bodies of JSON, by method and path; the other paths have none."""

BATCH_HEADERS: dict[str, dict[str, tuple[JsonSchema, str]]] = {
    path: {
        "Idempotency-Key": (
            {"type": "string", "minLength": 1, "maxLength": 255},
            "The same request again gives the batch that there is; with another request, 422.",
        )
    }
    for path in BATCH_BODIES
}
"""Headers that the gateway reads, besides keys."""

BATCH_STATUSES: dict[str, frozenset[int]] = {
    **dict.fromkeys(BATCH_SUMMARIES, frozenset({501})),
    "POST /v1/batches": frozenset({422, 501}),
    **{
        f"POST /v1/batches/{{id}}/{verb}": frozenset({409, 501})
        for verb in ("cancel", "pause", "resume")
    },
    **{
        f"POST /v1/messages/batches/{{id}}/{verb}": frozenset({409, 501})
        for verb in ("pause", "resume")
    },
    "POST /v1/messages/batches": frozenset({415, 422, 501, 507}),
}
"""Errors besides those of every path."""
