"""What the client gets of a node's response: rewritten, and with errors in its API's form."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.base import RELAYED, ResponseRewriter
from gateway.api.json_values import run_at_once
from gateway.errors import GatewayError
from gateway.events import RequestRecord
from gateway.forward.client_response import (
    CacheFigureHider,
    EventsForClient,
    rewrite_in_steps,
)
from gateway.forward.header_fields import headers_for_client, headers_for_node
from gateway.transport.errors import InvalidResponse
from tests.each_case import each_case


class Shouting(ResponseRewriter):
    """Makes letters large, and fails on a question mark."""

    def rewrite_events(self, events: bytes) -> bytes:
        if b"?" in events:
            raise InvalidResponse("That is a question")
        return events.upper()

    def rewrite_body(self, content: bytes) -> Generator[None, None, bytes]:
        yield
        return self.rewrite_events(content)


def test_an_invalid_response_is_an_error_once() -> None:
    assert run_at_once(rewrite_in_steps(Shouting(), b"a")) == b"A"
    with pytest.raises(GatewayError) as raised:
        run_at_once(rewrite_in_steps(Shouting(), b"?"))
    assert (raised.value.status, raised.value.code) == (502, "node_failed")
    record = RequestRecord("req_1", "/v1/chat/completions")
    events = EventsForClient(Shouting(), RELAYED, record)
    assert (events.rewrite(b"a"), events.failed) == (b"A", False)
    assert events.rewrite(b"?").startswith(b'data: {"error":{"message":"That is a question.')
    assert (events.rewrite(b"b"), events.failed) == (b"", True)
    assert (record.status, record.reason) == (502, "node_failed")


# Which headers are forwarded to nodes and to clients.


def sent(*headers: tuple[bytes, bytes], extra: tuple[str, ...] = ()) -> list[bytes]:
    return headers_for_node(list(headers), extra).split(b"\r\n")[:-1]


def forwarded(*names: str, extra: tuple[str, ...] = ()) -> list[str]:
    """The names of these response headers that a client gets."""
    lines = (
        headers_for_client([(name.encode(), b"1") for name in names], extra).decode().split("\r\n")
    )
    return [line.partition(":")[0] for line in lines[:-1]]


OWN = [b"accept-encoding: identity", b"via: 1.1 llama-gateway"]


def test_useful_headers_are_forwarded_to_nodes_and_the_gateways_are_added() -> None:
    names = ["content-type", "accept", "user-agent", "traceparent", "tracestate",
             "anthropic-version", "anthropic-beta", "openai-organization"]  # fmt: skip
    fields = [(name.encode(), b"application/json") for name in names]
    assert sent(*fields) == [b": ".join(field) for field in fields] + OWN
    # What curl sends without being told.
    form = b"Application/X-WWW-Form-urlencoded; a=b"
    assert sent((b"content-type", form)) == [b"content-type: application/json", *OWN]
    users = [(b"x-openwebui-user-id", b"anna"), (b"x-openwebui-user-email", b"a@b")]
    assert sent(*users, extra=("X-OpenWebUI-User-Id",)) == [b"x-openwebui-user-id: anna", *OWN]
    got = sent((b"accept", b"1"), (b"connection", b"close, Accept"), (b"user-agent", b"2"))
    assert got == [b"user-agent: 2", *OWN]
    assert b"accept: 1" in sent((b"connection", b"keep-alive"), (b"accept", b"1"))


STAY_HERE = [
    "authorization", "x-api-key", "api-key", "cookie", "proxy-authorization",
    "x-priority", "x-request-timeout", "x-gateway-progress", "x-gateway-anything",
    "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
    "host", "content-length", "expect", "accept-encoding", "x-request-id",
    "cf-access-jwt-assertion", "x-auth-token", "x-openwebui-user-id", "x-openwebui-user-email",
    "referer", "origin", "x-forwarded-for", "x-real-ip", "forwarded", "x-amzn-oidc-data",
    "x-goog-iap-jwt-assertion", "x-ms-client-principal", "tailscale-user-login", "baggage",
    "remote-user", "x-csrf-token", "sec-fetch-site", "x-stainless-os", "x-anything",
    "anthropic-api-key", "openai-api-key", "anthropic-auth-token", "openai-cookie",
    "xanthropic-version", "openaix", "content-type-x",
]  # fmt: skip


@each_case("name", STAY_HERE)
def test_secrets_and_useless_headers_reach_no_node(name: str) -> None:
    assert sent((name.encode(), b"secret")) == OWN


NODES_ALONE = [
    "server", "date", "set-cookie", "transfer-encoding", "content-length", "keep-alive",
    "connection", "content-encoding", "access-control-allow-origin", "x-gateway-node",
    "x-request-id", "request-id", "x-accel-redirect", "x-accel-buffering", "x-accel-expires",
    "x-sendfile", "refresh", "clear-site-data", "strict-transport-security", "location",
    "content-location", "content-security-policy", "content-disposition", "alt-svc", "link",
    "report-to", "nel", "public-key-pins", "www-authenticate", "proxy-authenticate",
    "x-should-retry", "cache-control", "x-powered-by", "x-anything", "sourcemap", "upgrade",
]  # fmt: skip


def test_no_header_that_a_client_would_obey_is_forwarded_but_the_useful_ones_are() -> None:
    useful = ["content-type", "retry-after", "traceparent", "tracestate", "openai-processing-ms",
              "openai-version", "anthropic-ratelimit-requests-remaining"]  # fmt: skip
    assert forwarded(*NODES_ALONE, *useful) == useful
    names = ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
    assert forwarded(*names, extra=("X-RateLimit-Remaining-Requests",)) == [*names[:1]]
    hop_by_hop = [
        (b"connection", b"keep-alive, Retry-After"),
        (b"connection", b"OpenAI-Version"),
        (b"retry-after", b"1"),
        (b"openai-version", b"1"),
        (b"content-type", b"text/event-stream"),
    ]
    assert headers_for_client(hop_by_hop) == b"content-type: text/event-stream\r\n"


# What is taken out of responses, and what is not touched. That each path hides what was cached:
# tests/web/test_handler_hidden_figures.py.


HIDER = CacheFigureHider()


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def body(value: Any) -> Any:
    return json.loads(run_at_once(HIDER.rewrite_body(json.dumps(value).encode())))


@given(st.text())
def test_texts_pass_whatever_they_say(text: str) -> None:
    told = f'{text} "cached_tokens": 5, ,"id_slot":5 prompt_n "timings":{{"cache_n":1}}'
    chunk = {"choices": [{"delta": {"content": told, "tool": {"cached_tokens": 3}}}]}
    assert HIDER.rewrite_events(event(chunk)) == event(chunk)
    assert body(chunk) == chunk


def test_what_has_no_figures_passes_as_it_is() -> None:
    events = event({"choices": [{"delta": {"content": "hello"}}]}) * 3
    assert HIDER.rewrite_events(events) is events
    usages: tuple[Any, ...] = (None, [], "x", {"prompt_tokens_details": None}, {})
    for usage in usages:
        value = {"usage": usage, "prompt_cache_key": "mine"}
        assert body(value) == value
    text = b"the cache is prompt_n"
    assert run_at_once(HIDER.rewrite_body(text)) == text


def test_only_what_tells_is_changed_and_the_order_stays() -> None:
    told = {
        "id": "a",
        "timings": {"cache_n": 144, "prompt_n": 1, "predicted_n": 3, "predicted_ms": 2.5},
        "usage": {"prompt_tokens": 145, "prompt_tokens_details": {"cached_tokens": 144}},
        "z": [1.50, "x"],
    }
    edited = HIDER.rewrite_events(event(told)).decode()
    assert '"z":[1.5, "x"]' in edited  # the node's own bytes
    assert list(json.loads(edited.removeprefix("data: "))) == list(told)
    assert body(told) == {
        "id": "a",
        "timings": {"predicted_n": 3, "predicted_ms": 2.5},
        "usage": {"prompt_tokens": 145, "prompt_tokens_details": {"cached_tokens": 0}},
        "z": [1.5, "x"],
    }
    # A slot is named nowhere; nor is what tells in data of several lines, among what passes.
    first = b'data: {"id_slot":3,"content":"a"}\n\n'
    middle = b'data: {"index":0,"id_slot":12,"content":"a"}\n\n'
    last = b'data: {"content":"a","id_slot":-1}\n\n'
    split = b'event: x\ndata: {"cache_n": 1,\ndata: "a": 2}\n\n'
    assert HIDER.rewrite_events(first + middle + last) == (
        b'data: {"content":"a"}\n\ndata: {"index":0,"content":"a"}\n\ndata: {"content":"a"}\n\n'
    )
    passes = event({"a": "cache"})
    assert HIDER.rewrite_events(b":\n" + passes + split + b"data: [DONE]\n\n") == (
        b":\n" + passes + b'event: x\ndata: {"a":2}\n\n' + b"data: [DONE]\n\n"
    )
    assert body([{"id_slot": 1, "index": 0}, {"id_slot": 2}]) == [{"index": 0}, {}]


@pytest.mark.parametrize("data", [b'data: {"cache_n": \n\n', b'{"cache_n": 1\n'])
def test_what_cannot_be_read_does_not_pass(data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        HIDER.rewrite_events(data)
    with pytest.raises(InvalidResponse):
        run_at_once(HIDER.rewrite_body(b'{"cache_n": '))
