"""Which headers are forwarded to nodes and to clients."""

from __future__ import annotations

import pytest

from gateway.proxy.client_response import (
    headers_for_client,
    headers_for_node,
    without_times,
)


def sent(*headers: tuple[bytes, bytes], extra: tuple[str, ...] = ()) -> list[bytes]:
    return headers_for_node(list(headers), extra).split(b"\r\n")[:-1]


def forwarded(*names: str, extra: tuple[str, ...] = ()) -> list[str]:
    """The names of these response headers that a client gets."""
    lines = (
        headers_for_client([(name.encode(), b"1") for name in names], extra).decode().split("\r\n")
    )
    return [line.partition(":")[0] for line in lines[:-1]]


OWN = [b"accept-encoding: identity", b"via: 1.1 llama-gateway"]


def test_useful_headers_are_forwarded_and_the_gateways_are_added() -> None:
    fields = [
        (b"content-type", b"application/json"),
        (b"accept", b"text/event-stream"),
        (b"user-agent", b"me"),
        (b"traceparent", b"00-1-2-01"),
        (b"tracestate", b"a=b"),
        (b"anthropic-version", b"2023-06-01"),
        (b"anthropic-beta", b"x"),
        (b"openai-organization", b"org"),
    ]
    assert sent(*fields) == [b": ".join(field) for field in fields] + OWN


@pytest.mark.parametrize(
    "value", [b"application/x-www-form-urlencoded", b"Application/X-WWW-Form-urlencoded; a=b"]
)
def test_curls_default_content_type_becomes_json(value: bytes) -> None:
    assert sent((b"content-type", value)) == [b"content-type: application/json", *OWN]


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


@pytest.mark.parametrize("name", STAY_HERE)
def test_secrets_and_useless_headers_reach_no_node(name: str) -> None:
    assert sent((name.encode(), b"secret")) == OWN


def test_the_settings_forward_further_headers_to_nodes() -> None:
    fields = [(b"x-openwebui-user-id", b"anna"), (b"x-openwebui-user-email", b"a@b")]
    assert sent(*fields, extra=("X-OpenWebUI-User-Id",)) == [b"x-openwebui-user-id: anna", *OWN]


def test_hop_by_hop_headers_reach_no_node() -> None:
    got = sent((b"accept", b"1"), (b"connection", b"close, Accept"), (b"user-agent", b"2"))
    assert got == [b"user-agent: 2", *OWN]
    assert b"accept: 1" in sent((b"connection", b"keep-alive"), (b"accept", b"1"))


def test_via_lists_earlier_proxies() -> None:
    assert b"via: 1.0 fred, 1.1 llama-gateway" in sent((b"via", b"1.0 fred"))


def test_useful_headers_of_a_response_are_forwarded() -> None:
    names = [
        "content-type", "retry-after", "traceparent", "tracestate", "openai-processing-ms",
        "openai-version", "anthropic-ratelimit-requests-remaining",
    ]  # fmt: skip
    assert forwarded(*names) == names


NODES_ALONE = [
    "server", "date", "set-cookie", "transfer-encoding", "content-length", "keep-alive",
    "connection", "content-encoding", "access-control-allow-origin", "x-gateway-node",
    "x-request-id", "request-id", "x-accel-redirect", "x-accel-buffering", "x-accel-expires",
    "x-sendfile", "refresh", "clear-site-data", "strict-transport-security", "location",
    "content-location", "content-security-policy", "content-disposition", "alt-svc", "link",
    "report-to", "nel", "public-key-pins", "www-authenticate", "proxy-authenticate",
    "x-should-retry", "cache-control", "x-powered-by", "x-anything", "sourcemap", "upgrade",
]  # fmt: skip


@pytest.mark.parametrize("name", NODES_ALONE)
def test_headers_that_a_client_would_obey_are_not_forwarded(name: str) -> None:
    assert forwarded(name) == []


def test_the_settings_forward_further_headers_to_clients() -> None:
    extra = ("X-RateLimit-Remaining-Requests",)
    names = ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
    assert forwarded(*names, extra=extra) == ["x-ratelimit-remaining-requests"]


def test_hop_by_hop_headers_reach_no_client() -> None:
    headers = [
        (b"connection", b"keep-alive, Retry-After"),
        (b"connection", b"OpenAI-Version"),
        (b"retry-after", b"1"),
        (b"openai-version", b"1"),
        (b"content-type", b"text/event-stream"),
    ]
    assert headers_for_client(headers) == b"content-type: text/event-stream\r\n"


def test_times_and_counts_of_a_node_are_taken_out() -> None:
    kept = ["content-type", "retry-after", "openai-model", "anthropic-version", "x-timeout-kind"]
    telling = [
        "openai-processing-ms", "server-timing", "x-envoy-upstream-service-time", "x-cache",
        "anthropic-ratelimit-input-tokens-remaining", "x-response-duration", "X-Runtime",
    ]  # fmt: skip
    lines = b"".join(b"%b: time\r\n" % name.encode() for name in kept + telling)
    assert without_times(lines) == b"".join(b"%b: time\r\n" % name.encode() for name in kept)
