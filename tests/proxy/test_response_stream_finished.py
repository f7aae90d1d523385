"""What a node does after its answers have ended is no error to the client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.proxy.inbound.routes import ROUTES
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway
from tests.proxy.proxy_over_nodes import BODIES, GENERATION_PATHS, MESSAGES, proxy_over
from tests.transport.raw import Peer, raw_server
from tests.virtual import in_virtual_time

CHAT, COMPLETIONS, ANTHROPIC, RESPONSES, NATIVE = GENERATION_PATHS
OLD_ERROR = b'error: {"code": 507, "message": "out of luck", "type": "server_error"}\n\n'

AFTERWARDS: list[dict[str, Any]] = [
    {"kind": "no_done"},
    {"kind": "reset"},
    {"kind": "close"},
    {"kind": "cut"},
    {"kind": "end"},
    {"kind": "error_event"},
    {"kind": "garbage_body"},
    {"kind": "insert", "data": OLD_ERROR},
    {"kind": "insert", "data": b"data: {oops\n\n"},
]


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
        fields = api.streaming_fields or {}
        whole = await proxy.stream(path, **more, **fields)
        plain = (await proxy.ask(path, **more)).json()
        for fault in AFTERWARDS:
            after: dict[str, Any] = (
                {} if fault["kind"] == "no_done" else {"after_events": len(whole.events) - 1}
            )
            one.faults.next(**{**fault, **after})
            if not stream:
                reply = await proxy.ask(path, **more)
                assert reply.status_code == 200, (fault, reply.text)
                value = reply.json()
                for field in ("choices", "content", "stop_reason"):
                    assert value.get(field) == plain.get(field), fault
                assert value["usage"], fault
                continue
            found = await proxy.stream(path, **more, **fields)
            assert found.errors == [], fault
            assert len(found.events) == len(whole.events), fault
            assert api.is_stream_complete(found.body), fault
        await proxy.settled()
        assert {outcome for _, outcome in proxy.outcomes} == {"ok"}
        assert {record.status for record in proxy.finished} == {200}


@in_virtual_time
async def test_tokens_that_were_asked_for_and_never_came_are_no_error_either(
    tmp_path: Path,
) -> None:
    one = EmulatedNode(answer_tokens=6)
    async with proxy_over(tmp_path, one, retries={"attempts": 1}) as proxy:
        fields = ROUTES[CHAT].api.streaming_fields or {}
        whole = await proxy.stream(CHAT, **fields)
        one.faults.next("close", after_events=len(whole.events) - 2)
        found = await proxy.stream(CHAT, **fields)
        assert found.errors == []
        assert len(found.events) == len(whole.events) - 1
        assert ROUTES[CHAT].api.is_stream_complete(found.body)


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("after", [0, 3])
@in_virtual_time
async def test_an_error_line_of_an_old_server_is_its_error_in_its_words(
    tmp_path: Path, path: str, after: int
) -> None:
    one = EmulatedNode(answer_tokens=20, decode_tps=100.0)
    async with proxy_over(tmp_path, one, resume="off", retries={"attempts": 1}) as proxy:
        one.faults.next("insert", after_events=after + 2, data=OLD_ERROR)
        reply = await proxy.stream(path)
        if reply.status == 200:
            (error,) = reply.errors
            assert error["message"] == "out of luck."
        else:
            assert "out of luck" in reply.body.decode()
        assert b"\nerror:" not in reply.body
        assert [outcome for _, outcome in proxy.outcomes] in (["error_event"], ["server_error"])


def event(**value: Any) -> bytes:
    """An event, named by its type if it has one, without the blank line behind it."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}".encode()


CHOICE = event(choices=[{"index": 0, "delta": {"content": "yes"}}])
END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
BOTH = event(choices=[{"delta": {"content": "yes"}, "finish_reason": "stop"}])
TEXT_DELTA = {"delta": {"type": "text_delta", "text": "yes"}, "index": 0}
STOP_DELTA = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}
LAST_EVENTS: dict[str, list[list[bytes]]] = {
    CHAT: [[CHOICE, END], [BOTH], [BOTH, b"data: [DONE]"], [BOTH, b'data: {"choices": [], "usa']],
    COMPLETIONS: [[event(choices=[{"text": "yes", "finish_reason": "length"}])]],
    ANTHROPIC: [
        [event(type="content_block_delta", **TEXT_DELTA), event(type="message_delta", **STOP_DELTA)]
    ],
    RESPONSES: [
        [
            event(type="response.output_text.delta", delta="yes"),
            event(type="response.completed", response={"output": []}),
        ]
    ],
}


@pytest.mark.parametrize("path", LAST_EVENTS)
@pytest.mark.parametrize("line_end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("resets", [False, True])
async def test_a_last_event_without_a_blank_line_is_an_event(
    tmp_path: Path, path: str, line_end: bytes, resets: bool
) -> None:
    endings = [b"\n\n".join(events) for events in LAST_EVENTS[path]]

    async def serve(peer: Peer) -> None:
        request = await peer.request()
        if request.startswith(b"GET"):
            models = json.dumps({"data": [{"id": "demo"}]}).encode()
            await peer.say(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n" % len(models) + models)
            return
        body = endings[0] + line_end
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        if resets:
            # The last chunk never comes.
            head += b"transfer-encoding: chunked\r\n"
            body = b"%x\r\n%b\r\n" % (len(body), body)
        await peer.say(head + b"\r\n" + body)

    async with raw_server(serve) as server:
        node = {"name": "a", "url": f"http://127.0.0.1:{server.port}", "kind": "openai"}
        async with running_gateway(tmp_path, [node], {"retries": {"attempts": 1}}) as running:
            while endings:
                body = {**BODIES.get(path, {"messages": MESSAGES}), "stream": True}
                reply = await running.client.post(path, json=body)
                assert reply.status_code == 200
                assert "yes" in reply.text
                assert "error" not in reply.text
                assert reply.content.endswith(b"\n\n")
                assert ROUTES[path].api.is_stream_complete(reply.content), reply.text
                del endings[0]
