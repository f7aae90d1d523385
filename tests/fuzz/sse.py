"""The SSE filter: `api/sse.py`, and what reads and rewrites events behind it.

Oracles: a plain reader of the standard finds the same events before and behind the filter, however
the stream is cut; no more than the limit is buffered; rewriters and the transcript make the same of
events whether they come alone or together; only declared errors are raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from gateway.api import sse
from gateway.api.base import Api, AssemblyError, ResponseAssembler, ResponseRewriter
from gateway.api.chat import CHAT
from gateway.api.completions import COMPLETIONS
from gateway.api.json_values import run_at_once
from gateway.api.messages import MESSAGES, ChatToMessage, StopReasonRepair
from gateway.api.native import NATIVE
from gateway.api.ollama import OLLAMA_CHAT, OLLAMA_GENERATE, TranslatedApi
from gateway.api.responses import RESPONSES, ResponseLimits, ResponsesRepair
from gateway.api.transcript import TranscriptRecorder
from gateway.forward.event_pipeline import TokenIdExtractor
from gateway.transport.errors import InvalidResponse
from tests.fuzz.inputs import Divided, Target, seed

LIMIT = 1 << 20
"""Bytes of the largest event: more than any input."""

SMALL_LIMIT = 64

APIS: tuple[Api, ...] = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, NATIVE)

REWRITERS: dict[Api, tuple[Callable[[], ResponseRewriter], ...]] = {
    CHAT: (ChatToMessage, lambda: _ollama(OLLAMA_CHAT, b'{"model":"m","messages":[]}')),
    COMPLETIONS: (lambda: _ollama(OLLAMA_GENERATE, b'{"model":"m","prompt":"a"}'),),
    MESSAGES: (lambda: StopReasonRepair(lambda: frozenset({"x"})),),
    RESPONSES: (
        lambda: ResponsesRepair(
            numbers_events=True, limits=lambda: ResponseLimits(10, 100), model="m", created_at=1
        ),
    ),
    NATIVE: (),
}
"""What may rewrite the events of each API."""

_LONE_CR = re.compile(rb"\r(?!\n)")

_WHOLE = re.compile(rb"\A(?:|.*\n\r?\n|(?:.*\n\r?\n)?(?::\n)+)\Z", re.DOTALL)


def _ollama(kind: TranslatedApi, body: bytes) -> ResponseRewriter:
    api = replace(kind, clock=lambda: 1.0, wall_clock=lambda: 1e9)
    return run_at_once(api.translate(body, lambda _: True)).rewriter


def standard_events(data: bytes) -> list[list[bytes]]:
    """The whole events as a client of the standard sees them: their lines without comments."""
    found: list[list[bytes]] = []
    lines: list[bytes] = []
    for line in re.split(rb"\r?\n", data)[:-1]:
        if line or not lines:
            lines += filter(None, [line])
            continue
        fields = [one for one in lines if not one.startswith(b":")]
        if fields:
            found.append(fields)
        lines = []
    return found


def filtered(pieces: list[bytes], api: Api, *, comments: bool = True) -> tuple[bytes, int]:
    """What passes of a stream, and bytes at the end of the last output that are not ordinary."""
    framer = sse.EventFramer(LIMIT, api.ordinary_events, keep_comments=comments)
    parsing = sse.EventFramer(LIMIT, lambda _: None, keep_comments=comments)
    passed, out = b"", b""
    for piece in pieces:
        passed = framer.feed(piece)
        # Not byte by byte: one of the two may leave out blank lines that end no event.
        same = standard_events(parsing.feed(piece))
        assert standard_events(passed) == same, "the matcher changes what passes"
        if comments:
            assert _WHOLE.match(passed), "a part of an event passed"
        assert 0 <= framer.special_bytes <= len(passed)
        for event in sse.split(passed[: len(passed) - framer.special_bytes]):
            _check_ordinary(event, api)
        out += passed
    return out, framer.special_bytes


def _check_ordinary(event: bytes, api: Api) -> None:
    data = sse.payload(event)
    assert data.startswith(b"{")
    assert data.endswith(b"}")
    # Where errors have a name of their own, an event of another name may begin as they do.
    assert not sse.is_error(event) or sse.event_name(event) not in {b"", b"error"}
    assert api.terminal_mark_nested or not api.is_terminal_event(event)


def outcome_of(rewriter: ResponseRewriter, groups: list[bytes]) -> bytes | None:
    """What a rewriter makes of events that come in groups; None: they are invalid."""
    try:
        return b"".join(map(rewriter.rewrite_events, groups))
    except InvalidResponse:
        return None


def _numbered(events: bytes) -> list[object]:
    """Type, number and text of each event."""
    # The first line of an event's data may be empty.
    payloads = [sse.payload(event).lstrip() for event in sse.split(events)]
    values = [json.loads(data) for data in payloads if data[:1] == b"{"]
    return [[value.get(name) for name in ("type", "sequence_number", "delta")] for value in values]


def _check_behind(events: bytes, api: Api) -> None:
    """Check what reads events behind the filter."""
    single = list(sse.split(events))
    try:
        valid = sse.validated(events) == events
        assert not valid or sse.validated(sse.validated(events)) == events
    except InvalidResponse:
        valid = False
    assert b"".join(single) == events
    for make in REWRITERS[api]:
        together, alone = outcome_of(make(), [events]), outcome_of(make(), single)
        if api is RESPONSES and valid and together is not None and alone is not None:
            # The repair of deltas, which are many, does not look at wrong names and ids in them.
            assert _numbered(together) == _numbered(alone)
            continue
        # Ordinary events are passed unparsed, so one that is no JSON may pass in two forms.
        assert together == alone or not valid, (
            "a rewriter makes another stream of events that come together"
        )
    usage = api.read_usage(events)
    assert usage is None or usage == api.read_usage(events)
    api.is_stream_complete(events)
    for event in single:
        try:
            api.classify_event(event)
        except InvalidResponse:
            continue
    if api.streaming_fields is not None:
        with suppress(AssemblyError):
            ResponseAssembler(api, {}, events, LIMIT).response()
    if api.transcript_reader is not None:
        _check_transcript(events, single, api)
    if api.logprobs_fields is not None:
        ids: list[int] = []
        with suppress(InvalidResponse):
            TokenIdExtractor(api.take_token_ids, ids.extend)(events)


def _check_transcript(events: bytes, single: list[bytes], api: Api) -> None:
    assert api.transcript_reader is not None
    together, alone = (TranscriptRecorder(api.transcript_reader, LIMIT) for _ in range(2))
    together.add(events)
    for event in single:
        alone.add(event)
    one, other = together.transcript(), alone.transcript()
    assert (one.unresumable is None) == (other.unresumable is None)
    if one.unresumable is None:
        assert one.text == other.text, "the transcript has another text"
        assert one.reasoning_text == other.reasoning_text


def check(raw: Divided) -> None:
    """Check one node's stream."""
    # The filter knows the line ends of servers, LF and CRLF; a CR alone is undefined here.
    one = replace(raw, text=_LONE_CR.sub(b"", raw.text))
    api = APIS[one.choice % len(APIS)]
    pieces = one.pieces()
    whole, special = filtered([one.text], api)
    cut, _ = filtered(pieces, api)
    assert standard_events(whole) == standard_events(one.text), "events were lost or made"
    assert standard_events(cut) == standard_events(whole), "cuts change the events"
    silent, _ = filtered(pieces, api, comments=False)
    assert standard_events(silent) == standard_events(whole)
    framer = sse.EventFramer(SMALL_LIMIT, api.ordinary_events)
    with suppress(InvalidResponse):
        for piece in raw.pieces():
            framer.feed(piece)
            assert len(framer._tail) <= SMALL_LIMIT, "more than the limit is buffered"
    try:
        # As an attempt checks them before anything else reads them.
        at = len(whole) - special
        passed = whole[:at] + sse.validated(whole[at:])
        sse.check_utf8(passed)
    except InvalidResponse:
        return
    _check_behind(passed, api)


def _event(data: bytes, name: bytes = b"") -> bytes:
    line = b"event: %b\n" % name if name else b""
    return line + b"data: " + data + b"\n\n"


_CHAT = (
    _event(b'{"id":"a","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}')
    + _event(b'{"id":"a","choices":[{"index":0,"delta":{"content":"Hi"}}]}') * 3
    + _event(b'{"choices":[{"index":0,"delta":{"reasoning_content":"Hm","tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":"{}"}}]},"logprobs":{"content":[{"id":7,"token":"a"}]}}]}')
    + _event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2},"timings":{"cache_n":1,"predicted_n":2}}')
    + _event(b"[DONE]")
)  # fmt: skip

_MESSAGES = (
    _event(b'{"type":"message_start","message":{"id":"a","usage":{"input_tokens":1}}}', b"message_start")
    + _event(b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}', b"content_block_start")
    + _event(b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}', b"content_block_delta") * 2
    + _event(b'{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":"x"},"usage":{"output_tokens":2}}', b"message_delta")
    + _event(b'{"type":"message_stop"}', b"message_stop")
)  # fmt: skip

_RESPONSES = (
    _event(b'{"type":"response.created","response":{"id":"r","status":"in_progress"}}', b"response.created")
    + _event(b'{"type":"response.output_item.added","item":{"id":"m0","type":"message","content":[]}}', b"response.output_item.added")
    + _event(b'{"type":"response.output_text.delta","item_id":"m0","delta":"Hi"}', b"response.output_text.delta") * 3
    + _event(b'{"type":"response.completed","response":{"status":"completed","usage":{"input_tokens":15,"output_tokens":4,"total_tokens":19}}}', b"response.completed")
)  # fmt: skip

SSE = Target(
    "sse",
    check,
    (
        seed(_CHAT, 0),
        seed(_CHAT.replace(b'"delta":{"content":"Hi"}', b'"text":"Hi"'), 1),
        seed(_MESSAGES, 2),
        seed(_RESPONSES, 3),
        seed(_event(b'{"content":"Hi","tokens":[1],"stop":false}') * 3 + _event(b'{"content":"","stop":true,"timings":{}}'), 4),
        seed(b": ping\n\n:\n" + _event(b'{"error":{"message":"no","code":500}}'), 0),
        seed(b"data: a\r\n\r\n:\r\n\r\n: x\ndata: {\r\ndata:}\r\n\r\nid: 7\nevent: error\n\n", 2),
        seed(_event(b'{"prompt_progress":{"total":9,"cache":1,"processed":3}}') + _event(b"null"), 4),
    ),
    longest=2048,
)  # fmt: skip
