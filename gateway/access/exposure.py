"""On which addresses a listener may start, by who could reach it there."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.request import Headers


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`.

    A name other than `localhost` may resolve to any address, so it is not loopback.
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


def public_listener_problem(host: str, *, keys: int, allow_anonymous: bool) -> str | None:
    """Why the public listener must not start on `host`, with the remedy; None: it may."""
    if keys or allow_anonymous or is_loopback(host):
        return None
    return (
        f"the public listener would listen on {host} without any API key, open to everybody who "
        "can reach it: add a key ('llama-gateway keys create' makes one), or say that this is "
        "intended with --allow-anonymous (allow_anonymous: true)"
    )


def proxied_listener_problem(*, proxies: int, keys: int, allow_anonymous: bool) -> str | None:
    """Why the public listener must not start behind proxies, with the remedy; None: it may."""
    if not proxies or keys or allow_anonymous:
        return None
    return (
        "the gateway would serve behind a proxy (listen.trusted_proxies) without any API key, open "
        "to everybody who can reach that: add a key ('llama-gateway keys create' makes one), or "
        "say that this is intended with --allow-anonymous (allow_anonymous: true)"
    )


def admin_listener_problem(host: str, *, has_key: bool) -> str | None:
    """Why the admin listener must not start on `host`, with the remedy; None: it may."""
    if has_key or is_loopback(host):
        return None
    return (
        f"the admin listener would listen on {host} without a key: add one to admin.keys "
        "('llama-gateway keys hash' makes it), name a file that holds one with --admin-key-file "
        "(admin.key_file), or let it listen on 127.0.0.1"
    )


def port_conflict(host: str, admin_host: str, port: int, admin_port: int) -> str | None:
    """Why the two listeners can't have these addresses, with the remedy; None: they can."""
    everywhere = {"", "0.0.0.0", "::"}
    apart = host.lower() != admin_host.lower() and everywhere.isdisjoint((host, admin_host))
    if port != admin_port or port == 0 or apart:
        return None
    return (
        f"both listeners would use port {port}: choose another with --port (listen.port) "
        "or --admin-port (admin.port)"
    )


_PROXIED = re.compile(
    rb"""\n(?:
        x-(?: forwarded | real- | original- | envoy- | amz-cf- | appengine- | arr- | azure-
            | (?: amzn-trace-id | client-ip | cloud-trace-context | cluster-client-ip | nginx-proxy
                | proxyuser-ip | remote-addr | remote-ip | scheme | varnish )\n )
        | cf- | fastly- | fly- | tailscale-
        | (?: cdn-loop | client-ip | forwarded | proxy-client-ip | surrogate-capability
            | true-client-ip | via | wl-proxy-client-ip )\n )""",
    re.VERBOSE,
)
"""Header names, one per line: those of RFC 7239 and RFC 9110, and those that nginx, Apache,
HAProxy, Envoy, Traefik, Varnish, WebLogic, Tailscale, Cloudflare, Fastly, Akamai, Fly, Azure,
Amazon and Google add to a request."""


def is_proxied(headers: Headers) -> bool:
    """Whether a header shows that a proxy has forwarded this request, whatever its value."""
    # One search over all names costs a third of one search for each.
    names = b"\n".join([b"", *[name for name, _ in headers], b""])
    return _PROXIED.search(names) is not None


def is_local(
    headers: Headers, *, loopback_listener: bool, trusted_proxies: Sequence[object]
) -> bool:
    """Whether this request comes from this machine itself.

    The listener must be on loopback without a proxy in front of it, judged by the settings
    (`trusted_proxies`) and by the request's own headers.
    """
    return loopback_listener and not trusted_proxies and not is_proxied(headers)


@dataclass(frozen=True, slots=True)
class AnonymousAccess:
    """Whether callers without a key are admitted, over all reloads of a process.

    Losing the keys must not admit them: the keys may be gone by mistake.
    """

    had_keys: bool = False
    """There have been keys at some time, a predecessor's included."""
    allowed: bool = False
    """`allow_anonymous` admits callers without a key, and did when there last were keys."""
    locked: bool = False
    """There were keys and there are none: nobody is admitted until there are, or a restart."""

    def with_settings(self, *, keys: int, allow_anonymous: bool) -> AnonymousAccess:
        """The access under the next settings."""
        keyed = self.had_keys or keys > 0
        anonymous = allow_anonymous and (keys > 0 or not keyed or self.allowed)
        return AnonymousAccess(keyed, anonymous, locked=keyed and not keys and not anonymous)


INITIAL_ACCESS = AnonymousAccess()
"""The access before the first settings."""
