"""Connections between the members of a cluster: one TLS port, where each one says what it is for.

Both sides show certificates of the cluster's authority, and each checks that the other's names the
member that it says it is. The side that opens greets; the other one welcomes it, or says why not.
Then each has one end of a Unix socket pair, and what it writes there the other one reads: a stream
of bytes, whose directions end one by one. What one side does not read the other can't send for
long.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import structlog

from gateway.config.cluster import Address, ClusterSettings, ClusterTls
from gateway.http.certificates import (
    ServerCertificate,
)

VERSION = 1  # of greetings, and of what members tell each other
OPEN_SECONDS = 5.0  # for name, connection, handshake and greeting together
MOST_GREETING_BYTES = 4096
MOST_CHUNK_BYTES = 1 << 20  # bytes; what is read from a socket at one time is less
MOST_HANDSHAKES = 64  # connections at one time that have not greeted yet
MOST_TUNNELS = 512  # of one member, each way
STALL_SECONDS = 300.0  # in which nothing of what waits for the other side was read: it has ended
ACCEPT_PAUSE = 0.1  # seconds after an attempt to accept failed: the process may lack descriptors
SHUTDOWN_SECONDS = 2.0  # for the other side's end of TLS
log = structlog.get_logger()
_LENGTH = struct.Struct(">I")

Kind = Literal["control", "link", "public", "admin"]
"""Of a tunnel: a member's talk with the leader, the link of an edge, or a connection on which HTTP
requests to the leader's listener are passed on."""


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """What the side that opens a tunnel says first."""

    version: int
    cluster: str
    member: str  # who opens it
    process: str  # of that member; no other process has this name
    to: str  # the process that it is meant for; empty: any of the member that is asked
    kind: Kind
    name: str = ""  # of the edge, for a link
    client: tuple[str, int] | None = None  # of a connection that is passed on: the ends of the
    server: tuple[str, int] | None = None  # client's own one, and whether that has TLS
    tls: bool = False


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a greeting."""

    process: str  # of the member that was asked
    refused: str = ""  # why not, one word of `Refusal`; empty: it is welcome
    leader: str = ""  # the process that leads, if that is known; with `epoch`
    epoch: int = 0


Refusal = Literal[
    "address", "handshake", "certificate", "greeting", "version", "cluster", "unknown", "replaced",
    "not_leader", "other_process", "too_many",
]  # fmt: skip
"""Why a connection was refused: its address is not in `allow`; no TLS with a certificate of the
authority; the certificate does not name the member; what came first is no greeting, or that of
another version; it is for another cluster; nobody knows this member, or it has a newer process;
this process does not lead, or is not the one that was meant; there are too many."""


class TunnelError(OSError):
    """A tunnel can't be opened; the message says why."""

    def __init__(self, message: str, welcome: Welcome | None = None) -> None:
        super().__init__(message)
        self.welcome = welcome
        """The answer of the other side, if it has given one."""


def member_certificate(files: ClusterTls, member: str) -> ServerCertificate:
    """The certificate of this member, for both sides of its connections; checked as others will.

    Raises: CertificateError.
    """
    raise NotImplementedError


class Tunnels:
    """All tunnels of this member, those that it opens and those that others open to it.

    `admit` decides about a greeting whose certificate is in order: the answer; `on_tunnel` gets
    each one that is welcome, with this side's end of its socket pair (not blocking).
    """

    def __init__(
        self,
        settings: ClusterSettings,
        process: str,
        certificate: ServerCertificate,
        *,
        admit: Callable[[Greeting], Welcome],
        on_tunnel: Callable[[Greeting, socket.socket], None],
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Connections that were refused, by `Refusal`."""

    def serve(self, sock: socket.socket) -> None:
        """Accept tunnels on this socket, which listens, until `stop_accepting`."""
        raise NotImplementedError

    def stop_accepting(self) -> None:
        """Accept no more; those that are open stay. The socket stays open: it is its owner's."""
        raise NotImplementedError

    async def open(
        self,
        member: str,
        address: Address,
        kind: Kind,
        *,
        to: str = "",
        name: str = "",
        client: tuple[str, int] | None = None,
        server: tuple[str, int] | None = None,
        tls: bool = False,
    ) -> socket.socket:
        """Open a tunnel; this side's end of its socket pair (not blocking). Raises: TunnelError."""
        raise NotImplementedError

    def sample(self) -> Mapping[Kind, int]:
        """How many are open, by kind, both ways."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Accept no more, and end all at once."""
        raise NotImplementedError
