"""Which header fields pass, which way."""

from __future__ import annotations

from gateway.relay.fields import to_client, to_node


def sent(*headers: tuple[bytes, bytes]) -> list[bytes]:
    return to_node(list(headers)).split(b"\r\n")[:-1]


OWN = [b"accept-encoding: identity", b"via: 1.1 llama-gateway"]


def test_ordinary_fields_pass_and_ours_are_added() -> None:
    assert sent((b"content-type", b"application/json"), (b"anthropic-version", b"2023")) == [
        b"content-type: application/json",
        b"anthropic-version: 2023",
        *OWN,
    ]


SECRET_OR_OURS = [
        b"authorization", b"x-api-key", b"api-key", b"cookie", b"proxy-authorization",
        b"x-priority", b"x-request-timeout", b"x-gateway-progress", b"x-gateway-anything",
        b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade",
        b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id",
]  # fmt: skip


def test_secrets_and_what_is_meant_for_us_stay_here() -> None:
    for name in SECRET_OR_OURS:
        assert sent((name, b"secret")) == OWN, name


def test_fields_that_connection_names_stay_here() -> None:
    got = sent((b"x-hop", b"1"), (b"connection", b"close, X-Hop"), (b"x-other", b"2"))
    assert got == [b"x-other: 2", *OWN]
    assert b"x-keep: 1" in sent((b"connection", b"keep-alive"), (b"x-keep", b"1"))


def test_earlier_proxies_are_told() -> None:
    assert b"via: 1.0 fred, 1.1 llama-gateway" in sent((b"via", b"1.0 fred"))


def test_a_reply_loses_what_is_the_nodes_or_the_hops() -> None:
    headers = [
        (b"content-type", b"text/event-stream"),
        (b"server", b"llama.cpp"),
        (b"access-control-allow-origin", b"*"),
        (b"set-cookie", b"a=b"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"7"),
        (b"keep-alive", b"timeout=5"),
        (b"connection", b"keep-alive, X-Hop"),
        (b"x-hop", b"1"),
        (b"x-gateway-node", b"forged"),
        (b"x-request-id", b"forged"),
        (b"x-other", b"kept"),
    ]
    assert to_client(headers) == b"content-type: text/event-stream\r\nx-other: kept\r\n"
