from __future__ import annotations

from gateway.access.callers import (
    admin_listener_problem,
    is_loopback,
    port_conflict,
    proxied_listener_problem,
    public_listener_problem,
)
from tests.each_case import each_case


@each_case(
    "host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_loopback_hosts_are_reached_from_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@each_case(
    "host",
    [
        "0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org",
        "127.0.0.1.example.org",
    ],
)  # fmt: skip
def test_other_hosts_may_be_reached_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)


def test_a_public_address_needs_a_key_or_allow_anonymous() -> None:
    refusal = public_listener_problem("0.0.0.0", keys=0, allow_anonymous=False)
    assert refusal is not None
    assert "0.0.0.0" in refusal
    assert "keys create" in refusal
    assert "--allow-anonymous" in refusal
    assert public_listener_problem("0.0.0.0", keys=1, allow_anonymous=False) is None
    assert public_listener_problem("0.0.0.0", keys=0, allow_anonymous=True) is None
    assert public_listener_problem("127.0.0.1", keys=0, allow_anonymous=False) is None


def test_behind_a_proxy_a_key_or_allow_anonymous_is_needed() -> None:
    refusal = proxied_listener_problem(proxies=1, keys=0, allow_anonymous=False)
    assert refusal is not None
    assert "listen.trusted_proxies" in refusal
    assert "keys create" in refusal
    assert "--allow-anonymous" in refusal
    assert proxied_listener_problem(proxies=1, keys=1, allow_anonymous=False) is None
    assert proxied_listener_problem(proxies=1, keys=0, allow_anonymous=True) is None
    assert proxied_listener_problem(proxies=0, keys=0, allow_anonymous=False) is None


def test_the_admin_listener_needs_a_key_anywhere_but_on_loopback() -> None:
    refusal = admin_listener_problem("0.0.0.0", has_key=False)
    assert refusal is not None
    assert "--admin-key-file" in refusal
    assert admin_listener_problem("0.0.0.0", has_key=True) is None
    assert admin_listener_problem("::1", has_key=False) is None


@each_case(
    ("host", "admin_host", "port", "admin_port", "refused"),
    [
        ("127.0.0.1", "127.0.0.1", 8000, 8000, True),
        ("0.0.0.0", "127.0.0.1", 8000, 8000, True),
        ("127.0.0.1", "::", 8000, 8000, True),
        ("LOCALHOST", "localhost", 8000, 8000, True),
        ("127.0.0.1", "127.0.0.1", 8000, 8001, False),
        ("10.0.0.1", "127.0.0.1", 8000, 8000, False),
        ("127.0.0.1", "127.0.0.1", 0, 0, False),
    ],
)
def test_two_listeners_can_not_share_an_address(
    host: str, admin_host: str, port: int, admin_port: int, refused: bool
) -> None:
    refusal = port_conflict(host, admin_host, port, admin_port)
    assert (refusal is not None) == refused
    assert refusal is None or "--admin-port" in refusal
