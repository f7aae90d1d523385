"""The edges of a brain as processes: which client goes to which, and what if one ends.

The brain accepts connections and hands each to the edge with the fewest requests. Until the edge
has confirmed that it has a connection, the brain keeps a descriptor of its own: if the edge dies
before, another one gets it, and its client notices nothing. An edge that ends by itself is started
again, after growing pauses if that happens again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

import gateway
from gateway.edges import sockets
from gateway.edges.brain import Brain
from gateway.http.exchange import ConnectionOrigin
from gateway.watch.metrics import EdgeSample

MOST_UNTAKEN = 64  # connections that one edge has not confirmed yet; more wait in the backlog
MOST_START_SECONDS = 60.0  # for an edge to serve; then it is ended
# Seconds before an edge is started again: first, most, and of life after which it is the first.
FIRST_PAUSE, LONGEST_PAUSE, STEADY_SECONDS = 0.1, 10.0, 30.0
# Seconds for an edge to take a connection; until then it gets no more, which others might take.
HELD_UP_SECONDS = 0.5
CPU_WINDOW_SECONDS = 2.0  # over which an edge's use of the processor is told
# Seconds before an edge that has lost its link in a cluster gets another one: first, and most where
# no link holds; and of a link's life after which it is the first.
LINK_PAUSE, LONGEST_LINK_PAUSE, HELD_SECONDS = 0.25, 2.0, 10.0
OWN_END_SECONDS = 1.0  # for an edge to end by itself, and to say why, when its link is lost
END_SECONDS = 5.0  # for the last messages of a process that has ended
log = structlog.get_logger()


# Starts the process of the edge of this name with its end of the channel. Raises: OSError.
StartProcess = Callable[[str, socket.socket], Awaitable[Process]]
# Connects the edge of this name, over this socket, to the brain of the moment. It closes the socket
# at the end of the link. Raises: OSError.
Connect = Callable[[str, socket.socket], Awaitable[object]]


@dataclass(slots=True, eq=False)
class EdgeProcess:
    """One process of an edge, from its start to its end."""

    name: str
    process: Process
    started_at: float
    channel: sockets.SocketChannel[sockets.ToBrain] = field(init=False)
    load: sockets.EdgeLoad = field(default_factory=lambda: sockets.EdgeLoad(0, 0, 0, 0.0, 0))
    started: bool = False  # whether it has been ready
    ready: bool = False  # whether it gets connections
    untaken: deque[socket.socket] = field(default_factory=deque)
    """Connections that it may not have yet, the oldest first."""
    untaken_since: float = 0.0  # when it has last taken one, or was given one while it had all
    taken: int = 0  # connections that it has taken since `load`
    links: int = 0  # that it was given
    linked_at: float = 0.0  # when it got the last one
    link_pause: float = LINK_PAUSE  # seconds before it gets another one
    linking: asyncio.Task[None] | None = None  # gives it one
    late: asyncio.TimerHandle | None = None  # ends it, unless it has begun to serve
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """All that it has sent was read, and no more can come."""
    cpu_share: float = 0.0  # processors that it uses
    _measured: tuple[float, float] = (0.0, 0.0)  # when, and its processor time then

    def has_room(self, now: float) -> bool:
        """Whether it could take a connection now."""
        channel, untaken = self.channel, self.untaken
        if not self.ready or channel.closed or channel.lags:
            return False
        is_held_up = bool(untaken) and now - self.untaken_since > HELD_UP_SECONDS
        return len(untaken) < MOST_UNTAKEN and not is_held_up

    @property
    def rank(self) -> tuple[int, int]:
        """Requests, and connections; those that are new count as both."""
        new = self.taken + len(self.untaken)
        return self.load.streams + self.load.fresh + new, self.load.connections + new

    def stop_waiting(self) -> None:
        """It has ended: nobody waits for it to serve, or for its link."""
        for waits in (self.late, self.linking):
            if waits is not None:
                waits.cancel()

    def take_load(self, load: sockets.EdgeLoad, now: float) -> None:
        """Note how busy it is."""
        self.load, self.taken = load, 0
        before, used = self._measured
        if now - before >= CPU_WINDOW_SECONDS:
            if before:
                self.cpu_share = max(0.0, load.cpu_seconds - used) / (now - before)
            self._measured = now, load.cpu_seconds


class Edges:
    """The edges of one brain; the `ConnectionTakers` of its public listener.

    `adopt` gets what they pass on, with its origin, and connections of clients that no edge can
    take any more, without one.
    """

    def __init__(
        self,
        brain: Brain,
        adopt: Callable[[socket.socket, ConnectionOrigin | None], None],
        clock: Callable[[], float],
        start_process: StartProcess,
        member: str | None = None,
        suffix: str = "",
    ) -> None:
        """`member`: the name of this gateway in a cluster, where `relink` says whose the links are.

        `suffix`: of the names of its edges, if the member's last process still has some.
        """
        self.brain = brain
        self._member, self._suffix = member, suffix
        self._connect: Connect | None = self._connect_for_good if member is None else None
        self._on_room: Callable[[], None] = lambda: None
        self.died = 0  # edges that have ended by themselves
        self._adopt = adopt
        self._clock = clock
        self._start_process = start_process
        self._running: dict[str, EdgeProcess] = {}
        self._homeless: deque[socket.socket] = deque()
        """Connections of edges that have died, which wait for one with room."""
        self._keepers: set[asyncio.Task[None]] = set()
        self._untried: set[str] = set()
        """Those that have not been ready yet, and have not ended."""
        self._all_tried = asyncio.Event()
        self._ending = asyncio.Event()

    def sample(self) -> list[EdgeSample]:
        """The edges, as operators see them."""
        now = self._clock()
        return [
            EdgeSample(
                one.name, one.process.pid, one.ready, one.load.streams, one.load.connections,
                one.cpu_share, one.load.cpu_seconds, one.load.memory, now - one.started_at,
            )
            for one in self._running.values()
        ]  # fmt: skip

    # Clients.

    def call_with_room(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` whenever an edge has room again."""
        self._on_room = go_on

    def has_room(self) -> bool:
        """Whether some edge could take a connection now."""
        return not self._homeless and any(self._with_room())

    def take(self, sock: socket.socket) -> None:
        """Hand a client's connection to the edge with the fewest requests, once one has room."""
        edge = min(self._with_room(), key=lambda one: one.rank, default=None)
        if edge is not None:
            if not edge.untaken:
                edge.untaken_since = self._clock()
            edge.untaken.append(sock)
            edge.channel.send(sockets.NewClient(), sock)
        elif self._ending.is_set():
            self._adopt(sock, None)
        else:
            self._homeless.append(sock)

    def _with_room(self) -> Iterator[EdgeProcess]:
        now = self._clock()
        return (one for one in self._running.values() if one.has_room(now))

    def _go_on(self) -> None:
        """An edge may have room again."""
        for _ in range(len(self._homeless)):
            self.take(self._homeless.popleft())
        if self.has_room():
            self._on_room()

    # Start and end.

    async def start(self, seconds: float) -> bool:
        """Start all edges; returns within so many seconds whether one can serve at least."""
        prefix = "" if self._member is None else f"{self._member}/"
        numbers = range(1, self.brain.edges + 1)
        self._untried = {f"{prefix}edge-{number}{self._suffix}" for number in numbers}
        for name in sorted(self._untried):
            keeper = asyncio.create_task(self._keep(name), name=name)
            self._keepers.add(keeper)
            keeper.add_done_callback(self._keepers.discard)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_tried.wait(), seconds)
        return any(one.ready for one in self._running.values())

    def _tried(self, name: str) -> None:
        self._untried.discard(name)
        if not self._untried:
            self._all_tried.set()

    async def _connect_for_good(self, name: str, sock: socket.socket) -> None:
        """Without a cluster: an edge has one link, with which it ends."""
        edge = self._running[name]
        await self.brain.connect(sock, name, lambda: self._give_up(edge))

    def relink(self, connect: Connect | None) -> None:
        """Give each edge a new link, by `connect`, now and whenever it has lost that or starts.

        None: the links are taken away, until there is a brain again.
        """
        self._connect = connect
        for edge in self._running.values():
            edge.link_pause = LINK_PAUSE
            self._link_anew(edge)

    def _link_anew(self, edge: EdgeProcess) -> None:
        if edge.linking is not None:
            edge.linking.cancel()
        if not edge.channel.closed:
            edge.links, edge.linked_at = edge.links + 1, self._clock()
            edge.linking = asyncio.create_task(self._link(edge, self._connect))

    async def _link(self, edge: EdgeProcess, connect: Connect | None) -> None:
        """Give an edge a link. If that fails, the edge sees it as lost, and says so."""
        ours, its_end = socket.socketpair()
        new = sockets.NewLink(edge.links, self.brain.loopback, self.brain.edges)
        edge.channel.send(new, its_end, then_close=True)
        if connect is None:
            ours.close()
            return
        try:
            await connect(edge.name, ours)
        except OSError as error:
            ours.close()
            log.warning("an edge can't be linked", edge=edge.name, why=str(error))
        except BaseException:
            ours.close()
            raise
        else:
            self._expect_ready(edge)

    def _link_lost(self, edge: EdgeProcess, number: int) -> None:
        """If this was the last link that the edge was given, it gets another one."""
        is_running = self._running.get(edge.name) is edge
        if is_running and number == edge.links and self._connect is not None:
            self._link_anew(edge)

    def reject(self) -> None:
        """Have new requests refused: the gateway shuts down."""
        for edge in self._running.values():
            edge.channel.send(sockets.Reject())

    async def end(self, *, drain: bool) -> None:
        """Give the edges no more clients, and wait until what they serve has ended.

        `drain`: until the clients that they have are gone.
        """
        self._ending.set()
        for edge in self._running.values():
            if not edge.started:
                _kill(edge.process)
            if self._member is None:
                self.brain.expect_end(edge.name)
            edge.channel.send(sockets.Drain() if drain else sockets.End())
            edge.ready = False
        self._go_on()
        while self._keepers:
            await asyncio.wait(self._keepers)

    async def aclose(self) -> None:
        """End all edges that still run, at once."""
        self._ending.set()
        for edge in self._running.values():
            _kill(edge.process)
        tasks = list(self._keepers)
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._homeless:
            sock.close()
        await self.brain.aclose()

    async def _keep(self, name: str) -> None:
        """Run the edge of this name until all are to end; start it again whenever it ends."""
        pause = FIRST_PAUSE
        while not self._ending.is_set():
            began = self._clock()
            try:
                await self._run(name)
            except OSError as error:
                log.error("an edge could not be started", edge=name, why=str(error))  # noqa: TRY400
            if self._ending.is_set():
                return
            self.died += 1
            self._tried(name)
            if self._clock() - began > STEADY_SECONDS:
                pause = FIRST_PAUSE
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def _run(self, name: str) -> None:
        """Run one process of an edge until it ends. Raises: OSError."""
        ours, its_end = sockets.channel_pair()
        with its_end:
            try:
                process = await self._start_process(name, its_end)
            except OSError:
                ours.close()
                raise
        edge = EdgeProcess(name, process, self._clock())

        def lost() -> None:
            edge.ended.set()
            self._give_up(edge)

        edge.channel = sockets.SocketChannel(
            ours, sockets.ToBrain, lambda message, sock: self._receive(edge, message, sock), lost
        )
        self._running[name] = edge
        try:
            if self._connect is not None:
                self._link_anew(edge)
            if self._ending.is_set():
                _kill(process)
            status = await process.wait()
            if not self._ending.is_set():
                log.error("an edge has ended", edge=name, pid=process.pid, status=status)
        finally:
            edge.stop_waiting()
            _kill(process)
            with contextlib.suppress(TimeoutError):
                # What it has confirmed last tells which connections it has not had.
                await asyncio.wait_for(edge.ended.wait(), END_SECONDS)
            del self._running[name]
            edge.channel.close()
            self.brain.edge_ended(name, process.pid)
            for sock in edge.untaken:
                self.take(sock)

    @staticmethod
    def _give_up(edge: EdgeProcess) -> None:
        """Its link or its channel is lost: the edge ends by itself, or is ended."""
        edge.ready = False
        asyncio.get_running_loop().call_later(OWN_END_SECONDS, _kill, edge.process)

    def _expect_ready(self, edge: EdgeProcess) -> None:
        """An edge has its first link, or another one before it has begun to serve."""
        if edge.late is not None:
            edge.late.cancel()
        loop = asyncio.get_running_loop()
        edge.late = loop.call_later(MOST_START_SECONDS, self._end_late, edge)

    @staticmethod
    def _end_late(edge: EdgeProcess) -> None:
        """End an edge that has not begun to serve in time."""
        if not edge.started:
            log.error("an edge does not begin to serve and is ended", edge=edge.name)
            _kill(edge.process)

    def _receive(
        self, edge: EdgeProcess, message: sockets.ToBrain, sock: socket.socket | None
    ) -> None:
        match message:
            case sockets.Taken():
                if edge.untaken:
                    edge.untaken.popleft().close()
                    edge.taken += 1
                    edge.untaken_since = self._clock()
            case sockets.EdgeLoad():
                edge.take_load(message, self._clock())
            case sockets.Ready():
                edge.started, edge.ready = True, not self._ending.is_set()
                self._tried(edge.name)
                log.info("an edge serves", edge=edge.name, pid=edge.process.pid)
            case sockets.PassedOn():
                if sock is not None:
                    sock.setblocking(False)
                    self._adopt(sock, message.origin)
            case sockets.LinkEnded():
                if self._clock() - edge.linked_at > HELD_SECONDS:
                    edge.link_pause = LINK_PAUSE
                loop = asyncio.get_running_loop()
                loop.call_later(edge.link_pause, self._link_lost, edge, message.number)
                edge.link_pause = min(LONGEST_LINK_PAUSE, 2 * edge.link_pause)
        self._go_on()


async def start_edge_process(
    name: str, channel: socket.socket, *log_words: str, clustered: bool
) -> Process:
    """Start the process of an edge with this end of its channel. Raises: OSError.

    It has no other descriptor of this process but the standard ones. `log_words`: level and format
    of its log.
    """
    root = str(Path(gateway.__file__).parent.parent)
    paths = filter(None, [root, os.environ.get("PYTHONPATH")])
    number, kind = channel.fileno(), sockets.CLUSTERED if clustered else sockets.SINGLE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gateway", "edge", name, kind, str(number), *log_words),
        pass_fds=[number],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
