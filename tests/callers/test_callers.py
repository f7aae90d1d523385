from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers.callers import (
    MOST_FORWARDED_HOPS,
    MOST_IDENTITY_BYTES,
    IdentityHeaders,
    IPNetwork,
    client_address,
    effective_priority,
    identify_caller,
    is_local,
    is_loopback,
    is_proxied,
    owner_of_stored,
    priority_header,
)
from gateway.callers.keys import INITIAL_ACCESS, KeyRing, new_key
from gateway.errors import GatewayError
from gateway.terms import Caller, Headers, Priority
from tests.callers.test_keys import key_spec
from tests.each_case import each_case

KEY = new_key("team")
RING = KeyRing([key_spec(KEY.id, KEY.sha256, max_class="premium")])
WITH_KEY: Headers = [(b"authorization", b"Bearer " + KEY.text.encode())]
WRONG_KEY: Headers = [(b"x-api-key", b"lg_team_wrong")]
PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def caller(
    headers: Headers,
    ring: KeyRing,
    *,
    allow_anonymous: bool = False,
    loopback: bool = False,
    address: str = "192.0.2.7",
    proxies: Sequence[IPNetwork] = (),
) -> Caller:
    return identify_caller(
        headers,
        address,
        ring,
        allow_anonymous=allow_anonymous,
        loopback_listener=loopback,
        trusted_proxies=proxies,
    )


@each_case("loopback", [True, False])
def test_if_there_are_keys_one_is_needed_or_anonymous_callers_are_allowed(loopback: bool) -> None:
    for headers, allow_anonymous in (([], False), (WRONG_KEY, False), (WRONG_KEY, True)):
        with pytest.raises(GatewayError) as caught:
            caller(headers, RING, loopback=loopback, allow_anonymous=allow_anonymous)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    found = caller(WITH_KEY, RING, loopback=loopback)
    assert (found.id, found.max_priority) == ("team", Priority.PREMIUM)
    found = caller([], RING, allow_anonymous=True)
    assert found.anonymous
    assert (found.id, found.max_priority) == ("anonymous:192.0.2.7", Priority.NORMAL)
    assert not found.trust_user_headers


def test_without_keys_a_local_caller_gets_every_class_and_one_behind_a_proxy_does_not() -> None:
    local = caller([], KeyRing(), loopback=True)
    assert (local.max_priority, local.trust_user_headers) == (Priority.URGENT, True)
    behind = caller([(b"x-forwarded-for", b"127.0.0.1")], KeyRing(), loopback=True)
    trusted = caller([], KeyRing(), loopback=True, allow_anonymous=True, proxies=PROXIES)
    for found in (behind, trusted):
        assert found.id == "anonymous:192.0.2.7"
        assert (found.max_priority, found.trust_user_headers) == (Priority.NORMAL, False)
    with pytest.raises(GatewayError) as caught:
        caller([], KeyRing(), loopback=True, proxies=PROXIES)
    assert caught.value.status == 401


@each_case(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.7", [], "192.0.2.7"),
        ("192.0.2.7", [b"198.51.100.1"], "192.0.2.7"),  # the peer is not a trusted proxy
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [b"198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"203.0.113.9, 198.51.100.1"], "198.51.100.1"),  # the left one is claimed
        ("10.0.0.1", [b"203.0.113.9", b"198.51.100.1, 10.9.9.9"], "198.51.100.1"),
        ("10.0.0.1", [b"10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", [b"198.51.100.1, unknown"], "10.0.0.1"),
        ("10.0.0.1", [b"198.51.100.1, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", [b""], "10.0.0.1"),
        ("10.0.0.1", [b"198.51.100.1:4711"], "198.51.100.1"),
        ("10.0.0.1", [b"[2001:DB8:0::1]:4711"], "2001:db8::1"),
        ("10.0.0.1", [b"2001:db8::1"], "2001:db8::1"),
        ("10.0.0.1", [b"::ffff:198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"2001:db8::1%" + b"x" * 1000], "2001:db8::1"),
        ("::ffff:10.0.0.1", [b"198.51.100.1"], "198.51.100.1"),
        ("fd00::1", [b"198.51.100.1, fd00::2"], "198.51.100.1"),
        ("2001:db8::5", [b"198.51.100.1"], "2001:db8::5"),
        (None, [b"198.51.100.1"], "local"),
    ],
)
def test_the_address_is_the_rightmost_that_is_no_trusted_proxy(
    peer: str | None, forwarded: list[bytes], address: str
) -> None:
    headers = [(b"x-forwarded-for", value) for value in forwarded]
    assert client_address(headers, peer, PROXIES) == address


def test_only_the_last_entries_of_a_long_forwarded_list_are_read() -> None:
    value = b"198.51.100.1" + b",10.0.0.2" * MOST_FORWARDED_HOPS
    assert client_address([(b"x-forwarded-for", value)], "10.0.0.1", PROXIES) == "10.0.0.2"


@given(st.binary(max_size=200))
def test_no_x_forwarded_for_is_an_error(value: bytes) -> None:
    assert client_address([(b"x-forwarded-for", value)], "10.0.0.1", PROXIES)


@each_case(
    ("header", "body", "tier", "best", "priority"),
    [
        (None, None, None, Priority.URGENT, Priority.NORMAL),
        (b"urgent", "batch", "flex", Priority.URGENT, Priority.URGENT),
        (b" Premium ", None, None, Priority.URGENT, Priority.PREMIUM),
        (None, "batch", "priority", Priority.URGENT, Priority.BATCH),
        (None, None, "priority", Priority.URGENT, Priority.PREMIUM),
        (None, None, "flex", Priority.URGENT, Priority.BATCH),
        (None, None, "auto", Priority.URGENT, Priority.NORMAL),
        (None, "vip", None, Priority.URGENT, Priority.NORMAL),  # not one of our classes
        (None, "", "priority", Priority.URGENT, Priority.PREMIUM),
        # The caller's highest class is a cap without an error.
        (b"urgent", None, None, Priority.NORMAL, Priority.NORMAL),
        (b"urgent", None, None, Priority.PREMIUM, Priority.PREMIUM),
        (b"batch", None, None, Priority.PREMIUM, Priority.BATCH),
        (b"normal", None, None, Priority.BATCH, Priority.BATCH),
    ],
)
def test_the_class_comes_from_the_header_then_the_body_then_the_tier_up_to_a_cap(
    header: bytes | None, body: str | None, tier: str | None, best: Priority, priority: Priority
) -> None:
    headers = [] if header is None else [(b"x-priority", header)]
    holder = Caller(id="x", name="x", max_priority=best)
    assert effective_priority(priority_header(headers), body, tier, holder) is priority


@each_case("header", [b"high", b"", b"\xff" * 5000])
def test_an_unknown_class_is_400_and_names_the_known_ones(header: bytes) -> None:
    holder = Caller(id="x", name="x", max_priority=Priority.URGENT)
    with pytest.raises(GatewayError) as caught:
        effective_priority(priority_header([(b"x-priority", header)]), "normal", None, holder)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    assert caught.value.param == "X-Priority"
    assert "urgent, premium, normal, batch" in caught.value.message
    assert len(caught.value.message) < 300


@each_case(
    ("owner", "ring", "allow_anonymous", "found"),
    [
        ("team", RING, False, "team"),
        ("gone", RING, True, 401),
        ("gone", KeyRing(is_complete=False), False, 503),
        ("anonymous:127.0.0.1", KeyRing(), False, "anonymous:127.0.0.1"),
        ("anonymous:127.0.0.1", RING, False, 401),
        ("anonymous:127.0.0.1", RING, True, "anonymous:127.0.0.1"),
        ("anonymous:127.0.0.1", KeyRing(is_complete=False), False, 503),
    ],
)
def test_the_owner_of_a_stored_request_is_the_holder_of_its_key_as_it_is_now(
    owner: str, ring: KeyRing, allow_anonymous: bool, found: int | str
) -> None:
    try:
        got: int | str = owner_of_stored(owner, ring, allow_anonymous=allow_anonymous).id
    except GatewayError as error:
        got = error.status
    assert got == found


NAMING = IdentityHeaders.of(["X-OpenWebUI-User-Id", "X-User-Id"], ["X-OpenWebUI-Chat-Id"])
CHAT = Caller("chat", "Chat", Priority.NORMAL, trust_user_headers=True)
TEAM = Caller("team", "Team", Priority.NORMAL)


def test_a_trusted_caller_may_name_its_users_and_others_may_not() -> None:
    anna = [(b"a", b"b"), (b"x-openwebui-user-id", b"anna")]
    assert NAMING.fairness_key(anna, CHAT) == "chat/anna"
    assert NAMING.fairness_key([], CHAT) == "chat"
    assert NAMING.fairness_key([(b"x-openwebui-user-id", b"")], CHAT) == "chat"
    assert NAMING.fairness_key(anna, TEAM) == "team"
    # The first header of the list is preferred, and a long name is cut.
    both = [(b"x-user-id", b"second"), (b"x-openwebui-user-id", b"first")]
    for headers in (both, both[::-1]):
        assert NAMING.fairness_key(headers, CHAT) == "chat/first"
    long = NAMING.fairness_key([(b"x-user-id", b"\xff" * 5000)], CHAT)
    assert len(long) == len("chat/") + MOST_IDENTITY_BYTES
    # Sessions of one name differ by it.
    headers = [(b"x-openwebui-chat-id", b"1")]
    assert NAMING.session_key(headers, "team") != NAMING.session_key(headers, "chat/anna")
    assert NAMING.session_key([], "team") is None


def test_an_anonymous_client_is_its_ipv4_address_or_its_ipv6_64() -> None:
    for address, network in (
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("local", "local"),
        ("not:an:address", "not:an:address"),
    ):
        found = caller([], KeyRing(), allow_anonymous=True, address=address)
        assert found.id == f"anonymous:{network}"


def test_only_loopback_hosts_are_reached_from_this_machine_alone() -> None:
    loopback = (
        "127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1",
    )  # fmt: skip
    assert [host for host in loopback if not is_loopback(host)] == []
    others = (
        "0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org",
        "127.0.0.1.example.org",
    )  # fmt: skip
    assert [host for host in others if is_loopback(host)] == []


# When a caller without a key is admitted, and when it is trusted as local.


PROXIED = [
    "forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto",
    "x-forwarded-port", "x-forwarded-server", "x-forwarded-prefix", "x-forwarded", "x-real-ip",
    "true-client-ip", "client-ip", "x-client-ip",
    "x-cluster-client-ip", "cf-connecting-ip", "cf-ray", "cf-access-jwt-assertion", "cdn-loop",
    "fastly-client-ip", "fly-client-ip", "x-envoy-external-address", "x-azure-clientip",
    "x-original-forwarded-for", "x-amzn-trace-id", "tailscale-user-login", "x-scheme",
]  # fmt: skip
DIRECT = [
    "accept", "authorization", "content-type", "forwarded-by-me", "host", "origin", "referer",
    "traceparent", "user-agent", "via-ferrata", "x-api-key", "x-priority", "x-request-id",
    "x-openwebui-user-id", "x-stainless-timeout", "x-real",
]  # fmt: skip


@each_case("name", PROXIED)
@each_case("value", [b"", b"127.0.0.1", b"\xff" * 9000])
def test_a_request_with_a_proxys_header_is_never_local(name: str, value: bytes) -> None:
    headers = [(b"host", b"gateway"), (name.encode(), value)]
    assert is_proxied(headers)
    assert not is_local(headers, loopback_listener=True, trusted_proxies=())


@each_case("name", DIRECT)
def test_a_request_with_usual_client_headers_is_local(name: str) -> None:
    assert is_local([(name.encode(), b"1")], loopback_listener=True, trusted_proxies=())


@each_case(
    ("steps", "closed"),
    [
        ([(0, False)], False),
        ([(1, False)], False),
        ([(1, False), (0, False), (0, False)], True),
        ([(1, False), (0, True)], True),  # not both at once
        ([(1, False), (0, False), (1, False)], False),
        ([(1, True), (0, False)], True),
        ([(1, True), (0, True)], False),  # they were admitted beside the keys
        ([(1, True), (0, True), (0, False), (0, True)], True),
        ([(0, True), (0, False)], False),
    ],
)
def test_losing_the_last_key_locks_until_a_restart(
    steps: list[tuple[int, bool]], closed: bool
) -> None:
    access = INITIAL_ACCESS
    for keys, allow_anonymous in steps:
        access = access.with_settings(keys=keys, allow_anonymous=allow_anonymous)
    assert access.locked is closed
