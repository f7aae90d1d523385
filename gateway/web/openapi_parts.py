"""Parts of the OpenAPI document: headers, parameters, and the bodies of the admin API.

The pages of `docs/reference/http.md` show the same tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gateway.config.settings import Settings
from gateway.proxy.inbound.body import ParsedBody

JsonSchema = dict[str, Any]


REQUEST_HEADERS: Mapping[str, tuple[JsonSchema, str]] = {
    "X-Priority": (
        {"type": "string", "enum": ["urgent", "premium", "normal", "batch"]},
        "The class, lowered to the caller's highest one; an unknown word is 400.",
    ),
    "X-Request-Timeout": (
        {"type": "number", "exclusiveMinimum": 0},
        "Seconds that the client will wait for the whole response.",
    ),
    "X-Gateway-Progress": (
        {"type": "string", "examples": ["1"]},
        "`1`: comments of the stream tell the place in the queue and the progress of the prompt.",
    ),
    "X-Request-ID": (
        {"type": "string", "examples": ["my-request-1"]},
        "Used for the response and the log, if it is a sane one.",
    ),
    "X-User-Id": (
        {"type": "string"},
        (
            "The end user behind a key with `trust_user_headers`; other names: "
            "`identity.user_headers`."
        ),
    ),
    "X-Session-Id": (
        {"type": "string"},
        "The conversation, which keeps its node; other names: `identity.session_headers`.",
    ),
}
"""Headers of requests to nodes that the gateway itself reads, besides keys."""

RESPONSE_HEADERS: Mapping[str, tuple[JsonSchema, str]] = {
    "X-Request-ID": ({"type": "string"}, "The id in the log."),
    "X-Gateway-Class": ({"type": "string"}, "The class in force."),
    "X-Gateway-Attempts": ({"type": "integer"}, "Nodes tried."),
    "X-Gateway-Queue-Ms": ({"type": "integer"}, "Milliseconds spent waiting for a slot."),
    "X-Gateway-Node": (
        {"type": "string"},
        "The node; by default only on a loopback listener, and not through a proxy.",
    ),
    "X-Gateway-Tier": ({"type": "string", "enum": ["cpu", "gpu"]}, "The node's tier."),
    **{
        f"x-ratelimit-{kind}-{what}": ({"type": "string"}, meaning)
        for what in ("requests", "tokens")
        for kind, meaning in (
            ("limit", f"The limit of {what} that is nearest to its end."),
            ("remaining", "What is left of it."),
            ("reset", "When all of it is there again, such as `6m0s`."),
        )
    },
    "X-Gateway-Fallback": (
        {"type": "string"},
        "Why it ran on the other tier than its class belongs to.",
    ),
}
"""Headers of responses to routed requests."""

ERROR_HEADERS: Mapping[str, tuple[JsonSchema, str]] = {
    "X-Request-ID": ({"type": "string"}, "The id in the log."),
    "X-Gateway-Reason": ({"type": "string"}, "The error's code."),
}

STATUS_HEADERS: Mapping[int, tuple[str, JsonSchema, str]] = {
    401: ("WWW-Authenticate", {"type": "string"}, "`Bearer`."),
    405: ("Allow", {"type": "string"}, "The methods of this path."),
    429: ("Retry-After", {"type": "integer", "minimum": 1}, "Seconds."),
    503: ("Retry-After", {"type": "integer", "minimum": 1}, "Seconds."),
}
"""A header that errors of a status have besides."""

_BODY_FIELDS = {
    "model": "The model's public name; unset: `default_model`, the only one there is, or "
    'that of `"*"`.',
    "stream": "Answer by events, as the text is written.",
    "n": "Completions; above `limits.n` 400.",
    "max_tokens": "Most tokens of the answer; the largest of its names counts, and is lowered to "
    "`limits.max_tokens`. Negative: no bound.",
    "max_completion_tokens": "As `max_tokens`.",
    "max_output_tokens": "As `max_tokens`, on `/v1/responses`.",
    "n_predict": "As `max_tokens`, of llama.cpp.",
    "n_probs": "Lowered to `limits.n_probs`.",
    "top_logprobs": "Lowered to `limits.n_probs`.",
    "logprobs": "True, false, or a number, which is lowered to `limits.n_probs`.",
    "n_cmpl": "As `n`, of llama.cpp.",
    "best_of": "As `n`; llama.cpp refuses it.",
    "repeat_last_n": "Lowered to the model's largest context.",
    "dry_penalty_last_n": "Lowered to the model's largest context.",
    "priority": "One of the classes' names: the class, where no header names one.",
    "service_tier": "`priority` is premium, `flex` is batch.",
    "id_slot": "Removed.",
    "lora": "Removed.",
    "suffix": "The text behind the gap that is to be filled.",
    "prompt": "A text, token ids, or a list of them.",
    "messages": "The conversation.",
    "input": "Text, texts, or items.",
    "tools": "At most `limits.tools_bytes`.",
    "system": "The system prompt, on `/v1/messages`.",
    "instructions": "The system prompt, on `/v1/responses`.",
    "grammar": "GBNF, at most `limits.grammar_bytes` and `limits.grammar_depth`.",
    "json_schema": "A schema of the answer, of llama.cpp.",
    "response_format": "A form of the answer.",
    "text": "A form of the answer, on `/v1/responses`.",
    "output_config": "A form of the answer, on `/v1/messages`.",
    "output_format": "A form of the answer, on `/v1/messages`.",
    "stop": "At most `limits.stop_bytes`.",
    "stop_sequences": "At most `limits.stop_bytes`.",
    "logit_bias": "At most `limits.logit_bias_bytes`.",
    "samplers": "At most 32, in 1 KiB.",
    "dry_sequence_breakers": "At most 1 KiB.",
    "response_fields": "At most `limits.logit_bias_bytes`.",
    "grammar_triggers": "Refused.",
    "conversation": "Refused on `/v1/responses`, as is its `prompt`.",
}


def routed_body() -> JsonSchema:
    """The schema of a JSON body, as far as the gateway reads it: by `ParsedBody`."""
    properties = {}
    for one in msgspec.structs.fields(ParsedBody):
        schema = {} if one.type is msgspec.Raw else msgspec.json.schema(one.type)
        properties[one.name] = {**schema, "description": _BODY_FIELDS[one.name]}
    return {
        "type": "object",
        "description": (
            "The fields that the gateway reads. All others are passed on as they are, and so are "
            "those without a type here: the node checks them."
        ),
        "properties": properties,
    }


NODE_FIELDS: Mapping[str, tuple[str, str]] = {
    "name": ("string", "by which the inventory knows it"),
    "url": ("string", "where it is"),
    "kind": ("string", "`llama.cpp` or `openai`"),
    "tier": ("string", "`cpu` or `gpu`"),
    "host": ("string", "its fate domain"),
    "labels": ("object", "of the inventory"),
    "enabled": ("boolean", "of the inventory"),
    "standby": ("boolean", "of the inventory"),
    "elastic": ("object?", "of a standby node with hooks, [below](#standby-nodes)"),
    "draining": ("boolean", "whether an operator has drained it"),
    "state": (
        "string",
        (
            "`ready`, `degraded`, `mute`, `ejected`, `starting`, `loading`, `sleeping`, `down`, "
            "`draining` or `standby`"
        ),
    ),
    "reason": ("string", "why it is in that state"),
    "slots_total": ("integer", "slots that it has"),
    "slots_busy": ("integer", "the larger of our leases and what the node reports"),
    "leased": ("integer", "slots leased to requests of this gateway"),
    "foreign": ("integer", "slots that others use"),
    "in_flight": ("integer", "requests that run on it"),
    "pool": (
        "object?",
        (
            "where its slots share one pool of `tokens`: those `reserved` for our requests, and "
            "`foreign`, which others use"
        ),
    ),
    "models": ("array", "public names"),
    "context": ("integer?", "tokens of one slot"),
    "prefill_tps": ("number?", "measured tokens/s of prefill"),
    "decode_tps": ("number?", "measured tokens/s of decode, of one request alone"),
    "batch_cost": ("number?", "by how much each further busy slot prolongs a token, as a share"),
    "calibration": (
        "object?",
        (
            "the last [calibration](../scheduling.md#a-cold-node): `outcome` (`done`, `warmed`, "
            "`given_up`, `timed_out`, `failed`), `seconds_ago`, `prefill_tps` and `decode_tps` "
            "that one has shown, and whether these are `in_use`, as a first guess"
        ),
    ),
    "requests": ("integer", "sent to it since the start"),
    "failures": ("integer", "of those that it failed"),
    "cost_per_hour": ("number", "of the inventory"),
    "cost_per_million_tokens": ("object?", "of the inventory"),
    "build": ("string?", "of its server"),
    "drift": ("array", "what differs from the inventory"),
    "endpoints": ("array?", "of the inventory"),
    "endpoints_refused": ("array", "what it has refused with 501, or is not for"),
    "purpose": (
        "string?",
        "what its server was started for: `chat`, `embeddings`, `rerank` or `unknown`",
    ),
    "circuit": ("object", "`phase`, `failures` in a row, `open_for` seconds"),
    "deadline_in": ("number?", "seconds until a drain's deadline"),
}
"""Type and meaning of a node's fields; `?`: or null."""

MODEL_FIELDS: Mapping[str, tuple[str, str]] = {
    "name": ("string", "that clients ask for"),
    "stands_for": ("array", "of an alias: the models, in order of preference"),
    "paused": ("boolean", "whether requests for it get 503 `model_paused`"),
    "nodes": ("object", "that serve it, by state"),
    "slots_total": ("integer", "their slots"),
    "slots_busy": ("integer", "of these busy"),
    "waiting": ("integer", "requests for it that wait"),
    "differences": ("array", "in what its nodes differ, in words"),
}
"""Fields of a model, as the admin API shows it."""

STATUS_FIELDS: Mapping[str, tuple[str, str]] = {
    "version": ("string", "of this process"),
    "started_at": ("string", "of this process"),
    "uptime": ("number", "seconds"),
    "ready": ("boolean", "whether `/ready` is 200"),
    "reason": ("string?", "else the code that it answers with"),
    "in_flight": ("integer", "requests that wait or run"),
    "queue": ("object", "how many wait, by class"),
    "waiting": (
        "array",
        (
            "the first 100 of them: `position`, `seconds` waited, `class`, `model`, "
            "`expected_start` in seconds from now"
        ),
    ),
    "nodes": ("object", "nodes by state"),
    "slots_total": ("integer", "slots of all nodes"),
    "slots_busy": ("integer", "of these busy"),
    "totals": ("object", "since the start: requests, failures by code, clients that left, tokens"),
    "hybrid": (
        "object?",
        (
            "with GPU nodes: which classes go there first, and the [budget](../hybrid.md) for the "
            "others; else null"
        ),
    ),
    "models_paused": ("array", "public names that an operator has paused"),
    "model_differences": (
        "array",
        (
            "where nodes of one model differ: `model`, `what` (`quantisation`, `build`, `context` "
            "or `template`), `summary`, `values` with the nodes of each"
        ),
    ),
    "inventory_error": (
        "string?",
        "what is wrong with the inventory on the disk, while an older one is in force",
    ),
    "settings_error": ("string?", "likewise with the settings"),
    "certificate_error": (
        "string?",
        "likewise with a renewed certificate, of a listener or for a node",
    ),
    "certificates": (
        "object",
        (
            "`expires_at` and `days_left` of the certificates in force, by `listen.tls` and "
            "`admin.tls`"
        ),
    ),
    "audit_lost": (
        "integer",
        "changes that were logged and could not be kept",
    ),
    "store": (
        "object",
        "`state`, the reason and the remedy, [the store](../operations.md#the-store)",
    ),
    "ledger": (
        "object?",
        (
            "rows of the [ledger](../usage.md) in this process: `pending`, `written`, `recovered` "
            "for killed processes, `dropped`, and why the last writing failed (`error`); null "
            "without a store"
        ),
    ),
    "keys_lost": (
        "string?",
        "why the public listener answers 401 to everybody: a reload took the last API key away",
    ),
    "keys_unsaved": (
        "string?",
        (
            "why a gateway that starts without the store would not know the keys as they are now; "
            "it is tried again, at least once a minute"
        ),
    ),
}

KEY_FIELDS: Mapping[str, tuple[str, str]] = {
    "key": ("string?", "the key itself, only in the response of the request that made it"),
    "id": ("string", "public part of the key"),
    "name": ("string", "who uses it"),
    "source": ("string", "`settings` or `store`"),
    "state": (
        "string",
        "`active`, `expired`, `revoked`, or `hidden` by a key of the settings with its id",
    ),
    "class": ("string?", "of its requests that name none"),
    "max_class": ("string", "highest class of its requests"),
    "models": ("array?", "that it may use; null: all"),
    "group": ("string?", "whose limits it shares"),
    "limits": ("object?", "its own"),
    "user_limits": ("object?", "of each end user that it names"),
    "trust_user_headers": ("boolean", "whether it may name end users"),
    "cache": ("object?", "what it says of prompt caches"),
    "created_at": ("string?", "when it was stored"),
    "expires": ("string?", "until when it works"),
    "revoked_at": ("string?", "when it was revoked"),
    "previous_until": ("string?", "until when the secret before the last rotation works"),
    "warnings": ("array?", "models of it that no node has named yet"),
}
"""Fields of an API key, as the admin API shows it."""

REQUEST_FIELDS: Mapping[str, tuple[str, str]] = {
    "id": ("string", "inside the gateway"),
    "request_id": ("string", "`X-Request-ID`"),
    "path": ("string", "asked for"),
    "class": ("string", "in force"),
    "model": ("string?", "its public name"),
    "caller": ("string", "the key's id, or the address of one without a key"),
    "state": ("string", "`waiting` or `running`"),
    "position": ("integer?", "in the queue"),
    "expected_start": ("number?", "seconds from now"),
    "node": ("string?", "where it runs or ran last"),
    "attempts": ("integer", "nodes tried"),
    "slots": ("integer", "that it takes"),
    "stream": ("boolean", "asked for"),
    "seconds": ("number", "since it came"),
    "queue_seconds": ("number", "of these in the queue"),
    "prompt_tokens_estimate": ("integer", "tokens of its prompt"),
}

AUDIT_FIELDS: Mapping[str, tuple[str, str]] = {
    "id": ("integer", "grows with time"),
    "at": ("string", "time, UTC"),
    "actor": (
        "string",
        "an admin key's id, `key_file`, `local` (no key is needed), `file`, `signal` or `gateway`",
    ),
    "role": ("string?", "of the key"),
    "action": (
        "string",
        (
            "`drain`, `resume`, `probe`, `cancel`, `reload`, `settings`, `inventory`, "
            "`certificate`, `handover`, `start`, `stop`; `keys.…`"
        ),
    ),
    "target": ("string", "the node, request, key or file"),
    "outcome": ("string", "`done`, or the code of the error"),
    "refused": ("boolean", "whether it was refused (4xx) and changed nothing"),
    "details": ("object", "what else is known, such as a drain's deadline"),
}


CALLER_USAGE_FIELDS: Mapping[str, tuple[str, str]] = {
    "object": ("string", "`usage`"),
    "key": ("string", "the key's id, or `anonymous:` and the address of a caller without one"),
    "name": ("string", "of the key"),
    "group": ("string?", "of the key"),
    "user": ("string?", "the end user whose figures these are; null: all of the key's"),
    "as_of": ("string?", "when the figures were read; null: they are not known, see `reason`"),
    "today": ("object?", "requests, failures, tokens and cost of this day (UTC)"),
    "month": ("object?", "likewise of this month, also by model (`models`)"),
    "reason": ("string?", "why there are no figures"),
    "limits": ("array", "each limit, what is used of it, reserved by running requests, and left"),
    "max_class": ("string", "highest class of the requests"),
    "models_allowed": ("array?", "the models that may be used; null: all"),
    "largest_prompt_tokens": ("integer?", "of one request"),
    "largest_completion_tokens": ("integer?", "of one answer"),
}

USAGE_FIELDS: Mapping[str, tuple[str, str]] = {
    "since": ("string", "requests that ended from then on"),
    "until": ("string", "and before then"),
    "by": ("array", "the dimensions"),
    "rows": ("array", "each with its dimensions and sums, the dearest first, days in order"),
    "rows_found": ("integer", "rows that there are; `limit` may leave some out"),
    "total": ("object", "the sums of all"),
    "money": ("object", "what requests and machines cost, by tier and in all"),
    "notes": ("array", "what is counted otherwise than asked"),
}

ARRIVALS_FIELDS: Mapping[str, tuple[str, str]] = {
    "since": ("string", "requests that ended from then on, and those that still run"),
    "until": ("string", "and before then"),
    "first": ("string?", "the minute of the first of them; null: there is none"),
    "requests": ("integer", "that a node worked for, or that no slot was free for"),
    "hour": (
        "object",
        (
            "`from`, `to` and `seconds` of the hour in which they asked most of the nodes; shorter "
            "where it has more than 20,000 requests, or is not over"
        ),
    ),
    "columns": ("array", "names of the values of each arrival"),
    "arrivals": (
        "array",
        (
            "an array for each request of that hour: seconds from its beginning, model, class, "
            "node, prompt, cached and completion tokens, slot seconds, seconds that it lasted, and "
            "whether it found no slot"
        ),
    ),
}


def fields_schema(
    fields: Mapping[str, tuple[str, str]], optional: Collection[str] = ()
) -> JsonSchema:
    """The schema of an object with these fields, of which only the `optional` may be missing."""
    properties = {}
    for name, (kind, meaning) in fields.items():
        base = kind.removesuffix("?")
        properties[name] = {
            "type": [base, "null"] if kind.endswith("?") else base,
            "description": meaning[:1].upper() + meaning[1:] + ".",
        }
    required = [name for name in fields if name not in optional]
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
