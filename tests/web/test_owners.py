"""Whose things a request is about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from starlette.requests import Request

from gateway.access.keys import KeyRing
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.lease import KeyedHash
from gateway.request import Caller, Priority
from gateway.web.owners import ANONYMOUS_OWNER, no_store, owner_of
from gateway.web.request_context import HandlerConfig

KEY = Caller("k1", "alice", Priority.NORMAL)
NOBODY = Caller("anonymous:127.0.0.1", "anonymous", Priority.URGENT, anonymous=True)


def config(*, loopback: bool) -> HandlerConfig:
    return HandlerConfig.of(
        Settings(), loopback=loopback, keyed_hash=KeyedHash(b"0" * 16), key_ring=KeyRing()
    )


def request(*headers: tuple[bytes, bytes]) -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "headers": list(headers)})


def test_a_key_owns_what_it_sends_wherever_it_comes_from() -> None:
    for loopback in (True, False):
        assert owner_of(request(), KEY, config(loopback=loopback)) == "k1"
    assert owner_of(request((b"x-forwarded-for", b"10.1.1.1")), KEY, config(loopback=True)) == "k1"


def test_callers_without_a_key_share_an_owner_on_the_gateways_machine_alone() -> None:
    assert owner_of(request(), NOBODY, config(loopback=True)) == ANONYMOUS_OWNER
    other = replace(NOBODY, id="anonymous:::1")
    assert owner_of(request(), other, config(loopback=True)) == ANONYMOUS_OWNER
    for headers, loopback in (((), False), (((b"x-forwarded-for", b"10.1.1.1"),), True)):
        with pytest.raises(GatewayError, match="Batches belong to an API key") as refused:
            owner_of(request(*headers), NOBODY, config(loopback=loopback), "Batches")
        assert (refused.value.status, refused.value.retryable) == (401, False)


def test_without_a_store_nothing_is_kept() -> None:
    assert (no_store("batches").status, no_store("batches").retryable) == (501, False)
