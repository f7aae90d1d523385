"""How each response of a node is treated, through a whole gateway."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.outcome import (
    ResponseOutcome,
    classify,
    context_overflow_sizes,
    is_cut_by_router,
    retry_after,
    router_failure,
)
from gateway.nodes.health import RETRY_REFUSED_AFTER
from gateway.nodes.node import NodeState
from gateway.transport.errors import DECLINED, ConnectionReset, ModelNotLoaded
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import (
    A_FIRST,
    BODIES,
    GENERATION_PATHS,
    MESSAGES,
    prompt_field,
    proxy_over,
    two_nodes,
)
from tests.forward.test_resume import GREEDY, PATHS, check_whole, two_writers
from tests.gateways import until
from tests.virtual import in_virtual_time, now


@pytest.mark.parametrize(("status", "stream"), [(400, False), (400, True), (422, False)])
@in_virtual_time
async def test_a_clients_error_passes_through_without_a_retry(
    tmp_path: Path, status: int, stream: bool
) -> None:
    async with two_nodes(tmp_path) as (proxy, one, two):
        for node in (one, two):
            node.faults.set("status", status=status)
        reply = await proxy.ask(stream=stream)
        assert reply.status_code == reply.json()["error"]["code"] == status
        assert reply.headers["x-gateway-attempts"] == "1"
        assert "x-should-retry" not in reply.headers
        assert one.requests + two.requests == 1
        one.faults.next("status", status=422, body="x" * 1_000_000)
        two.faults.next("status", status=422, body="x" * 1_000_000)
        assert len((await proxy.ask()).content) < 1_000_000, "a huge error is replaced"
        assert [proxy.node(name).failures for name in "ab"] == [0, 0]


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\nRIFF\r\n\xff\r\n--b--\r\n"
)
FORM_KIND = {"content-type": "multipart/form-data; boundary=b"}
UNSUPPORTED = [
    ("/v1/embeddings", {"input": "a"}, "Start it with `--embeddings`"),
    ("/infill", {"input_prefix": "a"}, "prefix token is missing"),
    ("/v1/audio/transcriptions", None, "does not support audio input"),
]


@pytest.mark.parametrize(("path", "body", "hint"), UNSUPPORTED)
@in_virtual_time
async def test_an_endpoint_that_no_node_has_is_501_with_the_nodes_hint(
    tmp_path: Path, path: str, body: dict[str, Any] | None, hint: str
) -> None:
    async with two_nodes(tmp_path) as (proxy, one, two):
        for _ in range(3):
            form: dict[str, Any] = {"content": FORM % b"demo", "headers": FORM_KIND}
            post = proxy.running.client.post
            reply = await (post(path, **form) if body is None else proxy.ask(path, **body))
            assert (reply.status_code, reply.headers["x-gateway-reason"]) == (501, "not_supported")
            assert hint in reply.json()["error"]["message"]
            assert reply.headers["x-should-retry"] == "false"
        known = "--" in hint  # by the question for what they were started
        assert (one.requests, two.requests) == ((0, 0) if known else (1, 1))
        assert [proxy.node(name).failures for name in "ab"] == [0, 0]
        assert (await proxy.ask()).status_code == 200


@in_virtual_time
async def test_a_form_is_forwarded_unchanged_but_for_the_models_name(tmp_path: Path) -> None:
    node = EmulatedNode(audio=True, model="whisper-1")
    async with proxy_over(tmp_path, node, nodes=({"model": {"ears": "whisper-1"}},)) as proxy:
        path, post = "/v1/audio/transcriptions", proxy.running.client.post
        reply = await post(path, content=FORM % b"ears", headers=FORM_KIND)
        assert (reply.status_code, reply.json()["text"]) == (200, "heard")
        assert node.seen[-1].body == FORM % b"whisper-1"
        assert node.seen[-1].headers["content-type"] == FORM_KIND["content-type"]
        nobody = await post(path, content=FORM % b"nobody", headers=FORM_KIND)
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "model_not_found")
        assert [record.status for record in proxy.finished] == [200, 404]


@pytest.mark.parametrize("how", ["restart", "probe", "wait"])
@in_virtual_time
async def test_a_refused_endpoint_is_asked_for_again(tmp_path: Path, how: str) -> None:
    body: dict[str, Any] = {"input_prefix": "a", "n_predict": 1}
    async with proxy_over(tmp_path, node := EmulatedNode()) as proxy:
        assert (await proxy.ask("/infill", **body)).status_code == 501
        node.infill = True
        assert (await proxy.ask("/infill", **body)).status_code == 501
        if how == "restart":  # with another option it looks the same as before
            await node.kill()
            await until(lambda: proxy.node("a").state.value == "down")
            await node.revive()
            await until(lambda: not proxy.node("a").properties.refused)
        elif how == "probe":
            admin = f"{proxy.running.admin_url}/admin/nodes/a/probe"
            assert (await proxy.running.client.post(admin)).status_code == 200
        else:
            await asyncio.sleep(RETRY_REFUSED_AFTER + 1.0)
        assert (await proxy.ask("/infill", **body)).status_code == 200


@in_virtual_time
async def test_an_error_of_two_nodes_is_passed_on_as_the_requests_own(tmp_path: Path) -> None:
    nodes = [EmulatedNode() for _ in range(3)]
    async with proxy_over(tmp_path, *nodes) as proxy:
        for node in nodes:
            node.faults.set("status", status=500, body='{"error":{"message":"Bad template"}}')
        reply = await proxy.ask()
        assert (reply.status_code, reply.json()["error"]["message"]) == (500, "Bad template")
        assert reply.headers["x-gateway-attempts"] == "2"
        assert sum(node.requests for node in nodes) == 2
        assert [proxy.node(name).failures for name in "abc"] == [0, 0, 0]


REFUSED_REQUESTS = """\
Failed to parse tool call arguments as JSON: [json.exception.parse_error.101] at line 1
===
Failed to parse messages: Missing 'role' in message: {}
===
Failed to parse tools: Missing tool function: {}; tools = []
===

------------
While executing CallExpression at line 47, column 32 in source:
...{{- raise_exception('After the optional system message, con...
Error: Jinja Exception: Roles must alternate
===
Roles must alternate at row 19, column 27:
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate") }}
"""
"""What llama.cpp says; the last is an older build's, whose templates minja renders."""
SERVER_FAILURES = """\
Failed to parse input at pos 12: Failed to parse messages: no
===
The model produced output that does not match the expected peg-native format
===
vector::_M_range_check: __n (which is 9) >= this->size() (which is 5)
===
Value is not callable: null at row 49, column 79:
                {%- set content = (m_content.split('</think>')|last) %}
===

------------
While executing CallExpression at line 1, column 47 in source:
...r m in messages %}{{ m['content'].nofunc() }}{%- endfor %}...
Error: Callee is not a function: got Undefined (hint: 'nofunc')
"""
"""Templates that are broken for any request are among them."""


@in_virtual_time
async def test_a_500_that_blames_the_request_is_400_and_goes_to_one_node(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, ollama=True) as (proxy, one, two):

        @each_case(
            ("message", "path"),
            itertools.product(REFUSED_REQUESTS.split("===\n"), ("/api/chat", *BODIES)),
        )
        async def check(message: str, path: str) -> None:
            one.faults.next("status", status=500, body=_error_of(500, message).decode())
            more: dict[str, Any] = {}
            if path == "/api/chat":
                more = {"model": "demo", "messages": MESSAGES}
            reply = await proxy.ask(path, **more)
            told = reply.json()["error"]
            assert reply.status_code == 400
            assert (told if path == "/api/chat" else told["message"]) == message
            assert (reply.headers["x-gateway-attempts"], two.requests) == ("1", 0)

        await check()
        assert proxy.node("a").failures == 0
        assert {outcome for _, outcome in proxy.outcomes} == {"ok"}


@each_case("message", SERVER_FAILURES.split("===\n"))
def test_a_failure_of_the_server_is_not_taken_for_one_of_the_request(message: str) -> None:
    assert classify(500, _error_of(500, message), "chat") is ResponseOutcome.SERVER_ERROR


WORDS = " ".join(150 * ["a"])
"""About 150 tokens; the gateway estimates 75."""


@pytest.mark.parametrize(
    ("path", "stream"), [*((path, True) for path in GENERATION_PATHS), (GENERATION_PATHS[0], False)]
)
@in_virtual_time
async def test_a_prompt_too_long_goes_to_a_larger_node_once(
    tmp_path: Path, path: str, stream: bool
) -> None:
    small, large = EmulatedNode(context=120), EmulatedNode(context=4096)
    async with proxy_over(tmp_path, small, large, nodes=A_FIRST) as proxy:
        reply = await proxy.ask(path, stream=stream, **prompt_field(path, WORDS))
        assert reply.status_code == 200, reply.text
        assert (small.requests, large.requests) == (1, 1)
        assert [proxy.node(name).failures for name in "ab"] == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_a_prompt_too_long_for_all_is_400_with_the_context(
    tmp_path: Path, stream: bool
) -> None:
    small, other = EmulatedNode(context=120), EmulatedNode(context=121)
    async with proxy_over(tmp_path, small, other, nodes=A_FIRST) as proxy:
        reply = await proxy.ask(stream=stream, messages=[{"role": "user", "content": WORDS}])
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (
            400,
            "context_length_exceeded",
        )
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["n_ctx"] in {120, 121}
        assert error["n_prompt_tokens"] > 121
        assert small.requests + other.requests <= 2
        assert [proxy.node(name).failures for name in "ab"] == [0, 0]


OVERFLOW = b'{"error":{"type":"exceed_context_size_error","n_prompt_tokens":9,"n_ctx":8}}'


@each_case(
    ("status", "content", "verdict"),
    [
        (200, b"", ResponseOutcome.PASS), (302, b"", ResponseOutcome.REFUSED),
        (400, b"", ResponseOutcome.PASS), (400, b"not json", ResponseOutcome.PASS),
        (400, b'{"error":"text"}', ResponseOutcome.PASS),
        (400, OVERFLOW, ResponseOutcome.CONTEXT_OVERFLOW), (402, b"", ResponseOutcome.BUSY),
        (409, b"", ResponseOutcome.REFUSED), (408, b"", ResponseOutcome.BUSY),
        (500, b'{"error":{"message":"input is too large"}}', ResponseOutcome.SERVER_ERROR),
        (507, b"", ResponseOutcome.SERVER_ERROR), (504, OVERFLOW, ResponseOutcome.BUSY),
    ],
)  # fmt: skip
def test_a_response_is_classified_by_status_and_type(
    status: int, content: bytes, verdict: ResponseOutcome
) -> None:
    assert classify(status, content, "chat") is verdict


OVERFLOWS = """\
112946 16384 10000 This model's maximum context length is 16384 tokens. However, you requested \
122946 tokens (112946 in the messages, 10000 in the completion). Please reduce the length.
5000 4096 - This model's maximum context length is 4096 tokens. However, your request has 5000 \
input tokens. Please reduce the length of the input messages.
530 1024 1000 'max_tokens' or 'max_completion_tokens' is too large: 1000. This model's maximum \
context length is 1024 tokens and your request has 530 input tokens (1000 > 1024 - 530).
8193 16384 8192 This model's maximum context length is 16384 tokens. However, you requested 8192 \
output tokens and your prompt contains at least 8193 input tokens, for a total of at least 16385.
31745 32768 1024 You passed 31745 input tokens and requested 1024 output tokens. However, the \
model's context length is only 32768 tokens, resulting in a maximum input length of 31744 tokens.
11466 8192 - The decoder prompt (length 11466) is longer than the maximum model length of 8192.
691793 540000 - The input (691793 tokens) is longer than the model's context length (540000 tokens).
4500 4096 500 Requested token count exceeds the model's maximum context length of 4096 tokens. You \
requested a total of 5000 tokens: 4500 tokens from the input messages and 500 for the completion.
9000 8192 - This model's maximum context length is 8192 tokens. However, your messages resulted in \
9000 tokens.
4002 1024 - request (4002 tokens) exceeds the available context size (1024 tokens)
- - - the request exceeds the available context size
"""
"""Tokens of prompt, context and answer, and how an engine tells them, in one line."""


@each_case("told", OVERFLOWS.splitlines())
def test_an_overflow_is_known_by_its_message_and_its_figures_are_read(told: str) -> None:
    *figures, message = told.split(" ", 3)
    sizes = tuple(None if figure == "-" else int(figure) for figure in figures)
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    for content in (msgspec.json.encode({"error": error}), msgspec.json.encode(error)):
        assert classify(400, content, "chat") is ResponseOutcome.CONTEXT_OVERFLOW
        assert context_overflow_sizes(content) == sizes
    by_code = b'{"error":{"message":"too long","code":"context_length_exceeded"}}'
    assert classify(400, by_code, "chat") is ResponseOutcome.CONTEXT_OVERFLOW


def _error_of(status: int, message: str) -> bytes:
    return msgspec.json.encode({"error": {"code": status, "message": message, "type": "x"}})


@each_case(
    ("status", "content", "outcome", "is_gone"),
    [
        (400, _error_of(400, "model is not loaded"), "not_loaded", False),
        (500, _error_of(500, "model name=a failed to load"), "not_loaded", False),
        (503, _error_of(503, "Loading model"), "not_loaded", False),
        (500, b"proxy error: Could not establish connection", "not_loaded", False),
        (400, _error_of(400, "model 'a/b' not found"), "not_loaded", True),
        (500, b"proxy error: Failed to read connection", "reset", False),
        # What the server of the model says itself, also of what a client wrote.
        (400, _error_of(400, "the model is not loaded"), None, False),
        (400, b"proxy error: Could not establish connection", None, False),
        (404, _error_of(404, "model 'a' not found"), None, False),
        (500, b"\xff" * 5000, None, False),
        (400, _error_of(400, "model '" + "a" * 5000 + "' not found"), None, False),
    ],
)
def test_a_routers_own_errors_are_told_from_those_of_its_models(
    status: int, content: bytes, outcome: str | None, is_gone: bool
) -> None:
    failure = router_failure(status, content)
    assert (None if failure is None else failure.outcome) == outcome
    assert isinstance(failure, ModelNotLoaded) == (outcome == "not_loaded")
    assert isinstance(failure, ConnectionReset) == (outcome == "reset")
    assert getattr(failure, "is_gone", False) == is_gone


def test_a_stream_that_a_router_ended_is_known_by_what_stands_behind_its_events() -> None:
    lost = b"proxy error: Failed to read connection"
    assert is_cut_by_router(lost)
    assert is_cut_by_router(b'data: {"choices"' + lost)
    assert not is_cut_by_router(b"")
    assert not is_cut_by_router(b'data: {"content":"%b"}' % lost)


@each_case(
    ("value", "seconds"),
    [
        (b"7", 7.0), (b" 0 ", 0.0), (b"Thu, 01 Jan 1970 00:17:00 GMT", 20.0),
        (b"Thu, 01 Jan 1970 00:16:00 GMT", 0.0), (b"999999999", 86_400.0),
        (b"Fri, 31 Dec 9999 23:59:59 GMT", 86_400.0), (b"soon", None), (b"-3", None),
        (b"1e9", None), (b"99999999999999999999", None), ("\u0663".encode(), None),
    ],
)  # fmt: skip
def test_retry_after_is_read_as_seconds_or_a_date(value: bytes, seconds: float | None) -> None:
    assert retry_after([(b"a", b"1"), (b"retry-after", value)], 1000.0) == seconds
    assert retry_after([(b"content-length", value)], 1000.0) is None


# Nodes that decline a request, or want none for a while: others serve it, and nobody is blamed.


HOSTED: dict[str, Any] = {"kind": "openai", "model": "demo", "slots": 4}
WAITS = {"retry-after": "30"}


def decline(node: EmulatedNode, status: int, headers: dict[str, str] | None = None) -> None:
    """The node answers all requests like this from now on."""
    node.faults.clear()
    node.faults.set("status", status=status, headers=headers or {})


@in_virtual_time
async def test_one_callers_content_takes_a_node_from_nobody(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (proxy, one, _):

        @each_case(
            ("status", "path", "stream"),
            itertools.product([401, 404, 409, 424, 425, 451], GENERATION_PATHS, [False, True]),
        )
        async def check(status: int, path: str, stream: bool) -> None:
            decline(one, status)
            for _ in range(4):
                reply = await proxy.ask(path, stream=stream)
                assert (reply.status_code, reply.headers["x-gateway-node"]) == (200, "b")
                assert reply.headers["x-gateway-attempts"] == "2"
            one.faults.clear()
            node = proxy.node("a")
            assert (node.failures, node.state) == (0, NodeState.READY)
            reply = await proxy.ask(path, stream=stream)
            assert reply.headers["x-gateway-node"] == "a"

        await check()


@pytest.mark.parametrize("count", [1, 2])
@in_virtual_time
async def test_what_all_nodes_decline_has_failed_and_is_not_repeated(
    tmp_path: Path, count: int
) -> None:
    servers = [EmulatedNode() for _ in range(count)]
    async with proxy_over(tmp_path, *servers, nodes=A_FIRST[:count]) as proxy:

        @each_case(("status", "path"), itertools.product(sorted(DECLINED), GENERATION_PATHS))
        async def check(status: int, path: str) -> None:
            before = sum(server.requests for server in servers)
            for server in servers:
                decline(server, status)
            reply = await proxy.ask(path, stream=True)
            assert (reply.status_code, reply.headers["x-gateway-reason"]) == (502, "node_failed")
            assert reply.headers["x-should-retry"] == "false"
            assert sum(server.requests for server in servers) == before + count
            assert [node.failures for node in proxy.app.fleet.nodes.values()] == [0] * count

        await check()


@pytest.mark.parametrize("status", [402, 429])
@in_virtual_time
async def test_the_next_model_of_an_alias_serves_while_one_pauses(
    tmp_path: Path, status: int
) -> None:
    first, second = EmulatedNode(), EmulatedNode()
    specs: tuple[dict[str, Any], ...] = ({**HOSTED, "model": "m"}, {})
    models = {"helper": {"use": ["m", "demo"]}}
    async with proxy_over(tmp_path, first, second, nodes=specs, models=models) as proxy:
        decline(first, status, WAITS)
        for number in range(4):
            began = now()
            reply = await proxy.ask(model="helper", stream=bool(number % 2))
            assert (reply.status_code, reply.headers["x-gateway-node"]) == (200, "b")
            assert now() - began < 5
        assert first.requests == 1
        first.faults.clear()
        await asyncio.sleep(30)
        reply = await proxy.ask(model="helper")
        assert reply.headers["x-gateway-node"] == "a"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_a_pause_of_all_nodes_is_429_with_the_shortest(
    tmp_path: Path, path: str, stream: bool
) -> None:
    servers = [EmulatedNode() for _ in range(3)]
    async with proxy_over(tmp_path, *servers) as proxy:
        for server, wait in zip(servers, ("30", "12", "17"), strict=True):
            decline(server, 429, {"retry-after": wait})
        began = now()
        reply = await proxy.ask(path, stream=stream)
        assert (reply.status_code, reply.headers["x-gateway-reason"]) == (429, "queue_full")
        assert reply.headers["retry-after"] == "12"
        assert "x-should-retry" not in reply.headers
        assert reply.headers["x-gateway-attempts"] == "3"
        assert now() - began < 2
        assert reply.json()["error"]["type"] == "rate_limit_error"


@in_virtual_time
async def test_a_short_pause_of_all_nodes_is_waited_for(tmp_path: Path) -> None:
    one, retries = EmulatedNode(), {"backoff_max": 2.0}
    async with proxy_over(tmp_path, one, nodes=(HOSTED,), retries=retries) as proxy:
        began = now()
        one.faults.next("status", status=429, headers={"retry-after": "2"})
        reply = await proxy.ask()
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        assert now() - began >= 2


@in_virtual_time
async def test_a_pause_counts_unless_another_node_failed(tmp_path: Path) -> None:
    """Whoever only declines could not have served it; a node that failed may fail it again."""
    one, two = EmulatedNode(), EmulatedNode()

    @each_case(
        ("first", "second", "status"),
        [(429, 401, 429), (429, 404, 429), (402, 429, 429), (429, 503, 502), (503, 429, 502)],
    )
    async def check(first: int, second: int, status: int) -> None:
        folder = tmp_path / f"{first}-{second}"
        folder.mkdir()
        async with proxy_over(folder, one, two, nodes=A_FIRST) as proxy:
            decline(one, first, WAITS if first == 429 else None)
            decline(two, second, WAITS if second == 429 else None)
            reply = await proxy.ask()
            assert reply.status_code == status
            if status == 429:
                assert reply.headers["retry-after"] == "30"

    await check()


@in_virtual_time
async def test_a_node_that_declines_in_the_middle_of_a_stream_is_not_blamed(tmp_path: Path) -> None:
    async with two_writers(tmp_path) as (proxy, one, _):
        whole = await proxy.stream(**GREEDY)
        declined = b'data: {"error":{"code":451,"message":"Not this content"}}\n\n'
        one.faults.next("insert", after_events=9, data=declined)
        check_whole(PATHS[0], await proxy.stream(**GREEDY), whole)
        await proxy.settled()
        assert proxy.outcomes == [("a", "ok"), ("a", "refused"), ("b", "ok")]
        assert proxy.node("a").failures == 0
