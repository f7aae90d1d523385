"""Headers, bodies and errors of the OpenAPI document.

The pages of `docs/reference/http.md` show the same tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from gateway.admin.models import PlacementObject, ServedModelObject
from gateway.admin.nodes import NodeObject
from gateway.admin.requests import RequestObject
from gateway.admin.status import StatusObject
from gateway.admin.why import (
    ComparedNode,
    ExplainedRequest,
    ToldGrant,
    ToldQueueing,
    ToldRefusal,
    WhyObject,
)
from gateway.config.settings import Settings
from gateway.request.body import ParsedBody
from gateway.watch.audit import AuditEntry

JsonSchema = dict[str, Any]
Fields = Mapping[str, tuple[str, str]]  # type and meaning, by name
TEXT: JsonSchema = {"type": "string"}


def object_schema(optional: Collection[str] = (), /, **properties: JsonSchema) -> JsonSchema:
    """An object with these properties, of which only the `optional` may be missing."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _fields(table: str) -> Fields:
    """Type and meaning of fields, by name: `name (type): meaning`; the type's `?` is: or null.

    Further lines of a field are indented.
    """
    fields = {}
    for row in table.strip().replace("\n    ", " ").split("\n"):
        key, meaning = row.split(": ", 1)
        name, kind = key.removesuffix(")").split(" (")
        fields[name] = (kind, meaning)
    return fields


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


def _headers(table: str) -> dict[str, tuple[JsonSchema, str]]:
    """Schema and meaning of headers, by name: as `_fields`; words with `|` are all it may be."""
    headers: dict[str, tuple[JsonSchema, str]] = {}
    for name, (kind, meaning) in _fields(table).items():
        words = kind.split("|")
        schema = {"type": kind} if len(words) == 1 else {"type": "string", "enum": words}
        headers[name] = (schema, meaning)
    return headers


# Headers of requests to nodes that the gateway itself reads, besides keys.
REQUEST_HEADERS = _headers("""
X-Priority (urgent|premium|normal|batch): The class, lowered to the caller's highest one; an unknown
    word is 400.
X-Request-Timeout (number): Seconds that the client will wait for the whole response.
X-Gateway-Progress (string): `1`: comments of the stream tell the place in the queue and the
    progress of the prompt.
X-Request-ID (string): Used for the response and the log, if it is a sane one.
X-User-Id (string): The end user behind a key with `trust_user_headers`; other names:
    `identity.user_headers`.
X-Session-Id (string): The conversation, which keeps its node; other names:
    `identity.session_headers`.
""")

REQUEST_HEADERS["X-Request-Timeout"][0]["exclusiveMinimum"] = 0
REQUEST_HEADERS["X-Gateway-Progress"][0]["examples"] = ["1"]
REQUEST_HEADERS["X-Request-ID"][0]["examples"] = ["my-request-1"]

# Headers of responses to routed requests.
RESPONSE_HEADERS = _headers("""
X-Request-ID (string): The id in the log.
X-Gateway-Class (string): The class in force.
X-Gateway-Attempts (integer): Nodes tried.
X-Gateway-Queue-Ms (integer): Milliseconds spent waiting for a slot.
X-Gateway-Node (string): The node; by default only on a loopback listener, and not through a proxy.
X-Gateway-Tier (cpu|gpu): The node's tier.
x-ratelimit-limit-requests (string): The limit of requests that is nearest to its end.
x-ratelimit-remaining-requests (string): What is left of it.
x-ratelimit-reset-requests (string): When all of it is there again, such as `6m0s`.
x-ratelimit-limit-tokens (string): The limit of tokens that is nearest to its end.
x-ratelimit-remaining-tokens (string): What is left of it.
x-ratelimit-reset-tokens (string): When all of it is there again, such as `6m0s`.
X-Gateway-Fallback (string): Why it ran on the other tier than its class belongs to.
""")

ERROR_HEADERS = _headers("""
X-Request-ID (string): The id in the log.
X-Gateway-Reason (string): The error's code.
""")

# A header that errors of a status have besides.
STATUS_HEADERS: Mapping[int, tuple[str, JsonSchema, str]] = {
    401: ("WWW-Authenticate", {"type": "string"}, "`Bearer`."),
    405: ("Allow", {"type": "string"}, "The methods of this path."),
    429: ("Retry-After", {"type": "integer", "minimum": 1}, "Seconds."),
    503: ("Retry-After", {"type": "integer", "minimum": 1}, "Seconds."),
}


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


# Type and meaning of the fields of described bodies, by the names of their schemas; `?`: or null.
FIELDS: dict[str, Fields] = {
    "Status": described_fields(StatusObject),
    "Node": described_fields(NodeObject),
    "ServedModel": described_fields(ServedModelObject),
    "Placement": described_fields(PlacementObject),
    "Request": described_fields(RequestObject),
    "Why": described_fields(WhyObject),
    "ExplainedRequest": described_fields(ExplainedRequest),
    "Decision": described_fields(ToldQueueing, ToldRefusal, ToldGrant),
    "ComparedNode": described_fields(ComparedNode),
    "ApiKey": _fields("""
key (string?): the key itself, only in the response of the request that made it
id (string): public part of the key
name (string): who uses it
source (string): `settings` or `store`
state (string): `active`, `expired`, `revoked`, or `hidden` by a key of the settings with its id
class (string?): of its requests that name none
max_class (string): highest class of its requests
models (array?): that it may use; null: all
group (string?): whose limits it shares
limits (object?): its own
user_limits (object?): of each end user that it names
trust_user_headers (boolean): whether it may name end users
cache (object?): what it says of prompt caches
created_at (string?): when it was stored
expires (string?): until when it works
revoked_at (string?): when it was revoked
previous_until (string?): until when the secret before the last rotation works
warnings (array?): models of it that no node has named yet
"""),
    "AuditEntry": described_fields(AuditEntry) | {"at": ("string", "time, UTC")},
    "CallerUsage": _fields("""
object (string): `usage`
key (string): the key's id, or `anonymous:` and the address of a caller without one
name (string): of the key
group (string?): of the key
user (string?): the end user whose figures these are; null: all of the key's
as_of (string?): when the figures were read; null: they are not known, see `reason`
today (object?): requests, failures, tokens and cost of this day (UTC)
month (object?): likewise of this month, also by model (`models`)
reason (string?): why there are no figures
limits (array): each limit, what is used of it, reserved by running requests, and left
max_class (string): highest class of the requests
models_allowed (array?): the models that may be used; null: all
largest_prompt_tokens (integer?): of one request
largest_completion_tokens (integer?): of one answer
"""),
    "Usage": _fields("""
since (string): requests that ended from then on
until (string): and before then
by (array): the dimensions
rows (array): each with its dimensions and sums, the dearest first, days in order
rows_found (integer): rows that there are; `limit` may leave some out
total (object): the sums of all
money (object): what requests and machines cost, by tier and in all
notes (array): what is counted otherwise than asked
"""),
    "Arrivals": _fields("""
since (string): requests that ended from then on, and those that still run
until (string): and before then
first (string?): the minute of the first of them; null: there is none
requests (integer): that a node worked for, or that no slot was free for
hour (object): `from`, `to` and `seconds` of the hour in which they asked most of the nodes; shorter
    where it has more than 20,000 requests, or is not over
columns (array): names of the values of each arrival
arrivals (array): an array for each request of that hour: seconds from its beginning, model, class,
    node, prompt, cached and completion tokens, slot seconds, seconds that it lasted, and whether it
    found no slot
"""),
}


def fields_schema(fields: Fields, optional: Collection[str] = ()) -> JsonSchema:
    """The schema of an object with these fields, of which only the `optional` may be missing."""
    properties = {}
    for name, (kind, meaning) in fields.items():
        base = kind.removesuffix("?")
        properties[name] = {
            "type": [base, "null"] if kind.endswith("?") else base,
            "description": _sentence(meaning),
        }
    return object_schema(optional, **properties)


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


class ErrorRow(NamedTuple):
    """One error of the public listener."""

    status: int
    code: str
    when: str
    retried: str = "no"  # whether official clients send the request again by themselves


def _errors(table: str) -> tuple[ErrorRow, ...]:
    """The rows of a table: `status code (how clients retry it): when`."""
    rows = []
    for row in table.strip().replace("\n    ", " ").split("\n"):
        head, when = row.split(": ", 1)
        status, code, *retried = head.removesuffix(")").split(" ", 2)
        how = retried[0].removeprefix("(") if retried else "no"
        rows.append(ErrorRow(int(status), code, when, how))
    return tuple(rows)


# Every error of the public listener, by status.
ERRORS = _errors("""
400 invalid_json: the body is not JSON
400 invalid_request: no valid HTTP/1.0 or 1.1 (no `Host`, or two; a body of unclear length), wrong
    types, unknown class, no model, more slots than any node has, a grammar or schema larger or
    deeper than it may be
400 missing_required_parameter: batches: a field is missing; `param` names it, as in the next three
400 unknown_parameter: batches: there is no such field
400 invalid_type: batches: a field has a value of another type
400 invalid_value: batches: a field has a value that it can't have
400 batch_in_progress: a message batch can be deleted only when it has ended
400 context_length_exceeded: the prompt fits no node; with `n_prompt_tokens` and `n_ctx` where
    known, and the words that clients look for: `prompt is too long: N tokens > M maximum`, `exceeds
    the available context size`
401 invalid_api_key: no key, an unknown or an expired one (its holder is told), or those of
    different callers; all requests, where a reload has taken the last key away
403 model_not_allowed: the key may not use this model
403 host_not_allowed: without a key, on a loopback listener: asked by a `Host` that is neither
    loopback's, nor this machine's, nor one of `listen.hosts`
403 origin_not_allowed: without a key, on a loopback listener: posted by a web page of another
    origin that is not in `cors.origins`
404 model_not_found: no node serves this name, now or when last seen, over restarts of the gateway
    too
404 file_not_found: no such file of this key, or it has expired; 400 where a batch shall read it
404 batch_not_found: no such batch of this key, or it is kept no more
404 results_gone: the results of this batch were deleted, or have expired
404 batch_not_ended: a message batch has not ended, so it has no results
404 not_found: no such path; says what to use
405 method_not_allowed: with `Allow`
408 request_timeout (yes): the client sent its request too slowly
409 superseded: an editor's completion: its session has sent a newer one
409 file_in_use: an unfinished batch still reads this file
409 batch_ended: a batch that has ended can't be cancelled, paused or resumed
413 request_too_large: body above `limits.body_bytes`; a file above `batches.file_bytes`
415 unsupported_media_type: a compressed body (`Content-Encoding`); an upload that is no form
422 idempotency_key_reused: batches: an `Idempotency-Key` came before with another request
429 too_many_batches: the key has `batches.batches_per_key` batches that have not ended; with
    `x-should-retry: false`
429 queue_full (after `Retry-After`, if at most 60 s): no more requests of this class or caller may
    wait now, or another caller with fewer needs the place; every node that could serve it answered
    429; too many connections or uploads; the memory for bodies is used up
429 rate_limit_exceeded (after `Retry-After`, if at most 60 s): requests or tokens of the minute, or
    running requests, of the key, its group, its end user or all callers; the message names the
    limit
429 insufficient_quota: the tokens of the day, or the money of the day or month, of one of these are
    used up; the key has as many files, or keeps as many bytes, as it may; with `x-should-retry:
    false`
431 headers_too_large: headers above `limits.header_bytes` or 256 fields; extensions and trailers of
    a chunked body above `limits.header_bytes`
500 internal_error (yes): the gateway itself failed; its log says why
501 not_supported: no node that serves the model has this feature, with a node's own hint; nodes are
    asked again after five minutes; files and batches without a store (`store: {url: off}`)
502 node_failed: every permitted attempt failed
503 no_node (after `Retry-After`): every fitting node has been out for `retries.wait_for_node` (30
    s); or no node is known to serve this name, and one that is enabled has never reported what it
    serves (at once, with its state)
503 model_paused: an operator has paused this model; with `x-should-retry: false`
503 queue_timeout: waited as long as it may, or could not meet its deadline
503 starting (after `Retry-After`): the nodes are being asked for the first time (`GET /v1/models`,
    `/props`, `/ready`), or the standby node for it is still being started
503 shutting_down (after `Retry-After`): the gateway is shutting down
503 cancelled: an operator cancelled it
503 node_drained (after `Retry-After`): its node was drained with a deadline, which has passed
503 store_unavailable (after `Retry-After`): files and batches: the store can't be read or written
    now
503 storage_unavailable (after `Retry-After`): files and batches: their folder can't be used now
503 file_elsewhere: the file is in the folder of another gateway of the store
504 node_timeout: a node took longer than it may
507 storage_full: no room for the upload: the disk is full, or `batches.folder_bytes` is reached
""")

# Every error of the admin listener, by status.
ADMIN_ERRORS = _errors("""
400 invalid_request: no valid HTTP, or a parameter of a wrong form
401 invalid_api_key: admin keys exist, and none that is valid was sent
403 role_required: the key's role is too low; the message says which is needed
403 host_not_allowed: asked by a `Host` that is not the listener's: see `admin.hosts`
403 origin_not_allowed: sent by a web page of another origin
404 node_not_found: no node of this name; says which are similar
404 model_not_found: no model of this name, or the router has none; says which are similar
409 placement_refused: a model can't be loaded, unloaded or pinned there; says why, and what to do
404 request_not_found: no such request waits or runs
404 not_found: no such path
405 method_not_allowed: with `Allow`
408 request_timeout: the client sent its request too slowly
413 request_too_large: a body larger than the path takes
429 too_many_watchers: `/admin/live` has as many watchers as it serves
404 key_not_found: no API key of this name or id
409 key_exists: an API key of this name or id is there already
409 key_of_settings: a key of the settings, which is changed there
409 key_expired: an expired key gets no new secret
409 key_revoked: a revoked key stays revoked
422 invalid_configuration: a file is invalid and has changed nothing
429 queue_full: too many connections
431 headers_too_large: headers above `limits.header_bytes` or 256 fields
500 internal_error: the gateway itself failed; its log says why
501 not_supported: there is no store (`store: {url: off}`) to keep it
503 no_node: `GET /ready`: no node can take or queue work
503 queue_full: `GET /ready`: every slot and every place in the queue is taken
503 starting: `GET /ready`: the nodes are being asked for the first time
503 shutting_down: `GET /ready`: the gateway is shutting down
503 store_unavailable: what is asked for is in the store, which can't be read
""")


def error_schemas() -> dict[str, JsonSchema]:
    """The schemas of errors, by name."""
    param, code = {"type": ["string", "null"]}, {"type": ["string", "integer", "null"]}
    openai = object_schema(
        ("type", "param", "code"), message=TEXT, type=TEXT, param=param, code=code
    )
    anthropic = object_schema(type=TEXT, message=TEXT)
    either = {
        "anyOf": [TEXT, openai],
        "description": "A text; an object where the request can't even be read.",
    }
    return {
        "Error": {
            **object_schema(error=openai),
            "description": "OpenAI's form; `code` is also sent as `X-Gateway-Reason`.",
        },
        "AnthropicError": object_schema(
            ("request_id",), type={"const": "error"}, error=anthropic, request_id=TEXT
        ),
        "OllamaError": object_schema(error=either),
    }
