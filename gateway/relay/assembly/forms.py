"""Which paths can be assembled, and how each is asked for as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.relay.assembly import chat, messages, native, responses
from gateway.relay.large import Body
from gateway.relay.values import UNREADABLE, NoJson, Value, object_of


@dataclass(frozen=True, slots=True)
class Form:
    """How one path's plain answers are assembled."""

    whole: Callable[[Iterable[Value], Value], Value]
    """The answer that these events make, for a request of this body. Raises: NotAssembled."""
    usage: bool = False
    """Whether a stream counts tokens only if `stream_options` asks for it."""


_CHAT = Form(chat.chat_answer, usage=True)
_COMPLETIONS = Form(chat.completions_answer, usage=True)
_NATIVE = Form(native.answer)

FORMS: dict[str, Form] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETIONS,
    "/v1/messages": Form(messages.answer),
    "/v1/responses": Form(responses.answer),
    "/completion": _NATIVE,
    "/infill": _NATIVE,
}
"""The form of each path, as nodes know it, that generates and can be assembled."""

_STREAM = {"stream": True}
_COUNTED = {"stream": True, "stream_options": {"include_usage": True}}

_OTHERWISE = (
    b'"response_fields"', b'"return_progress"', b'"timings_per_token"', b'"verbose"', b'"echo"',
    b'"__verbose"',
)  # fmt: skip
"""Fields that make a plain answer another than the sum of a stream's events."""
_OTHERWISE_NAMES = tuple(name.decode().strip('"') for name in _OTHERWISE)


def asked(path: str) -> dict[str, Any]:
    """What a body of this path must say to be answered as a stream."""
    return _COUNTED if FORMS[path].usage else _STREAM


def fits(path: str, body: Body, messages: msgspec.Raw, slots: int) -> bool:
    """Whether the plain answer to this body equals what its stream makes.

    Where the last message is the assistant's own, a plain answer repeats it, a stream does not;
    several answers are told apart in a chat's stream alone.
    """
    if path not in FORMS or (slots != 1 and path != "/v1/chat/completions"):
        return False
    if not isinstance(body, bytes):
        return not body.continues() and not body.has(_OTHERWISE_NAMES)
    said = bytes(messages)
    if b'"assistant"' in said and _continues(said):
        return False
    return not any(field in body for field in _OTHERWISE)


_LAST = msgspec.json.Decoder(list[msgspec.Raw])


def _continues(messages: bytes) -> bool:
    try:
        last = object_of(_LAST.decode(messages)[-1])
    except (*UNREADABLE, NoJson, IndexError):
        return True  # whatever it is, the node knows better
    return last.get("role") == "assistant"
