"""By which names a listener may be asked, and which web pages are its own.

A web page can make a browser send requests to 127.0.0.1 or to the local network. It can't choose
their `Host` without owning that name (DNS rebinding), nor leave `Origin` away where it writes
(request forgery).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from gateway.access.exposure import is_loopback

_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")
_ORIGIN = re.compile(rf"(https?)://{_AUTHORITY.pattern}")
_PORTS = {"http": 80, "https": 443}


class Hosts:
    """The names that a listener answers to: `names`, those of loopback, and its own address."""

    def __init__(self, names: Iterable[str]) -> None:
        # Nobody is "at" 0.0.0.0; a page that asks for it reaches this machine all the same.
        self._names = {_plain(name) for name in names} - {"0.0.0.0", "::"}

    def include(self, host: str, own_address: object) -> bool:
        """Whether this `Host`, with or without a port, is one of them.

        `own_address` is the one that the connection came to, which no name server has a say in;
        what is no IP address is none.
        """
        found = _AUTHORITY.fullmatch(host)
        if found is None:
            return False
        name = _plain(found[1])
        return (
            is_loopback(name)
            or name.endswith(".localhost")
            or name in self._names
            or name == _address(own_address)
        )


def is_same_origin(origin: str, host: str) -> bool:
    """Whether a page of this origin comes from this host, TLS before us or not."""
    page, own = _ORIGIN.fullmatch(origin), _AUTHORITY.fullmatch(host)
    if page is None or own is None:
        return False
    port = _PORTS[page[1]]
    return (_plain(page[2]), int(page[3] or port)) == (_plain(own[1]), int(own[2] or port))


def _plain(name: str) -> str:
    """A host in one form: addresses as Python writes them, names in lower case."""
    name = name.strip("[]").lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _address(text: object) -> str | None:
    try:
        return _plain(str(ipaddress.ip_address(str(text))))
    except ValueError:
        return None
