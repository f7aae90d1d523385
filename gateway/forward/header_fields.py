"""The header fields that go on, from a client to nodes and from a node to the client.

Only listed fields are forwarded, either way (RFC 9110, section 7.6.1). Others of a request (tokens,
names, addresses that a proxy, a login or a browser adds) must not reach a node, least of all an
outside endpoint. Others of a response (redirects, cookies, instructions to a browser or to nginx)
would be obeyed by clients that trust the gateway. The settings can add names (`headers`).
"""

from __future__ import annotations

import re
from functools import lru_cache

from gateway.terms import Headers

_TO_NODE = frozenset({b"accept", b"content-type", b"traceparent", b"tracestate", b"user-agent"})
_TO_CLIENT = frozenset({b"content-type", b"retry-after", b"traceparent", b"tracestate"})
# Prefixes of two APIs' headers: versions, betas, organisations, processing times, limits.
_EITHER_WAY = (b"anthropic-", b"openai-")
_NO_HEADER_NAMES = (b"keep-alive", b"close")
# The content type of forms, which no routed path takes.
_FORM = b"application/x-www-form-urlencoded"
# Header names that are never forwarded by their prefix alone.
_SECRET = re.compile(rb"-(api-?)?(key|token|secret|password|auth|authorization|cookie)$")


def headers_for_node(headers: Headers, extra: tuple[str, ...] = ()) -> bytes:
    """The header lines of a client that are forwarded to a node, but for the request's id.

    `extra`: further names, from the settings.
    """
    passed = _allowed(_TO_NODE, extra)
    lines = []
    # Not strings that grow: a head of 64 KiB may have thousands of these two headers.
    hop_by_hop: set[bytes] = set()
    via: list[bytes] = []
    for name, value in headers:
        if name in passed or (name.startswith(_EITHER_WAY) and not _SECRET.search(name)):
            # curl's default for every POST, of which llama.cpp's server takes 8 kB at most.
            sent = b"application/json" if value[:33].lower() == _FORM else value
            lines.append(name + b": " + sent + b"\r\n")
        elif name == b"connection":
            if value.lower() not in _NO_HEADER_NAMES:
                hop_by_hop.update(_names_in(value))
        elif name == b"via":
            via.append(value)
    if hop_by_hop:
        lines = [line for line in lines if line[: line.index(b":")] not in hop_by_hop]
    via.append(b"1.1 llama-gateway")
    lines.append(b"accept-encoding: identity\r\nvia: %b\r\n" % b", ".join(via))
    return b"".join(lines)


def headers_for_client(headers: Headers, extra: tuple[str, ...] = ()) -> bytes:
    """The header lines of a node that are forwarded to the client, but for the length.

    `extra`: further names, from the settings.
    """
    passed = _allowed(_TO_CLIENT, extra)
    hop_by_hop: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            hop_by_hop.update(_names_in(value))
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if (name in passed or name.startswith(_EITHER_WAY)) and name not in hop_by_hop
    )


# Words in names of headers that tell a time, or what a node has counted of a request: Anthropic's
# limits leave cached tokens out, for one.
_TELLING_NAMES = re.compile(
    rb"(^|-)(ms|seconds|time|timing|duration|elapsed|latency|runtime|cache|cached|ratelimit)(-|$)"
)


def without_times(lines: bytes) -> bytes:
    """Header lines without those that tell a client what was cached of its prompt."""
    return b"".join(
        line
        for line in lines.splitlines(keepends=True)
        if not _TELLING_NAMES.search(line.partition(b":")[0].lower())
    )


_TYPE_LINE = re.compile(rb"^content-type:[^\n]*\n", re.MULTILINE)


def with_content_type(lines: bytes, type_line: bytes) -> bytes:
    """Header lines with this `Content-Type` in place of their own."""
    return type_line + _TYPE_LINE.sub(b"", lines)


def _names_in(connection: bytes) -> list[bytes]:
    """The headers that `Connection` restricts to the next hop."""
    return [part.strip() for part in connection.lower().split(b",")]


@lru_cache(maxsize=16)
def _allowed(passed: frozenset[bytes], also: tuple[str, ...]) -> frozenset[bytes]:
    return passed.union(name.lower().encode() for name in also)
