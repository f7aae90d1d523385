"""Who asks, and with which class: the contract's rules over a request's headers and address."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from gateway import errors
from gateway.access.exposure import is_local
from gateway.access.keys import KeyRing, caller_from_keys
from gateway.request import Caller, Headers, Priority

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

MOST_FORWARDED_HOPS = 32
"""Entries of X-Forwarded-For that are looked at, from the right."""

_TIERS = {"priority": Priority.PREMIUM, "flex": Priority.BATCH}


def identify_caller(
    headers: Headers,
    peer_address: str | None,
    key_ring: KeyRing,
    *,
    allow_anonymous: bool,
    loopback_listener: bool,
    trusted_proxies: Sequence[IPNetwork] = (),
    locked: bool = False,
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
    if key_ring:
        caller = caller_from_keys(headers, key_ring)
        if caller is not None:
            return caller
        if not allow_anonymous:
            raise errors.invalid_api_key()
    elif locked or not (allow_anonymous or loopback_listener):
        raise errors.invalid_api_key()
    if local is None:
        local = is_local(
            headers, loopback_listener=loopback_listener, trusted_proxies=trusted_proxies
        )
    best = Priority.URGENT if local else Priority.NORMAL
    address = client_address(headers, peer_address, trusted_proxies)
    return _anonymous(client_network(address), best, local)


@lru_cache(maxsize=1024)
def _anonymous(address: str, best: Priority, trusted: bool) -> Caller:  # noqa: FBT001
    id_ = f"anonymous:{address}"
    return Caller(
        id=id_, name="anonymous", max_priority=best, anonymous=True, trust_user_headers=trusted
    )


def client_address(
    headers: Headers, peer_address: str | None, trusted_proxies: Sequence[IPNetwork]
) -> str:
    """The client's address: the rightmost one in X-Forwarded-For that is no trusted proxy.

    The field is read only when the peer itself is a trusted proxy. What is not an address ends the
    search: the last proxy that could be trusted is then the best that is known.
    """
    if peer_address is None:
        return "local"
    if not trusted_proxies:
        # By far the usual case, and the event loop writes addresses in one form already.
        return peer_address.removeprefix("::ffff:")
    address = _parsed(peer_address)
    if address is None or not _trusted(address, trusted_proxies):
        return str(address or peer_address)
    fields = [value for name, value in headers if name == b"x-forwarded-for"]
    hops = (
        b",".join(fields).decode("latin-1").rsplit(",", MOST_FORWARDED_HOPS)[-MOST_FORWARDED_HOPS:]
    )
    for hop in reversed(hops):
        before = _parsed(_without_port(hop.strip()))
        if before is None:
            break
        address = before
        if not _trusted(address, trusted_proxies):
            break
    return str(address)


def effective_priority(
    header_priority: str | None, body_priority: str | None, service_tier: str | None, caller: Caller
) -> Priority:
    """The class of a request: what it asks for, else its caller's; capped by the caller's best.

    `asked_for` is what `X-Priority` says, `body_priority` the body's `priority` where that is a
    string. An unknown word in the body may be meant for somebody else and is ignored.

    Raises: errors.GatewayError (400) for an unknown class in `X-Priority`.
    """
    asked = None
    if header_priority is not None:
        asked = Priority.parse(header_priority)
        if asked is None:
            known = ", ".join(priority.label for priority in Priority)
            raise errors.invalid_request(
                f"There is no class {header_priority[:32]!r} (in X-Priority); the classes are "
                f"{known}.",
                "X-Priority",
            )
    elif body_priority is not None:
        asked = Priority.parse(body_priority)
    if asked is None:
        asked = _TIERS.get(service_tier or "", caller.default_priority)
    return max(asked, caller.max_priority)


def priority_header(headers: Headers) -> str | None:
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


IPV6_PREFIX_BITS = 64
"""Bits of an IPv6 address that tell one party from another: one subscriber has all that follow
(RFC 6177)."""

MOST_IDENTITY_BYTES = 128
"""Bytes of a header's value that tell one user or session from another; the rest is cut."""


@dataclass(frozen=True, slots=True)
class IdentityHeaders:
    """The headers that name users and sessions, in lower case, first things first."""

    users: tuple[bytes, ...]
    sessions: tuple[bytes, ...]

    @classmethod
    def of(cls, users: Sequence[str], sessions: Sequence[str]) -> Self:
        """From the names as the settings write them."""
        return cls(_lower(users), _lower(sessions))

    def fairness_key(self, headers: Headers, caller: Caller) -> str:
        """Whom the queue is fair to: the caller, or the end user that it may name."""
        if caller.trust_user_headers and self.users:
            user = _first(headers, self.users)
            if user is not None:
                return f"{caller.id}/{user}"
        return caller.id

    def session_key(self, headers: Headers, fairness_key: str) -> str | None:
        """The session that a header names; another party's of the same name is another one."""
        name = _first(headers, self.sessions) if self.sessions else None
        return None if name is None else f"{fairness_key}/{name}"


def client_network(address: str) -> str:
    """What stands for an address's party: an IPv4 address itself, of IPv6 the /64."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, IPV6_PREFIX_BITS), strict=False))


def _lower(names: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(name.lower().encode() for name in names)


def _first(headers: Headers, names: tuple[bytes, ...]) -> str | None:
    best = len(names)
    found = b""
    for name, value in headers:
        if name in names and value and (rank := names.index(name)) < best:
            best, found = rank, value
    return found[:MOST_IDENTITY_BYTES].decode("latin-1") if best < len(names) else None
