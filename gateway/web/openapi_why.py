"""Parts of the OpenAPI document: the explanation of a request, `GET /admin/requests/{id}/why`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.web.openapi_parts import fields_schema

JsonSchema = dict[str, Any]

WHY_FIELDS: Mapping[str, tuple[str, str]] = {
    "id": ("string", "inside the gateway"),
    "request_id": ("string", "`X-Request-ID`"),
    "state": (
        "string",
        (
            "`waiting`, `running`, `finished`, `failed` (on its nodes), `refused` (it was at none) "
            "or `left` (by its client)"
        ),
    ),
    "summary": ("string", "the whole story in some sentences, for people"),
    "path": ("string?", "asked for; like the next three null once only the scheduler remembers it"),
    "class": ("string?", "in force"),
    "model": ("string?", "its public name"),
    "caller": ("string?", "the key's id, or the address of one without a key"),
    "received_at": ("string?", "when it came, UTC"),
    "seconds": ("number?", "from then to its end, or until now"),
    "outcome": (
        "object?",
        (
            "once it has ended: `status`, `reason`, `node`, `tier`, `attempts`, `queue_seconds`, "
            "`ttft`, `seconds`, `prompt_tokens`, `cached_tokens`, `completion_tokens`, `cost`"
        ),
    ),
    "waiting": (
        "object?",
        (
            "while it waits: `position`, `expected_start`, `waited`, `expires_in`, `deferred_to` "
            "(the busy node that has its prompt cached), `tokens_needed` (in a pool that slots "
            "share; null: it is to run alone there), `nodes_alive`, and in `nodes` the best 8 of "
            "them: `name`, `state`, `slots_busy`, `slots_total`, `pool` (as a node has it), "
            "`free_in` (seconds until it has room, were it alone), `cached_tokens`, "
            "`expected_seconds` (that wait included)"
        ),
    ),
    "decisions": ("array", "about it, the oldest first, [below](#a-decision)"),
    "parts": ("array", "of a request of several prompts: the ids that they ran under"),
}
"""Fields of an explained request."""

DECISION_FIELDS: Mapping[str, tuple[str, str]] = {
    "kind": ("string", "`granted` (an attempt on a node), `queued` or `refused`"),
    "at": ("string", "when, UTC"),
    "seconds": ("number", "after it came"),
    "summary": ("string", "in words"),
    "ahead": ("integer?", "`queued`: about how many went before it"),
    "waiting": ("integer", "`queued`: how many others waited"),
    "predicted_wait": ("number?", "`queued`: seconds, as predicted then; null: nothing measured"),
    "may_wait": ("number", "`queued`: seconds, at most"),
    "waited": ("number", "`queued`: seconds until the next decision, or until now"),
    "class": ("string", "`queued`: in force"),
    "status": ("integer", "`refused`: as its client got it, or would have without a heartbeat"),
    "code": ("string", "`refused`: likewise"),
    "message": ("string", "`refused`: likewise"),
    "attempt": ("integer", "`granted`, like all that follow: 1, 2, …"),
    "node": ("string?", "the chosen one"),
    "model": ("string", "the name for which it was granted"),
    "tier": ("string", "`cpu` or `gpu`"),
    "fallback": ("string?", "why it is not the tier of its class (`X-Gateway-Fallback`)"),
    "slots": ("integer", "that it takes"),
    "resumes": ("boolean", "whether it goes on with a response that another node began"),
    "yielded": ("integer", "how often it had given up its slot to a higher class"),
    "failed_nodes": ("array", "nodes that had failed it"),
    "excluded_nodes": ("array", "nodes that had refused it for good"),
    "deferral": (
        "object?",
        (
            "if it waited for a busy node while another was free: `node`, `wait`, "
            "`expected_seconds` with that wait, `expected_seconds_at_once` elsewhere, "
            "`cached_tokens`"
        ),
    ),
    "by_cost": ("boolean", "whether the setting `policy` compares costs"),
    "nodes": (
        "array",
        "the best 8 that had room, the least cost first, [below](#a-node-that-was-considered)",
    ),
    "not_listed": (
        "object",
        (
            "how many nodes are not listed, by the reason: `slower` (had room and cost more), "
            "`full` (no free slot, or kept for others), a node state, `paused` (asked for less "
            "work), `failed`, `excluded` (context or slots too small, or refused it), "
            "`not_candidates` (serve another model or endpoint, are of another pool, or of a tier "
            "that was closed to it)"
        ),
    ),
    "predicted": (
        "object",
        (
            "`ttft` and `seconds` from the grant on, `prompt_tokens`, `cached_tokens`, "
            "`completion_tokens`"
        ),
    ),
    "actual": (
        "object",
        (
            "likewise, as it came, null where it is not known (yet); `outcome` of the attempt, "
            "null while it runs, its `status`, and whether the node `reported` the tokens"
        ),
    ),
}
"""Fields of a decision; which of them it has depends on its kind."""

COMPARED_FIELDS: Mapping[str, tuple[str, str]] = {
    "name": ("string", "of the node"),
    "chosen": ("boolean", "whether it was"),
    "measured": ("boolean", "whether it had shown its speed; else its figures are guesses"),
    "expected_seconds": (
        "number",
        (
            "its cost: the request's time there and the time that it takes from others; the sum of "
            "`terms`"
        ),
    ),
    "terms": (
        "object",
        (
            "`queue` (prompts that it had to read first), `reading` (what was not cached), "
            "`writing` (alone), `neighbours` (what they and this request cost each other), "
            "`doubt` (failures, a trial; negative for the session's last node), in seconds"
        ),
    ),
    "slowed_by_neighbours": ("number", "part of `neighbours`: this request's own loss"),
    "holds_up_neighbours": ("number", "the other part: theirs"),
    "doubts": ("array", "why `doubt` is not 0, in words"),
    "cached_tokens": ("integer", "of its prompt, believed to be in the node's cache"),
    "cached_saves": ("number", "seconds of reading that these save"),
    "prefill_tps": ("number", "tokens/s of prefill, as expected"),
    "decode_tps": ("number", "tokens/s of decode, as expected of one request alone"),
    "slots_busy": ("integer", "neighbours, before this request came"),
    "slots_total": ("integer", "its slots"),
    "pool_tokens": ("integer", "tokens of the pool that its slots share; 0: they share none"),
    "pool_used": ("integer", "of these reserved or in use, before this request came"),
}
"""Fields of a node that was compared."""

_KINDS = {"kind", "at", "seconds", "summary"}
"""Fields of every decision."""


def _with_items(schema: JsonSchema, **items: JsonSchema) -> JsonSchema:
    """The schema with these schemas of the items of its arrays."""
    properties = schema["properties"]
    told = {name: {**properties[name], "items": each} for name, each in items.items()}
    return {**schema, "properties": {**properties, **told}}


WHY_SCHEMAS: dict[str, JsonSchema] = {
    "Why": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "description": "As it was asked for."},
            "remembered_since": {
                "type": "string",
                "description": "Since when every attempt is remembered, UTC.",
            },
            "requests": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/ExplainedRequest"},
                "description": "Those of this id or `X-Request-ID`, the newest first, 20 at most.",
            },
        },
        "required": ["id", "remembered_since", "requests"],
    },
    "ExplainedRequest": _with_items(
        fields_schema(WHY_FIELDS),
        decisions={"$ref": "#/components/schemas/Decision"},
        parts={"type": "string"},
    ),
    "Decision": _with_items(
        fields_schema(DECISION_FIELDS, set(DECISION_FIELDS) - _KINDS),
        nodes={"$ref": "#/components/schemas/ComparedNode"},
    ),
    "ComparedNode": fields_schema(COMPARED_FIELDS),
}
"""Schemas of an explanation, by name."""
