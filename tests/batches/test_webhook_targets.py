"""Which URLs and which addresses events may be sent to."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.webhook_receivers import WebhookTargets, address_problem
from gateway.config.webhooks import WebhookSettings, WebhookUrl
from gateway.errors import GatewayError
from tests.batches.receivers import target


def targets(*given: dict[str, Any]) -> WebhookTargets:
    settings = WebhookSettings(targets=tuple(target(**one) for one in given))
    return WebhookTargets(lambda: settings)


def test_a_url_below_a_target_of_the_key_is_taken() -> None:
    known = targets({"url": "https://h.example/hooks", "keys": ("ci",)})
    assert known.check("ci", None, "https://H.example:443/hooks/a") == "https://h.example/hooks/a"


@pytest.mark.parametrize(
    ("owner", "url", "code"),
    [
        ("ci", "https://h.example/other", "webhook_url_not_allowed"),
        ("ci", "https://h.example.evil/hooks", "webhook_url_not_allowed"),
        ("bob", "https://h.example/hooks", "webhook_url_not_allowed"),
        ("ci", "https://h.example/hooks/../other", "invalid_request"),
        ("ci", "https://x@h.example/hooks", "invalid_request"),
        ("ci", 7, "invalid_request"),
        ("ci", "", "invalid_request"),
    ],
)
def test_any_other_url_is_refused_without_telling_which_there_are(
    owner: str, url: object, code: str
) -> None:
    known = targets({"url": "https://h.example/hooks", "keys": ("ci",)})
    with pytest.raises(GatewayError) as caught:
        known.check(owner, None, url)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, "webhook_url")
    assert "/hooks" not in error.message
    assert not error.retryable


def test_an_event_goes_to_the_targets_of_its_key_and_to_the_url_of_its_request() -> None:
    known = targets(
        {"url": "https://all.example"},
        {"url": "https://ci.example", "keys": ("ci",)},
        {"url": "https://night.example", "groups": ("night",), "events": ("batch.failed",)},
        {"url": "https://named.example/a", "named_only": True},
    )

    def sent(owner: str, group: str | None, event: str, named: str | None = None) -> list[str]:
        return [url.host for url in known.receivers(owner, group, event, named)]

    assert sent("bob", None, "batch.completed") == ["all.example"]
    assert sent("ci", None, "batch.completed") == ["all.example", "ci.example"]
    assert sent("bob", "night", "batch.completed") == ["all.example"]
    assert sent("bob", "night", "batch.failed") == ["all.example", "night.example"]
    named = "https://named.example/a/7"
    assert sent("bob", None, "batch.failed", named) == ["all.example", "named.example"]
    # The target is gone, or is not this key's any more.
    assert sent("bob", None, "batch.failed", "https://ci.example/x") == ["all.example"]
    assert sent("bob", None, "batch.failed", "what was never checked") == ["all.example"]
    # No URL gets an event twice.
    assert sent("bob", None, "batch.failed", "https://all.example/") == ["all.example"]


def test_the_target_with_the_longest_path_signs() -> None:
    known = targets(
        {"url": "https://h.example/"},
        {"url": "https://h.example/a"},
        {"url": "https://h.example/a/b", "keys": ("ci",)},
    )

    def signing(owner: str) -> str | None:
        found = known.target_of(owner, None, WebhookUrl.parse("https://h.example/a/b/c"))
        return None if found is None else found.url

    assert signing("ci") == "https://h.example/a/b"
    assert signing("bob") == "https://h.example/a"
    assert targets().target_of("bob", None, WebhookUrl.parse("https://h.example/")) is None


PUBLIC = ["1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111"]
PUBLIC += ["::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1"]

PRIVATE = ["127.0.0.1", "127.255.0.1", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"]
PRIVATE += ["100.64.0.1", "100.127.255.255", "198.18.0.1", "::1", "fd00::1", "fc00::1"]
PRIVATE += ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "::10.0.0.1", "64:ff9b:1::1"]
PRIVATE += ["64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::", "2002:a00:1::1"]

NEVER = ["0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.1", "224.0.0.1", "239.1.1.1"]
NEVER += ["240.0.0.1", "255.255.255.255", "192.0.2.1", "198.51.100.1", "203.0.113.1", "::"]
NEVER += ["fe80::1", "fe80::1%lo", "ff02::1", "2001:db8::1", "2001::1", "fec0::1", "100::1"]
NEVER += ["::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::", "4000::1"]
NEVER += ["::ffff:0.0.0.0", "::ffff:224.0.0.1", "not an address", ""]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_taken(address: str) -> None:
    assert address_problem(address, target("https://h", allow_private=False), "https") is None
    assert address_problem(address, target("https://h"), "https") is None


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_taken_where_the_target_allows_them(address: str) -> None:
    problem = address_problem(address, target("https://h", allow_private=False), "https")
    assert problem == "is private or loopback"
    assert address_problem(address, target("https://h"), "https") is None
    assert address_problem(address, target("http://h"), "http") is None


@pytest.mark.parametrize("address", NEVER)
def test_other_addresses_are_never_taken(address: str) -> None:
    assert address_problem(address, target("https://h", allow_http=True), "https") is not None


@pytest.mark.parametrize("address", PUBLIC)
def test_http_goes_to_public_addresses_only_where_it_is_allowed(address: str) -> None:
    assert address_problem(address, target("http://h"), "http") is not None
    assert address_problem(address, target("http://h", allow_http=True), "http") is None


@given(st.ip_addresses())
def test_no_address_that_python_calls_not_global_is_taken(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    taken = address_problem(str(address), target("https://h", allow_private=False), "https") is None
    if taken and isinstance(address, ipaddress.IPv4Address):
        assert address.is_global
        assert not address.is_multicast
    if taken:
        mapped = ipaddress.IPv6Address(f"::ffff:{address}") if address.version == 4 else address
        public = target("https://h", allow_private=False)
        assert address_problem(str(mapped), public, "https") is None
