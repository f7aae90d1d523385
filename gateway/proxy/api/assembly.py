"""Which paths can be assembled, and how each is asked for as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.proxy.api import chat, messages, native, responses
from gateway.proxy.api.base import read_events
from gateway.proxy.inbound.large_body import Body, without_large_fields
from gateway.proxy.json_values import JSON_ERRORS, InvalidJson, JsonObject, parse_object


@dataclass(frozen=True, slots=True)
class AssemblyRule:
    """How one path's plain answers are assembled."""

    assemble: Callable[[Iterable[JsonObject], JsonObject], JsonObject]
    """The answer that these events make, for a request of this body. Raises: NotAssembled."""
    usage_on_request: bool = False
    """Whether a stream counts tokens only if `stream_options` asks for it."""


_CHAT = AssemblyRule(chat.assemble_chat, usage_on_request=True)

_COMPLETIONS = AssemblyRule(chat.assemble_completion, usage_on_request=True)

_NATIVE = AssemblyRule(native.assemble_native)

ASSEMBLY_RULES: dict[str, AssemblyRule] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETIONS,
    "/v1/messages": AssemblyRule(messages.assemble_message),
    "/v1/responses": AssemblyRule(responses.assemble_response),
    "/completion": _NATIVE,
    "/infill": _NATIVE,
}
"""The form of each path, as nodes know it, that generates and can be assembled."""

_STREAM = {"stream": True}

_COUNTED = {"stream": True, "stream_options": {"include_usage": True}}

_UNASSEMBLABLE = (
    b'"response_fields"', b'"return_progress"', b'"timings_per_token"', b'"verbose"', b'"echo"',
    b'"__verbose"',
)  # fmt: skip
"""Fields that make a plain answer another than the sum of a stream's events."""

_UNASSEMBLABLE_NAMES = tuple(name.decode().strip('"') for name in _UNASSEMBLABLE)


def streaming_fields(path: str) -> dict[str, Any]:
    """What a body of this path must say to be answered as a stream."""
    return _COUNTED if ASSEMBLY_RULES[path].usage_on_request else _STREAM


def can_assemble(path: str, body: Body, messages: msgspec.Raw, slots: int) -> bool:
    """Whether the plain answer to this body equals what its stream makes.

    Where the last message is the assistant's own, a plain answer repeats it, a stream does not;
    several answers are told apart in a chat's stream alone.
    """
    if path not in ASSEMBLY_RULES or (slots != 1 and path != "/v1/chat/completions"):
        return False
    if not isinstance(body, bytes):
        return not body.ends_with_assistant() and not body.has_any(_UNASSEMBLABLE_NAMES)
    said = bytes(messages)
    if b'"assistant"' in said and _ends_with_assistant(said):
        return False
    return not any(field in body for field in _UNASSEMBLABLE)


_LAST = msgspec.json.Decoder(list[msgspec.Raw])


def _ends_with_assistant(messages: bytes) -> bool:
    try:
        last = parse_object(_LAST.decode(messages)[-1])
    except (*JSON_ERRORS, InvalidJson, IndexError):
        return True  # whatever it is, the node knows better
    return last.get("role") == "assistant"


class ResponseAssembler:
    """Takes a stream's pieces. `most`: bytes that an answer may have."""

    __slots__ = ("_left", "_parts")

    def __init__(self, first: bytes, max_bytes: int) -> None:
        self._parts = [first]
        self._left = max_bytes - len(first)

    @property
    def too_large(self) -> bool:
        """Whether there are more bytes than may be."""
        return self._left < 0

    def add(self, events: bytes) -> bool:
        """These whole events have come; whether that is too much."""
        self._parts.append(events)
        self._left -= len(events)
        return self._left < 0

    def assemble(self, path: str, body: Body) -> bytes:
        """The whole answer to a request of this body, as JSON. Raises: NotAssembled."""
        events = read_events(b"".join(self._parts))
        return msgspec.json.encode(
            ASSEMBLY_RULES[path].assemble(events, parse_object(without_large_fields(body)))
        )
