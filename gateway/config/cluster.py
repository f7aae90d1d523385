"""Settings of a cluster: several machines that are one gateway."""

from __future__ import annotations

import re
import socket
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field

from gateway.config.fields import (
    ConfigModel,
    ExistingFile,
    Networks,
    Seconds,
    TypeLabel,
    is_host,
    matching,
    read_by,
)
from gateway.config.listeners import TlsFiles

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
# A leader renews several times in a term, and its database may take its time.
LEAST_TERM, LONGEST_TERM = 1.0, 60.0
_WILDCARDS = frozenset({"0.0.0.0", "::"})


class Address(NamedTuple):
    """Where a member listens, or is reached."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """The address that `HOST:PORT` means, with an IPv6 address in brackets. Raises: ValueError."""
    parts = urlsplit(f"//{text}")
    found = Address(parts.hostname or "", parts.port or 0)
    if not found.port or not is_host(found.host) or str(found) != text.lower():
        raise ValueError("it is no HOST:PORT")
    return found


_READ_ADDRESS = read_by(
    lambda value: str(parse_address(str(value))),
    "must be an address with a port",
    "such as 10.0.0.1:8090 or [fd00::1]:8090",
)
_AddressText = Annotated[str, _READ_ADDRESS, TypeLabel("HOST:PORT")]
_ReachedAddress = Annotated[
    str,
    matching(
        lambda text: parse_address(text).host not in _WILDCARDS,
        "must be an address by which others reach this member",
        "0.0.0.0 and :: are none",
    ),
    _READ_ADDRESS,  # the last one reads first
    TypeLabel("HOST:PORT"),
]

Name = Annotated[
    str,
    matching(
        _NAME.fullmatch,
        "must be a name of letters, digits, '.', '_' and '-'",
        "at most 63 characters, the first and the last a letter or a digit",
    ),
    TypeLabel("name"),
]


class ClusterTls(TlsFiles):
    """Certificates between members: each side shows one, and checks that of the other."""

    ca: ExistingFile
    """PEM file of the authority that has signed the certificates of all members, and none else."""


class ClusterSettings(ConfigModel):
    """Several machines as one gateway. They share `store.url`. A change needs a restart."""

    name: Name = "llama-gateway"
    """Name of the cluster, the same for all its members. Several clusters may share a store."""
    member: Name | None = None
    """Name of this member, which its certificate must have (`subjectAltName`). Unset: the host's
    name."""
    listen: _AddressText
    """Address for the other members, over TLS."""
    advertise: _ReachedAddress | None = None
    """Address by which the others reach this member. Unset: `listen`, with the host's name in place
    of `0.0.0.0` or `::`."""
    allow: Networks = ()
    """Addresses or networks of the other members; connections from elsewhere are closed. Empty: any
    address, as long as it shows a certificate."""
    tls: ClusterTls
    """Certificates between members."""
    term: Annotated[Seconds, Field(ge=LEAST_TERM, le=LONGEST_TERM)] = 2.0
    """For so long the leader leads after it has last renewed its row in the store. If it dies,
    another one leads some two terms later. The same for all members."""

    @property
    def member_name(self) -> str:
        """The name of this member."""
        return self.member or socket.gethostname()

    @property
    def advertised(self) -> Address:
        """Where the others reach this member."""
        found = parse_address(self.advertise or self.listen)
        if self.advertise is None and found.host in _WILDCARDS:
            return Address(socket.gethostname(), found.port)
        return found
