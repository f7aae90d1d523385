"""Connections between the members of a cluster: one TLS port, where each one says what it is for.

Both sides show certificates of the cluster's authority, and each checks that the other's names the
member that it says it is. The side that opens greets; the other one welcomes it, or says why not.
Then each has one end of a Unix socket pair, and what it writes there the other one reads: a stream
of bytes, whose directions end one by one. What one side does not read the other can't send for
long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import msgspec
import structlog

from gateway.config.listeners import TlsFiles
from gateway.config.settings import Address, ClusterSettings, ClusterTls
from gateway.http.certificates import (
    CertificateError,
    LoadedCertificate,
    ServerCertificate,
    load_certificate,
)
from gateway.http.exchange import ConnectionOrigin

VERSION = 1  # of greetings, and of what members tell each other
OPEN_SECONDS = 5.0  # for name, connection, handshake and greeting together
MOST_GREETING_BYTES = 4096
# Bytes of a chunk, and of one that is sent.
MOST_CHUNK_BYTES, SENT_CHUNK_BYTES = 1 << 20, 1 << 16
MOST_UNREAD_BYTES = 1 << 16  # bytes that wait for one side, above which no more is read for it
# Connections at one time that have not greeted yet; of one address: a half, since all edges of a
# member are linked at once, and members behind one address too.
MOST_HANDSHAKES = 256
MOST_TUNNELS = 512  # of one member, each way
STALL_SECONDS = 300.0  # in which nothing of what waits for one side was read: it has ended
ACCEPT_PAUSE = 0.1  # seconds after an attempt to accept failed: the process may lack descriptors
SHUTDOWN_SECONDS = 2.0  # for the other side's end of TLS
LOG_SECONDS = 10.0  # seconds between two lines about refusals of one kind
_LENGTH = struct.Struct(">I")  # of a greeting, of its answer, of a chunk; 0: the direction's end
_END = _LENGTH.pack(0)
log = structlog.get_logger()

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
    name: str = ""  # of the edge, for a link; `draining`, for a process that is to end
    origin: ConnectionOrigin | None = None  # of a connection that is passed on


Refusal = Literal[
    "address", "too_many", "handshake", "greeting", "version", "cluster", "certificate",
    "unknown", "replaced", "other_process", "not_leader", "no_control", "edge",
]  # fmt: skip
"""Why a connection was refused: its address is not in `allow`; there are too many; no TLS with a
certificate of the authority in time; what came first is no greeting, or is that of another version,
or for another cluster; the certificate does not name the member; nobody knows this member, or it
has a newer process; this process is not the one that was meant, or does not lead; the member has no
control link, which must be there first; the edge is another member's."""


_PASSING: frozenset[Refusal] = frozenset({"other_process", "not_leader", "no_control"})
"""Those that are usual while leaders change."""


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a greeting."""

    process: str  # of the member that was asked
    refused: Refusal | None = None
    leader: str = ""  # the member that leads, as far as the one that was asked knows


class TunnelError(OSError):
    """A tunnel can't be opened; the message says why."""

    def __init__(self, message: str, welcome: Welcome | None = None) -> None:
        super().__init__(message)
        self.welcome = welcome
        """The answer of the other side; None: it has given none."""


# Certificates.


def member_certificate(files: ClusterTls, member: str) -> ServerCertificate:
    """The certificate of this member, for both sides of its connections.

    Raises: CertificateError, if other members would refuse it.
    """

    def load(some: TlsFiles) -> LoadedCertificate:
        loaded, server = load_certificate(some), load_certificate(some).context
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            client.load_cert_chain(some.cert, some.key)
            for context in (server, client):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(files.ca)
            server.num_tickets = 0
            names = _try_out(server, client, member)
        except (OSError, ValueError) as error:
            reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error
            raise CertificateError(
                f"{files.cert} with {files.ca} would be refused by other members ({reason}): the "
                f"authority must have signed it, for servers and clients, for the name {member}"
            ) from None
        if member.lower() not in names:
            raise CertificateError(
                f"{files.cert} names {', '.join(names) or 'nobody'} and not this member, {member}: "
                "make one with that name (subjectAltName), or correct `member`"
            )
        return LoadedCertificate(server, loaded.expires_at, client)

    return ServerCertificate(files, load)


def _try_out(server: ssl.SSLContext, client: ssl.SSLContext, member: str) -> tuple[str, ...]:
    """Shake hands with oneself, in memory; the names of the certificate. Raises: OSError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=member),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):  # as many as TLS 1.3 needs
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return _names_of(sides[1].getpeercert())


def _names_of(certificate: Mapping[str, object] | None) -> tuple[str, ...]:
    found = (certificate or {}).get("subjectAltName", ())
    assert isinstance(found, tuple)
    return tuple(name.lower() for kind, name in found if kind == "DNS")


# One tunnel.


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
T = TypeVar("T")


def _write_first(writer: asyncio.StreamWriter, message: Greeting | Welcome) -> None:
    """Write the first frame: a greeting, or its answer."""
    payload = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(payload)) + payload)


async def _read_first(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Read the first frame. Raises: OSError, msgspec.MsgspecError."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MOST_GREETING_BYTES:
            raise ConnectionError("what came first is no greeting")
        return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
    except asyncio.IncompleteReadError:
        raise ConnectionError("it was closed") from None


async def _carry(far: Stream, near: Stream) -> None:
    """Pass on what both sides write, until both have written all, or the far one is lost."""
    sending = asyncio.create_task(_send(near[0], far[1]))
    try:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _receive(far[0], near[1])
            await sending
    finally:
        sending.cancel()


async def _send(near: asyncio.StreamReader, far: asyncio.StreamWriter) -> None:
    """Send what the owner of the socket here writes, in chunks."""
    with contextlib.suppress(OSError):
        while data := await near.read(SENT_CHUNK_BYTES):
            if not await _write(far, _LENGTH.pack(len(data)) + data):
                return
    await _write(far, _END)


async def _receive(far: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
    """Hand on what the other member sends, until it has sent all, or nobody is here to read it.

    Raises: OSError, asyncio.IncompleteReadError, if the other member is lost.
    """
    while left := _LENGTH.unpack(await far.readexactly(_LENGTH.size))[0]:
        if left > MOST_CHUNK_BYTES:
            raise ConnectionError("a chunk is too long")
        while left:
            data = await far.read(left)
            if not data:
                raise ConnectionError("a chunk ends early")
            if not await _write(near, data):
                return
            left -= len(data)
    if not near.is_closing():
        near.write_eof()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> bool:
    """Write this, and wait while much has not been read; False: that side is closed, or stalls."""
    if not writer.is_closing():
        writer.write(data)
        if writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await writer.drain()
            except (TimeoutError, ConnectionError):
                writer.transport.abort()
    return not writer.is_closing()


# All of them.


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
        self._settings, self._process, self._certificate = settings, process, certificate
        self._admit, self._on_tunnel = admit, on_tunnel
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """Connections that have not greeted yet, with the addresses that they come from."""
        self._open: dict[asyncio.StreamWriter, str] = {}
        """Of each tunnel the side of the other member, and the process that has opened it."""
        self._carrying: set[asyncio.Task[None]] = set()
        self._logged: dict[str, float] = {}

    def serve(self, sock: socket.socket) -> None:
        """Accept tunnels on this socket, which listens, until `stop_accepting`."""
        sock.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(sock), name="accept tunnels")

    def stop_accepting(self) -> None:
        """Accept no more; those that are open stay. The socket stays open: it is its owner's."""
        if self._accepting is not None:
            self._accepting.cancel()

    async def open(
        self,
        member: str,
        address: Address,
        kind: Kind,
        *,
        to: str = "",
        name: str = "",
        origin: ConnectionOrigin | None = None,
        sock: socket.socket | None = None,
    ) -> socket.socket:
        """Open a tunnel; this side's end of its socket pair (not blocking). Raises: TunnelError.

        `sock`: what the tunnel is joined with in place of a new pair; it is returned, and the
        tunnel's from then on.
        """
        settings = self._settings
        greeting = Greeting(
            VERSION, settings.name, settings.member_name, self._process, to, kind, name, origin
        )  # fmt: skip
        if self._count(self._process) >= MOST_TUNNELS:
            raise TunnelError(f"{MOST_TUNNELS} tunnels are open already")
        far: Stream | None = None
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                far = await asyncio.open_connection(
                    *address,
                    ssl=self._certificate.loaded.client_context,
                    server_hostname=member,
                    ssl_handshake_timeout=OPEN_SECONDS,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
                _write_first(far[1], greeting)
                welcome = await _read_first(far[0], Welcome)
                if welcome.refused is None:
                    return await self._join(far, greeting, sock)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            why = f"no answer within {OPEN_SECONDS:g} s" if isinstance(error, TimeoutError) else ""
            why = why or getattr(error, "verify_message", "") or str(error) or type(error).__name__
            raise TunnelError(f"{member} at {address}: {why}") from None
        finally:
            if far is not None and far[1] not in self._open:
                far[1].transport.abort()
        raise TunnelError(f"{member} at {address} refuses: {welcome.refused}", welcome)

    async def aclose(self) -> None:
        """Accept no more, and end all at once."""
        self.stop_accepting()
        tasks = [
            *self._handshakes,
            *self._carrying,
            *([self._accepting] if self._accepting else []),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(
        self, far: Stream, greeting: Greeting, sock: socket.socket | None = None
    ) -> socket.socket:
        """Connect it with this socket, or with one end of a pair; returns it, or the other end."""
        self._open[far[1]] = greeting.process
        inner, outer = socket.socketpair() if sock is None else (sock, sock)
        for one in (inner, outer):
            one.setblocking(False)
        try:
            near = await asyncio.open_unix_connection(sock=inner)
        except BaseException:
            del self._open[far[1]]
            if sock is None:
                inner.close()
                outer.close()
            raise
        _keep_alive(far[1])
        task = asyncio.create_task(_carry(far, near), name="carry a tunnel")
        self._carrying.add(task)
        task.add_done_callback(functools.partial(self._ended, far[1], near[1]))
        return outer

    def _ended(
        self, far: asyncio.StreamWriter, near: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        self._carrying.discard(task)
        self._open.pop(far, None)
        if task.cancelled():
            far.transport.abort()
        for one in (far, near):
            if not one.is_closing():  # asyncio's TLS can't be closed twice.
                one.close()

    # Those that others open.

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                made, peer = await loop.sock_accept(sock)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            host = peer[0].removeprefix("::ffff:").partition("%")[0]
            address, allow = ipaddress.ip_address(host), self._settings.allow
            pending = list(self._handshakes.values())
            if allow and not any(address in network for network in allow):
                self._refuse("address", host)
            elif len(pending) >= MOST_HANDSHAKES or pending.count(host) >= MOST_HANDSHAKES // 2:
                self._refuse("too_many", host)
            else:
                task = asyncio.create_task(self._welcome(made, host), name="welcome a tunnel")
                self._handshakes[task] = host
                task.add_done_callback(self._handshakes.pop)
                continue
            made.close()

    async def _welcome(self, sock: socket.socket, host: str) -> None:
        """Take in one connection, or refuse it."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop, writer = asyncio.get_running_loop(), None
        refused: Refusal = "handshake"
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol,
                    sock,
                    ssl=self._certificate.loaded.context,
                    ssl_handshake_timeout=OPEN_SECONDS,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                refused = "greeting"
                greeting = await _read_first(reader, Greeting)
            welcome = self._answer(greeting, writer)
            _write_first(writer, welcome)
            if welcome.refused is None:
                self._on_tunnel(greeting, await self._join((reader, writer), greeting))
            else:
                self._refuse(welcome.refused, host, greeting.member)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            self._refuse(refused, host, why=str(error) or type(error).__name__)
        finally:
            if writer is not None and writer not in self._open:
                writer.close()

    def _answer(self, greeting: Greeting, far: asyncio.StreamWriter) -> Welcome:
        """Whether a greeting is in order, and what its owner says of it."""
        refused: Refusal
        if greeting.version != VERSION:
            refused = "version"
        elif greeting.cluster != self._settings.name:
            refused = "cluster"
        elif greeting.member.lower() not in _names_of(far.get_extra_info("peercert")):
            refused = "certificate"
        elif greeting.to not in {"", self._process}:
            refused = "other_process"
        elif self._count(greeting.process) >= MOST_TUNNELS:
            refused = "too_many"
        else:
            return self._admit(greeting)
        return Welcome(self._process, refused)

    def _count(self, process: str) -> int:
        """How many tunnels this process has opened."""
        return [*self._open.values()].count(process)

    def _refuse(self, reason: Refusal, host: str, member: str = "", why: str = "") -> None:
        """Count a refusal, and log the first of its kind in a while."""
        self.refused[reason] += 1
        now = asyncio.get_running_loop().time()
        if reason in _PASSING:
            log.debug("cluster: a connection is refused", reason=reason, member=member)
        elif now - self._logged.get(reason, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged[reason] = now
            told = {key: text for key, text in (("member", member), ("why", why)) if text}
            log.warning("cluster: a connection is refused", reason=reason, address=host, **told)


def _keep_alive(far: asyncio.StreamWriter) -> None:
    """Have the system notice within some ten seconds that the other machine has vanished."""
    sock = far.get_extra_info("socket")
    if sock is None:
        return  # The other side has gone already, which ends the tunnel.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEPT_ALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


_KEPT_ALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 10_000,  # milliseconds
}
