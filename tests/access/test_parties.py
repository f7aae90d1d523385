from __future__ import annotations

import pytest

from gateway.access.callers import caller_of
from gateway.access.keys import KeyRing, new_key
from gateway.access.parties import LONGEST_NAME, NamingHeaders, network_of
from gateway.request import Caller, Priority
from tests.access.test_keys import Spec

NAMING = NamingHeaders.of(["X-OpenWebUI-User-Id", "X-User-Id"], ["X-OpenWebUI-Chat-Id"])
CHAT = Caller("chat", "Chat", Priority.NORMAL, names_users=True)
TEAM = Caller("team", "Team", Priority.NORMAL)


def test_a_trusted_caller_names_its_users() -> None:
    anna, ben = [(b"x-openwebui-user-id", b"anna")], [(b"x-openwebui-user-id", b"ben")]
    assert NAMING.party(anna, CHAT) != NAMING.party(ben, CHAT)
    assert NAMING.party(anna, CHAT) == NAMING.party([(b"a", b"b"), *anna], CHAT)
    assert NAMING.party([], CHAT) == "chat"
    assert NAMING.party([(b"x-openwebui-user-id", b"")], CHAT) == "chat"


def test_nobody_else_does() -> None:
    assert NAMING.party([(b"x-openwebui-user-id", b"anna")], TEAM) == "team"


def test_the_first_of_the_list_goes_first() -> None:
    headers = [(b"x-user-id", b"second"), (b"x-openwebui-user-id", b"first")]
    assert NAMING.party(headers, CHAT) == "chat/first"


def test_a_name_of_any_length_is_kept_short() -> None:
    party = NAMING.party([(b"x-user-id", b"\xff" * 5000)], CHAT)
    assert len(party) == len("chat/") + LONGEST_NAME


def test_sessions_of_the_same_name_are_told_apart_by_their_party() -> None:
    headers = [(b"x-openwebui-chat-id", b"1")]
    assert NAMING.session(headers, "team") != NAMING.session(headers, "chat/anna")
    assert NAMING.session([], "team") is None


def test_without_names_in_the_settings_nothing_is_read() -> None:
    nothing = NamingHeaders.of([], [])
    headers = [(b"x-openwebui-user-id", b"anna"), (b"x-openwebui-chat-id", b"1")]
    assert (nothing.party(headers, CHAT), nothing.session(headers, "c")) == ("chat", None)


@pytest.mark.parametrize("trusted", [True, False])
def test_the_settings_say_which_key_is_trusted(trusted: bool) -> None:
    key = new_key()
    ring = KeyRing([Spec(key.id, key.sha256, trust_user_headers=trusted)])
    found = ring.find(key.text)
    assert found is not None
    assert found.names_users is trusted


@pytest.mark.parametrize("loopback", [True, False])
def test_of_anonymous_callers_those_of_a_loopback_listener_are(loopback: bool) -> None:
    found = caller_of([], "127.0.0.1", KeyRing(), allow_anonymous=True, loopback_listener=loopback)
    assert found.names_users is loopback


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
def test_an_address_is_its_party_and_of_ipv6_the_64(address: str, network: str) -> None:
    assert network_of(address) == network


def test_anonymous_callers_are_told_apart_by_64() -> None:
    found = {
        caller_of([], address, KeyRing(), allow_anonymous=True, loopback_listener=False).id
        for address in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1")
    }
    assert found == {"anonymous:2001:db8::/64", "anonymous:2001:db8:0:1::/64"}
