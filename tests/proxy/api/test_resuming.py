"""The end of a resumed response, and events that can't be read."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.proxy.api.base import Api
from gateway.proxy.api.chat import CHAT, ChatRewriter
from gateway.proxy.api.completions import COMPLETIONS
from gateway.proxy.api.messages import MESSAGES
from gateway.proxy.api.native import NATIVE
from gateway.proxy.api.resuming import EventRewriter, StreamRewriter
from gateway.proxy.transcript import Transcript
from gateway.transport.errors import InvalidResponse, NodeReportedError
from tests.each_case import each_case
from tests.proxy.api.events import IDENTITY, SPLICE_POINT, values


def final_events(api: Api, transcript: Transcript, reason: str) -> bytes:
    assert api.event_rewriter is not None
    rewriter: EventRewriter = api.event_rewriter(transcript, SPLICE_POINT)
    return rewriter.final_events(reason, usage=True)


@each_case(
    ("api", "transcript", "reason"),
    [
        (CHAT, Transcript(first_event=IDENTITY), '"length"'),
        (COMPLETIONS, Transcript(first_event=IDENTITY), '"length"'),
        (NATIVE, Transcript(), '"limit"'),
        (MESSAGES, Transcript(open_blocks={0: "text"}, token_count=2), '"max_tokens"'),
    ],
)
def test_a_response_of_complete_text_is_ended(
    api: Api, transcript: Transcript, reason: str
) -> None:
    out = final_events(api, transcript, "length")
    assert reason in out.decode()
    last: dict[str, Any] = values(out)[-1]
    if api is MESSAGES:
        assert last == {"type": "message_stop"}
    elif api is not NATIVE:
        assert last["usage"]["completion_tokens"] == 2
    transcript.finish_reason, transcript.usage_sent, transcript.open_blocks = "stop", True, {}
    if api is not NATIVE:
        assert b'"usage"' not in final_events(api, transcript, "stop")


@each_case(
    ("data", "error"),
    [
        (b"data: {oops\n\n", InvalidResponse),
        (b"data: [1]\n\n", InvalidResponse),
        (b'data: {"choices":[3]}\n\n', InvalidResponse),
        (b'data: {"error":{"message":"no"}}\n\n', NodeReportedError),
        (b'event: error\ndata: {"message":"no"}\n\n', NodeReportedError),
    ],
)
def test_a_continuation_that_can_not_be_read_is_sent_to_nobody(
    data: bytes, error: type[Exception]
) -> None:
    rewriter = StreamRewriter(ChatRewriter(Transcript(first_event=IDENTITY), SPLICE_POINT))
    with pytest.raises(error):
        rewriter.rewrite(data)
