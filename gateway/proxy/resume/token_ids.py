"""Token ids of what goes out, for `resume: exact`: asked for as probabilities, and taken out again.

llama.cpp tells the ids of a chat or completion only with `logprobs`. The client sees its stream
as it would have been without; each event is read and written anew, which is the price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from gateway.proxy import sse
from gateway.proxy.json_values import InvalidJson, JsonObject, parse_object
from gateway.proxy.resume import plan
from gateway.proxy.resume.transcript import Transcript
from gateway.transport.errors import InvalidResponse

LOGPROBS_FIELDS: dict[str, JsonObject] = {
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 1},
    "/v1/completions": {"logprobs": 1},
}
"""What makes each path tell its tokens' ids. `/completion` does so unasked."""

_MARK = b'"logprobs"'


def can_resume_exactly(path: str, body: JsonObject) -> bool:
    """Whether ids can be had for an answer to this body, and could be gone on with."""
    return (
        path in LOGPROBS_FIELDS
        and not body.get("tools")
        and plan.unresumable_reason(body, Transcript()) is None
    )


class TokenIdExtractor:
    """Takes the probabilities out of events, and hands the ids in them to `know`."""

    __slots__ = ("_bare", "_before", "_know")

    def __init__(
        self,
        path: str,
        on_token_ids: Callable[[Iterable[int]], None],
        inner_filter: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """`before` takes out something else, before this."""
        self._know = on_token_ids
        self._before = inner_filter
        self._bare = path == "/v1/completions"
        """Whether the field stays, as null."""

    def __call__(self, events: bytes) -> bytes:
        """The events as the client would have had them. Raises: Garbage."""
        if self._before is not None:
            events = self._before(events)
        return sse.edit_matching(events, _MARK, self._stripped)

    def _stripped(self, event: bytes) -> bytes:
        try:
            value = parse_object(sse.payload(event))
            for choice in value["choices"]:
                told = choice.pop("logprobs", None)
                if told is not None:
                    self._know([token["id"] for token in told["content"]])
                if self._bare:
                    choice["logprobs"] = None
        except (InvalidJson, KeyError, TypeError):
            raise InvalidResponse("An event of the node's stream can't be read") from None
        return b"data: " + msgspec.json.encode(value) + b"\n\n"
