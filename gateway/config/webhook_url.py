"""URLs of webhooks: one strict form, so that what is compared is also what is called.

Nothing is repaired. A URL that two programs could read differently is refused: one with a user,
with dots or slashes that are percent-encoded, with dot segments, with a number for a host that is
no plain address. Scheme and host are in lower case afterwards, and the default port is left out.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

LONGEST_URL = 2048

_DEFAULT_PORTS = {"http": 80, "https": 443}

_FORM = re.compile(r"(https?)://([^/?#]*)(/[^?#]*)?(\?[^#]*)?", re.IGNORECASE)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")

_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""As the last label it makes a host an IPv4 address, for libc too: `127.1`, `0x7f.1`."""

_PORT = re.compile(r"[1-9][0-9]{0,4}")

_PATH = re.compile(r"(?:/(?:[A-Za-z0-9._~!$&'()*+,=:@-]|%[0-9A-Fa-f]{2})*)*")

_QUERY = re.compile(r"\?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")

_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")

_MAY_BE_ESCAPED = frozenset({*b' "<>[]^`{|}', *range(0x80, 0x100)})
"""What a path can't have as it is. Every other byte must stand for itself, or not be there."""


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    """A URL in the one form. An IPv6 address as `host` has no brackets."""

    scheme: str
    host: str
    port: int
    path: str
    """Begins with a slash."""
    query: str
    """With its question mark; empty: none."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises: ValueError, whose text never repeats the URL: it may hold a secret."""
        if len(text) > LONGEST_URL:
            raise ValueError(f"is longer than {LONGEST_URL} characters")
        if not text.isascii() or not text.isprintable():
            raise ValueError("has characters that a URL can't have; percent-encode them")
        if "#" in text:
            raise ValueError("must have no fragment (#...)")
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError("must be an http or https URL with a host")
        scheme, place, path, query = found[1].lower(), found[2], found[3] or "/", found[4] or ""
        if "@" in place:
            raise ValueError("must have no user and no password")
        host, port = _host_and_port(place, _DEFAULT_PORTS[scheme])
        _check_path(path)
        if query and not _QUERY.fullmatch(query):
            raise ValueError("has characters in its query that a URL can't have")
        return cls(scheme, host, port, path, query)

    @property
    def origin(self) -> str:
        """Scheme, host and port: what may be shown in logs and metrics."""
        return f"{self.scheme}://{self.host_field}"

    @property
    def host_field(self) -> str:
        """The value of the field `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.origin}{self.path}{self.query}"

    def covers(self, other: WebhookUrl) -> bool:
        """Whether the other is this one, or lies below it; never below one that has a query."""
        if (self.scheme, self.host, self.port) != (other.scheme, other.host, other.port):
            return False
        if self.query:
            return self == other
        if self.path == other.path:
            return True
        return other.path.startswith(self.path if self.path.endswith("/") else f"{self.path}/")


def _host_and_port(place: str, default_port: int) -> tuple[str, int]:
    if place.startswith("["):
        end = place.find("]")
        host, rest = place[1:end], place[end + 1 :]
        if end < 0 or (rest and not rest.startswith(":")):
            raise ValueError("has no valid host")
        host = _ipv6(host)
        port_text = rest.removeprefix(":") if rest else None
    else:
        name, colon, port = place.partition(":")
        host, port_text = _name(name.lower()), port if colon else None
    if port_text is None:
        return host, default_port
    if not _PORT.fullmatch(port_text) or int(port_text) > 65535:
        raise ValueError("has no valid port")
    return host, int(port_text)


def _ipv6(text: str) -> str:
    # A zone (`fe80::1%eth0`) belongs to one machine, and is none of a URL's.
    try:
        address = None if "%" in text else ipaddress.IPv6Address(text)
    except ValueError:
        address = None
    if address is None:
        raise ValueError("has no valid host")
    return str(address)


def _name(text: str) -> str:
    labels = text.split(".")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            raise ValueError("must write an IPv4 address as four decimal numbers") from None
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("has no valid host")
    return text


def _check_path(path: str) -> None:
    if not _PATH.fullmatch(path):
        raise ValueError("has characters in its path that a webhook's URL can't have")
    for found in _ESCAPE.finditer(path):
        if int(found[1], 16) not in _MAY_BE_ESCAPED:
            raise ValueError(f"must not have {found[0]} in its path")
    segments = path.split("/")[1:]
    # A slash at the end is no empty segment.
    if not all(segments[:-1]):
        raise ValueError("must have no empty segment (//) in its path")
    if not {".", ".."}.isdisjoint(segments):
        raise ValueError("must have no dot segment (. or ..) in its path")
