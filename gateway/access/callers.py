"""Who asks, and with which class: the contract's rules over a request's headers and address."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from gateway import errors
from gateway.access.anonymous import is_local
from gateway.access.keys import KeyRing, holder
from gateway.access.parties import network_of
from gateway.request import Caller, Headers, Priority

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

FORWARDED_HOPS = 32
"""Entries of X-Forwarded-For that are looked at, from the right."""

_TIERS = {"priority": Priority.PREMIUM, "flex": Priority.BATCH}


def caller_of(
    headers: Headers,
    client_address: str | None,
    ring: KeyRing,
    *,
    allow_anonymous: bool,
    loopback_listener: bool,
    trusted_proxies: Sequence[IPNetwork] = (),
    closed: bool = False,
    local: bool | None = None,
) -> Caller:
    """Who sent this request.

    `client_address` is the peer's IP address, None where there is none (a Unix socket). `local`:
    what `is_local` says of it, where that is known already.
    Where there are no keys at all, a key that was sent means nothing: clients have to send some.
    Then nobody is let in whose listener is not a loopback one, unless that is allowed, and nobody
    at all where there were keys before (`closed`): losing them must not open the door.

    Raises: errors.GatewayError (401).
    """
    if ring:
        caller = holder(headers, ring)
        if caller is not None:
            return caller
        if not allow_anonymous:
            raise errors.invalid_api_key()
    elif closed or not (allow_anonymous or loopback_listener):
        raise errors.invalid_api_key()
    if local is None:
        local = is_local(
            headers, loopback_listener=loopback_listener, trusted_proxies=trusted_proxies
        )
    best = Priority.URGENT if local else Priority.NORMAL
    address = address_of(headers, client_address, trusted_proxies)
    return _anonymous(network_of(address), best, local)


@lru_cache(maxsize=1024)
def _anonymous(address: str, best: Priority, trusted: bool) -> Caller:  # noqa: FBT001
    id_ = f"anonymous:{address}"
    return Caller(id=id_, name="anonymous", best=best, anonymous=True, names_users=trusted)


def address_of(
    headers: Headers, client_address: str | None, trusted_proxies: Sequence[IPNetwork]
) -> str:
    """The client's address: the rightmost one in X-Forwarded-For that is no trusted proxy.

    The field is read only when the peer itself is a trusted proxy. What is not an address ends the
    search: the last proxy that could be trusted is then the best that is known.
    """
    if client_address is None:
        return "local"
    if not trusted_proxies:
        # By far the usual case, and the event loop writes addresses in one form already.
        return client_address.removeprefix("::ffff:")
    address = _parsed(client_address)
    if address is None or not _trusted(address, trusted_proxies):
        return str(address or client_address)
    fields = [value for name, value in headers if name == b"x-forwarded-for"]
    hops = b",".join(fields).decode("latin-1").rsplit(",", FORWARDED_HOPS)[-FORWARDED_HOPS:]
    for hop in reversed(hops):
        before = _parsed(_without_port(hop.strip()))
        if before is None:
            break
        address = before
        if not _trusted(address, trusted_proxies):
            break
    return str(address)


def priority_of(
    asked_for: str | None, body_priority: str | None, service_tier: str | None, caller: Caller
) -> Priority:
    """The class of a request: what it asks for, else its caller's; capped by the caller's best.

    `asked_for` is what `X-Priority` says, `body_priority` the body's `priority` where that is a
    string. An unknown word in the body may be meant for somebody else and is ignored.

    Raises: errors.GatewayError (400) for an unknown class in `X-Priority`.
    """
    asked = None
    if asked_for is not None:
        asked = Priority.parse(asked_for)
        if asked is None:
            known = ", ".join(priority.label for priority in Priority)
            raise errors.invalid_request(
                f"There is no class {asked_for[:32]!r} (in X-Priority); the classes are {known}.",
                "X-Priority",
            )
    elif body_priority is not None:
        asked = Priority.parse(body_priority)
    if asked is None:
        asked = _TIERS.get(service_tier or "", caller.usual)
    return max(asked, caller.best)


def asked_class(headers: Headers) -> str | None:
    """What `X-Priority` says, if it is there."""
    for name, value in headers:
        if name == b"x-priority":
            return value.decode("latin-1")
    return None


def _trusted(address: IPAddress, proxies: Sequence[IPNetwork]) -> bool:
    return any(address in network for network in proxies)


def _parsed(text: str) -> IPAddress | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address
    return address


def _without_port(hop: str) -> str:
    """`1.2.3.4:80` and `[2001:db8::1]:443` without port or zone; some proxies add them."""
    hop = hop.partition("%")[0]
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    if hop.count(":") == 1:
        return hop.partition(":")[0]
    return hop
