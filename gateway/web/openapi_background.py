"""Parts of the OpenAPI document that are about stored responses and deferred requests."""

from __future__ import annotations

from typing import Any

JsonSchema = dict[str, Any]

_OBJECT: JsonSchema = {"type": "object"}

_DELETED: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "deleted": {"const": True},
    },
}

BACKGROUND_SUMMARIES = {
    "/v1/responses/{id}": (
        "a [stored response](../background.md) as it is now; with `stream=true` its events"
    ),
    "DELETE /v1/responses/{id}": "end it, and remove all that is kept of it",
    "POST /v1/responses/{id}/cancel": "end it, if it has not ended",
    "/v1/responses/{id}/input_items": "the conversation that it was asked with",
    "/v1/background/{id}": (
        "a request with `Prefer: respond-async`: 202 while it waits or runs, then its response "
        "as it was, with `X-Gateway-Replay`"
    ),
    "DELETE /v1/background/{id}": "end it, and remove all that is kept of it",
}
"""What each path is."""

BACKGROUND_RESPONSES: dict[str, JsonSchema] = {
    "/v1/responses/{id}": _OBJECT,
    "DELETE /v1/responses/{id}": _DELETED,
    "POST /v1/responses/{id}/cancel": _OBJECT,
    "/v1/responses/{id}/input_items": _OBJECT,
    "/v1/background/{id}": _OBJECT,
    "DELETE /v1/background/{id}": _DELETED,
}
"""The body of each answer."""

BACKGROUND_QUERY: dict[str, dict[str, tuple[JsonSchema, str]]] = {
    "/v1/responses/{id}": {
        "stream": ({"type": "boolean"}, "Answer with the events."),
        "starting_after": (
            {"type": "integer", "minimum": 0},
            "The `sequence_number` behind which they begin; all of them without it.",
        ),
    },
    "/v1/responses/{id}/input_items": {
        "limit": ({"type": "integer", "minimum": 1, "maximum": 100}, "Items of a page; 20."),
        "order": ({"enum": ["asc", "desc"]}, "`desc` without it."),
        "after": ({"type": "string"}, "The last id of the page before."),
    },
}
"""Parameters of the query."""

_READ = frozenset({404, 501, 503})

BACKGROUND_STATUSES: dict[str, frozenset[int]] = {
    "/v1/responses/{id}": _READ | {400},
    "DELETE /v1/responses/{id}": _READ,
    "POST /v1/responses/{id}/cancel": _READ,
    "/v1/responses/{id}/input_items": _READ | {400},
    "/v1/background/{id}": _READ,
    "DELETE /v1/background/{id}": _READ,
}
"""Statuses besides those of all paths."""

BACKGROUND_CONTENT: dict[str, JsonSchema] = {
    "/v1/responses/{id}": {
        "application/json": {"schema": _OBJECT},
        "text/event-stream": {"schema": {"type": "string"}},
    },
}
"""Answers that are not only JSON."""
