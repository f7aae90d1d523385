"""Where a listener may stand: who could reach it, and what it then needs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.request import Headers


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


def public_listener_problem(host: str, *, keys: int, allow_anonymous: bool) -> str | None:
    """Why the public listener must not start on `host`, with the remedy; None: it may."""
    if keys or allow_anonymous or is_loopback(host):
        return None
    return (
        f"the public listener would stand on {host} without any API key, open to everybody who "
        "can reach it: add a key ('llama-gateway keys hash' makes one), or say that it is meant "
        "with --allow-anonymous (allow_anonymous: true)"
    )


def proxied_listener_problem(*, proxies: int, keys: int, allow_anonymous: bool) -> str | None:
    """Why the public listener must not start behind proxies, with the remedy; None: it may."""
    if not proxies or keys or allow_anonymous:
        return None
    return (
        "the gateway would stand behind a proxy (listen.trusted_proxies) without any API key, open "
        "to everybody who can reach that: add a key ('llama-gateway keys hash' makes one), or say "
        "that it is meant with --allow-anonymous (allow_anonymous: true)"
    )


def admin_listener_problem(host: str, *, has_key: bool) -> str | None:
    """Why the admin listener must not start on `host`, with the remedy; None: it may."""
    if has_key or is_loopback(host):
        return None
    return (
        f"the admin listener would stand on {host} without a key: name a file that holds one with "
        "--admin-key-file (admin.key_file), or let it stand on 127.0.0.1"
    )


def port_conflict(host: str, admin_host: str, port: int, admin_port: int) -> str | None:
    """Why the two listeners can't stand where they would, with the remedy; None: they can."""
    everywhere = {"", "0.0.0.0", "::"}
    apart = host.lower() != admin_host.lower() and everywhere.isdisjoint((host, admin_host))
    if port != admin_port or port == 0 or apart:
        return None
    return (
        f"both listeners would stand on port {port}: choose another with --port (listen.port) "
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
"""Names of fields, one a line: what RFC 7239 and RFC 9110 name, and what nginx, Apache, HAProxy,
Envoy, Traefik, Varnish, WebLogic, Tailscale, Cloudflare, Fastly, Akamai, Fly, Azure, Amazon and
Google add to a request."""


def is_proxied(headers: Headers) -> bool:
    """Whether a field tells that a proxy has passed this request on, whatever its value."""
    # One search over all names costs a third of a look at each.
    names = b"\n".join([b"", *[name for name, _ in headers], b""])
    return _PROXIED.search(names) is not None


def is_local(
    headers: Headers, *, loopback_listener: bool, trusted_proxies: Sequence[object]
) -> bool:
    """Whether this request comes from this machine itself.

    The listener must be a loopback one with nothing in front of it: neither by the settings
    (`trusted_proxies`) nor by the request's own fields.
    """
    return loopback_listener and not trusted_proxies and not is_proxied(headers)


@dataclass(frozen=True, slots=True)
class AnonymousAccess:
    """Whether callers without a key may come in at all, over all reloads of a process.

    Losing the keys must not open it: they may be gone by mistake.
    """

    had_keys: bool = False
    """There have been keys since the start, a predecessor's included."""
    allowed: bool = False
    """`allow_anonymous` lets callers in without a key, and did when there last were keys."""
    locked: bool = False
    """There were keys, there are none now: nobody comes in until there are some, or a restart."""

    def with_settings(self, *, keys: int, allow_anonymous: bool) -> AnonymousAccess:
        """The door under the next settings."""
        keyed = self.had_keys or keys > 0
        anonymous = allow_anonymous and (keys > 0 or not keyed or self.allowed)
        return AnonymousAccess(keyed, anonymous, locked=keyed and not keys and not anonymous)


INITIAL_ACCESS = AnonymousAccess()
"""Of a gateway that has had no settings yet."""
