"""The way of a routed request through the edge: read it, relay it, send what comes back."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from gateway import errors
from gateway.access.callers import address_of, priority_of
from gateway.access.keys import KeyRing
from gateway.access.parties import NamingHeaders
from gateway.config.settings import Settings
from gateway.errors import ClientClosed, GatewayError
from gateway.events import Bus, RequestFinished
from gateway.fleet.fleet import Fleet
from gateway.relay.live import Live, Registry
from gateway.relay.naming import Names
from gateway.relay.peek import NOTHING, Peek, peek
from gateway.relay.prepare import Incoming, Rules, prepare
from gateway.relay.relay import Relay
from gateway.relay.reply import Reply, Rest
from gateway.relay.routes import Route
from gateway.relay.volatile import Volatile
from gateway.scheduling.expectations import Expectations
from gateway.scheduling.latest import Latest
from gateway.transport.errors import UpstreamError
from gateway.web.public.body import Buffered, read_body, take_body
from gateway.web.public.heads import (
    STREAM_LINES,
    error_fields,
    lines_of,
    own_fields,
    progress_line,
    tag_of,
)
from gateway.web.public.heartbeat import PROGRESS_EVERY, Heartbeat
from gateway.web.public.origins import allowed_origin
from gateway.web.public.preamble import Preamble, understood
from gateway.web.public.turn import Turn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one version of the settings says to the edge."""

    settings: Settings
    keys: KeyRing
    naming: NamingHeaders
    rules: Rules
    loopback: bool
    """Whether the listener can be reached from this machine alone."""
    expose_node: bool

    @classmethod
    def of(cls, settings: Settings, *, loopback: bool) -> Snapshot:
        """The snapshot of these settings for a listener that is `loopback` or not."""
        expose = settings.listen.expose_node
        identity = settings.identity
        return cls(
            settings=settings,
            keys=KeyRing(settings.keys),
            naming=NamingHeaders.of(identity.user_headers, identity.session_headers),
            rules=Rules(
                settings.limits,
                Names(settings.models),
                settings.default_model,
                Volatile(settings.prompts.volatile, settings.prompts.strip),
            ),
            loopback=loopback,
            expose_node=loopback if expose is None else expose,
        )


@dataclass(slots=True, eq=False)
class Edge:
    """Serves the routed paths; `snapshot` is replaced as a whole at a reload."""

    snapshot: Snapshot
    relay: Relay
    fleet: Fleet
    registry: Registry
    bus: Bus
    clock: Callable[[], float]
    closing: bool = False
    """The gateway is on its way out, as `/ready` tells."""
    refusing: bool = False
    """... and takes nothing more."""
    buffered: Buffered = field(default_factory=Buffered)
    latest: Latest[Live] = field(default_factory=Latest)
    """What editors wait for: a newer one of the same session ends it."""
    _prefix: str = field(default_factory=lambda: f"req_{secrets.token_hex(4)}")
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def learning(self) -> Expectations:
        """What is learnt of requests, perhaps with some delay."""
        return self.relay.means.scheduler.expectations

    def serve(self, route: Route, turn: Turn) -> Awaitable[None]:
        """Serve one request to a routed path; cancelled when its client leaves."""
        return _Exchange(self, route, turn).serve()

    def next_id(self) -> str:
        """An id that no other request of this process has or will have."""
        return f"{self._prefix}{next(self._numbers):x}"


class _Exchange:
    """One request and its reply."""

    __slots__ = (
        "_body_size", "_edge", "_editing", "_live", "_reply", "_route", "_snapshot", "_turn",
        "received", "record", "request_id",
    )  # fmt: skip

    def __init__(self, edge: Edge, route: Route, turn: Turn) -> None:
        self._edge = edge
        self._route = route
        self._turn = turn
        self._snapshot = edge.snapshot
        self._live: Live | None = None
        self._editing: str | None = None
        """The editor session that waits for this, and for nothing before it."""
        self._reply: Reply | None = None
        self._body_size = 0
        self.received = edge.clock()
        self.request_id = edge.next_id()
        self.record = RequestFinished(tag_of(turn.headers) or self.request_id, route.path)

    async def serve(self) -> None:
        """Read, relay, send."""
        record = self.record
        try:
            edge, settings = self._edge, self._snapshot.settings
            preamble = self._admitted()
            body = take_body(self._turn, settings.limits, edge.buffered)
            if body is None:
                body = await read_body(self._turn, settings.limits, edge.buffered)
            self._body_size = len(body)
            live = self._live = self._prepared(preamble, body)
            edge.registry.add(live)
            if self._editing is not None:
                self._replace(self._editing, live)
            heartbeat = self._heartbeat(live, preamble)
            if heartbeat is not None:
                try:
                    self._reply = await edge.relay(live)
                finally:
                    heartbeat.stop()
            else:
                self._reply = await edge.relay(live)
            if self._reply.rest is None:
                self._pass_on_whole(self._reply)
            else:
                await self._pass_on(self._reply, self._reply.rest)
        except GatewayError as error:
            self.refuse(error)
        except (ClientClosed, asyncio.CancelledError):
            record.code, record.reason = 499, "client_closed"
            raise
        except Exception:
            record.code, record.reason = 500, "internal_error"
            raise
        finally:
            self.close()

    def _admitted(self) -> Preamble:
        """Who asks, and how; before anything of the body is read. Raises: GatewayError."""
        turn, snapshot = self._turn, self._snapshot
        memory = turn.memory
        preamble = memory.preamble
        if preamble is None or memory.version is not snapshot or memory.headers != turn.headers:
            preamble = understood(
                turn.headers,
                turn.address,
                snapshot.settings,
                snapshot.keys,
                snapshot.naming,
                loopback=snapshot.loopback,
            )
            memory.headers, memory.version, memory.preamble = turn.headers, snapshot, preamble
        self.record.caller = preamble.caller.id
        if self._edge.refusing:
            raise errors.shutting_down()
        return preamble

    def _prepared(self, preamble: Preamble, body: bytes) -> Live:
        """The request that the body makes. Raises: GatewayError."""
        edge, record = self._edge, self.record
        peeked = peek(body)
        tier = peeked.service_tier
        wanted = peeked.priority
        record.priority = priority_of(
            preamble.asked,
            wanted if isinstance(wanted, str) else None,
            tier if isinstance(tier, str) else None,
            preamble.caller,
        )
        incoming = Incoming(
            self.request_id,
            record.id,
            self._route,
            preamble.fields,
            preamble.patience
            if peeked.stream or self._snapshot.settings.heartbeat_plain
            else preamble.plain_patience,
            body,
            preamble.caller,
            self.received,
            preamble.party,
            preamble.session,
        )
        catalogue = edge.fleet.catalogue
        request = prepare(
            incoming, peeked, record.priority, self._snapshot.rules, catalogue.model_names
        )
        if request.prompt is not None and edge.learning.is_behind(request):
            edge.bus.flush()
        record.stream = request.stream
        for name in request.candidates:
            if catalogue.known(name):
                record.model = request.model
                break
        if _is_editing(self._route, peeked) and self._snapshot.settings.queue.latest_wins:
            self._editing = request.session or self._whereabouts(request.party, request.model)
        return Live(request, record)

    def _whereabouts(self, party: str, model: str) -> str:
        """What stands for an editor's session that no header names."""
        proxies = self._snapshot.settings.listen.trusted_proxies
        address = address_of(self._turn.headers, self._turn.address, proxies)
        return f"{party} {address} {model}"

    def _replace(self, session: str, live: Live) -> None:
        """Nobody reads the earlier completion of this session any more."""
        earlier = self._edge.latest.enter(session, live)
        if earlier is not None:
            error = errors.superseded()
            if not self._edge.relay.means.scheduler.refuse(earlier.request.id, error):
                earlier.end(error)

    def _pass_on_whole(self, reply: Reply) -> None:
        record, turn = self.record, self._turn
        if reply.status >= 400:
            record.code = reply.status
            record.reason = record.reason or "node_error"
        if not turn.response_started:
            turn.reply(reply.status, reply.fields + self._own_fields(), reply.content)
        elif not record.stream:
            turn.end(reply.content)
        elif reply.status >= 400:
            turn.end(self._route.dialect.error_event(_as_error(reply), record.id))
        else:
            raise errors.node_failed("The node did not stream its answer.")

    async def _pass_on(self, reply: Reply, rest: Rest) -> None:
        record, turn = self.record, self._turn
        if turn.response_started and record.stream and not rest.attempt.streams:
            raise errors.node_failed("The node did not stream its answer.")
        if turn.response_started:
            turn.write(reply.content)
        else:
            fields = reply.fields + self._own_fields()
            if rest.attempt.streams:
                fields += b"x-accel-buffering: no\r\n"
            turn.begin(reply.status, fields, reply.content)
        try:
            await turn.drained()
            while (chunk := await rest.next(turn.write)) != b"":
                if chunk is None or turn.write(chunk):
                    await turn.drained()
        except UpstreamError:
            # Half of a plain answer is out: it must not look like a whole one.
            record.code, record.reason = 502, "node_failed"
            turn.abort()
            return
        turn.end()

    def refuse(self, error: GatewayError) -> None:
        """End with an error: a reply of its own, or an event if the stream has begun."""
        record, dialect, turn = self.record, self._route.dialect, self._turn
        record.code, record.reason = error.status, error.code
        if turn.response_started:
            told = dialect.error_event if record.stream else dialect.error_body
            turn.end(told(error, record.id))
            return
        if turn.more_body:
            # What is left of it must not be taken for the next request.
            turn.keep_alive = False
        body = dialect.error_body(error, record.id)
        turn.reply(error.status, lines_of(error_fields(error)) + self._own_fields(), body)

    def close(self) -> None:
        """Tell what became of it and let go of everything."""
        edge, record = self._edge, self.record
        edge.buffered.release(self._body_size)
        if self._reply is not None and self._reply.rest is not None:
            self._reply.rest.close()
        if self._live is not None:
            edge.registry.remove(self._live)
            if self._editing is not None:
                edge.latest.leave(self._editing, self._live)
        record.duration = edge.clock() - self.received
        edge.bus.publish_soon(record)

    def _own_fields(self) -> bytes:
        fields = own_fields(
            self.record,
            anthropic=self._route.dialect.name == "messages",
            expose_node=self._snapshot.expose_node,
        )
        cors = self._snapshot.settings.cors
        return (
            fields if cors is None else fields + lines_of(allowed_origin(cors, self._turn.headers))
        )

    def _heartbeat(self, live: Live, preamble: Preamble) -> Heartbeat | None:
        """What shows its client that the request is not forgotten."""
        settings = self._snapshot.settings
        if not live.request.stream:
            if settings.heartbeat and settings.heartbeat_plain:
                return Heartbeat(settings.heartbeat, self._pad)
        elif preamble.progress:
            return Heartbeat(PROGRESS_EVERY, self._tell_progress)
        elif settings.heartbeat:
            return Heartbeat(settings.heartbeat, self._beat)
        return None

    async def _pad(self) -> None:
        """White space, which JSON may begin with."""
        if self._turn.response_started:
            self._turn.write(b" ")
        else:
            fields = b"content-type: application/json; charset=utf-8\r\n"
            self._turn.begin(200, fields + self._own_fields(), b" ")
        await self._turn.drained()

    async def _tell_progress(self) -> None:
        """A heartbeat that says how far the request has come."""
        assert self._live is not None
        place = self._edge.relay.means.scheduler.place(self._live.request)
        dialect = self._route.dialect
        if place is None:
            await self._beat()
        elif dialect.pings:
            await self._beat(progress_line(place) + dialect.heartbeat())
        else:
            await self._beat(progress_line(place))

    async def _beat(self, beat: bytes = b"") -> None:
        beat = beat or self._route.dialect.heartbeat()
        if self._turn.response_started:
            self._turn.write(beat)
        else:
            self._turn.begin(200, STREAM_LINES + self._own_fields(), beat)
        await self._turn.drained()


def _is_editing(route: Route, peeked: Peek) -> bool:
    """Whether this fills in the middle of a text, as editors ask at each pause of typing."""
    if route.endpoint == "infill":
        return True
    suffix = peeked.suffix
    return suffix is not NOTHING and route.prompt == "prompt" and bytes(suffix) not in _NO_SUFFIX


_NO_SUFFIX = (b"null", b'""')


def _as_error(reply: Reply) -> GatewayError:
    """A node's own error after a heartbeat has committed status 200."""
    try:
        message = str(msgspec.json.decode(reply.content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        message = f"The node answered with status {reply.status}."
    return GatewayError(reply.status, "node_error", message)
