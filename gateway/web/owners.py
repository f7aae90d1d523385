"""Whose files, batches and stored responses a request is about."""

from __future__ import annotations

from starlette.requests import Request

from gateway.access.callers import is_local
from gateway.errors import GatewayError
from gateway.request import Caller, Headers
from gateway.web.request_context import HandlerConfig

ANONYMOUS_OWNER = "anonymous:local"
"""Owns what callers without a key keep; no key has a colon in its id."""


def owner_of(request: Request, caller: Caller, config: HandlerConfig, what: str = "Files") -> str:
    """The owner's id. Raises: GatewayError 401."""
    return owner_by_head(request.scope["headers"], caller, config, what)


def owner_by_head(headers: Headers, caller: Caller, config: HandlerConfig, what: str) -> str:
    """The owner's id: that of the key.

    Callers without a key own things only on a loopback listener without a proxy in front, and own
    them together. `what` is named in the error. Raises: GatewayError 401.
    """
    if not caller.anonymous:
        return caller.id
    if is_local(
        headers,
        loopback_listener=config.loopback,
        trusted_proxies=config.settings.listen.trusted_proxies,
    ):
        return ANONYMOUS_OWNER
    raise GatewayError(
        401,
        "invalid_api_key",
        f"{what} belong to an API key: send one as 'Authorization: Bearer lg_...'. Without one "
        "they are kept only for callers on the gateway's own machine.",
        retryable=False,
    )


def no_store(what: str) -> GatewayError:
    """501: the gateway has no store, so it keeps nothing."""
    return GatewayError(
        501,
        "not_supported",
        f"The gateway has no store (store.url: off), so it keeps no {what}.",
        retryable=False,
    )
