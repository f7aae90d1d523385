"""The way of a routed request through the edge: read it, relay it, send what comes back.

Raw ASGI: Starlette's `Request` and `Response` would cost more than all the rest together.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway import errors
from gateway.access.callers import caller_of, priority_of
from gateway.access.keys import KeyRing
from gateway.config.settings import Settings
from gateway.errors import ClientClosed, GatewayError
from gateway.events import Bus, RequestFinished
from gateway.fleet.fleet import Fleet
from gateway.relay.live import Live, Registry
from gateway.relay.naming import Names
from gateway.relay.peek import peek
from gateway.relay.prepare import Incoming, Rules, prepare
from gateway.relay.relay import Relay
from gateway.relay.reply import Reply
from gateway.relay.routes import Route
from gateway.request import Priority
from gateway.web.public.body import Buffered, read_body
from gateway.web.public.departure import Departure
from gateway.web.public.heads import STREAM_FIELDS, error_fields, own_fields, tag_of
from gateway.web.public.heartbeat import Heartbeat

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]
Scope = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one version of the settings says to the edge."""

    settings: Settings
    keys: KeyRing
    rules: Rules
    loopback: bool
    """Whether the listener can be reached from this machine alone."""
    expose_node: bool

    @classmethod
    def of(cls, settings: Settings, *, loopback: bool) -> Snapshot:
        """The snapshot of these settings for a listener that is `loopback` or not."""
        expose = settings.listen.expose_node
        return cls(
            settings=settings,
            keys=KeyRing(settings.keys),
            rules=Rules(settings.limits, Names(settings.models), settings.default_model),
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
    _prefix: str = field(default_factory=lambda: f"req_{secrets.token_hex(4)}")
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def serve(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to a routed path."""
        exchange = _Exchange(self, route, scope, receive, send)
        record = exchange.record
        departure = Departure(receive)
        try:
            await exchange.run()
        except GatewayError as error:
            await exchange.refuse(error)
        except ClientClosed:
            record.code, record.reason = 499, "client_closed"
        except asyncio.CancelledError:
            record.code, record.reason = 499, "client_closed"
            if not departure.left:
                raise
        except Exception:
            record.code, record.reason = 500, "internal_error"
            raise
        finally:
            departure.stop()
            exchange.close()

    def next_id(self) -> str:
        """An id that no other request of this process has or will have."""
        return f"{self._prefix}{next(self._numbers):x}"


class _Exchange:
    """One request and its reply."""

    __slots__ = (
        "_body_size", "_edge", "_headers", "_live", "_receive", "_reply", "_route", "_scope",
        "_send", "_snapshot", "_started", "received", "record", "request_id",
    )  # fmt: skip

    def __init__(
        self, edge: Edge, route: Route, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._edge = edge
        self._route = route
        self._scope = scope
        self._receive = receive
        self._send = send
        self._snapshot = edge.snapshot
        self._headers = scope["headers"]
        self._started = False
        """Whether the status line has gone out."""
        self._live: Live | None = None
        self._reply: Reply | None = None
        self._body_size = 0
        self.received = edge.clock()
        self.request_id = edge.next_id()
        self.record = RequestFinished(
            id=tag_of(self._headers) or self.request_id,
            path=route.path,
            model="unknown",
            priority=Priority.NORMAL,
            caller="unknown",
            code=200,
            reason=None,
            stream=False,
            node=None,
            tier=None,
            attempts=0,
            queue=0.0,
            ttft=None,
            duration=0.0,
            overhead=None,
        )

    async def run(self) -> None:
        """Read, relay, send. Raises: GatewayError, ClientClosed."""
        live = self._live = await self._read()
        edge, settings = self._edge, self._snapshot.settings
        edge.registry.add(live)
        if live.request.stream and settings.heartbeat:
            heartbeat = Heartbeat(settings.heartbeat, self._beat)
            try:
                reply = await edge.relay(live)
            finally:
                heartbeat.stop()
        else:
            reply = await edge.relay(live)
        self._reply = reply
        await self._pass_on(reply)

    async def _read(self) -> Live:
        edge, snapshot, record = self._edge, self._snapshot, self.record
        settings = snapshot.settings
        client = self._scope.get("client")
        caller = caller_of(
            self._headers,
            client[0] if client else None,
            snapshot.keys,
            allow_anonymous=settings.allow_anonymous,
            loopback_listener=snapshot.loopback,
            trusted_proxies=settings.listen.trusted_proxies,
        )
        record.caller = caller.id
        if edge.refusing:
            raise errors.shutting_down()
        body = await read_body(self._receive, self._headers, settings.limits, edge.buffered)
        self._body_size = len(body)
        peeked = peek(body)
        tier = peeked.service_tier
        wanted = peeked.priority
        record.priority = priority_of(
            self._headers,
            wanted if isinstance(wanted, str) else None,
            tier if isinstance(tier, str) else None,
            caller,
        )
        incoming = Incoming(
            id=self.request_id,
            tag=record.id,
            route=self._route,
            headers=self._headers,
            body=body,
            caller=caller,
            received=self.received,
        )
        request = prepare(incoming, peeked, record.priority, snapshot.rules, edge.fleet.model_names)
        record.stream = request.stream
        if any(edge.fleet.known(name) for name in request.candidates):
            record.model = request.model
        return Live(request, record)

    async def _pass_on(self, reply: Reply) -> None:
        record, rest = self.record, reply.rest
        if reply.status >= 400:
            record.code = reply.status
            record.reason = record.reason or "node_error"
            if self._started:
                error = _as_error(reply)
                await self._end_with(self._route.dialect.error_event(error, record.id))
                return
        if not self._started:
            streams = rest is not None and record.stream
            fields = reply.headers + self._own_fields()
            if streams:
                fields.append((b"x-accel-buffering", b"no"))
            await self._start(reply.status, fields)
        send = self._send
        if rest is None:
            await self._end_with(reply.content)
            return
        if reply.content:
            await send({"type": "http.response.body", "body": reply.content, "more_body": True})
        while chunk := await rest.next():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._end_with(b"")

    async def refuse(self, error: GatewayError) -> None:
        """End with an error: a reply of its own, or an event if the stream has begun."""
        record, dialect = self.record, self._route.dialect
        record.code, record.reason = error.status, error.code
        if self._started:
            await self._end_with(dialect.error_event(error, record.id))
            return
        body = dialect.error_body(error, record.id)
        await self._start(error.status, error_fields(error, len(body)) + self._own_fields())
        await self._end_with(body)

    def close(self) -> None:
        """Tell what became of it and let go of everything."""
        edge, record = self._edge, self.record
        edge.buffered.release(self._body_size)
        if self._reply is not None and self._reply.rest is not None:
            self._reply.rest.close()
        if self._live is not None:
            edge.registry.remove(self._live)
        record.duration = edge.clock() - self.received
        edge.bus.publish(record)

    def _own_fields(self) -> list[tuple[bytes, bytes]]:
        return own_fields(
            self.record,
            anthropic=self._route.dialect.name == "messages",
            expose_node=self._snapshot.expose_node,
        )

    async def _beat(self) -> None:
        if not self._started:
            await self._start(200, STREAM_FIELDS + self._own_fields())
        beat = self._route.dialect.heartbeat()
        await self._send({"type": "http.response.body", "body": beat, "more_body": True})

    async def _start(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def _end_with(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _as_error(reply: Reply) -> GatewayError:
    """A node's own error after a heartbeat has committed status 200."""
    try:
        message = str(msgspec.json.decode(reply.content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        message = f"The node answered with status {reply.status}."
    return GatewayError(reply.status, "node_error", message)
