"""For whom a request is: the end user behind a key, and the conversation it belongs to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from gateway.request import Caller, Headers

IPV6_PREFIX = 64
"""Bits of an IPv6 address that tell one party from another: one subscriber has all that follow
(RFC 6177)."""

LONGEST_NAME = 128
"""Bytes of a header's value that tell one user or session from another; the rest is cut."""


@dataclass(frozen=True, slots=True)
class NamingHeaders:
    """The headers that name users and sessions, in lower case, first things first."""

    users: tuple[bytes, ...]
    sessions: tuple[bytes, ...]

    @classmethod
    def of(cls, users: Sequence[str], sessions: Sequence[str]) -> Self:
        """From the names as the settings write them."""
        return cls(_lower(users), _lower(sessions))

    def party(self, headers: Headers, caller: Caller) -> str:
        """Whom the queue is fair to: the caller, or the end user that it may name."""
        if caller.names_users and self.users:
            user = _first(headers, self.users)
            if user is not None:
                return f"{caller.id}/{user}"
        return caller.id

    def session(self, headers: Headers, party: str) -> str | None:
        """The session that a header names; another party's of the same name is another one."""
        name = _first(headers, self.sessions) if self.sessions else None
        return None if name is None else f"{party}/{name}"


def network_of(address: str) -> str:
    """What stands for an address's party: an IPv4 address itself, of IPv6 the /64."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, IPV6_PREFIX), strict=False))


def _lower(names: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(name.lower().encode() for name in names)


def _first(headers: Headers, names: tuple[bytes, ...]) -> str | None:
    best = len(names)
    found = b""
    for name, value in headers:
        if name in names and value and (rank := names.index(name)) < best:
            best, found = rank, value
    return found[:LONGEST_NAME].decode("latin-1") if best < len(names) else None
