"""Settings of header fields: which ones pass, and which ones name users and conversations."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.config.fields import (
    ConfigModel,
    TypeLabel,
    as_list,
    validation_error,
)

_HOP = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Hop-by-hop fields and those that frame a body: the gateway makes its own for each side."""

_CREDENTIALS = frozenset(
    {
        "api-key",
        "authorization",
        "cookie",
        "proxy-authenticate",
        "proxy-authorization",
        "set-cookie",
        "set-cookie2",
        "www-authenticate",
        "x-api-key",
    }
)

_OWN = frozenset(
    {
        "accept-encoding",
        "request-id",
        "via",
        "x-priority",
        "x-request-id",
        "x-request-timeout",
        "x-should-retry",
    }
)

_OWN_PREFIXES = ("access-control-", "x-accel-", "x-gateway-")


def _may_pass(name: str) -> str:
    lowered = name.lower()
    if "*" in name:
        raise validation_error("must be one header's name, not a pattern", "write each name")
    if lowered in _HOP:
        raise validation_error(
            f"{name} can't pass",
            "it belongs to one connection or body, and the gateway makes its own; leave it out",
        )
    if lowered in _CREDENTIALS:
        raise validation_error(
            f"{name} can't pass",
            "it holds credentials; a node's own key is named by its api_key_env or api_key_file in "
            "the inventory",
        )
    if lowered in _OWN or lowered.startswith(_OWN_PREFIXES):
        raise validation_error(
            f"{name} can't pass", "the gateway itself reads or writes it; leave it out"
        )
    return name


_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")


def _header(value: object) -> object:
    if not isinstance(value, str) or not _HEADER.fullmatch(value):
        raise validation_error("must be the name of a header", "such as X-OpenWebUI-User-Id")
    return value


HeaderName = Annotated[str, BeforeValidator(_header), TypeLabel("header name")]


_Names = Annotated[
    tuple[Annotated[HeaderName, AfterValidator(_may_pass)], ...],
    BeforeValidator(as_list),
    TypeLabel("list of header names"),
]


class HeaderSettings(ConfigModel):
    """Header fields that pass in addition to those that always do.

    To nodes: `Accept`, `Content-Type`, `User-Agent`, `traceparent`, `tracestate`; to clients:
    `Content-Type`, `Retry-After`, `traceparent`, `tracestate`; both ways: `anthropic-*` and
    `openai-*`.
    """

    to_nodes: Annotated[
        _Names,
        Field(
            description=(
                "Further headers of requests that nodes get, outside endpoints too, such as "
                "`X-OpenWebUI-User-Id`."
            )
        ),
    ] = ()
    to_clients: Annotated[
        _Names,
        Field(
            description=(
                "Further headers of nodes' responses that clients get, such as "
                "`x-ratelimit-remaining-requests`."
            )
        ),
    ] = ()


class IdentitySettings(ConfigModel):
    """The end user and the session that a request belongs to, where one key serves many people.

    User headers count for keys with `trust_user_headers`, and for local callers (no key, a
    loopback listener, no proxy); session headers count for everybody, within one caller.
    """

    user_headers: Annotated[
        tuple[HeaderName, ...],
        BeforeValidator(as_list),
        Field(
            description=(
                "Headers that name the end user; the first one present counts. The queue is fair "
                "between end users. An empty list trusts nobody."
            )
        ),
        TypeLabel("list of header names"),
    ] = ("X-OpenWebUI-User-Id", "X-User-Id")
    session_headers: Annotated[
        tuple[HeaderName, ...],
        BeforeValidator(as_list),
        Field(
            description=(
                "Headers that name the conversation or the editor's session; the first one present "
                "counts. A session keeps its node unless another is a good deal faster, and a "
                "request can supersede an earlier one of its session only."
            )
        ),
        TypeLabel("list of header names"),
    ] = ("X-OpenWebUI-Chat-Id", "X-Claude-Code-Session-Id", "X-Session-Id")
