"""Settings that let further header fields pass between clients and nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.config.fields import ConfigModel, Kind, one_or_many, wrong
from gateway.config.waiting import HeaderName

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
"""Of one connection, or of how a body is framed: each side has its own."""

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
        raise wrong("must be one header's name, not a pattern", "write each name")
    if lowered in _HOP:
        raise wrong(
            f"{name} can't pass",
            "it belongs to one connection or body, and is made anew; leave it away",
        )
    if lowered in _CREDENTIALS:
        raise wrong(
            f"{name} can't pass",
            "it holds somebody's credentials; a node's own key is its api_key_env or api_key_file "
            "in the inventory",
        )
    if lowered in _OWN or lowered.startswith(_OWN_PREFIXES):
        raise wrong(f"{name} can't pass", "the gateway itself reads or writes it; leave it away")
    return name


_Names = Annotated[
    tuple[Annotated[HeaderName, AfterValidator(_may_pass)], ...],
    BeforeValidator(one_or_many),
    Kind("list of header names"),
]


class HeaderSettings(ConfigModel):
    """Header fields that pass besides those that always do.

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
                "Further headers of nodes' replies that clients get, such as "
                "`x-ratelimit-remaining-requests`."
            )
        ),
    ] = ()
