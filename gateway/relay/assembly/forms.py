"""Which paths can be assembled, and how each is asked for as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.relay.assembly import chat, messages, native, responses
from gateway.relay.assembly.events import Value


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
