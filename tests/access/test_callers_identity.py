from __future__ import annotations

import pytest

from gateway.access.callers import (
    MOST_IDENTITY_BYTES,
    IdentityHeaders,
    client_network,
    identify_caller,
)
from gateway.access.keys import KeyRing, new_key
from gateway.request import Caller, Priority
from tests.access.test_keys import Spec

NAMING = IdentityHeaders.of(["X-OpenWebUI-User-Id", "X-User-Id"], ["X-OpenWebUI-Chat-Id"])
CHAT = Caller("chat", "Chat", Priority.NORMAL, trust_user_headers=True)
TEAM = Caller("team", "Team", Priority.NORMAL)


def test_a_trusted_caller_may_name_its_users() -> None:
    anna, ben = [(b"x-openwebui-user-id", b"anna")], [(b"x-openwebui-user-id", b"ben")]
    assert NAMING.fairness_key(anna, CHAT) != NAMING.fairness_key(ben, CHAT)
    assert NAMING.fairness_key(anna, CHAT) == NAMING.fairness_key([(b"a", b"b"), *anna], CHAT)
    assert NAMING.fairness_key([], CHAT) == "chat"
    assert NAMING.fairness_key([(b"x-openwebui-user-id", b"")], CHAT) == "chat"


def test_other_callers_may_not_name_users() -> None:
    assert NAMING.fairness_key([(b"x-openwebui-user-id", b"anna")], TEAM) == "team"


def test_the_first_header_of_the_list_is_preferred() -> None:
    headers = [(b"x-user-id", b"second"), (b"x-openwebui-user-id", b"first")]
    assert NAMING.fairness_key(headers, CHAT) == "chat/first"


def test_a_long_name_is_cut() -> None:
    party = NAMING.fairness_key([(b"x-user-id", b"\xff" * 5000)], CHAT)
    assert len(party) == len("chat/") + MOST_IDENTITY_BYTES


def test_sessions_of_the_same_name_differ_by_their_fairness_key() -> None:
    headers = [(b"x-openwebui-chat-id", b"1")]
    assert NAMING.session_key(headers, "team") != NAMING.session_key(headers, "chat/anna")
    assert NAMING.session_key([], "team") is None


def test_without_configured_headers_nothing_is_read() -> None:
    nothing = IdentityHeaders.of([], [])
    headers = [(b"x-openwebui-user-id", b"anna"), (b"x-openwebui-chat-id", b"1")]
    assert (nothing.fairness_key(headers, CHAT), nothing.session_key(headers, "c")) == (
        "chat",
        None,
    )


@pytest.mark.parametrize("trusted", [True, False])
def test_the_settings_decide_which_key_may_name_users(trusted: bool) -> None:
    key = new_key()
    ring = KeyRing([Spec(key.id, key.sha256, trust_user_headers=trusted)])
    found = ring.find(key.text)
    assert found is not None
    assert found.trust_user_headers is trusted


@pytest.mark.parametrize("loopback", [True, False])
def test_anonymous_callers_of_a_loopback_listener_may_name_users(loopback: bool) -> None:
    found = identify_caller(
        [], "127.0.0.1", KeyRing(), allow_anonymous=True, loopback_listener=loopback
    )
    assert found.trust_user_headers is loopback


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("local", "local"),
        ("not:an:address", "not:an:address"),
    ],
)
def test_a_client_is_its_ipv4_address_or_its_ipv6_64(address: str, network: str) -> None:
    assert client_network(address) == network


def test_anonymous_ipv6_callers_differ_by_their_64() -> None:
    found = {
        identify_caller([], address, KeyRing(), allow_anonymous=True, loopback_listener=False).id
        for address in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1")
    }
    assert found == {"anonymous:2001:db8::/64", "anonymous:2001:db8:0:1::/64"}
