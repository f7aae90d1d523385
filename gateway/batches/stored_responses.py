"""What a request to `/v1/responses` asks of the gateway itself, and the conversation before it.

Everything here is about values: a stored response's own body holds its whole conversation, so the
next one needs only the body and the output of the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway import errors
from gateway.errors import GatewayError
from gateway.proxy.json_values import (
    FIELDS_DECODER,
    ITEMS_DECODER,
    JSON_ERRORS,
    TEXT_DECODER,
    JsonObject,
    raw_head,
)

RESPONSES_PATH = "/v1/responses"

RESPONSE_PREFIX = "resp_"

OWN_FIELDS = frozenset(
    {
        *("background", "background_options", "store", "stream", "stream_options"),
        *("previous_response_id", "webhook_url", "metadata", "include"),
    }
)
"""Fields of a request that no node gets: the gateway does what they say."""

_MARKS = (b'"background"', b'"store"', b'"previous_response_id"')
"""Without any of these names a request asks for nothing of the kind."""

MOST_PAIRS, LONGEST_NAME, LONGEST_VALUE = 16, 64, 512
"""Bounds of `metadata`, as OpenAI's API has them."""

COMPLETION_WINDOWS = {"soonest": None, "2h": 7200.0, "8h": 28800.0}
"""Values of `background_options.completion_window`, and their seconds."""

LONGEST_OPTION = 128 * 1024
"""Bytes of a field that is read for the gateway itself: the longest `metadata` has fewer."""

MOST_ECHOED_BYTES = 256 * 1024
"""Bytes of the fields that a response repeats, all together. It repeats them in several events, and
each that is larger is left out."""

CONTINUABLE = frozenset({"completed", "incomplete"})
"""Statuses of responses that a conversation can go on from."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What the caller asks besides the generation."""

    background: bool = False
    store: bool | None = None
    stream: bool = False
    previous: str | None = None  # `previous_response_id`
    seconds: float | None = None  # within which it must have ended; None: the caller does not say
    webhook_url: object = None  # not checked yet; None: there is none


def may_ask_to_store(body: bytes) -> bool:
    """Whether the body may have a field that `read_options` reads."""
    return any(mark in body for mark in _MARKS)


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a request's body. Raises: GatewayError 400."""
    try:
        return dict(FIELDS_DECODER.decode(body))
    except (*JSON_ERRORS, msgspec.ValidationError):
        raise errors.invalid_json("it must be an object") from None


def read_options(fields: Mapping[str, msgspec.Raw]) -> StoreOptions:
    """What these fields ask. Raises: GatewayError 400."""
    previous = _typed(fields, "previous_response_id", str, "a string")
    background = _typed(fields, "background", bool, "true or false") is True
    options = StoreOptions(
        background=background,
        store=_typed(fields, "store", bool, "true or false"),
        stream=_typed(fields, "stream", bool, "true or false") is True,
        previous=previous or None,
        seconds=_completion_seconds(fields),
        webhook_url=_value(fields, "webhook_url"),
    )
    if previous is not None and _value(fields, "conversation") is not None:
        raise errors.invalid_request(
            "'previous_response_id' and 'conversation' exclude each other.", "conversation"
        )
    check_metadata(_value(fields, "metadata"))
    return options


def check_metadata(metadata: object) -> None:
    """Raises: GatewayError 400, if it is not as OpenAI's API has it."""
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise errors.invalid_request("'metadata' must be an object.", "metadata")
    if len(metadata) > MOST_PAIRS:
        raise errors.invalid_request(f"'metadata' may have {MOST_PAIRS} keys.", "metadata")
    for name, value in metadata.items():
        shown = errors.truncate_echo(name)
        if not isinstance(value, str):
            raise errors.invalid_request(f"'metadata.{shown}' must be a string.", "metadata")
        if len(name) > LONGEST_NAME or len(value) > LONGEST_VALUE:
            raise errors.invalid_request(
                f"'metadata': keys have up to {LONGEST_NAME} characters, values {LONGEST_VALUE}.",
                "metadata",
            )


def echoed_fields(fields: Mapping[str, msgspec.Raw], names: Collection[str]) -> JsonObject:
    """Those of the request's fields with these names, as the response repeats them."""
    echoed: JsonObject = {}
    left = MOST_ECHOED_BYTES
    for name in names:
        raw = fields.get(name)
        if raw is not None and len(bytes(raw)) <= left:
            left -= len(bytes(raw))
            echoed[name] = msgspec.json.decode(raw)
    return echoed


def body_to_run(
    fields: Mapping[str, msgspec.Raw], before: Sequence[object], most_bytes: int
) -> bytes:
    """The body that nodes get, as a stream, behind the conversation `before`.

    Raises: GatewayError (400, 413).
    """
    kept: dict[str, Any] = {name: raw for name, raw in fields.items() if name not in OWN_FIELDS}
    if before:
        kept["input"] = [*before, *input_items(fields)]
    body = msgspec.json.encode({**kept, "stream": True})
    if len(body) > most_bytes:
        raise too_long_a_conversation(most_bytes) if before else errors.body_too_large(most_bytes)
    return body


def plain_body(
    fields: Mapping[str, msgspec.Raw], before: Sequence[object], most_bytes: int
) -> bytes:
    """The body of a request that is served as usual, behind the conversation `before`.

    Raises: GatewayError (400, 413).
    """
    kept: dict[str, Any] = {k: raw for k, raw in fields.items() if k != "previous_response_id"}
    kept["input"] = [*before, *input_items(fields)]
    body = msgspec.json.encode(kept)
    if len(body) > most_bytes:
        raise too_long_a_conversation(most_bytes)
    return body


def too_long_a_conversation(most_bytes: int) -> GatewayError:
    """413: with what was said before, the request is too large."""
    return GatewayError(
        413,
        "request_too_large",
        f"With the conversation of 'previous_response_id' the request has more than {most_bytes} "
        "bytes ('limits.body_bytes'): begin a new one.",
        param="previous_response_id",
    )


class _Item(msgspec.Struct):
    """An item of an `input`, as far as a list of items tells one from another."""

    id: Any = None
    type: Any = "message"


_ITEM = msgspec.json.Decoder(_Item)


class _Object(msgspec.Struct):
    """Any object."""


_OBJECTS = msgspec.json.Decoder(list[_Object])


def input_items(fields: Mapping[str, msgspec.Raw]) -> list[msgspec.Raw]:
    """The items of a body's `input`, undecoded: there may be 100,000. Raises: GatewayError 400."""
    raw = fields.get("input", msgspec.Raw(b"null"))
    try:
        if raw_head(raw, 1) == b"[":
            _OBJECTS.decode(raw)
            return ITEMS_DECODER.decode(raw)
        part = {"type": "input_text", "text": TEXT_DECODER.decode(raw)}
    except msgspec.ValidationError:
        raise errors.invalid_request(
            "'input' must be a string or a list of items.", "input"
        ) from None
    message = {"type": "message", "role": "user", "content": [part]}
    return [msgspec.Raw(msgspec.json.encode(message))]


def conversation_of(body: bytes, response: JsonObject) -> list[Any]:
    """What was said up to the end of a stored response: its body's input, and its output.

    Raises: GatewayError 400, if no conversation can go on from it.
    """
    status = response.get("status")
    if status not in CONTINUABLE:
        why = "has not ended yet" if status in {"queued", "in_progress"} else f"has {status}"
        raise errors.invalid_request(
            f"The previous response {why}: a conversation goes on from completed ones.",
            "previous_response_id",
        )
    said = input_items(read_fields(body))
    return [*said, *(response.get("output") or [])]


def item_id(response_id: str, number: int, item: msgspec.Raw) -> str:
    """The id of an input item of a stored response: its own, or one that stays the same."""
    found = _ITEM.decode(item)
    if isinstance(found.id, str):
        return found.id
    prefix = _ITEM_PREFIXES.get(str(found.type), "item_")
    return f"{prefix}{response_id.rpartition('_')[2]}{number:06x}"


def listed_item(response_id: str, number: int, item: msgspec.Raw) -> JsonObject:
    """An input item of a stored response, with its id."""
    fields: JsonObject = msgspec.json.decode(item)
    kind = fields.get("type", "message")
    listed = {"type": kind, **fields, "id": item_id(response_id, number, item)}
    listed.setdefault("status", "completed")
    if kind == "message" and isinstance(text := listed.get("content"), str):
        part = "output_text" if listed.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": text}]
    return listed


_ITEM_PREFIXES = {
    "message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_",
}  # fmt: skip


def previous_not_found(id_: str) -> GatewayError:
    """400: the caller has no such response."""
    return GatewayError(
        400,
        "previous_response_not_found",
        f"Previous response with id '{errors.truncate_echo(id_)}' not found.",
        param="previous_response_id",
    )


def response_not_found(id_: str) -> GatewayError:
    """404: the caller has no such response."""
    shown = errors.truncate_echo(id_)
    return GatewayError(404, "response_not_found", f"Response with id '{shown}' not found.")


def _completion_seconds(fields: Mapping[str, msgspec.Raw]) -> float | None:
    given = _value(fields, "background_options")
    if given is None:
        return None
    window = given.get("completion_window") if isinstance(given, dict) else given
    if window is None:
        return None
    if not isinstance(window, str) or window not in COMPLETION_WINDOWS:
        known = "', '".join(COMPLETION_WINDOWS)
        raise errors.invalid_request(
            f"'background_options.completion_window' must be '{known}'.", "background_options"
        )
    return COMPLETION_WINDOWS[window]


def _typed(fields: Mapping[str, msgspec.Raw], name: str, kind: type, words: str) -> Any:
    value = _value(fields, name)
    if value is not None and not isinstance(value, kind):
        raise errors.invalid_request(f"'{name}' must be {words}.", name)
    return value


def _value(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    """A field that is short. Raises: GatewayError 400."""
    raw = fields.get(name)
    if raw is None:
        return None
    if len(bytes(raw)) > LONGEST_OPTION:
        raise errors.invalid_request(f"'{name}' has more than {LONGEST_OPTION} bytes.", name)
    return msgspec.json.decode(raw)
