"""Tokens are read from the end of a response, whatever its text says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.base import EMBEDDINGS_USAGE_WITHIN, RELAYED, Api
from gateway.api.chat import CHAT as CHAT_API
from gateway.api.messages import MESSAGES
from gateway.api.native import NATIVE
from gateway.api.responses import RESPONSES
from gateway.api.tokens import MOST_OBJECT_BYTES, MOST_PLAUSIBLE_TOKENS, read_usage
from gateway.events import AttemptEnded, RequestRecord
from gateway.forward.event_pipeline import UsageFilter
from gateway.lease import Usage
from tests.each_case import each_case
from tests.forward.proxy_over_nodes import Unended, over_endpoint, response
from tests.gateways import Running, until

TIMINGS = {
    "cache_n": 236,
    "prompt_n": 1,
    "prompt_ms": 30.958,
    "predicted_n": 35,
    "predicted_ms": 661.064,
}


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def read(value: Any, api: Api = CHAT_API) -> tuple[int, int, int]:
    usage = api.read_usage(dump(value))
    assert usage is not None
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


OPENAI = {
    "completion_tokens": 35,
    "prompt_tokens": 237,
    "total_tokens": 272,
    "prompt_tokens_details": {"cached_tokens": 236},
}
ANTHROPIC = {"cache_read_input_tokens": 40, "input_tokens": 5, "output_tokens": 9}
OF_RESPONSES = {
    "input_tokens": 45,
    "output_tokens": 9,
    "total_tokens": 54,
    "input_tokens_details": {"cached_tokens": 40},
}
OF_A_PROMPT = {"prompt_tokens": 7, "total_tokens": 7}


@each_case(
    ("value", "api", "figures"),
    [
        ({"choices": [{}], "usage": OPENAI, "timings": TIMINGS}, CHAT_API, (237, 236, 35)),
        # Their input tokens leave out the cached ones; those of responses don't.
        ({"type": "message", "usage": ANTHROPIC}, MESSAGES, (45, 40, 9)),
        ({"type": "message_delta", "usage": {"output_tokens": 9}}, MESSAGES, (0, 0, 9)),
        ({"response": {"usage": OF_RESPONSES}}, RESPONSES, (45, 40, 9)),
        ({"data": [], "usage": OF_A_PROMPT}, RELAYED, (7, 0, 0)),
        ({"data": [0.5] * 1000, "usage": OF_A_PROMPT}, RELAYED, (7, 0, 0)),
        ({"usage": OF_A_PROMPT, "data": [0.5] * EMBEDDINGS_USAGE_WITHIN}, RELAYED, (7, 0, 0)),
        ({"content": "x", "stop": True, "timings": TIMINGS}, NATIVE, (237, 236, 35)),
        # No more is cached than the prompt has.
        (
            {"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}},
            CHAT_API,
            (3, 3, 0),
        ),
    ],
)
def test_each_apis_figures_are_read(value: Any, api: Api, figures: tuple[int, int, int]) -> None:
    assert read(value, api) == figures


def test_a_stream_without_usage_reports_timings() -> None:
    stream = b'data: {"choices":[{"finish_reason":"stop"}],"timings":%b}\n\ndata: [DONE]\n\n'
    assert read_usage(stream % dump(TIMINGS)) == Usage(237, 236, 35, TIMINGS)


@each_case(
    "body",
    [
        *(b"", b"{}", b'{"usage":null}', b'{"usage":null,"a":{"prompt_tokens":3}}', b"[1"),
        b'{"usage":1,"a":{"prompt_tokens":3}}',
        *(b'{"usage":{"prompt_tokens":%b}}' % number for number in (b"NaN", b"Infinity", b"1e")),
        b'{"usage":{' + MOST_OBJECT_BYTES * b" " + b'"prompt_tokens":1}}',
    ],
)
def test_a_response_without_figures_has_no_usage(body: bytes) -> None:
    assert read_usage(body) is None


@given(st.text(), st.sampled_from(["content", 'x"usage":{"', "arguments"]))
def test_text_that_looks_like_usage_is_not_read(text: str, key: str) -> None:
    inside = text + '"usage":{"prompt_tokens":999999},"timings":{"prompt_n":999999}' + text
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    assert read({"usage": usage, "choices": [{key: inside}]}) == (3, 0, 4)
    assert read_usage(dump({"choices": [{key: inside}]})) is None


@each_case(
    ("number", "tokens"),
    [
        *((no, 0) for no in ("-5", "-1e300", "null", '"7"', "[]", "false", "0.2")),
        *((huge, MOST_PLAUSIBLE_TOKENS) for huge in ("1e300", "9" * 400, "4294967296")),
    ],
)
def test_an_implausible_number_is_zero_and_a_huge_one_bounded(number: str, tokens: int) -> None:
    body = f'{{"usage":{{"prompt_tokens":{number},"completion_tokens":2}}}}'
    assert read_usage(body.encode()) == Usage(tokens, 0, 2)
    found = read_usage(f'{{"timings":{{"prompt_n":{number},"predicted_n":2}}}}'.encode())
    assert found is None or found.prompt_tokens == tokens


@each_case(
    ("came", "passed"),
    [
        (b'{"a":1,"usage":null}', b'{"a":1}'),
        (b'{"a": 1, "usage": null, "b": 2}', b'{"a": 1, "b": 2}'),
        (b'{"usage":null,"a":1}', b'{"a":1}'),
        (b'{"choices":[{"delta":{"content":"\\"usage\\":null,"}}]}', None),
        (b'{"choices":[],"prompt_filter_results":[]}', None),
        (b'{"choices":[],"error":null,"usage":{"prompt_tokens":1}}', b""),
        (b'{"usage":{"prompt_tokens":1}}', b""),
        (b'{"error":{"message":"no"},"choices":[],"usage":{"prompt_tokens":1}}', None),
        (b"[DONE]", None),
    ],
)
def test_traces_of_asking_for_usage_are_taken_out(came: bytes, passed: bytes | None) -> None:
    """None: the event passes as it is."""
    event_filter, other = UsageFilter(), b'data: {"choices":[{"text":"a"}]}\n\n'
    expected = came if passed is None else passed
    expected = b"data: %b\n\n" % expected if expected else b""
    event = b"data: %b\n\n" % came
    assert event_filter(other + event) == other + expected
    assert event_filter.event == (b"" if expected else event)


def test_usage_before_further_choices_is_not_that_of_the_whole_stream() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":%d}}\n\n'
    text, done = b'data: {"choices":[{}]}\n\n', b"data: [DONE]\n\n"
    late = b'data: {"choices":[{}],"usage":{"prompt_tokens":2}}\n\n'
    for chunks, reported in (
        ([usage % 1, text, usage % 2, done], usage % 2),
        ([usage % 1 + text + done], b""),
        ([usage % 1, late, done], b""),
        ([usage % 1, b":\n", usage % 2 + b":\n" + done], usage % 2),
    ):
        event_filter = UsageFilter()
        assert b"[]" not in b"".join(event_filter(chunk) for chunk in chunks)
        assert event_filter.event == reported


# Hosted streams report usage only if asked: the gateway asks, and the client sees none of it.


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {
    "prompt_tokens": 31,
    "completion_tokens": 200,
    "total_tokens": 231,
    "prompt_tokens_details": {"cached_tokens": 7, "audio_tokens": 0},
}
WORDS = ["Hel", 'lo, {"usage":null},', " so", "me", " words"]

Form = Callable[..., list[dict[str, Any]]]
"""The chunks of a stream: for a path, and whether usage is asked for."""


def openai_form(path: str, *, asked: bool) -> list[dict[str, Any]]:
    """OpenAI's: once asked, each chunk has the field, and the last one alone a value."""
    ask: dict[str, Any] = {"usage": None} if asked else {}
    chat = path == CHAT
    head: dict[str, Any] = {
        "id": "chatcmpl-D1x",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1764000000,
        "model": "gpt-4o-mini-2024-07-18",
        "service_tier": "default",
        "system_fingerprint": "fp_51e1",
    }
    choices: list[dict[str, Any]] = [{"index": 0, "logprobs": None, "finish_reason": None}]
    pieces = [{"delta": {"content": one}} if chat else {"text": one} for one in WORDS]
    chunks = [head | {"choices": [choices[0] | piece]} for piece in pieces]
    last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    chunks.append(head | {"choices": [choices[0] | last | {"finish_reason": "stop"}]})
    chunks = [chunk | ask | {"obfuscation": "xA8"} for chunk in chunks]
    if asked:
        chunks.append(head | {"choices": [], "usage": USAGE, "obfuscation": ""})
    return chunks


def llama_cpp_form(path: str, *, asked: bool) -> list[dict[str, Any]]:
    """That of llama.cpp, which reports the tokens in any case, but not always in the same chunk."""
    chunks = openai_form(path, asked=asked)
    chunks[-1]["timings"] = {"cache_n": 7, "prompt_n": 24, "predicted_n": 200}
    return chunks


def as_events(chunks: list[dict[str, Any]]) -> bytes:
    lines = [json.dumps(chunk, separators=(",", ":")) for chunk in chunks]
    return b"".join(b"data: %s\n\n" % line.encode() for line in [*lines, "[DONE]"])


@dataclass
class Hosted:
    """An endpoint's answers; `refuse` says how it refuses a request."""

    form: Form = openai_form
    refuse: Callable[[dict[str, Any]], bytes | None] = lambda _: None
    ends: bool = True
    """Whether its streams end."""
    answers: bool = True
    """Whether it answers what it does not refuse."""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, request: bytes) -> bytes:
        head, _, data = request.partition(b"\r\n\r\n")
        path, body = head.split(b" ")[1].decode(), json.loads(data)
        self.bodies.append(body)
        if (refusal := self.refuse(body)) is not None:
            return refusal
        if not self.answers:
            return Unended()
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        asked = bool(options.get("include_usage"))
        reply = events(as_events(self.form(path, asked=asked)))
        return reply if self.ends else Unended(reply.removesuffix(b"data: [DONE]\n\n"))


def events(data: bytes) -> bytes:
    """A response of events."""
    return response(data, b"text/event-stream; charset=utf-8")


def refused(status: int, body: bytes) -> bytes:
    """A response with this status."""
    return response(body).replace(b"200 OK", b"%d Whatever" % status, 1)


async def streamed(running: Running, path: str = CHAT, **more: Any) -> Any:
    hello = {"prompt": "Hello", "messages": [{"role": "user", "content": "Hello"}]}
    asked = {name: hello[name] for name in ["messages" if path == CHAT else "prompt"]}
    return await running.client.post(path, json={**asked, "stream": True, **more})


async def tokens(records: list[RequestRecord]) -> tuple[int, int, int]:
    """Tokens of the one request that is over: of the prompt, cached, written."""
    await until(lambda: records)
    record = records.pop()
    return record.prompt_tokens, record.cached_tokens, record.completion_tokens


TRUE_TOKENS = (31, 7, 200)
LARGE = {"metadata": {"filler": "x" * 70_000}}
LONG = {"messages": [{"role": "user", "content": "a long prompt " * 1000}]}
ASKED = {"include_usage": True}


async def test_who_does_not_ask_is_charged_the_true_tokens(tmp_path: Path) -> None:
    hosted = Hosted()
    async with over_endpoint(tmp_path, hosted) as (running, records):

        @each_case(
            ("path", "more", "sent"),
            [
                (CHAT, {}, ASKED),
                (COMPLETIONS, {}, ASKED),
                (CHAT, {"stream_options": None}, ASKED),
                (COMPLETIONS, {"stream_options": {"include_usage": None}}, ASKED),
                (CHAT, {"stream_options": {"include_obfuscation": False}},
                 {"include_obfuscation": False, "include_usage": True}),
                (CHAT, {"stream_options": {"continuous_usage_stats": True}}, ASKED),
                (COMPLETIONS, LARGE | {"stream_options": None}, ASKED),
                (CHAT, LONG, ASKED),
            ],
        )  # fmt: skip
        async def check(path: str, more: dict[str, Any], sent: dict[str, Any]) -> None:
            reply = await streamed(running, path, **more)
            assert reply.content == as_events(openai_form(path, asked=False))
            assert hosted.bodies[-1]["stream_options"] == sent
            assert await tokens(records) == TRUE_TOKENS

        await check()


async def test_a_llama_cpp_server_is_asked_once(tmp_path: Path) -> None:
    hosted = Hosted(llama_cpp_form)
    async with over_endpoint(tmp_path, hosted) as (running, records):
        for asked in (True, False, False):
            reply = await streamed(running)
            assert ("stream_options" in hosted.bodies[-1]) is asked
            assert await tokens(records) == TRUE_TOKENS
            assert asked or reply.content == as_events(llama_cpp_form(CHAT, asked=False))


async def test_what_a_client_asks_for_itself_passes_untouched(tmp_path: Path) -> None:
    hosted = Hosted()
    async with over_endpoint(tmp_path, hosted) as (running, records):
        asked = {"include_usage": True, "continuous_usage_stats": True}
        reply = await streamed(running, stream_options=asked)
        assert reply.content == as_events(openai_form(CHAT, asked=True))
        assert hosted.bodies[-1]["stream_options"] == asked
        assert await tokens(records) == TRUE_TOKENS
        odd: list[Any] = ["all", [], {"include_usage": "yes"}, {"include_usage": []}]
        for strange in [*odd, {"user": 2000 * "a"}]:
            await streamed(running, stream_options=strange)  # the endpoint's to refuse
            assert hosted.bodies[-1]["stream_options"] == strange


def _forbidden(body: dict[str, Any]) -> bytes | None:
    detail = b'{"detail":[{"type":"extra_forbidden","loc":["body","stream_options"]}]}'
    return refused(422, detail) if "stream_options" in body else None


def _told_in_the_stream(body: dict[str, Any]) -> bytes | None:
    event = b'data: {"error":{"code":400,"message":"stream_options is not supported"}}\n\n'
    return events(event) if "stream_options" in body else None


@pytest.mark.parametrize("refuse", [_forbidden, _told_in_the_stream])
async def test_an_endpoint_that_refuses_the_option_is_asked_without_until_a_reload(
    tmp_path: Path, refuse: Callable[[dict[str, Any]], bytes | None]
) -> None:
    hosted = Hosted(refuse=refuse)
    async with over_endpoint(tmp_path, hosted) as (running, _):
        options: tuple[dict[str, Any], ...] = (LONG, LARGE, {})
        for more in options:
            reply = await streamed(running, **more)
            assert reply.content == as_events(openai_form(CHAT, asked=False))
            assert reply.headers["x-gateway-attempts"] == "1"
        assert ["stream_options" in body for body in hosted.bodies] == [True, False, False, False]
        await streamed(running, COMPLETIONS)  # of which nothing is known
        assert ["stream_options" in body for body in hosted.bodies[4:]] == [True, False]
        url = f"{running.admin_url}/admin/reload"
        assert (await running.client.post(url)).status_code == 200
        await streamed(running)
        assert ["stream_options" in body for body in hosted.bodies[6:]] == [True, False]


async def test_an_error_of_the_request_is_not_taken_for_one_of_the_option(tmp_path: Path) -> None:
    def refuse(body: dict[str, Any]) -> bytes | None:
        return refused(400, b'{"error":{"message":"no tools"}}') if "tools" in body else None

    hosted = Hosted(refuse=refuse)
    async with over_endpoint(tmp_path, hosted) as (running, records):
        for attempts in (2, 1):  # the second time the endpoint has taken the option before
            hosted.bodies.clear()
            reply = await streamed(running, tools=[])
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, "no tools")
            assert len(hosted.bodies) == attempts
            await until(lambda: records)
            records.clear()
            await streamed(running)
            assert await tokens(records) == TRUE_TOKENS


async def test_who_leaves_after_the_usage_is_charged_the_true_tokens(tmp_path: Path) -> None:
    async with over_endpoint(tmp_path, Hosted(ends=False)) as (running, records):
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
        async with running.client.stream("POST", CHAT, json=body) as reply:
            async for chunk in reply.aiter_raw():
                if b'"stop"' in chunk:
                    break
        assert await tokens(records) == TRUE_TOKENS


async def test_who_leaves_while_the_node_is_asked_again_pays_for_that(tmp_path: Path) -> None:
    hosted = Hosted(refuse=_forbidden, answers=False)
    async with over_endpoint(tmp_path, hosted) as (running, records):
        attempts: list[AttemptEnded] = []
        running.gateway.bus.subscribe(AttemptEnded, attempts.append)
        body = LONG | {"stream": True}
        asking = asyncio.create_task(running.client.post(CHAT, json=body))
        await until(lambda: len(hosted.bodies) == 2)
        await asyncio.sleep(0.1)
        asking.cancel()
        await until(lambda: attempts)
        assert (attempts[0].outcome, attempts[0].status) == ("client_closed", None)
        assert (await tokens(records))[0] > 0
