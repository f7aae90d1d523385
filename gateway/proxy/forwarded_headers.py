"""Header fields across the gateway: what passes, which way (RFC 9110, section 7.6.1).

Only what is listed passes. What else a proxy, a login or a browser puts into a request (tokens,
names of people, addresses) is no business of a node's, least of all of an outside endpoint; what
else a node puts into a reply (redirects, cookies, orders to a browser or to nginx) would be obeyed
by who trusts the gateway. The settings add names (`headers`).
"""

from __future__ import annotations

import re
from functools import lru_cache

from gateway.request import Headers

_TO_NODE = frozenset({b"accept", b"content-type", b"traceparent", b"tracestate", b"user-agent"})

_TO_CLIENT = frozenset({b"content-type", b"retry-after", b"traceparent", b"tracestate"})

_EITHER_WAY = (b"anthropic-", b"openai-")
"""Versions, betas, organisations; processing times and limits: of these two APIs."""

_HARMLESS = (b"keep-alive", b"close")

_FORM = b"application/x-www-form-urlencoded"
"""No routed path takes such a form."""

_SECRET = re.compile(rb"-(api-?)?(key|token|secret|password|auth|authorization|cookie)$")
"""What no field may be named that passes by its beginning alone."""


def headers_for_node(headers: Headers, extra: tuple[str, ...] = ()) -> bytes:
    """The lines of a client's head that go on to a node, all but the request's id.

    `also`: further names that pass, as the settings write them.
    """
    passed = _allowed(_TO_NODE, extra)
    lines = []
    # Sets and lists: a head of 64 KiB may have thousands of these two.
    named: set[bytes] = set()
    via: list[bytes] = []
    for name, value in headers:
        if name in passed or (name.startswith(_EITHER_WAY) and not _SECRET.search(name)):
            # curl says so of all that it posts; llama.cpp's server then takes 8 kB at most.
            kind = b"application/json" if value[:33].lower() == _FORM else value
            lines.append(name + b": " + kind + b"\r\n")
        elif name == b"connection":
            if value.lower() not in _HARMLESS:
                named.update(_names_in(value))
        elif name == b"via":
            via.append(value)
    if named:
        lines = [line for line in lines if line[: line.index(b":")] not in named]
    via.append(b"1.1 llama-gateway")
    lines.append(b"accept-encoding: identity\r\nvia: %b\r\n" % b", ".join(via))
    return b"".join(lines)


def headers_for_client(headers: Headers, extra: tuple[str, ...] = ()) -> bytes:
    """The lines of a node's reply that go on to the client; its length is told anew.

    `also`: further names that pass, as the settings write them.
    """
    passed = _allowed(_TO_CLIENT, extra)
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(_names_in(value))
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if (name in passed or name.startswith(_EITHER_WAY)) and name not in named
    )


def _names_in(connection: bytes) -> list[bytes]:
    """The fields that `Connection` says are for the next hop alone."""
    return [part.strip() for part in connection.lower().split(b",")]


@lru_cache(maxsize=16)
def _allowed(passed: frozenset[bytes], also: tuple[str, ...]) -> frozenset[bytes]:
    return passed.union(name.lower().encode() for name in also)
