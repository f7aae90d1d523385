"""Header fields across the gateway: what passes, which way (RFC 9110, section 7.6.1)."""

from __future__ import annotations

from gateway.request import Headers

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_TO_NODE_DROPPED = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",
    # The caller's secrets and what is meant for us.
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"cookie",
    b"x-priority",
    b"x-request-timeout",
    b"x-request-id",
    b"via",
}
_TO_CLIENT_DROPPED = _HOP_BY_HOP | {
    b"content-length",
    b"server",
    b"date",
    b"set-cookie",
    b"content-encoding",
    # What is sent may be longer or shorter: an error event more, a comment less.
    b"x-accel-buffering",
    b"x-request-id",
    b"request-id",
}
_HARMLESS = (b"keep-alive", b"close")


def to_node(headers: Headers) -> bytes:
    """The lines of a client's head that go on to a node, all but the request's id."""
    lines = []
    named: frozenset[bytes] = frozenset()
    via = b""
    for name, value in headers:
        if name in _TO_NODE_DROPPED:
            if name == b"connection" and value.lower() not in _HARMLESS:
                named = named.union(part.strip() for part in value.lower().split(b","))
            elif name == b"via":
                via += value + b", "
        elif not name.startswith(b"x-gateway-"):
            lines.append(name + b": " + value + b"\r\n")
    if named:
        lines = [line for line in lines if line[: line.index(b":")] not in named]
    lines.append(b"accept-encoding: identity\r\nvia: %s1.1 llama-gateway\r\n" % via)
    return b"".join(lines)


def to_client(headers: Headers) -> bytes:
    """The lines of a node's reply that go on to the client; its length is told anew.

    Which web pages may read an answer is for the gateway to say, not for a node.
    """
    dropped = _TO_CLIENT_DROPPED
    for name, value in headers:
        if name == b"connection":
            dropped = dropped.union(part.strip() for part in value.lower().split(b","))
    return b"".join(
        b"%b: %b\r\n" % field
        for field in headers
        if field[0] not in dropped and not field[0].startswith((b"access-control-", b"x-gateway-"))
    )
