"""Token ids of what goes out, for `resume: exact`: asked for as probabilities, and taken out again.

llama.cpp tells the ids of a chat or completion only with `logprobs`. The client sees its stream
as it would have been without; each event is read and written anew, which is the price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from gateway.relay import sse
from gateway.relay.continuation import bounds
from gateway.relay.continuation.said import Said
from gateway.relay.values import NoJson, Value, object_of
from gateway.transport.errors import Garbage

ASKED: dict[str, Value] = {
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 1},
    "/v1/completions": {"logprobs": 1},
}
"""What makes each path tell its tokens' ids. `/completion` does so unasked."""

_MARK = b'"logprobs"'


def fits(path: str, body: Value) -> bool:
    """Whether ids can be had for an answer to this body, and could be gone on with."""
    return path in ASKED and not body.get("tools") and bounds.why_not(body, Said()) is None


class Stripper:
    """Takes the probabilities out of events, and hands the ids in them to `know`."""

    __slots__ = ("_bare", "_before", "_know")

    def __init__(
        self,
        path: str,
        know: Callable[[Iterable[int]], None],
        before: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """`before` takes out something else, before this."""
        self._know = know
        self._before = before
        self._bare = path == "/v1/completions"
        """Whether the field stays, as null."""

    def __call__(self, events: bytes) -> bytes:
        """The events as the client would have had them. Raises: Garbage."""
        if self._before is not None:
            events = self._before(events)
        return sse.edited(events, _MARK, self._stripped)

    def _stripped(self, event: bytes) -> bytes:
        try:
            value = object_of(sse.payload(event))
            for choice in value["choices"]:
                told = choice.pop("logprobs", None)
                if told is not None:
                    self._know([token["id"] for token in told["content"]])
                if self._bare:
                    choice["logprobs"] = None
        except (NoJson, KeyError, TypeError):
            raise Garbage("An event of the node's stream can't be read") from None
        return b"data: " + msgspec.json.encode(value) + b"\n\n"
