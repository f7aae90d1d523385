"""A stream that has begun ends as its API says, or with its error event; never in silence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.api import sse
from gateway.config.settings import Settings
from gateway.forward.event_pipeline import EventPipeline
from gateway.request.routes import ROUTES
from tests.emulator import EmulatedNode
from tests.forward.granted_lease import a_proxy_request
from tests.forward.proxy_over_nodes import (
    BODIES,
    GENERATION_PATHS,
    Stream,
    over_endpoint,
    proxy_over,
    two_nodes,
)
from tests.gateways import until
from tests.virtual import in_virtual_time

AFTER = 12  # events; by then, content has come in every API

CHAT, COMPLETIONS, ANTHROPIC, RESPONSES, NATIVE = GENERATION_PATHS
BREAKS: list[tuple[str, dict[str, Any]]] = [
    ("reset", {}),
    ("close", {}),
    ("cut", {}),
    ("cut", {"reset": True}),
    ("end", {}),
    ("garbage_body", {}),
    ("error_event", {}),
    ("hang", {}),
]


def event(**value: Any) -> bytes:
    """An event, named by its type if it has one, without the blank line behind it."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}".encode()


def check_failed(path: str, reply: Stream, text: str | None = None) -> None:
    """Check that the last event is the only error event, in the API's form, without an end."""
    assert reply.status == 200
    assert len(reply.errors) == 1, reply.body[-500:]
    *_, last = reply.events
    api = ROUTES[path].api
    assert sse.is_error(last)
    assert not api.is_stream_complete(reply.body)
    assert b"[DONE]" not in reply.body
    value = reply.values[-1]
    named = path in {"/v1/messages", "/v1/responses"}
    assert (sse.event_name(last) == b"error") is named
    if named:
        assert value["type"] == "error"
    assert value["error"]["type"] == ("api_error" if path == "/v1/messages" else "server_error")
    if text is not None:
        assert value["error"]["message"].startswith(text)


NODE_ERRORS: list[tuple[dict[str, Any], int, str]] = [
    ({"code": 400, "type": "invalid_request_error"}, 400, "invalid_request_error"),
    ({"type": "invalid_request_error"}, 400, "invalid_request_error"),
    ({"type": "request_too_large"}, 413, "request_too_large"),
    ({"type": "rate_limit_error"}, 429, "rate_limit_error"),
    ({"type": "overloaded_error"}, 503, "overloaded_error"),
    ({"code": 529}, 529, "overloaded_error"),
    ({"type": "timeout_error"}, 504, "timeout_error"),
    ({"type": "authentication_error"}, 502, "api_error"),
    ({"code": 500, "type": "server_error"}, 502, "api_error"),
    ({"code": "x"}, 502, "api_error"),
]


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
@in_virtual_time
async def test_a_nodes_error_in_a_stream_keeps_its_meaning(tmp_path: Path, path: str) -> None:
    one = EmulatedNode(answer_tokens=40)
    async with proxy_over(tmp_path, one, resume="off", health={"failures": 100}) as proxy:
        failures = 0
        for fields, code, kind in NODE_ERRORS:
            error = event(error={**fields, "message": "It says so"}) + b"\n\n"
            name = b"event: error\n" if path == ANTHROPIC else b""
            one.faults.next("insert", after_events=AFTER, data=name + error)
            (reported,) = (await proxy.stream(path)).errors
            assert reported["message"].startswith("It says so")
            assert path != ANTHROPIC or reported["type"] == kind
            await proxy.settled()
            assert proxy.finished[-1].status == code
            # An error of the request is no failure of the node.
            failures += code not in {400, 413}
            assert proxy.node("a").failures == failures


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("stream", [True, False])
@in_virtual_time
async def test_an_error_of_the_request_behind_the_first_content_is_not_retried(
    tmp_path: Path, path: str, stream: bool
) -> None:
    """A context overflow gets the gateway's words."""
    says = {"code": 400, "message": "It says so"}
    message = "request (9000 tokens) exceeds the available context size (4096 tokens)"
    overflow = {"code": 400, "type": "exceed_context_size_error", "message": message}
    async with two_nodes(tmp_path, answer_tokens=40) as (proxy, one, two):
        for fields, words in (
            (overflow, "prompt is too long: 9000 tokens > 4096 maximum"),
            (says, "It says so"),
        ):
            error = event(error=fields) + b"\n\n"
            if path == ANTHROPIC:
                error = b"event: error\ndata: " + json.dumps(fields).encode() + b"\n\n"
            one.faults.next("insert", after_events=AFTER, data=error)
            reply = await proxy.ask(path, stream=stream)
            assert words in reply.text
            assert reply.status_code == (200 if stream else 400)
        assert two.requests == proxy.node("a").failures == 0
        assert [outcome for _, outcome in proxy.outcomes] == ["request_error"] * 2


@pytest.mark.parametrize(
    ("path", "kind", "options"),
    [
        *((CHAT, kind, options) for kind, options in BREAKS),
        # The two points in which APIs differ: the end of a stream, and the form of its errors.
        *((path, kind, {}) for path in GENERATION_PATHS[1:] for kind in ("end", "error_event")),
    ],
)
@in_virtual_time
async def test_a_stream_that_breaks_after_its_first_content_ends_with_an_error_event(
    tmp_path: Path, path: str, kind: str, options: dict[str, Any]
) -> None:
    one = EmulatedNode(answer_tokens=40)
    async with proxy_over(tmp_path, one, timeouts={"silence": 0.3}) as proxy:
        # A reset takes with it what was not read: the connection is made before.
        assert (await proxy.stream(path)).errors == []
        proxy.finished.clear()
        one.faults.next(kind, after_events=AFTER, **options)
        reply = await proxy.stream(path)
        check_failed(path, reply, "Compute error." if kind == "error_event" else None)
        # The events before it are those that the node had sent.
        assert len(reply.events) - 1 == AFTER
        assert one.requests == 2, "a stream that has begun is not repeated"
        await proxy.settled()
        (record,) = proxy.finished
        wanted = (504, "node_timeout") if kind == "hang" else (502, "node_failed")
        assert (record.status, record.reason) == wanted
        assert record.completion_tokens > 0
        assert proxy.node("a").failures == 1


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *((path, kind) for path in GENERATION_PATHS for kind in ("split", "crlf")),
        *((GENERATION_PATHS[0], kind) for kind in ("merge", "comments", "chunk_extensions")),
    ],
)
@in_virtual_time
async def test_a_stream_passes_unchanged_however_it_is_cut(
    tmp_path: Path, path: str, kind: str
) -> None:
    one = EmulatedNode(answer_tokens=12)
    async with proxy_over(tmp_path, one) as proxy:
        plain = await proxy.stream(path)
        one.faults.next(kind)
        reply = await proxy.stream(path)
        assert reply.errors == []
        assert masked(reply) == masked(plain)
        assert not re.search(rb"(?:\A|\n):[^\n]*\n\r?\n", reply.body)
        assert (b":\n" in reply.body) is (kind == "comments")


def masked(reply: Stream) -> list[bytes]:
    """The events without ids, numbers and times."""
    return [
        re.sub(rb'[\d.]+|"id[_a-z]*":"[^"]*"|\w+_\w+', b"#", sse.payload(event))
        for event in reply.events
    ]


def check_readable(path: str, reply: Stream) -> None:
    """Check that the strictest client can read all of it."""
    assert reply.status == 200
    text = re.sub(r"(?m)^:.*\n", "", reply.body.decode())
    *events, rest = text.split("\n\n")
    assert rest == ""
    for each in events:
        fields = [line.partition(": ") for line in each.split("\n")]
        assert [name for name, _, _ in fields] in (["data"], ["event", "data"])
        data = fields[-1][2]
        assert data in {"[DONE]", "null"} or isinstance(json.loads(data), dict)
    if reply.errors:
        check_failed(path, reply)
    else:
        assert ROUTES[path].api.is_stream_complete(reply.body)


HARMFUL = ("invalid_utf8", "huge", "half", "no_blank_line", "not_json")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        *((CHAT, what) for what in ("no_data", "empty", "comment", "line_comment", "fields")),
        *((CHAT, what) for what in ("nul", *HARMFUL[:-1])),
        *((path, "done") for path in [*GENERATION_PATHS, "/infill"]),
        *((path, "null") for path in [*GENERATION_PATHS, "/infill"]),
        *((path, "not_json") for path in [*GENERATION_PATHS, "/infill"]),
    ],
)
@in_virtual_time
async def test_odd_events_of_a_node_leave_the_stream_readable(
    tmp_path: Path, path: str, what: str
) -> None:
    # Slowly, so that the first content has been sent by then.
    one = EmulatedNode(answer_tokens=20, decode_tps=100.0, infill=True)
    async with proxy_over(tmp_path, one, resume="off") as proxy:
        whole = await proxy.stream(path)
        for after in (0, AFTER):
            one.faults.next("insert", after_events=after, what=what, size=2 << 20)
            reply = await proxy.stream(path)
            check_readable(path, reply)
            if after and what in HARMFUL:
                assert reply.errors
            elif what not in {"done", "null"}:
                # Nothing had been sent yet, so the request was retried.
                assert masked(reply) == masked(whole)


@in_virtual_time
async def test_a_stream_fails_without_the_event_that_alone_says_that_it_has_ended(
    tmp_path: Path,
) -> None:
    async with proxy_over(tmp_path, one := EmulatedNode(answer_tokens=8, slots=2)) as proxy:
        for path in (RESPONSES, NATIVE):
            one.faults.next("no_done")
            check_failed(path, await proxy.stream(path))
        # The end of one of several answers is none.
        whole = await proxy.stream(NATIVE, prompt="one", n=2)
        assert sum(value["stop"] for value in whole.values) == 2
        one.faults.next("close", after_events=len(whole.events) - 1)
        check_failed(NATIVE, await proxy.stream(NATIVE, prompt="one", n=2))


# What a node does after its answers have ended is no error to the client.


OLD_ERROR = b'error: {"code": 507, "message": "out of luck", "type": "server_error"}\n\n'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "more"), [(CHAT, {}), (CHAT, {"n": 2}), (COMPLETIONS, {}), (ANTHROPIC, {})]
)
@in_virtual_time
async def test_nothing_that_follows_a_finished_answer_is_an_error(
    tmp_path: Path, path: str, more: dict[str, Any], stream: bool
) -> None:
    one = EmulatedNode(answer_tokens=6, slots=2)
    async with proxy_over(tmp_path, one, resume="off", retries={"attempts": 1}) as proxy:
        api = ROUTES[path].api
        asked: dict[str, Any] = {**more, **(api.streaming_fields or {})}
        whole = await proxy.stream(path, **asked)
        plain = (await proxy.ask(path, **more)).json()
        last = len(whole.events) - 1
        kinds = ("reset", "close", "cut", "end", "error_event", "garbage_body")
        faults: list[dict[str, Any]] = [
            {"kind": "no_done"},
            {"kind": "double_done"},
            *({"kind": kind, "after_events": last} for kind in kinds),
            *(
                {"kind": "insert", "after_events": last, "data": data}
                for data in (OLD_ERROR, b"data: {oops\n\n")
            ),
        ]
        for fault in faults:
            one.faults.next(**fault)
            if not stream:
                value = (await proxy.ask(path, **more)).json()
                for field in ("choices", "content", "stop_reason"):
                    assert value.get(field) == plain.get(field), fault
                assert value["usage"], fault
                continue
            found = await proxy.stream(path, **asked)
            assert (found.errors, len(found.events)) == ([], len(whole.events)), fault
            assert api.is_stream_complete(found.body), fault
        if stream and path == CHAT and not more:
            # Nor are the figures missed that were asked for.
            one.faults.next("close", after_events=last - 1)
            found = await proxy.stream(path, **asked)
            assert (found.errors, len(found.events)) == ([], last)
            assert api.is_stream_complete(found.body)
        await proxy.settled()
        assert {outcome for _, outcome in proxy.outcomes} == {"ok"}
        assert {record.status for record in proxy.finished} == {200}


@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_an_error_however_it_is_written_is_told_in_the_nodes_words(
    tmp_path: Path, path: str
) -> None:
    one = EmulatedNode(answer_tokens=20, decode_tps=100.0)
    once = {"attempts": 1, "quarantine": 0}
    async with proxy_over(tmp_path, one, resume="off", retries=once) as proxy:
        for written in (OLD_ERROR, b'data:{"error":{"message":"out of luck"}}\n\n'):
            for after in (2, 5):
                one.faults.next("insert", after_events=after, data=written)
                reply = await proxy.stream(path)
                assert "out of luck" in reply.body.decode()
                assert reply.status != 200 or len(reply.errors) == 1
                assert b"\nerror:" not in reply.body
        assert {outcome for _, outcome in proxy.outcomes} <= {"error_event", "server_error"}


CHOICE = event(choices=[{"index": 0, "delta": {"content": "yes"}}])
END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
BOTH = event(choices=[{"delta": {"content": "yes"}, "finish_reason": "stop"}])
TEXT_DELTA = {"delta": {"type": "text_delta", "text": "yes"}, "index": 0}
STOP_DELTA = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}
EVENT_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
DELTA = event(type="response.output_text.delta", delta="yes")
COMPLETED = event(type="response.completed", response={"output": []})
LAST_EVENTS: dict[str, list[list[bytes]]] = {
    CHAT: [[CHOICE, END], [BOTH], [BOTH, b"data: [DONE]"], [BOTH, b'data: {"choices": [], "usa']],
    COMPLETIONS: [[event(choices=[{"text": "yes", "finish_reason": "length"}])]],
    ANTHROPIC: [
        [event(type="content_block_delta", **TEXT_DELTA), event(type="message_delta", **STOP_DELTA)]
    ],
    RESPONSES: [[DELTA, COMPLETED]],
}


@pytest.mark.parametrize("path", LAST_EVENTS)
@pytest.mark.parametrize("line_end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("resets", [False, True])
async def test_a_last_event_without_a_blank_line_is_an_event(
    tmp_path: Path, path: str, line_end: bytes, resets: bool
) -> None:
    said = b""
    once = {"attempts": 1}
    async with over_endpoint(tmp_path, lambda _: said, retries=once) as (running, _):
        for events in LAST_EVENTS[path]:
            body = b"\n\n".join(events) + line_end
            said = EVENT_STREAM + b"\r\n" + body
            if resets:  # The last chunk never comes.
                chunk = b"%x\r\n%b\r\n" % (len(body), body)
                said = EVENT_STREAM + b"transfer-encoding: chunked\r\n\r\n" + chunk
            reply = await running.client.post(path, json={**BODIES[path], "stream": True})
            assert reply.status_code == 200
            assert "yes" in reply.text
            assert "error" not in reply.text
            assert reply.content.endswith(b"\n\n")
            assert ROUTES[path].api.is_stream_complete(reply.content), reply.text


TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"yes"}}]}\n\n'


@pytest.mark.parametrize("line_end", [b"", b"\n", b"\n\n"])
async def test_an_error_event_that_ends_a_stream_is_the_nodes_with_or_without_a_blank_line(
    tmp_path: Path, line_end: bytes
) -> None:
    error = b'data: {"error":{"message":"It says so","type":"overloaded_error"}}' + line_end
    said = EVENT_STREAM + b"\r\n" + TOKEN + error
    once = {"attempts": 1}
    async with over_endpoint(tmp_path, lambda _: said, retries=once) as (running, records):
        reply = await running.client.post(CHAT, json={**BODIES[CHAT], "stream": True})
        assert "yes" in reply.text
        assert "It says so" in reply.text
        await until(lambda: records)
        assert [record.status for record in records] == [503]


@pytest.mark.parametrize(
    ("before", "body", "passes"),
    [
        (TOKEN, TOKEN, True),
        (TOKEN, TOKEN.replace(b"yes", "j\xe0".encode()), True),
        (TOKEN, TOKEN.replace(b"yes", b"\xe0"), False),
        (TOKEN, TOKEN + TOKEN, False),
        (TOKEN, TOKEN.replace(b"\n", b"\r\n"), False),
        (TOKEN, b"data: [DONE]\n\n", False),
        (TOKEN, b'data: {"error":{"code":500}}\n\n', False),
        (TOKEN, b"\n: of another event}\n\n", False),
        # The rest of an event, which passes behind what is held of it.
        (TOKEN[:-1], b"\n: of another event}\n\n", False),
        (TOKEN[:-1], TOKEN, False),
    ],
)
def test_a_chunk_passes_as_it_came_only_if_it_is_one_more_event_like_the_last(
    before: bytes, body: bytes, passes: bool
) -> None:
    recorded: list[bytes] = []
    pipeline = EventPipeline(
        ROUTES[CHAT].api, a_proxy_request(), 0, Settings(), lambda: 1.0, recorded.append
    )
    pipeline.feed_opening(TOKEN)
    pipeline.feed(before)
    written: list[tuple[bytes, bytes | None]] = []

    def write(data: bytes, chunk: bytes | None = None, /) -> bool:
        written.append((data, chunk))
        return False

    size, events = b"%x\r\n" % len(body), pipeline.content_events
    chunk = b"%b%b\r\n" % (size, body)
    assert pipeline.passing_to(write)(chunk, len(size)) is passes
    assert written == ([(body, chunk)] if passes else [])
    assert pipeline.content_events == events + passes
    del recorded[:]
    assert not passes or pipeline.last_events.endswith(body)
    assert recorded == ([body] if passes else [])
