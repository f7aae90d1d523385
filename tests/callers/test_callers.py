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
    client_network,
    effective_priority,
    identify_caller,
    is_local,
    is_loopback,
    is_proxied,
    owner_of_stored,
    priority_header,
)
from gateway.callers.keys import INITIAL_ACCESS, AnonymousAccess, KeyRing, new_key
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
@each_case("allow_anonymous", [True, False])
def test_a_key_is_that_of_its_holder_or_401_on_every_listener(
    loopback: bool, allow_anonymous: bool
) -> None:
    found = caller(WITH_KEY, RING, loopback=loopback, allow_anonymous=allow_anonymous)
    assert (found.id, found.max_priority) == ("team", Priority.PREMIUM)
    with pytest.raises(GatewayError) as caught:
        caller(WRONG_KEY, RING, loopback=loopback, allow_anonymous=allow_anonymous)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_if_there_are_keys_one_is_needed_or_anonymous_callers_are_allowed() -> None:
    for loopback in (True, False):
        with pytest.raises(GatewayError) as caught:
            caller([], RING, loopback=loopback)
        assert caught.value.status == 401
    found = caller([], RING, allow_anonymous=True)
    assert found.anonymous
    assert (found.id, found.max_priority) == ("anonymous:192.0.2.7", Priority.NORMAL)
    assert not found.trust_user_headers


def test_without_keys_a_local_caller_gets_every_class_and_one_behind_a_proxy_does_not() -> None:
    local = caller([], KeyRing(), loopback=True)
    assert (local.max_priority, local.trust_user_headers) == (Priority.URGENT, True)
    behind = caller([(b"x-forwarded-for", b"127.0.0.1")], KeyRing(), loopback=True)
    assert (behind.id, behind.max_priority) == ("anonymous:192.0.2.7", Priority.NORMAL)
    assert not behind.trust_user_headers


def test_behind_trusted_proxies_nobody_is_local_nor_admitted_without_any_key() -> None:
    found = caller([], KeyRing(), loopback=True, allow_anonymous=True, proxies=PROXIES)
    assert (found.max_priority, found.trust_user_headers) == (Priority.NORMAL, False)
    with pytest.raises(GatewayError) as caught:
        caller([], KeyRing(), loopback=True, proxies=PROXIES)
    assert caught.value.status == 401


@each_case("allow_anonymous", [True, False])
def test_if_the_keys_were_lost_nobody_is_admitted(allow_anonymous: bool) -> None:
    ring = KeyRing([key_spec(KEY.id, KEY.sha256)])
    ring.configure([], allow_anonymous=allow_anonymous)
    for headers in ([], WITH_KEY):
        with pytest.raises(GatewayError) as caught:
            caller(headers, ring, allow_anonymous=allow_anonymous, loopback=True)
        assert caught.value.status == 401


def test_without_configured_keys_a_sent_key_is_ignored() -> None:
    assert caller(WRONG_KEY, KeyRing(), loopback=True).anonymous
    assert caller(WRONG_KEY, KeyRing(), allow_anonymous=True).max_priority is Priority.NORMAL


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


def test_without_trusted_proxies_the_peer_is_the_caller() -> None:
    headers = [(b"x-forwarded-for", b"198.51.100.1")]
    assert client_address(headers, "::ffff:10.0.0.1", ()) == "10.0.0.1"
    assert client_address(headers, "2001:db8::1", ()) == "2001:db8::1"


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
    ("usual", "best", "asked", "got"),
    [
        (None, None, None, Priority.NORMAL),
        ("premium", None, None, Priority.PREMIUM),
        ("premium", None, b"urgent", Priority.PREMIUM),
        ("batch", "premium", None, Priority.BATCH),
        ("batch", "premium", b"urgent", Priority.PREMIUM),
        (None, "premium", None, Priority.NORMAL),
        (None, "batch", None, Priority.BATCH),
    ],
)
def test_a_request_without_a_class_gets_its_keys_default(
    usual: str | None, best: str | None, asked: bytes | None, got: Priority
) -> None:
    ring = KeyRing([key_spec(KEY.id, KEY.sha256, class_=usual, max_class=best)])
    headers = WITH_KEY + ([] if asked is None else [(b"x-priority", asked)])
    assert effective_priority(priority_header(headers), None, None, caller(headers, ring)) is got
    assert effective_priority(priority_header(headers), None, "auto", caller(headers, ring)) is got


def owner_status(owner: str, ring: KeyRing, *, allow_anonymous: bool = False) -> int | str:
    """The owner's id, or the status of the refusal."""
    try:
        return owner_of_stored(owner, ring, allow_anonymous=allow_anonymous).id
    except GatewayError as error:
        return error.status


def test_the_owner_of_a_stored_request_is_the_holder_of_its_key_as_it_is_now() -> None:
    found = owner_of_stored("team", RING, allow_anonymous=False)
    assert found is RING.caller("team")
    assert owner_status("gone", RING) == 401
    assert owner_status("gone", RING, allow_anonymous=True) == 401
    assert owner_status("gone", KeyRing(is_complete=False)) == 503


def test_an_owner_without_a_key_may_as_long_as_one_is_admitted() -> None:
    local = "anonymous:127.0.0.1"
    assert owner_status(local, KeyRing()) == local
    assert owner_status(local, RING) == 401
    assert owner_status(local, RING, allow_anonymous=True) == local
    assert owner_status(local, KeyRing(is_complete=False)) == 503


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


def test_sessions_of_the_same_name_differ_by_their_fairness_key() -> None:
    headers = [(b"x-openwebui-chat-id", b"1")]
    assert NAMING.session_key(headers, "team") != NAMING.session_key(headers, "chat/anna")
    assert NAMING.session_key([], "team") is None


def test_without_configured_headers_nothing_is_read() -> None:
    nothing = IdentityHeaders.of([], [])
    headers = [(b"x-openwebui-user-id", b"anna"), (b"x-openwebui-chat-id", b"1")]
    assert nothing.fairness_key(headers, CHAT) == "chat"
    assert nothing.session_key(headers, "c") is None


@each_case(
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
    addresses = ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1")
    found = {caller([], KeyRing(), allow_anonymous=True, address=one).id for one in addresses}
    assert found == {"anonymous:2001:db8::/64", "anonymous:2001:db8:0:1::/64"}


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


def door(*steps: tuple[int, bool], start: AnonymousAccess = INITIAL_ACCESS) -> AnonymousAccess:
    for keys, allow_anonymous in steps:
        start = start.with_settings(keys=keys, allow_anonymous=allow_anonymous)
    return start


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
def test_losing_the_last_key_locks_the_gateway_until_a_restart(
    steps: list[tuple[int, bool]], closed: bool
) -> None:
    assert door(*steps).locked is closed


SETTINGS = st.tuples(st.integers(0, 2), st.booleans())


@given(st.lists(SETTINGS, min_size=1), st.lists(SETTINGS))
def test_no_reload_admits_callers_that_the_one_before_refused(
    before: list[tuple[int, bool]], later: list[tuple[int, bool]]
) -> None:
    shut = door(*before, (1, False))
    for keys, allow_anonymous in later:
        after = door((keys, allow_anonymous), start=shut)
        if keys == 0:
            assert after.locked
        shut = door((1, False), start=after)
