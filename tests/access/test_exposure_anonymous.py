"""When a caller without a key is admitted, and when it is trusted as local."""

from __future__ import annotations

from ipaddress import ip_network

from hypothesis import given
from hypothesis import strategies as st

from gateway.access.callers import is_local, is_proxied
from gateway.access.keys import INITIAL_ACCESS, AnonymousAccess
from tests.each_case import each_case

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
@each_case("value", [b"", b"127.0.0.1", b"unknown", b"\xff" * 9000])
def test_a_request_with_a_proxys_header_is_never_local(name: str, value: bytes) -> None:
    headers = [(b"host", b"gateway"), (name.encode(), value)]
    assert is_proxied(headers)
    assert not is_local(headers, loopback_listener=True, trusted_proxies=())


@each_case("name", DIRECT)
def test_a_request_with_usual_client_headers_is_local(name: str) -> None:
    assert is_local([(name.encode(), b"1")], loopback_listener=True, trusted_proxies=())


def test_no_caller_is_local_elsewhere_or_behind_trusted_proxies() -> None:
    assert not is_local([], loopback_listener=False, trusted_proxies=())
    proxies = (ip_network("10.0.0.0/8"),)
    assert not is_local([], loopback_listener=True, trusted_proxies=proxies)


def door(*steps: tuple[int, bool], start: AnonymousAccess = INITIAL_ACCESS) -> AnonymousAccess:
    for keys, allow_anonymous in steps:
        start = start.with_settings(keys=keys, allow_anonymous=allow_anonymous)
    return start


@each_case(
    ("steps", "closed"),
    [
        ([(0, False)], False),
        ([(0, True)], False),
        ([(1, False)], False),
        ([(1, False), (0, False)], True),
        ([(1, False), (0, False), (0, False)], True),
        ([(1, False), (0, True)], True),  # not both at once
        ([(1, False), (0, False), (0, True)], True),
        ([(0, False), (2, False), (0, False)], True),
        ([(1, False), (0, False), (1, False)], False),
        ([(1, True), (0, False)], True),
        ([(1, True), (0, True)], False),  # they were admitted beside the keys
        ([(1, True), (0, True), (0, False)], True),
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
