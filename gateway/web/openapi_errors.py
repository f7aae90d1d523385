"""The errors of both listeners, as the OpenAPI document and the HTTP reference have them."""

from __future__ import annotations

from typing import NamedTuple

from gateway.web.openapi_parts import JsonSchema


class ErrorRow(NamedTuple):
    """One error of the public listener."""

    status: int
    code: str
    when: str
    retried: str = "no"
    """Whether official clients send the request again by themselves."""


_LATER = "after `Retry-After`"

ERRORS = (
    ErrorRow(400, "invalid_json", "the body is not JSON"),
    ErrorRow(
        400,
        "invalid_request",
        "no valid HTTP/1.0 or 1.1 (no `Host`, or two; a body of unclear length), wrong types, "
        "unknown class, no model, more slots than any node has, a grammar or schema larger or "
        "deeper than it may be",
    ),
    ErrorRow(
        400,
        "missing_required_parameter",
        "batches: a field is missing; `param` names it, as in the next three",
    ),
    ErrorRow(400, "unknown_parameter", "batches: there is no such field"),
    ErrorRow(400, "invalid_type", "batches: a field has a value of another type"),
    ErrorRow(400, "invalid_value", "batches: a field has a value that it can't have"),
    ErrorRow(400, "batch_in_progress", "a message batch can be deleted only when it has ended"),
    ErrorRow(
        400,
        "context_length_exceeded",
        "the prompt fits no node; with `n_prompt_tokens` and `n_ctx` where known, and the words "
        "that clients look for: `prompt is too long: N tokens > M maximum`, `exceeds the available "
        "context size`",
    ),
    ErrorRow(
        401,
        "invalid_api_key",
        "no key, an unknown or an expired one (its holder is told), or those of different callers; "
        "all requests, where a reload has taken the last key away",
    ),
    ErrorRow(403, "model_not_allowed", "the key may not use this model"),
    ErrorRow(
        403,
        "host_not_allowed",
        "without a key, on a loopback listener: asked by a `Host` that is neither loopback's, nor "
        "this machine's, nor one of `listen.hosts`",
    ),
    ErrorRow(
        403,
        "origin_not_allowed",
        "without a key, on a loopback listener: posted by a web page of another origin that is not "
        "in `cors.origins`",
    ),
    ErrorRow(
        404,
        "model_not_found",
        "no node serves this name, now or when last seen, over restarts of the gateway too",
    ),
    ErrorRow(
        404,
        "file_not_found",
        "no such file of this key, or it has expired; 400 where a batch shall read it",
    ),
    ErrorRow(404, "batch_not_found", "no such batch of this key, or it is kept no more"),
    ErrorRow(404, "results_gone", "the results of this batch were deleted, or have expired"),
    ErrorRow(404, "batch_not_ended", "a message batch has not ended, so it has no results"),
    ErrorRow(404, "not_found", "no such path; says what to use"),
    ErrorRow(405, "method_not_allowed", "with `Allow`"),
    ErrorRow(408, "request_timeout", "the client sent its request too slowly", "yes"),
    ErrorRow(409, "superseded", "an editor's completion: its session has sent a newer one"),
    ErrorRow(409, "file_in_use", "an unfinished batch still reads this file"),
    ErrorRow(409, "batch_ended", "a batch that has ended can't be cancelled, paused or resumed"),
    ErrorRow(
        413,
        "request_too_large",
        "body above `limits.body_bytes`; a file above `batches.file_bytes`",
    ),
    ErrorRow(
        415,
        "unsupported_media_type",
        "a compressed body (`Content-Encoding`); an upload that is no form",
    ),
    ErrorRow(
        422,
        "idempotency_key_reused",
        "batches: an `Idempotency-Key` came before with another request",
    ),
    ErrorRow(
        429,
        "too_many_batches",
        "the key has `batches.batches_per_key` batches that have not ended; with "
        "`x-should-retry: false`",
    ),
    ErrorRow(
        429,
        "queue_full",
        "no more requests of this class or caller may wait now, or another caller with fewer needs "
        "the place; every node that could serve it answered 429; too many connections or "
        "uploads; the memory for bodies is used up",
        f"{_LATER}, if at most 60 s",
    ),
    ErrorRow(
        429,
        "rate_limit_exceeded",
        "requests or tokens of the minute, or running requests, of the key, its group, its end "
        "user or all callers; the message names the limit",
        f"{_LATER}, if at most 60 s",
    ),
    ErrorRow(
        429,
        "insufficient_quota",
        "the tokens of the day, or the money of the day or month, of one of these are used up; the "
        "key has as many files, or keeps as many bytes, as it may; with `x-should-retry: false`",
    ),
    ErrorRow(
        431,
        "headers_too_large",
        "headers above `limits.header_bytes` or 256 fields; extensions and trailers of a chunked "
        "body above `limits.header_bytes`",
    ),
    ErrorRow(500, "internal_error", "the gateway itself failed; its log says why", "yes"),
    ErrorRow(
        501,
        "not_supported",
        "no node that serves the model has this feature, with a node's own hint; nodes are asked "
        "again after five minutes; files and batches without a store (`store: {url: off}`)",
    ),
    ErrorRow(502, "node_failed", "every permitted attempt failed"),
    ErrorRow(
        503,
        "no_node",
        "every fitting node has been out for `retries.wait_for_node` (30 s); or no node is known "
        "to serve this name, and one that is enabled has never reported what it serves (at once, "
        "with its state)",
        _LATER,
    ),
    ErrorRow(
        503,
        "model_paused",
        "an operator has paused this model; with `x-should-retry: false`",
    ),
    ErrorRow(503, "queue_timeout", "waited as long as it may, or could not meet its deadline"),
    ErrorRow(
        503,
        "starting",
        "the nodes are being asked for the first time (`GET /v1/models`, `/props`, `/ready`), or "
        "the standby node for it is still being started",
        _LATER,
    ),
    ErrorRow(503, "shutting_down", "the gateway is shutting down", _LATER),
    ErrorRow(503, "cancelled", "an operator cancelled it"),
    ErrorRow(
        503,
        "node_drained",
        "its node was drained with a deadline, which has passed",
        _LATER,
    ),
    ErrorRow(
        503,
        "store_unavailable",
        "files and batches: the store can't be read or written now",
        _LATER,
    ),
    ErrorRow(
        503, "storage_unavailable", "files and batches: their folder can't be used now", _LATER
    ),
    ErrorRow(503, "file_elsewhere", "the file is in the folder of another gateway of the store"),
    ErrorRow(504, "node_timeout", "a node took longer than it may"),
    ErrorRow(
        507,
        "storage_full",
        "no room for the upload: the disk is full, or `batches.folder_bytes` is reached",
    ),
)
"""Every error of the public listener, by status."""

ADMIN_ERRORS = (
    ErrorRow(400, "invalid_request", "no valid HTTP, or a parameter of a wrong form"),
    ErrorRow(401, "invalid_api_key", "admin keys exist, and none that is valid was sent"),
    ErrorRow(403, "role_required", "the key's role is too low; the message says which is needed"),
    ErrorRow(
        403, "host_not_allowed", "asked by a `Host` that is not the listener's: see `admin.hosts`"
    ),
    ErrorRow(403, "origin_not_allowed", "sent by a web page of another origin"),
    ErrorRow(404, "node_not_found", "no node of this name; says which are similar"),
    ErrorRow(404, "request_not_found", "no such request waits or runs"),
    ErrorRow(404, "not_found", "no such path"),
    ErrorRow(405, "method_not_allowed", "with `Allow`"),
    ErrorRow(408, "request_timeout", "the client sent its request too slowly"),
    ErrorRow(413, "request_too_large", "a body larger than the path takes"),
    ErrorRow(429, "too_many_watchers", "`/admin/live` has as many watchers as it serves"),
    ErrorRow(404, "key_not_found", "no API key of this name or id"),
    ErrorRow(409, "key_exists", "an API key of this name or id is there already"),
    ErrorRow(409, "key_of_settings", "a key of the settings, which is changed there"),
    ErrorRow(409, "key_expired", "an expired key gets no new secret"),
    ErrorRow(409, "key_revoked", "a revoked key stays revoked"),
    ErrorRow(422, "invalid_configuration", "a file is invalid and has changed nothing"),
    ErrorRow(429, "queue_full", "too many connections"),
    ErrorRow(431, "headers_too_large", "headers above `limits.header_bytes` or 256 fields"),
    ErrorRow(500, "internal_error", "the gateway itself failed; its log says why"),
    ErrorRow(501, "not_supported", "there is no store (`store: {url: off}`) to keep it"),
    ErrorRow(503, "no_node", "`GET /ready`: no node can take or queue work"),
    ErrorRow(503, "queue_full", "`GET /ready`: every slot and every place in the queue is taken"),
    ErrorRow(503, "starting", "`GET /ready`: the nodes are being asked for the first time"),
    ErrorRow(503, "shutting_down", "`GET /ready`: the gateway is shutting down"),
    ErrorRow(503, "store_unavailable", "what is asked for is in the store, which can't be read"),
)
"""Every error of the admin listener, by status."""


def error_schemas() -> dict[str, JsonSchema]:
    """The schemas of errors, by name."""
    openai = {
        "type": "object",
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "integer", "null"]},
        },
        "required": ["message"],
    }
    anthropic = {
        "type": "object",
        "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        "required": ["type", "message"],
    }
    return {
        "Error": {
            "type": "object",
            "description": "OpenAI's form; `code` is also sent as `X-Gateway-Reason`.",
            "properties": {"error": openai},
            "required": ["error"],
        },
        "AnthropicError": {
            "type": "object",
            "properties": {
                "type": {"const": "error"},
                "error": anthropic,
                "request_id": {"type": "string"},
            },
            "required": ["type", "error"],
        },
        "OllamaError": {
            "type": "object",
            "properties": {
                "error": {
                    "anyOf": [{"type": "string"}, openai],
                    "description": "A text; an object where the request can't even be read.",
                }
            },
            "required": ["error"],
        },
    }
