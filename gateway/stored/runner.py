"""Runs one stored request through the `Forwarder` that clients' requests take, without HTTP.

The caller, its limits and its rights are those of now, not those of the time at which the request
was stored. The request's usage comes back with its result, so that both are recorded at once. What
has no result was run in vain: it costs the caller nothing, and is run again under the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Generic, NamedTuple, TypeVar

import structlog

from gateway import errors
from gateway.api.base import RELAYED, Api, ResponseRewriter
from gateway.api.json_values import parse_object
from gateway.api.outcome import to_gateway_error
from gateway.callers.callers import cache_policy_of, owner_of_stored
from gateway.callers.keys import KeyRing
from gateway.callers.ledger import UsageRow
from gateway.callers.limits import Accounts, Reservation
from gateway.callers.meter import Meter
from gateway.config.keys import SHARED_CACHE, CachePolicy, NodeLabels
from gateway.config.settings import Settings
from gateway.errors import CLIENT_CLOSED_STATUS, LIMIT_CODES, GatewayError
from gateway.events import EventBus, RequestRecord
from gateway.forward import client_response
from gateway.forward.client_response import BodyStream, ClientResponse, EventsForClient
from gateway.forward.forwarder import Forwarder
from gateway.forward.header_fields import headers_for_node
from gateway.forward.in_flight import InFlightRegistry, InFlightRequest
from gateway.forward.resume import FirstRun, NotResumable, is_greedy, node_kind
from gateway.lease import AttemptCharge, BatchRoomService, Usage
from gateway.request.body import TimeSlicer, bytes_to_parse
from gateway.request.preparation import (
    IncomingRequest,
    Request,
    RequestRules,
    Sender,
    read_in_turn,
    resolve_model,
)
from gateway.request.routes import ROUTES, Route
from gateway.store.failures import StoreError
from gateway.stored.claims import RowLeases, StoredRow
from gateway.stored.folder import FolderError, StorageTrouble
from gateway.stored.response_events import ResponseEvents, RunEnd
from gateway.terms import Caller, Endpoint, Headers, Priority
from gateway.transport.errors import UpstreamError
from gateway.watch.request_tracing import RequestTracing

# The header fields of a stored request that nodes get.
STORED_HEADERS: Headers = [(b"content-type", b"application/json")]
MOST_RUNS = 3  # runs of a stored request that nodes may fail; then that is its result
SETTLE_SECONDS = 30.0  # most seconds until the usage of a response that has ended is known
TIMER_TOLERANCE = 0.01  # seconds by which a timer may fire early
# Seconds after which a request is offered again, where the error names none.
DEFAULT_RETRY_AFTER = 5.0
AWAY_SECONDS = 2.0  # seconds after which a row whose body could not be read is tried again

# Codes of the gateway's own errors after which a stored request waits and is run again: a limit of
# its caller is reached, there is no room or no node at this time, or an operator has paused the
# model.
_WAITING_CODES = LIMIT_CODES | {
    *("queue_full", "queue_timeout", "no_node", "starting", "shutting_down"),
    "model_paused",
}

# Codes of errors that a deadline brings about.
_LATE_CODES = frozenset({"queue_timeout", "node_timeout"})
_NODES_FAILED = frozenset({"node_failed", "node_timeout"})
log = structlog.get_logger()


class RequestTarget(NamedTuple):
    """What may serve a stored request: the fields of a `WantedNode`."""

    model_names: tuple[str, ...]
    endpoint: Endpoint
    node_labels: NodeLabels


def node_word(id_: str, node: str | None) -> str:
    """A word for a node's name that does not tell it to the owner of the request `id_`."""
    return hashlib.sha256(f"{id_} {node}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run: a response, or an error that is the request's result."""

    status: int
    header_lines: bytes  # the header lines of a node that are meant for the client
    content: bytes  # the body of a plain response or error; empty: the sink has the events
    usage: UsageRow | None  # the row that the ledger is to have; None: the request was not admitted
    record: RequestRecord
    error_code: str | None = None

    @property
    def failed_on_nodes(self) -> bool:
        """Whether nodes failed it: another run may end otherwise, unless many have."""
        return self.error_code in _NODES_FAILED


class RowDeferred(Exception):  # noqa: N818 - not an error: it is run again
    """There is no result. The request waits and is run again; this run cost the caller nothing."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(f"{reason}: again in {seconds:.0f} s")
        self.reason = reason  # the error's code
        self.seconds = seconds  # after which it is worth a try

    @property
    def concerns_owner(self) -> bool:
        """Whether a limit of its caller is reached: its other requests are refused as well."""
        return self.reason in {"rate_limit_exceeded", "insufficient_quota"}


class RowExpired(Exception):  # noqa: N818 - the end of its time
    """Its deadline passed without a result; this run cost the caller nothing."""


@dataclass(slots=True, eq=False)
class RequestRunner:
    """Runs stored requests, many at a time. A reload replaces `settings` and `rules`."""

    settings: Settings
    rules: RequestRules
    key_ring: KeyRing
    meter: Meter
    forwarder: Forwarder
    registry: InFlightRegistry
    bus: EventBus
    time_slicer: TimeSlicer
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    tracing: RequestTracing

    def configure(self, settings: Settings, rules: RequestRules) -> None:
        """Run by these from now on."""
        self.settings, self.rules = settings, rules

    def caller_of(self, owner: str) -> Caller:
        """The owner of stored requests, as its key is now. Raises: GatewayError."""
        allow_anonymous = self.settings.allow_anonymous
        return owner_of_stored(owner, self.key_ring, allow_anonymous=allow_anonymous)

    def target_of(self, owner: str, path: str, model: str | None) -> RequestTarget | None:
        """What may serve a request of this owner now; None: it is refused without a node."""
        route, settings = ROUTES.get(path), self.settings
        if route is None:
            return None
        try:
            caller = self.caller_of(owner)
            labels = cache_policy_of(caller, settings).node_labels
            name, models = resolve_model(model, self.rules, caller, labels)
        except GatewayError as error:
            errors.drop_traceback(error)
            return None
        paused = self.rules.model_aliases.catalog.paused
        names = tuple(one.name for one in models if one.name not in paused)
        if name in paused:
            names = ()  # Without a node for now: its rows wait apart from those of others.
        return RequestTarget(names, route.endpoint, labels)

    def late_priority(self, owner: str) -> Priority:
        """The class to which this owner's requests are raised when their deadline comes near."""
        try:
            return self.meter.book.accounts(self.caller_of(owner), None).caller.late_priority
        except GatewayError as error:
            errors.drop_traceback(error)
            return Priority.BATCH

    def has_begun(self, request_id: str) -> bool:
        """Whether a request in flight has been at a node."""
        found = self.registry.find(request_id) if request_id in self.registry else None
        if found is None:
            return False
        parts = (found.sub_requests or {}).values()
        return any(one.record.attempts > 0 for one in (found, *parts))

    def raise_class(
        self, rooms: BatchRoomService, ids: Collection[str], priority: Priority
    ) -> set[str]:
        """Raise requests that run to a class; returns those that wait for a slot."""
        waiting = rooms.raise_class(set(ids), priority)
        for id_ in ids:
            if id_ in self.registry and (found := self.registry.find(id_)) is not None:
                found.record.classify(min(found.record.priority, priority))
        return waiting

    def recovered_usage(
        self, row: StoredRow, end: RunEnd, tokens: Usage, nodes: Iterable[tuple[str, str]]
    ) -> UsageRow:
        """The ledger's row of a response whose process was killed before it was recorded.

        It counts on its key's limits, too. `nodes`: names and tiers of those that it may have run
        on; others are not named.
        """
        priority = Priority.parse(row.class_) or Priority.NORMAL
        record = RequestRecord(row.id, row.path, row.model or "unknown", priority)
        for name, tier in nodes:
            if node_word(row.id, name) == end.node:
                record.node, record.tier = name, tier
        record.stream, record.attempts = True, end.attempts
        record.count_tokens(tokens.prompt_tokens, tokens.cached_tokens, tokens.completion_tokens)
        record.charge(AttemptCharge(end.cost, end.slot_seconds))
        accounts = None
        try:
            caller = self.caller_of(row.owner)
            accounts = self.meter.book.accounts(caller, row.user)
            record.classify(max(priority, caller.max_priority))
        except GatewayError as error:
            errors.drop_traceback(error)  # Its key is gone; its use was all the same.
        whose, times = (row.owner, row.group_name, row.user), (end.started_at, end.ended_at)
        return self.meter.recovered_row(row.id, whose, times, record, accounts)

    async def run(
        self,
        row: StoredRow,
        body: bytes,
        sink: ResponseEvents | None = None,
        *,
        priority: Priority | None = None,
        on_slot_free: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """The result of a stored request; `sink` gets the events if it asks for a stream.

        `priority`: its class, that of the row if None; lowered to its caller's highest one. The run
        goes on with what the sink has. Cancelling it ends the request. `on_slot_free` is called
        once, when it has left its node: somewhat before its usage is known. Raises: RowDeferred,
        RowExpired.
        """
        if priority is None:
            priority = Priority.parse(row.class_) or Priority.NORMAL
        return await _Run(self, row, priority, sink, on_slot_free).run(body)


@dataclass(slots=True, eq=False)
class _Run:
    runner: RequestRunner
    stored: StoredRow
    priority: Priority
    sink: ResponseEvents | None
    on_slot_free: Callable[[], None]
    _sink_has_events: bool = False
    _resumed: bool = False  # whether it goes on with the response of an earlier run
    _cache: CachePolicy = SHARED_CACHE
    _deadline: float | None = None  # by the monotonic clock
    _reservation: Reservation | None = None  # None: it was not admitted
    _in_flight: InFlightRequest | None = None
    _response: ClientResponse | None = None
    _api: Api = field(init=False)
    """The API of the one who reads the result."""
    _received_at: float = field(init=False)
    _record: RequestRecord = field(init=False)

    def __post_init__(self) -> None:
        runner, stored = self.runner, self.stored
        route = ROUTES.get(stored.path)
        self._api = RELAYED if route is None else route.api
        self._received_at = runner.clock()
        if stored.deadline is not None:
            self._deadline = self._received_at + stored.deadline - runner.wall_clock()
        self._record = RequestRecord(stored.id, stored.path, request_id=stored.id)
        if runner.tracing.active:
            runner.tracing.begin(stored.id, self._record, [], self._received_at)

    async def run(self, body: bytes) -> Outcome:
        """Raises: RowDeferred, RowExpired."""
        runner, record, has_result = self.runner, self._record, False
        try:
            try:
                status, header_lines, content = await self._respond(body)
            except GatewayError as error:
                status, header_lines, content = await self._result(error)
            finally:  # Release everything but what the limits hold.
                if self._response is not None and self._response.body_stream is not None:
                    self._response.body_stream.close()
                if self._in_flight is not None:
                    runner.registry.remove(self._in_flight)
                self.on_slot_free()
            usage = None if self._reservation is None else await self._usage(self._reservation)
            has_result = True
        except asyncio.CancelledError:
            record.fail(CLIENT_CLOSED_STATUS, "cancelled")
            raise
        except (RowDeferred, RowExpired):
            raise
        except Exception:
            record.fail(500, "internal_error")
            raise
        finally:
            if not has_result and self._reservation is not None:
                runner.meter.dropped(self._reservation)
            if has_result or record.attempts:
                if runner.tracing.active:
                    runner.tracing.finished(self.stored.id, record, [], self._received_at)
                runner.bus.publish_deferred(record.finish(self._received_at, runner.clock()))
            elif runner.tracing.active:
                runner.tracing.forget(self.stored.id)
        return Outcome(status, header_lines, content, usage, record, record.reason)

    async def _result(self, error: GatewayError) -> tuple[int, bytes, bytes]:
        """What the error is as a result. Raises: RowDeferred, RowExpired."""
        record, api = self._record, self._api
        errors.drop_traceback(error)
        record.fail(error.status, error.code)
        self._check_waits(error.code, error.retry_after)
        if self.sink is None or not self._sink_has_events:
            content = api.error_body(error, record.x_request_id)
            return error.status, client_response.JSON_HEADER_LINE, content
        await self.sink.write(api.error_event(error, record.x_request_id))
        return error.status, b"", b""

    def _check_waits(self, code: str, retry_after: float | None) -> None:
        """Check that an error of this code is a result. Raises: RowDeferred, RowExpired."""
        if code in _LATE_CODES and self._is_late():
            raise RowExpired
        # What the sink has of a stream can't be taken back, unless it is to go on from there.
        if code in _WAITING_CODES and (not self._sink_has_events or code == "shutting_down"):
            raise RowDeferred(code, DEFAULT_RETRY_AFTER if retry_after is None else retry_after)

    def _is_late(self) -> bool:
        deadline = self._deadline
        return deadline is not None and self.runner.clock() >= deadline - TIMER_TOLERANCE

    # The request.

    async def _respond(self, body: bytes) -> tuple[int, bytes, bytes]:
        """Status, header lines and body. Raises: GatewayError, RowDeferred, RowExpired."""
        if self._is_late():
            raise RowExpired
        runner, stored, record = self.runner, self.stored, self._record
        route, settings = ROUTES.get(stored.path), runner.settings
        if route is None or route.multipart or not route.takes_slot:
            raise errors.not_found(stored.path)
        caller = runner.caller_of(stored.owner)
        user = stored.user if caller.trust_user_headers else None
        accounts = runner.meter.book.accounts(caller, user)
        self._cache = cache_policy_of(accounts.caller, settings)
        record.identify(caller.id)
        request = await self._read(route, accounts, body)
        if request.stream and self.sink is None:
            raise errors.invalid_request(
                "'stream' is not possible here: the response is kept whole.", "stream"
            )
        self._reservation = runner.meter.admit_stored(
            accounts, request.lease_request, request.prompts
        )
        in_flight = self._in_flight = InFlightRequest(request, record)
        runner.registry.add(in_flight)
        response = self._response = await self._forward(in_flight)
        rewriter = None
        if self._api.rewrites_responses or self._cache.hide:
            response, rewriter = client_response.for_client(
                request, response, self._api, settings, hides_cache=self._cache.hide
            )
        self._response = response
        stream = response.body_stream
        if self.sink is not None and (self._resumed if stream is None else stream.is_sse):
            await self._pass_events(response.content, stream, rewriter, self.sink)
            return record.status, response.header_lines, b""
        content, header_lines = await self._read_whole(response), response.header_lines
        if response.status >= 400:
            record.fail(
                response.status, record.reason or client_response.node_error_code(response.status)
            )
            content = client_response.node_error_body(response, self._api, record.x_request_id)
            if content is not response.content:
                header_lines = client_response.JSON_HEADER_LINE
        elif rewriter is not None:
            work = client_response.rewrite_in_steps(rewriter, content)
            content = await runner.time_slicer.run(work)
        return response.status, header_lines, content

    async def _forward(self, in_flight: InFlightRequest) -> ClientResponse:
        """The response of a node, or the rest of the one that the sink has.

        Raises: GatewayError.
        """
        forwarder, sink = self.runner.forwarder, self.sink
        if sink is None:
            return await forwarder.forward(in_flight)
        sink.measured_by(self._measure)
        if (begun := sink.begun) is not None:
            try:
                response = await forwarder.resume(in_flight, *begun)
            except NotResumable as failure:
                errors.drop_traceback(failure)
                body = next(iter(in_flight.request.bodies.values()))
                greedy = is_greedy(parse_object(bytes_to_parse(body)))
                await sink.run_anew(f"{failure}", greedy=greedy)
            else:
                self._resumed = True
                return response
        response = await forwarder.forward(in_flight)
        if response.node is not None and response.status < 300 and in_flight.attempt is not None:
            lease = in_flight.attempt.lease
            sink.runs_on(FirstRun(lease.model, node_kind(response.node.resume_key)))
        return response

    def _measure(self, prompt: int, completion: int) -> RunEnd:
        runner, record, id_ = self.runner, self._record, self.stored.id
        reservation = self._reservation
        assert reservation is not None
        cost = runner.meter.cost_so_far(id_, record.node, prompt, completion)
        started_at, now = reservation.admitted_at, runner.wall_clock()
        return RunEnd(started_at, now, node_word(id_, record.node), record.attempts, *cost)

    async def _read(self, route: Route, accounts: Accounts, body: bytes) -> Request:
        """The request that the body describes. Raises: GatewayError."""
        runner, stored, record, caller = self.runner, self.stored, self._record, accounts.caller
        if len(body) > runner.rules.limits.body_bytes:
            raise errors.body_too_large(runner.rules.limits.body_bytes)
        seconds = None if self._deadline is None else self._deadline - self._received_at
        sender = Sender(
            accounts,
            headers_for_node(STORED_HEADERS, runner.settings.headers.to_nodes),
            caller.id if accounts.user is None else f"{caller.id}/{accounts.user}",
            client_timeout=seconds,
            plain_client_timeout=seconds,
            cache=self._cache,
            # Of class `batch`, one of a higher class that would have to wait may have its slot.
            patient=True,
        )
        incoming = IncomingRequest(
            stored.id, record.x_request_id, route, body, sender, self._received_at
        )
        priority = max(self.priority, caller.max_priority)
        return await read_in_turn(
            incoming, record, runner.rules, lambda _: priority, runner.time_slicer
        )

    # The response.

    async def _pass_events(
        self,
        first: bytes,
        stream: BodyStream | None,
        rewriter: ResponseRewriter | None,
        sink: ResponseEvents,
    ) -> None:
        """Give the sink all events. Raises: RowDeferred."""
        record = self._record
        events = None if rewriter is None else EventsForClient(rewriter, self._api, record)
        chunk: bytes | None = first
        while chunk:
            if record.status >= 400 and record.reason is not None:
                # The chunk is the error event.
                self._check_waits(record.reason, None)
            data = chunk if events is None else events.rewrite(chunk)
            if data:
                await sink.write(data)
                self._sink_has_events = True
            chunk = b"" if stream is None else await stream.next_chunk()

    async def _read_whole(self, response: ClientResponse) -> bytes:
        """The body of a plain response. Raises: GatewayError 502, 504."""
        try:
            return await response.whole_content(self.runner.settings.limits.response_bytes)
        except UpstreamError as failure:
            errors.drop_traceback(failure)
            raise to_gateway_error(failure) from None

    # The end.

    async def _usage(self, reservation: Reservation) -> UsageRow:
        """What the request has used, once that is known. Raises: RowDeferred."""
        known: asyncio.Future[UsageRow] = asyncio.get_running_loop().create_future()

        def deliver(row: UsageRow) -> None:
            if not known.done():
                known.set_result(row)

        self.runner.meter.ended_stored(reservation, self._record, deliver)
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                return await known
        except TimeoutError:
            raise RowDeferred("unsettled", DEFAULT_RETRY_AFTER) from None


# Claimed rows and their runs.


@dataclass(slots=True, eq=False)
class HeldRow:
    """A row that this process has claimed, and the task that runs it."""

    row: StoredRow
    task: asyncio.Task[None] | None = field(default=None, kw_only=True)
    recording: bool = field(default=False, kw_only=True)

    def has_result(self) -> bool:
        """Whether it has a result, which is being recorded."""
        return self.recording


H = TypeVar("H", bound=HeldRow)


class RunFailed(Exception):  # noqa: N818 - it is tried again
    """Nodes have failed this run, and another one may go better."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds  # after which it is run again


@dataclass(eq=False)
class RowRuns(Generic[H]):
    """Runs claimed rows, each until its result is recorded or it waits again.

    What is claimed, and when a row begins, is for the feeder of batches and the runner of
    background requests to say. A row is held from its claim to its end. Meanwhile its lease is
    renewed; a process that dies gives it up, and another one runs the row.
    """

    retry_seconds: ClassVar[float]  # until a run is repeated that failed for a reason of our own
    failed_event: ClassVar[str]  # what the log tells of it
    leases: RowLeases
    runner: RequestRunner
    rooms: BatchRoomService
    _trouble: StorageTrouble = field(init=False)
    _held: dict[str, H] = field(init=False, default_factory=dict)
    _none_held: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def now(self) -> float:
        """Unix time."""
        return self.leases.storage.now()

    async def ended(self) -> None:
        """Wait until no row is held any more; none must be claimed."""
        while self._held:
            self._none_held.clear()
            await self._none_held.wait()

    def _begin(self, held: H) -> None:
        held.task = asyncio.create_task(self._run_to_end(held), name="run a stored request")
        held.task.add_done_callback(partial(self._done, held))

    def _done(self, held: H, task: asyncio.Task[None]) -> None:
        """Let a row wait again whose task was cancelled before it had begun."""
        if held.task is task and self._held.get(held.row.id) is held:
            self.leases.put_back([held.row.id], self.now())
            self._let_go(held)

    async def _run_to_end(self, held: H) -> None:
        """Run a row until its result is recorded, or let it wait again."""
        id_ = held.row.id
        try:
            try:
                await self._run(held, await self._body(held.row))
            except asyncio.CancelledError:
                await self._cancelled(held)
                raise
        except RowDeferred as deferred:
            self.leases.put_back([id_], self.now() + deferred.seconds)
        except RunFailed as failed:
            self.leases.put_back([id_], self.now() + failed.seconds, failed=True)
        except Exception:
            log.exception(self.failed_event, request=id_)
            self.leases.put_back([id_], self.now() + self.retry_seconds, failed=True)
        finally:
            self._let_go(held)

    async def _body(self, row: StoredRow) -> bytes | None:
        """The body of a row; None: its file is gone. Raises: RowDeferred, if it can't be read."""
        storage, where = self.leases.storage, (row.place, row.offset, row.length)
        try:
            body = await storage.threads.run(storage.folder.read, *where)
        except FileNotFoundError:
            body = None
        except FolderError as error:
            self._trouble.tell(error, "bodies")
            raise RowDeferred(str(error), AWAY_SECONDS) from None
        self._trouble.over("bodies")
        return body

    async def _run(self, held: H, body: bytes | None) -> None:
        """Run a row and record its result; `body`: None: its file is gone.

        Raises: RowDeferred, RunFailed.
        """
        raise NotImplementedError

    async def _cancelled(self, held: H) -> None:
        """The run was cancelled: the row waits again, unless it has a result, which is recorded."""
        if not held.has_result():
            self.leases.put_back([held.row.id], self.now())

    def _let_go(self, held: H) -> None:
        self._forget(held)

    def _forget(self, held: H) -> None:
        self._held.pop(held.row.id, None)
        if not self._held:
            self._none_held.set()

    async def _renew(self) -> int:
        """Renew the leases, end rows that are not wanted, and let those of lost processes wait.

        Returns how many the last are. Raises: StoreError, FolderError.
        """
        if ids := set(self._held):
            # First: the store may have been away for longer than a lease.
            await self._drop_unwanted(ids - await self.leases.renew(ids))
        return await self.leases.release_lost()

    async def _drop_unwanted(self, ids: set[str]) -> None:
        """End rows that were cancelled, or taken by another process."""
        raise NotImplementedError

    async def _close(self, seconds: float, *, until_recorded: bool) -> int:
        """End what runs, and let it wait again; returns how many runs do not end.

        `until_recorded`: what has a result is recorded here, else somebody else does it. Each of
        the steps takes so many seconds at most.
        """
        tasks = {held.task: held.has_result() for held in self._held.values() if held.task}
        for task, has_result in tasks.items():
            if not has_result:
                task.cancel()
        waited = [task for task, has_result in tasks.items() if until_recorded or not has_result]
        if waited:
            await asyncio.wait(waited, timeout=seconds)
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=seconds)
        # A row whose run does not end keeps its claim: there must not be a second writer.
        running = sum(not task.done() for task in tasks)
        with contextlib.suppress(StoreError, FolderError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self.leases.write()
        return running
