"""Where a listener may stand: who could reach it, and what it then needs."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a listener on `host` can be reached from this machine alone.

    A name other than `localhost` may resolve to anything, so it is not.
    """
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def public_refusal(host: str, *, keys: int, allow_anonymous: bool) -> str | None:
    """Why the public listener must not start on `host`, with the remedy; None: it may."""
    if keys or allow_anonymous or is_loopback(host):
        return None
    return (
        f"the public listener would stand on {host} without any API key, open to everybody who "
        "can reach it: add a key ('llama-gateway keys hash' makes one), or say that it is meant "
        "with --allow-anonymous (allow_anonymous: true)"
    )


def edge_refusal(*, proxies: int, keys: int, allow_anonymous: bool) -> str | None:
    """Why the public listener must not start behind proxies, with the remedy; None: it may."""
    if not proxies or keys or allow_anonymous:
        return None
    return (
        "the gateway would stand behind a proxy (listen.trusted_proxies) without any API key, open "
        "to everybody who can reach that: add a key ('llama-gateway keys hash' makes one), or say "
        "that it is meant with --allow-anonymous (allow_anonymous: true)"
    )


def admin_refusal(host: str, *, has_key: bool) -> str | None:
    """Why the admin listener must not start on `host`, with the remedy; None: it may."""
    if has_key or is_loopback(host):
        return None
    return (
        f"the admin listener would stand on {host} without a key: name a file that holds one with "
        "--admin-key-file (admin.key_file), or let it stand on 127.0.0.1"
    )


def shared_refusal(host: str, admin_host: str, port: int, admin_port: int) -> str | None:
    """Why the two listeners can't stand where they would, with the remedy; None: they can."""
    everywhere = {"", "0.0.0.0", "::"}
    apart = host.lower() != admin_host.lower() and everywhere.isdisjoint((host, admin_host))
    if port != admin_port or port == 0 or apart:
        return None
    return (
        f"both listeners would stand on port {port}: choose another with --port (listen.port) "
        "or --admin-port (admin.port)"
    )
