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
import ipaddress
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

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
MOST_CHUNK_BYTES = 1 << 20  # bytes; what is read from a socket at one time is less
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


class _Side(asyncio.Protocol):
    """One side of a tunnel: TLS to the other member, or the Unix socket here."""

    transport: asyncio.Transport | None = None

    def __init__(self) -> None:
        self.other: _Side | None = None
        """What this one reads goes there."""
        self._ended = False
        """Whether this direction has ended."""
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is connected."""
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed: what it has sent still goes out on the other side."""
        self.transport = None
        self.resume_writing()
        if self.other is not None:
            self.other.close()

    def write(self, data: bytes | memoryview) -> None:
        """Send this, or drop it if this side is closed."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def hold(self, *, reading: bool) -> None:
        """Read, or do not."""
        if self.transport is not None and not self.transport.is_closing():
            (self.transport.resume_reading if reading else self.transport.pause_reading)()

    def pause_writing(self) -> None:
        """Much waits to be sent."""
        if self._stall is None:
            self._stall = asyncio.get_running_loop().call_later(STALL_SECONDS, self.abort)
        if self.other is not None:
            self.other.hold(reading=False)

    def resume_writing(self) -> None:
        """Little waits to be sent, or nothing more will be."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self.other is not None:
            self.other.hold(reading=True)

    def write_end(self) -> None:
        """Tell this side that nothing more comes."""
        self.write(_END)

    def ended(self, other: _Side) -> None:
        """Nothing more comes from this side. When both directions have ended, so has the tunnel."""
        other.write_end()
        self._ended = True
        if other._ended:
            self.close()
            other.close()

    def close(self) -> None:
        """Close it when all is sent."""
        # asyncio's TLS can't be closed twice.
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def abort(self) -> None:
        """Close it at once."""
        if self.transport is not None:
            self.transport.abort()


class _Far(_Side):
    """The side of the other member: frames over TLS, the first one a greeting or its answer."""

    def __init__(self, on_closed: Callable[[_Far], None]) -> None:
        super().__init__()
        self.first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The first frame; its error, if the connection was lost before."""
        self.first.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.greeting: Greeting | None = None
        self._on_closed = on_closed
        self._head = bytearray()
        """What has come of the first frame, or of the length of a later one."""
        self._left = 0  # bytes of the chunk under way that have not come

    def send(self, message: Greeting | Welcome) -> None:
        """Send the first frame."""
        payload = msgspec.msgpack.encode(message)
        self.write(_LENGTH.pack(len(payload)) + payload)

    def join(self, near: _Side) -> None:
        """From now on all goes between this and the socket here."""
        self.other, near.other = near, self
        early, self._head = bytes(self._head), bytearray()
        self.hold(reading=True)
        if self.transport is None:
            near.close()
        else:
            self.data_received(early)

    def names(self) -> tuple[str, ...]:
        """What the other side's certificate names."""
        shown = None if self.transport is None else self.transport.get_extra_info("peercert")
        return _names_of(shown)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.other is None:
            self._take_first(data)
            return
        rest = memoryview(data)
        while rest:
            if self._left:
                self.other.write(rest[: self._left])
                gone = min(self._left, len(rest))
                self._left -= gone
                rest = rest[gone:]
                continue
            missing = _LENGTH.size - len(self._head)
            self._head += rest[:missing]
            rest = rest[missing:]
            if len(self._head) == _LENGTH.size:
                (self._left,) = _LENGTH.unpack(self._head)
                self._head.clear()
                if self._left > MOST_CHUNK_BYTES or self._ended:
                    self.abort()
                    return
                if not self._left:
                    self.ended(self.other)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is lost."""
        if not self.first.done():
            self.first.set_exception(error or ConnectionError("it was closed"))
        self._on_closed(self)
        super().connection_lost(error)

    def _take_first(self, data: bytes) -> None:
        self._head += data
        if self.first.done() or len(self._head) < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack_from(self._head)
        end = _LENGTH.size + length
        if length > MOST_GREETING_BYTES:
            self.first.set_exception(ConnectionError("what came first is no greeting"))
            self.abort()
        elif len(self._head) >= end:
            self.hold(reading=False)
            self.first.set_result(bytes(self._head[_LENGTH.size : end]))
            del self._head[:end]


class _Near(_Side):
    """The side that is here: one end of a socket pair, whose other end is its owner's."""

    def data_received(self, data: bytes) -> None:
        """Its owner has written."""
        if self.other is not None:
            self.other.write(_LENGTH.pack(len(data)) + data)

    def eof_received(self) -> bool:
        """Its owner writes no more, but may go on reading."""
        if self.other is not None:
            self.ended(self.other)
        return True

    def write_end(self) -> None:
        """The other member writes no more."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()


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
        self._open: set[_Far] = set()
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
        far = _Far(self._open.discard)
        far.greeting = greeting
        self._open.add(far)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await asyncio.get_running_loop().create_connection(
                    lambda: far,
                    *address,
                    ssl=self._certificate.loaded.client_context,
                    server_hostname=member,
                    ssl_handshake_timeout=OPEN_SECONDS,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
                far.send(greeting)
                welcome = msgspec.msgpack.decode(await far.first, type=Welcome)
                if welcome.refused is None:
                    return await self._join(far, sock)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            why = f"no answer within {OPEN_SECONDS:g} s" if isinstance(error, TimeoutError) else ""
            why = why or getattr(error, "verify_message", "") or str(error) or type(error).__name__
            raise TunnelError(f"{member} at {address}: {why}") from None
        else:
            raise TunnelError(f"{member} at {address} refuses: {welcome.refused}", welcome)
        finally:
            if far.other is None:
                far.abort()
                self._open.discard(far)

    async def aclose(self) -> None:
        """Accept no more, and end all at once."""
        self.stop_accepting()
        tasks = [*self._handshakes, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for far in tuple(self._open):
            far.abort()

    @staticmethod
    async def _join(far: _Far, sock: socket.socket | None = None) -> socket.socket:
        """Connect it with this socket, or with one end of a pair; returns it, or the other end."""
        inner, outer = socket.socketpair() if sock is None else (sock, sock)
        for one in (inner, outer):
            one.setblocking(False)
        near = _Near()
        near.other = far  # What its owner has written already comes at once.
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: near, sock=inner)
        except BaseException:
            if sock is None:
                inner.close()
                outer.close()
            raise
        _keep_alive(far)
        far.join(near)
        return outer

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
        far = _Far(self._open.discard)
        refused: Refusal = "handshake"
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: far,
                    sock,
                    ssl=self._certificate.loaded.context,
                    ssl_handshake_timeout=OPEN_SECONDS,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
                refused = "greeting"
                greeting = msgspec.msgpack.decode(await far.first, type=Greeting)
            welcome = self._answer(greeting, far)
            far.send(welcome)
            if welcome.refused is not None:
                self._refuse(welcome.refused, host, greeting.member)
                return
            far.greeting = greeting
            self._open.add(far)
            self._on_tunnel(greeting, await self._join(far))
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            self._refuse(refused, host, why=str(error) or type(error).__name__)
        finally:
            if far.greeting is None:
                far.close()
            elif far.other is None:
                # It could not be joined. While nothing is read, its end would not be noticed.
                far.abort()

    def _answer(self, greeting: Greeting, far: _Far) -> Welcome:
        """Whether a greeting is in order, and what its owner says of it."""
        refused: Refusal
        if greeting.version != VERSION:
            refused = "version"
        elif greeting.cluster != self._settings.name:
            refused = "cluster"
        elif greeting.member.lower() not in far.names():
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
        return sum(one.greeting is not None and one.greeting.process == process
                   for one in self._open)  # fmt: skip

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


def _keep_alive(far: _Far) -> None:
    """Have the system notice within some ten seconds that the other machine has vanished."""
    sock = None if far.transport is None else far.transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEPT_ALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


_KEPT_ALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 10_000,  # milliseconds
}
