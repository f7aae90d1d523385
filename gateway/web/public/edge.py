"""The way of a routed request through the edge: read it, relay it, send what comes back."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from gateway import errors
from gateway.access.anonymous import OPEN, Door
from gateway.access.callers import address_of, priority_of
from gateway.access.keys import KeyRing
from gateway.access.parties import NamingHeaders
from gateway.config.settings import Settings
from gateway.errors import ClientClosed, GatewayError
from gateway.events import Bus, RequestFinished
from gateway.fleet.fleet import Fleet
from gateway.relay import forms
from gateway.relay.fingerprint import fingerprint_large
from gateway.relay.large import LARGE, Body, read_large
from gateway.relay.live import Live, Registry
from gateway.relay.naming import Names
from gateway.relay.peek import peek
from gateway.relay.prefill import Prefill
from gateway.relay.prepare import Incoming, Rules, prepare, prepare_form
from gateway.relay.relay import Relay
from gateway.relay.reply import Remainder, Reply
from gateway.relay.routes import Route, is_editing
from gateway.relay.volatile import Volatile
from gateway.request import Request
from gateway.scheduling.latest import Latest
from gateway.transport.errors import UpstreamError
from gateway.transport.taskless import in_task
from gateway.web.public import nodes_error
from gateway.web.public.body import (
    MARK,
    SIMPLE,
    WORKING,
    read_body,
    take_body,
    takes_turns,
)
from gateway.web.public.buffered import Buffered, Share
from gateway.web.public.heads import (
    STREAM_LINES,
    error_fields,
    first_fields,
    lines_of,
    own_fields,
    progress_line,
    tag_of,
)
from gateway.web.public.heartbeat import PROGRESS_EVERY, Heartbeat
from gateway.web.public.origins import PageRules, allowed_origin
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
    door: Door
    pages: PageRules | None
    """What callers without a key are held to."""

    @classmethod
    def of(cls, settings: Settings, *, loopback: bool, before: Door = OPEN) -> Snapshot:
        """The snapshot of these settings for a listener that is `loopback` or not.

        `before`: the door under the settings before these.
        """
        keys, anonymous = len(settings.keys), settings.allow_anonymous
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
            door=before.after(keys=keys, allow_anonymous=anonymous),
            pages=PageRules.of(settings, loopback=loopback),
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
    """What takes the turns of large bodies."""
    latest: Latest[Live] = field(default_factory=Latest)
    """What editors wait for: a newer one of the same session ends it."""
    _prefix: str = field(default_factory=lambda: f"req_{secrets.token_hex(4)}")
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def serve(self, route: Route, turn: Turn) -> Awaitable[None]:
        """Serve one request to a routed path; cancelled when its client leaves."""
        return _Exchange(self, route, turn).serve()

    def next_id(self) -> str:
        """An id that no other request of this process has or will have."""
        return f"{self._prefix}{next(self._numbers):x}"


class _Exchange:
    """One request and its reply."""

    __slots__ = (
        "_body_size", "_edge", "_editing", "_exposes", "_heartbeat", "_live", "_reply", "_route",
        "_share",
        "_shown", "_snapshot", "_turn", "received", "record", "request_id",
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
        self._heartbeat: Heartbeat | None = None
        self._exposes = False
        """Whether the reply may name nodes."""
        self._shown = 0.0
        """When it is known to have shown its client a sign of life."""
        self._body_size = 0
        """Of a small body; else ..."""
        self._share: Share | None = None
        """... what it holds of the memory for them."""
        self.received = edge.clock()
        self.request_id = edge.next_id()
        memory, headers = turn.memory, turn.headers
        tag = memory.tag if headers is memory.headers else tag_of(headers)
        self.record = RequestFinished(tag or self.request_id, route.path)

    async def serve(self) -> None:
        """Read, relay, send."""
        record = self.record
        try:
            edge, settings = self._edge, self._snapshot.settings
            preamble = self._admitted()
            body = take_body(self._turn, settings.limits, edge.buffered)
            if body is not None:
                self._body_size = len(body)
            else:
                share = self._share = Share(preamble.caller.id, preamble.party)
                body = await read_body(self._turn, settings.limits, edge.buffered, share)
                share.refuse = self._turned_away
            if len(body) < SIMPLE or self._route.form or not takes_turns(body):
                live = self._live = self._prepared(preamble, body)
            else:
                live = self._live = await self._prepared_in_turn(preamble, body)
            edge.registry.add(live)
            if self._editing is not None:
                self._replace(self._editing, live)
            self._heartbeat = self._begun_heartbeat(live, preamble)
            self._reply = await edge.relay(live)
            if self._reply.rest is None:
                self._pass_on_whole(self._reply)
            else:
                await self._pass_on(self._reply, self._reply.rest)
        except GatewayError as error:
            self.record.code, self.record.reason = error.status, error.code
            if self._live is not None and self._live.request.own_timer:
                await self._let_it_time_out(self._live.request)
            self.refuse(error)
            errors.forget_trace(error)
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
                closed=snapshot.door.closed,
            )
            if snapshot.pages is not None and preamble.caller.anonymous:
                snapshot.pages.check(turn.headers, turn.own_address, posts=True)
            memory.headers, memory.version, memory.preamble = turn.headers, snapshot, preamble
            memory.tag = tag_of(turn.headers)
        self.record.caller = preamble.caller.id
        self._exposes = preamble.exposes
        if self._edge.refusing:
            raise errors.shutting_down()
        return preamble

    async def _prepared_in_turn(self, preamble: Preamble, body: bytes) -> Live:
        """The same of a body that takes more than a moment: others have their turn in between.

        Raises: GatewayError.
        """
        await in_task()
        if len(body) < LARGE:
            return await self._edge.relay.means.steps.once(partial(self._prepared, preamble, body))
        edge, rules = self._edge, self._snapshot.rules
        # What is made of it on the way counts while it is there.
        made = min(len(body), WORKING)
        share = self._share or Share(preamble.caller.id, preamble.party)
        edge.buffered.take(share, made, rules.limits.buffered_bytes)
        try:
            return await self._prepared_in_steps(preamble, body)
        finally:
            edge.buffered.release(share, made)

    async def _prepared_in_steps(self, preamble: Preamble, body: bytes) -> Live:
        steps, rules = self._edge.relay.means.steps, self._snapshot.rules
        body = body.removeprefix(MARK)
        large = await steps.run(read_large(body, rules.limits))
        live = self._prepared(preamble, large)
        request = live.request
        request.prompt = await steps.run(
            fingerprint_large(large, self._route, request.model, rules.volatile)
        )
        return live

    def _prepared(self, preamble: Preamble, body: Body) -> Live:
        """The request that the body makes. Raises: GatewayError."""
        edge, record, route = self._edge, self.record, self._route
        made = prepare
        if not isinstance(body, bytes):
            peeked = body.peek()
        elif route.form:
            peeked = forms.peek(body, self._turn.headers)
            made = prepare_form
        else:
            try:
                peeked = peek(body)
            except GatewayError:
                if not body.startswith(MARK):
                    raise
                body = body[len(MARK) :]
                peeked = peek(body)
        tier = peeked.service_tier
        wanted = peeked.priority
        record.priority = priority_of(
            preamble.asked,
            wanted if isinstance(wanted, str) else None,
            tier if isinstance(tier, str) else None,
            preamble.caller,
        )
        patience, own_timer = preamble.plain_patience, preamble.own_timer
        if peeked.stream or self._snapshot.settings.heartbeat_plain:
            patience, own_timer = preamble.patience, False
        incoming = Incoming(
            self.request_id,
            record.id,
            route,
            preamble.fields,
            patience,
            body,
            preamble.caller,
            self.received,
            preamble.party,
            preamble.session,
            own_timer,
        )
        catalogue = edge.fleet.catalogue
        request = made(incoming, peeked, record.priority, self._snapshot.rules, catalogue)
        record.stream = request.stream
        for name in request.candidates:
            if catalogue.known(name):
                record.model = request.model
                break
        if is_editing(route, peeked) and self._snapshot.settings.queue.latest_wins:
            self._editing = request.session or self._whereabouts(request.party, request.model)
        return Live(request, record)

    def _whereabouts(self, party: str, model: str) -> str:
        """What stands for an editor's session that no header names."""
        proxies = self._snapshot.settings.listen.trusted_proxies
        address = address_of(self._turn.headers, self._turn.address, proxies)
        return f"{party} {address} {model}"

    def _turned_away(self, error: GatewayError) -> bool:
        """End it with `error` if it waits for a slot; whether it did."""
        live, scheduler = self._live, self._edge.relay.means.scheduler
        waiting = [self.request_id] if live is None or live.parts is None else live.parts
        return any(scheduler.turn_away(one, error) for one in waiting)

    def _replace(self, session: str, live: Live) -> None:
        """Nobody reads the earlier completion of this session any more."""
        earlier = self._edge.latest.enter(session, live)
        if earlier is not None:
            error = errors.superseded()
            if not self._edge.relay.means.scheduler.refuse(earlier.request.id, error):
                earlier.end(error)

    def _pass_on_whole(self, reply: Reply) -> None:
        record, turn, dialect = self.record, self._turn, self._route.dialect
        fields, content = reply.fields, reply.content
        if reply.status >= 400:
            record.code = reply.status
            record.reason = record.reason or "node_error"
            content = nodes_error.body_of(reply, dialect, record.id)
            fields = nodes_error.fields_of(reply, content)
        if not turn.response_started:
            turn.reply(reply.status, fields + self._own_fields(), content)
        elif not record.stream:
            turn.end(content)
        elif reply.status >= 400:
            turn.end(dialect.error_event(nodes_error.as_error(reply), record.id))
        else:
            raise errors.node_failed("The node did not stream its answer.")

    async def _pass_on(self, reply: Reply, rest: Remainder) -> None:
        record, turn = self.record, self._turn
        streams = rest.attempt.streams
        if turn.response_started and record.stream and not streams:
            raise errors.node_failed("The node did not stream its answer.")
        if self._heartbeat is not None and not (streams and self._snapshot.settings.heartbeat):
            self._heartbeat.stop()
        if turn.response_started:
            turn.write(reply.content)
        else:
            fields = reply.fields + self._own_fields()
            if streams:
                fields += b"x-accel-buffering: no\r\n"
            turn.begin(reply.status, fields, reply.content)
        try:
            await self._taken(rest)
            while (chunk := await rest.next(turn.write)) != b"":
                if chunk is None or turn.write(chunk):
                    await self._taken(rest)
        except UpstreamError as failure:
            errors.forget_trace(failure)
            # Half of a plain answer is out: it must not look like a whole one.
            record.code, record.reason = 502, "node_failed"
            turn.abort()
            return
        turn.end()

    async def _taken(self, rest: Remainder) -> None:
        """Wait until the client has taken most of what it has, unless the request is to end."""
        turn, attempt = self._turn, rest.attempt
        if turn.lags and attempt.failure is None:
            attempt.on_fail = turn.hurry
            await turn.drained()

    async def _let_it_time_out(self, request: Request) -> None:
        """Past the deadline of an official client, its own timer is to end the request.

        An error in that very moment it would take for the gateway's, and ask again.
        """
        assert request.deadline is not None
        now = self._edge.clock()
        if now >= request.deadline - SAME_MOMENT:
            await in_task()
            await asyncio.sleep(request.deadline + LINGERS + SAME_MOMENT - now)

    def refuse(self, error: GatewayError) -> None:
        """End with an error: a reply of its own, or an event if the stream has begun."""
        record, dialect, turn = self.record, self._route.dialect, self._turn
        record.code, record.reason = error.status, error.code
        if self._exposes:
            error.name_nodes()
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
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None  # which holds on to this
        if self._share is None:
            edge.buffered.held -= self._body_size
        else:
            edge.buffered.release(self._share)
            self._share.refuse = None  # which holds on to this
        if self._reply is not None and self._reply.rest is not None:
            self._reply.rest.close()
        if self._live is not None:
            edge.registry.remove(self._live)
            if self._editing is not None:
                edge.latest.leave(self._editing, self._live)
        record.duration = edge.clock() - self.received
        edge.bus.publish_soon(record)

    def _own_fields(self, *, known: bool = True) -> bytes:
        """The gateway's lines of a head; not `known`: how the request will fare."""
        anthropic = self._route.dialect.name == "messages"
        if known:
            fields = own_fields(self.record, anthropic=anthropic, expose_node=self._exposes)
        else:
            fields = first_fields(self.record, anthropic=anthropic)
        cors = self._snapshot.settings.cors
        return (
            fields if cors is None else fields + lines_of(allowed_origin(cors, self._turn.headers))
        )

    def _begun_heartbeat(self, live: Live, preamble: Preamble) -> Heartbeat | None:
        """What shows its client that the request is not forgotten."""
        settings = self._snapshot.settings
        if not live.request.stream:
            if settings.heartbeat and settings.heartbeat_plain:
                return Heartbeat(settings.heartbeat, self._pad)
        elif preamble.progress:
            live.prefill = Prefill()
            return Heartbeat(PROGRESS_EVERY, self._tell_progress)
        elif settings.heartbeat:
            return Heartbeat(settings.heartbeat, self._beat)
        return None

    def _pad(self) -> float:
        """White space, which JSON may begin with."""
        self._show(b" ", b"content-type: application/json; charset=utf-8\r\n")
        return self._snapshot.settings.heartbeat

    def _tell_progress(self) -> float:
        """A heartbeat that says how far the request has come."""
        live, edge, dialect = self._live, self._edge, self._route.dialect
        if self._reply is not None:
            return self._beat()
        assert live is not None
        assert live.prefill is not None
        place = edge.relay.means.scheduler.place(live.request)
        reading = live.prefill.reading(edge.clock()) if place is None else None
        line = progress_line(place, reading)
        beat = dialect.heartbeat() if dialect.pings or not line else b""
        self._show(line + beat, STREAM_LINES)
        return PROGRESS_EVERY

    def _beat(self) -> float:
        """A sign of life, if there was none for so long; seconds until it is time again."""
        rest = None if self._reply is None else self._reply.rest
        interval, now = self._snapshot.settings.heartbeat, self._edge.clock()
        if rest is not None:
            left = max(self._shown, rest.moved) + interval - now
            if left > interval * IN_TIME:
                return left
        if rest is None or rest.waits:
            self._show(self._route.dialect.heartbeat(), STREAM_LINES)
        return interval

    def _show(self, beat: bytes, lines: bytes) -> None:
        """Send a sign of life, and before the first of a reply its head with these lines."""
        turn = self._turn
        self._shown = self._edge.clock()
        if turn.disconnected or turn.lags:
            return  # it has enough that it has not taken
        if turn.response_started:
            turn.write(beat)
        else:
            turn.begin(200, lines + self._own_fields(known=False), beat)
            if self._live is not None:
                self._live.request.begun = True


SAME_MOMENT = 0.01
"""Seconds by which a timer may be early."""

LINGERS = 2.0
"""Seconds past its deadline before an official client is told that its time is over."""

IN_TIME = 0.01
"""Part of its interval by which a sign of life may come before its time."""
