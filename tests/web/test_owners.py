"""Whose things a request is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.access.keys import KeyRing
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.http.request_head import ANONYMOUS_OWNER, HandlerConfig, no_store, owner_by_head
from gateway.lease import KeyedHash
from gateway.request import Caller, Priority

KEY = Caller("k1", "alice", Priority.NORMAL)
NOBODY = Caller("anonymous:127.0.0.1", "anonymous", Priority.URGENT, anonymous=True)


def owner_of(
    *headers: tuple[bytes, bytes], caller: Caller, loopback: bool, what: str = "Files"
) -> str:
    config = HandlerConfig.of(
        Settings(), loopback=loopback, keyed_hash=KeyedHash(b"0" * 16), key_ring=KeyRing()
    )
    return owner_by_head(list(headers), caller, config, what)


def test_a_key_owns_what_it_sends_wherever_it_comes_from() -> None:
    for loopback in (True, False):
        assert owner_of(caller=KEY, loopback=loopback) == "k1"
    assert owner_of((b"x-forwarded-for", b"10.1.1.1"), caller=KEY, loopback=True) == "k1"


def test_callers_without_a_key_share_an_owner_on_the_gateways_machine_alone() -> None:
    for caller in (NOBODY, replace(NOBODY, id="anonymous:::1")):
        assert owner_of(caller=caller, loopback=True) == ANONYMOUS_OWNER
    for headers, loopback in (((), False), (((b"x-forwarded-for", b"10.1.1.1"),), True)):
        with pytest.raises(GatewayError, match="Batches belong to an API key") as refused:
            owner_of(*headers, caller=NOBODY, loopback=loopback, what="Batches")
        assert (refused.value.status, refused.value.retryable) == (401, False)


def test_without_a_store_nothing_is_kept() -> None:
    assert (no_store("batches").status, no_store("batches").retryable) == (501, False)
