"""`/admin/requests`: requests in flight, without their text; ending one; why one went where.

The numbers of `{id}/why` are the scheduler's own, from its decision log and, for a request that
waits, from the queue as it is now. The sentences are made of these figures.

`GET /admin/timeline` tells what each slot has done in the last ten minutes, for a picture of it. It
is read from the decision log, which remembers each lease anyway: a request pays nothing for it. Of
a fleet with more than `MOST_LANES` slots it tells a sample of the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.guard import identity_of
from gateway.admin.nodes import pool_json
from gateway.callers.ended import EndedFinder, EndedRow
from gateway.callers.keys import AdminRole
from gateway.callers.processes import LOST
from gateway.callers.windows import time_text
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError, truncate_echo
from gateway.events import RequestRecord
from gateway.forward.in_flight import InFlightRegistry, InFlightRequest
from gateway.lease import QueuePosition
from gateway.nodes.node import Node
from gateway.schedule.admission import Waiter
from gateway.schedule.candidates import FAILURE_PENALTY, SAME_HOST_PENALTY, TRIAL_BONUS
from gateway.schedule.core.requests import MOST_COMPARED_ROWS, Comparison, RowFigures
from gateway.schedule.core.selection import cost_of_figures, uncached_tokens
from gateway.schedule.core.wait_queue import prospects
from gateway.schedule.decision_log import MOST_GRANTS, Decision, Grant, Queueing, RememberedRequest
from gateway.schedule.model_placer import model_key
from gateway.schedule.scheduler import Scheduler
from gateway.store.failures import StoreError
from gateway.watch.history import FleetHistory
from gateway.web.asgi import JsonResponse, number_parameter


@dataclass(frozen=True, slots=True)
class RequestEndpoints:
    """The endpoints of requests: those in flight, and why one went where it went."""

    registry: InFlightRegistry
    scheduler: Scheduler
    history: FleetHistory
    wall_clock: Callable[[], float]  # seconds since 1970
    ended: EndedFinder | None  # None: there is no store
    name_of: Callable[[str], str | None]  # the name of the key with this id

    async def show(self, _: Request) -> Response:
        """All requests, queued and running, the oldest first."""
        queued = {place.request_id: place for place in self.scheduler.queue_positions()}
        requests = [self._object(one, queued.get(one.request.id)) for one in self.registry]
        return JsonResponse({"requests": requests})

    def _object(self, in_flight: InFlightRequest, place: QueuePosition | None) -> RequestObject:
        """The request as it is now; `place` in the queue is None if it runs."""
        request, record = in_flight.request, in_flight.record
        asked, scheduler = request.lease_request, self.scheduler
        queued = record.queue_seconds + (0.0 if place is None else place.waited_seconds)
        return RequestObject(
            id=request.id,
            request_id=request.x_request_id,
            path=request.path,
            class_=asked.caller.priority.label,
            model=asked.wanted.model,
            caller=asked.caller.id,
            caller_name=self.name_of(asked.caller.id),
            state="running" if place is None else "waiting",
            position=None if place is None else place.position,
            expected_start=None if place is None else _if_known(place.expected_seconds),
            node=record.node,
            attempts=record.attempts,
            slots=asked.size.slots,
            stream=request.stream,
            seconds=round(scheduler.clock() - request.received_at, 3),
            queue_seconds=round(queued, 3),
            prompt_tokens_estimate=scheduler.demand_model.expected_prompt_tokens(asked),
        )

    async def cancel(self, request: Request) -> Response:
        """Cancel a request by its id, or by its `X-Request-ID` if no other request has the same."""
        name = request.path_params["id"]
        in_flight = self.registry.find(name)
        if in_flight is None:
            raise GatewayError(
                404,
                "request_not_found",
                f"No request '{truncate_echo(name)}' waits or runs, or several have this "
                "X-Request-ID. GET /admin/requests lists them.",
                param="id",
            )
        request_id, x_request_id = in_flight.request.id, in_flight.request.x_request_id
        if not self.scheduler.refuse(request_id, cancelled_by_operator()):
            in_flight.cancel(cancelled_by_operator())
        return JsonResponse({"id": request_id, "request_id": x_request_id, "cancelled": True})

    async def why(self, request: Request) -> Response:
        name = request.path_params["id"]
        log = self.scheduler.decision_log
        found = self._matches(name)
        remembered = log.find(found)
        since = self._time(log.reaches_back_to())
        explained = [self._explained(id_, *of, remembered[id_]) for id_, of in found.items()]
        if not found:
            explained, unread = await self._recorded(name)
            if not explained:
                raise GatewayError(
                    404,
                    "request_not_found",
                    f"No request '{truncate_echo(name)}' is remembered{unread}. Ask for the id in "
                    "the log or for the response's X-Request-ID. The last "
                    f"{MOST_GRANTS} decisions are kept, now those since {since}; the log reaches "
                    "further back.",
                    param="id",
                )
        return JsonResponse(
            WhyObject(id=truncate_echo(name), remembered_since=since, requests=explained)
        )

    async def _recorded(self, name: str) -> tuple[list[ExplainedRequest], str]:
        """What the ledger has of the requests of this name, and why it can't be read."""
        if self.ended is None:
            return [], ", and the gateway has no store (store.url: off)"
        try:
            return [*map(_explained_row, await self.ended.named(name))], ", nor in the ledger"
        except StoreError as error:
            return [], f", and the store can't be read: {error}"

    def _matches(self, name: str) -> dict[str, tuple[RequestRecord | None, float | None]]:
        """The one of this own id, then the newest first: those in flight, those that have ended.

        By id: the record (None: only the scheduler remembers it), and the end (None: it waits or
        runs). A client may send the gateway's own id of another request as its `X-Request-ID`.
        """
        matches: dict[str, tuple[RequestRecord | None, float | None]] = {}
        for in_flight in reversed([*self.registry]):
            request = in_flight.request
            if name in {request.id, request.x_request_id}:
                matches[request.id] = in_flight.record, None
        for record in self.history.find(name):
            matches.setdefault(record.request_id, (record, record.ended_at))
        if not matches and (known := self.scheduler.decision_log.find([name])[name].decisions):
            last = known[-1]
            matches[name] = None, last.ended_at if isinstance(last, Grant) else last.at
        newest = sorted(matches.items(), key=lambda one: (one[0] != name, -(one[1][1] or math.inf)))
        return dict(newest[:MOST_MATCHES])

    def _explained(
        self,
        id_: str,
        record: RequestRecord | None,
        ended_at: float | None,
        remembered: RememberedRequest,
    ) -> ExplainedRequest:
        now, decisions = self.scheduler.clock(), remembered.decisions
        waiter = self.scheduler.waiters.by_request_id(id_)
        received_at = decisions[0].received_at if decisions else None
        state, outcome = "running" if ended_at is None else "finished", None
        if record is not None and ended_at is not None:
            received_at = ended_at - record.duration_seconds
            state = _state_of(record.status, record.attempts)
            seconds = record.queue_seconds, record.ttft, record.duration_seconds
            outcome = _outcome(record, record.reason, seconds)
        explained = ExplainedRequest(
            id=id_,
            request_id=id_ if record is None else record.x_request_id,
            state=state if waiter is None else "waiting",
            path=None if record is None else record.path,
            class_=None if record is None else record.priority.label,
            model=None if record is None else record.model,
            caller=None if record is None else record.caller,
            caller_name=None if record is None else self.name_of(record.caller),
            received_at=None if received_at is None else self._time(received_at),
            seconds=None
            if received_at is None
            else round((now if ended_at is None else ended_at) - received_at, 3),
            outcome=outcome,
            waiting=None if waiter is None else self._waiting(waiter, now),
            decisions=[*self._decisions(decisions, now)],
            parts=sorted(remembered.parts)[:MOST_PARTS],
        )
        explained.summary = _of_request(explained)
        return explained

    def _decisions(self, decisions: list[Decision], now: float) -> Iterator[ToldDecision]:
        attempt = 0
        for index, one in enumerate(decisions):
            attempt += isinstance(one, Grant)
            if index < len(decisions) - MOST_DECISIONS:
                continue
            at, seconds = self._time(one.at), round(one.at - one.received_at, 3)
            after = decisions[index + 1] if index + 1 < len(decisions) else None
            if isinstance(one, Grant):
                yield _told_grant(one, at, seconds, attempt, now)
            elif isinstance(one, Queueing):
                later = now if after is None else after.at
                load = self._load_before(after, one.at) if isinstance(after, Grant) else None
                yield _told_queueing(one, at, seconds, later, load)
            else:
                # Messages are not kept over a restart.
                more = f": {one.message}" if one.message else "."
                yield ToldRefusal(
                    kind="refused",
                    at=at,
                    seconds=seconds,
                    summary=f"It was refused with {one.status} {one.code}{more}",
                    status=one.status,
                    code=one.code,
                    message=one.message,
                )

    def _load_before(self, grant: Grant, queued_at: float) -> Json | None:
        """The load that a queued request waited for on its node; None: there was none."""
        name = "" if grant.comparison is None else grant.comparison.chosen.name
        nodes = self.scheduler.fleet.nodes
        node = nodes.get(name)
        if node is None or node.router is None:
            return None
        loads = [(at, f"{one.node}/{one.model}", one) for at, one in self.history.loads]
        loads = [load for load in loads if load[0] <= grant.at]
        own = [(at, one.seconds) for at, of, one in loads if of == name and one.change == "loaded"]
        at, took = own[-1] if own else (-math.inf, None)
        if at < queued_at or took is None:
            return None
        unloaded = [
            of
            for when, of, one in loads
            if at - took - LONGEST_UNLOAD <= when <= at and one.change == "unloaded"
            if one.reason.startswith(f"{model_key(node)} needs its memory")
            if of in nodes and nodes[of].host == node.host
        ]
        waited = at - max(queued_at, at - took)
        return {
            "node": name,
            "seconds": round(took, 3),
            "waited": round(waited, 3),
            "unloaded": unloaded,
        }

    def _waiting(self, waiter: Waiter, now: float) -> Json:
        """The place of a request in the queue now, and the nodes that it waits for."""
        queued = waiter.queued
        needed = queued.tokens_needed
        place = self.scheduler.queue_position(waiter.request.id)
        found = prospects(queued, now)
        nodes, deferred_to = self.scheduler.fleet_sync.nodes, queued.deferred_to
        return {
            "position": None if place is None else place.position,
            "expected_start": None if place is None else _if_known(place.expected_seconds),
            "waited": round(now - waiter.queued_at, 3),
            "expires_in": round(max(0.0, waiter.expires_at - now), 3),
            "deferred_to": None if deferred_to is None else deferred_to.name,
            "tokens_needed": None if math.isinf(needed) else round(needed),
            "nodes_alive": len(found),
            "nodes": [
                {
                    "name": row.name,
                    "state": nodes[row.index].state.value if row.index in nodes else "removed",
                    "load": _load_json(nodes.get(row.index), now),
                    "slots_busy": row.busy,
                    "slots_total": row.total,
                    "pool": pool_json(row),
                    "free_in": _if_known(wait),
                    "cached_tokens": round(queued.cached.get(row.index, 0.0)),
                    "expected_seconds": _if_known(cost),
                }
                for row, wait, cost in found[:MOST_COMPARED_ROWS]
            ],
        }

    async def timeline(self, request: Request) -> Response:
        """Attempts that run and that have ended lately; callers are named for operators alone."""
        after = number_parameter(request, "after", 0.0, math.inf, "a Unix time")
        shows_callers = identity_of(request).role >= AdminRole.OPERATOR
        return JsonResponse(self.read_timeline(after or 0.0, shows_callers=shows_callers))

    def read_timeline(self, after: float, *, shows_callers: bool) -> TimelineObject:
        """What runs, and what has ended after this Unix time and within the last ten minutes."""
        scheduler, at = self.scheduler, self.wall_clock()
        log, shift = scheduler.decision_log, at - scheduler.clock()
        earliest = max(after, at - TIMELINE_SECONDS) - shift
        # Those that run, and those that have ended since, each with its node.
        running = [one for one in scheduler.records.values() if one.grant.ended_at is None]
        attempts: list[tuple[Grant, str | None]] = [(one.grant, one.node.name) for one in running]
        ended = [one for one in log.grants if one.ended_at is not None and one.ended_at > earliest]
        attempts += [(one, one.ran_on) for one in ended]
        # A router's slots are those of its models.
        slots = {
            node.name: node.slots_now
            for node in scheduler.fleet.nodes.values()
            if not node.is_router and node.slots_now
        }
        lanes = sample_of(slots)

        def unix(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds + shift, 2)

        spans = [
            SlotSpan(
                request=grant.request_id,
                lease=grant.lease_id,
                node=node,
                slots=grant.slots,
                caller=grant.caller if shows_callers else None,
                caller_name=self.name_of(grant.caller) if shows_callers else None,
                model=grant.model,
                begin=round(grant.at + shift, 2),
                writes=unix(grant.first_content_at),
                end=unix(grant.ended_at),
                outcome=grant.outcome,
                resumes=grant.resumes,
            )
            for grant, node in attempts
            if node is not None and node in lanes and grant.slots
        ]
        return TimelineObject(
            round(at, 2),
            round(max(log.reaches_back_to() + shift, at - TIMELINE_SECONDS), 2),
            sum(slots.values()),
            lanes,
            list(SlotSpan._fields),
            spans,
        )

    def _time(self, at: float) -> str:
        """A monotonic time as people and programs read it."""
        seconds = self.wall_clock() - (self.scheduler.clock() - at)
        return time_text(seconds, "milliseconds")


class RequestObject(msgspec.Struct, kw_only=True, rename={"class_": "class"}):
    """A request as the admin API shows it. Times are in seconds, sizes in tokens."""

    id: Annotated[str, "inside the gateway"]
    request_id: Annotated[str, "`X-Request-ID`"]
    path: Annotated[str, "asked for"]
    class_: Annotated[str, "in force"]
    model: Annotated[str | None, "its public name"]
    caller: Annotated[str, "the key's id, or the address of one without a key"]
    caller_name: Annotated[str | None, "the key's name"]
    state: Annotated[str, "`waiting` or `running`"]
    position: Annotated[int | None, "in the queue"]
    expected_start: Annotated[float | None, "seconds from now"]
    node: Annotated[str | None, "where it runs or ran last"]
    attempts: Annotated[int, "nodes tried"]
    slots: Annotated[int, "that it takes"]
    stream: Annotated[bool, "asked for"]
    seconds: Annotated[float, "since it came"]
    queue_seconds: Annotated[float, "of these in the queue"]
    prompt_tokens_estimate: Annotated[int, "tokens of its prompt"]


def cancelled_by_operator() -> GatewayError:
    """503: an operator has cancelled the request; clients should not retry by themselves."""
    return GatewayError(
        503,
        "cancelled",
        "An operator of the gateway has cancelled this request.",
        retry_after=5.0,
        retryable=False,
    )


MOST_MATCHES = 20  # requests of one `X-Request-ID` that are explained
MOST_DECISIONS = 50  # decisions about one request that are told, the newest
LONGEST_UNLOAD = 60.0  # seconds before a load in which others were unloaded for it
MOST_PARTS = 100  # parts of a request of several prompts that are named
Json = dict[str, Any]


class WhyObject(msgspec.Struct, kw_only=True):
    """Why the requests of an id went where they went. Times are in seconds, sizes in tokens."""

    id: Annotated[str, "as it was asked for"]
    remembered_since: Annotated[str, "since when every attempt is remembered, UTC"]
    requests: Annotated[list[ExplainedRequest], "those of this id or `X-Request-ID`, the newest "
        "first, 20 at most"]  # fmt: skip


class ExplainedRequest(msgspec.Struct, kw_only=True, rename={"class_": "class", "from_": "from"}):
    """A request of that id, with the decisions about it."""

    id: Annotated[str, "inside the gateway"]
    request_id: Annotated[str, "`X-Request-ID`"]
    state: Annotated[str, "`waiting`, `running`, `finished`, `failed` (on its nodes), `refused` "
        "(it was at none) or `left` (by its client)"]  # fmt: skip
    summary: Annotated[str, "the whole story in some sentences, for people"] = ""
    path: Annotated[str | None, "asked for; like the next three null once only the scheduler "
        "remembers it"]  # fmt: skip
    class_: Annotated[str | None, "in force"]
    model: Annotated[str | None, "its public name"]
    caller: Annotated[str | None, "the key's id, or the address of one without a key"]
    caller_name: Annotated[str | None, "the key's name"]
    received_at: Annotated[str | None, "when it came, UTC"]
    seconds: Annotated[float | None, "from then to its end, or until now"]
    outcome: Annotated[dict[str, Any] | None, "once it has ended: `status`, `reason`, `node`, "
        "`tier`, `attempts`, `queue_seconds`, `ttft`, `seconds`, `prompt_tokens`, "
        "`cached_tokens`, `completion_tokens`, `cost`"]  # fmt: skip
    waiting: Annotated[dict[str, Any] | None, "while it waits: `position`, `expected_start`, "
        "`waited`, `expires_in`, `deferred_to` (the busy node that has its prompt cached), "
        "`tokens_needed` (in a pool that slots share; null: it is to run alone there), "
        "`nodes_alive`, and in `nodes` the best 8 of them: `name`, `state`, `slots_busy`, "
        "`slots_total`, `pool` (as a node has it), `free_in` (seconds until it has room, were it "
        "alone), `cached_tokens`, `expected_seconds` (that wait included), and `load` where its "
        "model is not loaded: `seconds` since that is so, `expected` of a load, `progress`, "
        "`reason`"]  # fmt: skip
    decisions: Annotated[list[ToldDecision], "about it, the oldest first, [below](#a-decision)"]
    parts: Annotated[list[str], "of a request of several prompts: the ids that they ran under"]
    from_: Annotated[str, "`memory`; or `ledger`: the decisions about it are no longer remembered, "
        "and its row tells the rest"] = "memory"  # fmt: skip
    row: Annotated[dict[str, Any] | None, "from the ledger: as in `GET /admin/requests/ended`"] = (
        None
    )
    unknown: Annotated[list[str], "from the ledger: what is no longer known, in words"] = []


class ToldDecision(msgspec.Struct, kw_only=True):
    """What every decision of the scheduler has."""

    kind: Annotated[str, "`granted` (an attempt on a node), `queued` or `refused`"]
    at: Annotated[str, "when, UTC"]
    seconds: Annotated[float, "after it came"]
    summary: Annotated[str, "in words"] = ""


class ToldQueueing(ToldDecision, kw_only=True, rename={"class_": "class"}):
    """No node had room: the request was queued."""

    ahead: Annotated[int | None, "`queued`: about how many went before it"]
    waiting: Annotated[int, "`queued`: how many others waited"]
    predicted_wait: Annotated[float | None, "`queued`: seconds, as predicted then; null: nothing "
        "measured"]  # fmt: skip
    may_wait: Annotated[float, "`queued`: seconds, at most"]
    waited: Annotated[float, "`queued`: seconds until the next decision, or until now"]
    class_: Annotated[str, "`queued`: in force"]
    load: Annotated[dict[str, Any] | None, "`queued`: the load of its model that it waited for: "
        "`node`, `seconds` it took, `waited` of them, and what was `unloaded` for it"]  # fmt: skip


class ToldRefusal(ToldDecision, kw_only=True):
    """The request was refused."""

    status: Annotated[int, "`refused`: as its client got it, or would have without a heartbeat"]
    code: Annotated[str, "`refused`: likewise"]
    message: Annotated[str, "`refused`: likewise"]


class ToldGrant(ToldDecision, kw_only=True):
    """A lease that was granted: what its node was compared with, predicted and actual figures."""

    attempt: Annotated[int, "`granted`, like all that follow: 1, 2, …"]
    node: Annotated[str | None, "the chosen one"]
    model: Annotated[str, "the name for which it was granted"]
    tier: Annotated[str, "`cpu` or `gpu`"]
    fallback: Annotated[str | None, "why it is not the tier of its class (`X-Gateway-Fallback`)"]
    slots: Annotated[int, "that it takes"]
    resumes: Annotated[bool, "whether it goes on with a response that another node began"]
    yielded: Annotated[int, "how often it had given up its slot to a higher class"]
    failed_nodes: Annotated[list[str], "nodes that had failed it"]
    excluded_nodes: Annotated[list[str], "nodes that had refused it for good"]
    deferral: Annotated[dict[str, Any] | None, "if it waited for a busy node while another was "
        "free: `node`, `wait`, `expected_seconds` with that wait, `expected_seconds_at_once` "
        "elsewhere, `cached_tokens`"]  # fmt: skip
    by_cost: Annotated[bool, "whether the setting `policy` compares costs"]
    nodes: Annotated[list[ComparedNode], "the best 8 that had room, the least cost first, "
        "[below](#a-node-that-was-considered)"]  # fmt: skip
    not_listed: Annotated[dict[str, int], "how many nodes are not listed, by the reason: `slower` "
        "(had room and cost more), `full` (no free slot, or kept for others), a node state, "
        "`paused` (asked for less work), `failed`, `excluded` (context or slots too small, or "
        "refused it), `not_candidates` (serve another model or endpoint, are of another pool, or "
        "of a tier that was closed to it)"]  # fmt: skip
    predicted: Annotated[dict[str, Any], "`ttft` and `seconds` from the grant on, `prompt_tokens`, "
        "`cached_tokens`, `completion_tokens`"]  # fmt: skip
    actual: Annotated[dict[str, Any], "likewise, as it came, null where it is not known (yet); "
        "`outcome` of the attempt, null while it runs, its `status`, and whether the node "
        "`reported` the tokens"]  # fmt: skip


class ComparedNode(msgspec.Struct, kw_only=True):
    """A node that had room, with its cost and the terms that add up to it (`selection.py`)."""

    name: Annotated[str, "of the node"]
    chosen: Annotated[bool, "whether it was"]
    measured: Annotated[bool, "whether it had shown its speed; else its figures are guesses"]
    expected_seconds: Annotated[float, "its cost: the request's time there and the time that it "
        "takes from others; the sum of `terms`"]  # fmt: skip
    terms: Annotated[dict[str, float], "`queue` (prompts that it had to read first), `reading` "
        "(what was not cached), `writing` (alone), `neighbours` (what they and this request cost "
        "each other), `doubt` (failures, a trial; negative for the session's last node), in "
        "seconds"]  # fmt: skip
    slowed_by_neighbours: Annotated[float, "part of `neighbours`: this request's own loss"]
    holds_up_neighbours: Annotated[float, "the other part: theirs"]
    doubts: Annotated[list[str], "why `doubt` is not 0, in words"]
    cached_tokens: Annotated[int, "of its prompt, believed to be in the node's cache"]
    cached_saves: Annotated[float, "seconds of reading that these save"]
    prefill_tps: Annotated[float, "tokens/s of prefill, as expected"]
    decode_tps: Annotated[float, "tokens/s of decode, as expected of one request alone"]
    slots_busy: Annotated[int, "neighbours, before this request came"]
    slots_total: Annotated[int, "its slots"]
    pool_tokens: Annotated[int, "tokens of the pool that its slots share; 0: they share none"]
    pool_used: Annotated[int, "of these reserved or in use, before this request came"]


# What the ledger's row does not tell of a request.
_FORGOTTEN = (
    "the nodes that were compared, and what each was expected to take",
    "its place in the queue, and what it waited for",
    "the attempts before the last one",
    "what was predicted",
)


def _explained_row(row: EndedRow) -> ExplainedRequest:
    """A request of which only the ledger's row is left."""
    unknown = list(_FORGOTTEN)
    if row.wait_seconds is None:
        unknown.append("how long it waited, and when its first token came")
    elif row.prefill_seconds is None and row.attempts:
        unknown.append("how long its node read and wrote")
    lost = row.outcome == LOST
    return ExplainedRequest(
        id=row.id,
        request_id=row.client_request_id or row.id,
        state="failed" if lost else _state_of(row.status, row.attempts),
        summary=_of_row(row),
        path=row.path,
        class_=row.class_,
        model=row.model,
        caller=row.key,
        caller_name=row.key_name,
        received_at=row.started_at,
        seconds=row.seconds,
        outcome=_outcome(
            row,
            None if row.outcome == "ok" else row.outcome,
            (row.wait_seconds, row.ttft_seconds, row.seconds),
        ),
        waiting=None,
        decisions=[],
        parts=[],
        from_="ledger",
        row=msgspec.to_builtins(row),
        unknown=unknown,
    )


def _state_of(status: int, attempts: int) -> str:
    """How a request ended."""
    if status == CLIENT_CLOSED_STATUS:
        return "left"
    if status >= 400:
        return "failed" if attempts else "refused"
    return "finished"


def _outcome(
    ended: RequestRecord | EndedRow, reason: str | None, seconds: Sequence[float | None]
) -> Json:
    """What came of a request; `seconds` in the queue, to the first token, and to its end."""
    queued, ttft, lasted = map(_if_known, seconds)
    return {
        "status": ended.status,
        "reason": reason,
        "node": ended.node,
        "tier": ended.tier,
        "attempts": ended.attempts,
        "queue_seconds": queued,
        "ttft": ttft,
        "seconds": lasted,
        "prompt_tokens": ended.prompt_tokens,
        "cached_tokens": ended.cached_tokens,
        "completion_tokens": ended.completion_tokens,
        "cost": round(ended.cost, 6),
    }


def _told_queueing(
    queueing: Queueing, at: str, seconds: float, later: float, load: Json | None
) -> ToldQueueing:
    waited, predicted = round(later - queueing.at, 3), _if_known(queueing.predicted_wait)
    text = "No node had room for it: it was queued"
    if queueing.ahead is not None:
        text += f" behind {queueing.ahead} of its class or above"
    text += "" if predicted is None else f", with {_seconds(predicted)} to wait as predicted"
    return ToldQueueing(
        kind="queued",
        at=at,
        seconds=seconds,
        summary=f"{text}; it waited {_seconds(waited)}.",
        class_=queueing.priority.label,
        ahead=queueing.ahead,
        waiting=queueing.waiting,
        predicted_wait=predicted,
        may_wait=round(queueing.expires_at - queueing.at, 3),
        waited=waited,
        load=load,
    )


def _told_grant(grant: Grant, at: str, seconds: float, attempt: int, now: float) -> ToldGrant:
    comparison, tried, deferral = grant.comparison, grant.tried, grant.deferral
    prompt, completion = grant.prompt_tokens, grant.completion_tokens
    cached, compared = 0.0, list[ComparedNode]()
    if comparison is not None:
        cached = min(comparison.cached_on_chosen, prompt)
        for row in (comparison.chosen, *comparison.others):
            compared.append(_compare(comparison, row, prompt, completion))
    told = ToldGrant(
        kind="granted",
        at=at,
        seconds=seconds,
        attempt=attempt,
        node=grant.ran_on,
        model=grant.model,
        tier=grant.tier,
        fallback=grant.fallback,
        slots=grant.slots,
        resumes=grant.resumes,
        yielded=grant.times_yielded,
        failed_nodes=[] if tried is None else sorted(tried.failed_nodes),
        excluded_nodes=[] if tried is None else sorted(tried.excluded_nodes),
        deferral=None
        if deferral is None
        else {
            "node": deferral.node,
            "wait": round(deferral.wait_seconds, 3),
            "expected_seconds": round(deferral.cost_there, 3),
            "expected_seconds_at_once": round(deferral.cost_at_once, 3),
            "cached_tokens": round(deferral.cached),
        },
        by_cost=comparison is None or comparison.by_cost,
        nodes=sorted(compared, key=lambda one: (one.expected_seconds, not one.chosen)),
        not_listed=_not_listed(grant),
        predicted={
            "ttft": _if_known(grant.expected_ttft),
            "seconds": _if_known(grant.expected_seconds),
            "prompt_tokens": round(prompt),
            "cached_tokens": round(cached),
            "completion_tokens": round(completion),
        },
        actual=_actual(grant, now),
    )
    told.summary = _of_grant(told)
    return told


def _actual(grant: Grant, now: float) -> Json:
    first, ended, used = grant.first_content_at, grant.ended_at, grant.used
    prompt, cached, completion = (None, None, None) if used is None else used
    return {
        "outcome": grant.outcome,
        "status": grant.status or None,
        "ttft": None if first is None else round(first - grant.at, 3),
        "seconds": round((now if ended is None else ended) - grant.at, 3),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "reported": grant.reported,
    }


def _load_json(node: Node | None, now: float) -> Json | None:
    """How far the load of a router's model is; None: it is loaded."""
    if node is None or node.load is None or node.load.loaded:
        return None
    load = node.load
    return {
        "seconds": _if_known(now - load.since),
        "expected": round(node.sleep.wake_seconds(node.properties.size), 3),
        "progress": load.progress,
        "reason": load.reason or node.reason,
    }


def _not_listed(grant: Grant) -> Json:
    comparison, out = grant.comparison, grant.out or {}
    if comparison is None:
        return {}
    nodes = comparison.nodes
    found = {
        "slower": nodes.with_room - 1 - len(comparison.others),
        **out,
        "not_candidates": nodes.fleet - nodes.with_room - sum(out.values()),
    }
    return {reason: count for reason, count in found.items() if count > 0}


def _compare(
    comparison: Comparison, row: RowFigures, prompt: float, completion: float
) -> ComparedNode:
    speed, work, own = row.speed, row.work, comparison.own_figures(row)
    uncached, busy = uncached_tokens(own, prompt), work.busy
    reading = uncached / speed.prefill_tps
    slowed = completion * speed.token_step * busy
    held_up = reading * busy + work.decode_slowdown * comparison.remaining(row)
    return ComparedNode(
        name=row.name,
        chosen=row is comparison.chosen,
        measured=speed.measured,
        expected_seconds=round(cost_of_figures(comparison, row, prompt, completion), 3),
        terms={
            "queue": round(comparison.prefill_wait(row), 3),
            "reading": round(reading, 3),
            "writing": round(completion * speed.token_base, 3),
            "neighbours": round(slowed + held_up, 3),
            "doubt": round(speed.penalty + own.penalty, 3),
        },
        slowed_by_neighbours=round(slowed, 3),
        holds_up_neighbours=round(held_up, 3),
        doubts=_of_doubts(speed.penalty - speed.wake, own.penalty, speed.wake),
        cached_tokens=round(min(own.cached, prompt)),
        cached_saves=round((prompt - uncached) / speed.prefill_tps, 3),
        prefill_tps=round(speed.prefill_tps, 3),
        decode_tps=round(1 / speed.token_base, 3),
        slots_busy=busy,
        slots_total=row.total,
        pool_tokens=row.pool,
        pool_used=work.pool_used,
    )


def _if_known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


# Sentences, made of the figures above.

# Share of the better cost by which two nodes differ at least for one reason to be named.
LEAST_DIFFERENCE = 0.05

_OUTCOMES = {
    "ok": "answered",
    "client_closed": "was left by its client",
    "cancelled": "was cancelled",
    "yielded": "gave up its slot to a higher class",
    "moved": "was moved away by a drain",
    "pool_full": "was ended by the node, whose slots had no room left for their tokens together",
    "not_loaded": "found that the node had not loaded the model",
    "unknown": "went on under an earlier process of this gateway, which told no more of it",
}

_FALLBACKS = {
    "gpu_full": "the GPU nodes were full",
    "gpu_down": "no GPU node was up",
    "gpu_limited": "the GPU endpoint wants no work for a while (429, or 402: out of credit)",
    "gpu_failed": "a GPU node had failed it",
    "cpu_wait": "the CPU nodes had no room soon enough, and the budget allowed it",
    "cpu_down": "no CPU node was up",
}


def _of_doubts(penalty: float, own_penalty: float, wake: float) -> list[str]:
    """Why a node looked slower, or faster, than by its speed; penalties in seconds.

    `wake`: seconds that a node that sleeps takes to wake up.
    """
    found = [f"sleeps, and takes about {_seconds(wake)} to wake up"] if wake else []
    if penalty >= FAILURE_PENALTY:
        found.append(f"failed its last requests ({penalty / FAILURE_PENALTY:.0f})")
    elif penalty == -TRIAL_BONUS:
        found.append("was ejected, and needs one request on trial")
    if own_penalty >= SAME_HOST_PENALTY / 2:
        found.append("shares a host with a node that failed this request, or is on trial")
    elif own_penalty < 0:
        found.append("is explored, or served the session's last request")
    return found


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 or not value else f"{value:.2f} s"


def _of_request(request: ExplainedRequest) -> str:
    decisions, waiting, outcome = request.decisions, request.waiting, request.outcome
    grants = [one for one in decisions if isinstance(one, ToldGrant)]
    if waiting is not None:
        return _of_waiting(waiting)
    if grants:
        queued = [one for one in decisions if isinstance(one, ToldQueueing)]
        loads = []
        for load in [one.load for one in queued if one.load is not None]:
            text = f"It waited {_seconds(load['waited'])} for the load of {load['node']}"
            text += f", which took {_seconds(load['seconds'])}"
            if load["unloaded"]:
                text += f", and for which {', '.join(load['unloaded'])} had to be unloaded"
            loads.append(f"{text}.")
        several = [f"{len(grants)} attempts; about the last:"] if len(grants) > 1 else []
        return " ".join([*several, *loads, grants[-1].summary])
    if decisions:
        return decisions[-1].summary
    if request.parts:
        ran = "which ran as requests of their own: ask for one of the parts"
        return f"It has several prompts, {ran}."
    if outcome is not None and outcome["reason"]:
        why = f"{outcome['status']} {outcome['reason']}"
        return f"It was refused before it came to the scheduler: {why}."
    if request.state == "running":
        return "It runs, and the decision about it is no longer remembered."
    return "The decision about it is no longer remembered."


def _of_row(row: EndedRow) -> str:
    """The story as far as the ledger's row tells it."""
    parts = ["The decisions about it are no longer remembered; this is what the ledger keeps."]
    if row.wait_seconds is not None:
        waited = f"waited {_seconds(row.wait_seconds)} in the queue" if row.wait_seconds else ""
        parts.append(f"It {waited or 'did not wait in the queue'}.")
    if row.node is not None:
        ran = f"It ran on {row.node}" + (
            f", the last of {row.attempts} attempts" if row.attempts > 1 else ""
        )
        if row.prefill_seconds is not None and row.decode_seconds is not None:
            read = row.prompt_tokens - row.cached_tokens
            ran += (
                f": {_seconds(row.prefill_seconds)} to read {read} tokens of the prompt "
                f"({row.cached_tokens} were cached), {_seconds(row.decode_seconds)} to write "
                f"{row.completion_tokens}"
            )
        parts.append(f"{ran}.")
    if row.resumptions:
        times = "once" if row.resumptions == 1 else f"{row.resumptions} times"
        parts.append(f"Its stream was resumed {times}.")
    if row.outcome == LOST:
        parts.append("The process that ran it was killed; its figures are those of a moment ago.")
    else:
        default = "was answered" if row.status < 400 else f"ended with {row.status} {row.outcome}"
        word = default if row.outcome == "ok" else _OUTCOMES.get(row.outcome or "", default)
        parts.append(f"It {word} after {_seconds(row.seconds)}.")
    return " ".join(parts)


def _of_waiting(waiting: Json) -> str:
    place = f"place {waiting['position']} of the queue" if waiting["position"] else "the queue"
    start = waiting["expected_start"]
    when = (
        "it is not known when it starts" if start is None else f"starts in about {_seconds(start)}"
    )
    nodes = waiting["nodes"]
    loading = [one for one in nodes if one["state"] == "loading" and one["load"] is not None]
    if waiting["deferred_to"] is not None:
        why = (
            f"It waits for {waiting['deferred_to']}, which has its prompt cached and is expected "
            "to finish it sooner than a node that is free"
        )
    elif not nodes:
        why = "No node that could serve it is up"
    elif loading:
        load = loading[0]["load"]
        done = "" if load["progress"] is None else f", {load['progress']:.0%} of it is done"
        why = f"It waits for the load of {loading[0]['name']}, which goes on for "
        why += f"{_seconds(load['seconds'])} and takes about {_seconds(load['expected'])}{done}"
    elif all(one["load"] is not None for one in nodes):
        why = "Its model is not loaded: a node is being sought that has memory for it, or others "
        why += f"there end their requests first. {nodes[0]['name']}: {nodes[0]['load']['reason']}"
    elif any(not one["free_in"] for one in nodes if one["free_in"] is not None):
        why = "A slot is free, but others go before it, or the slot is kept for other classes"
    elif any(one["pool"] and one["slots_busy"] < one["slots_total"] for one in nodes):
        needed = waiting["tokens_needed"]
        why = "A slot is free, but in the pool of tokens that the node's slots share there is no "
        why += "room for it: it is to run alone" if needed is None else f"room for {needed}"
    else:
        why = f"No node that could serve it has a free slot ({waiting['nodes_alive']} are up)"
    return f"{why}. {place[:1].upper()}{place[1:]}; {when}."


def _of_grant(grant: ToldGrant) -> str:
    nodes, actual, text = grant.nodes, grant.actual, _why_chosen(grant)
    if grant.failed_nodes:
        text = f"After {', '.join(grant.failed_nodes)} had failed it, {text}"
    if grant.resumes:
        text += " It goes on there with the response that another node had begun."
    if grant.deferral is not None and grant.deferral["node"] == grant.node:
        text += (
            " It waited for this node though another was free, since "
            f"{grant.deferral['cached_tokens']} tokens of its prompt are cached here."
        )
    if grant.fallback:
        text += f" It left its class's tier, since {_FALLBACKS[grant.fallback]}."
    if any(one.chosen and not one.measured for one in nodes):
        text += " The node's speed was not measured yet: the figures are guesses."
    outcome, seconds = actual["outcome"], _seconds(actual["seconds"])
    if outcome is None:
        return f"{text} It runs there for {seconds} now."
    text += f" It {_OUTCOMES.get(outcome, f'failed ({outcome})')} after {seconds}"
    if outcome == "ok":
        text += f" ({_seconds(grant.predicted['seconds'])} predicted)"
    return f"{text}."


def _why_chosen(grant: ToldGrant) -> str:
    chosen, nodes = grant.node, grant.nodes
    if len(nodes) < 2:
        others = sum(
            count for reason, count in grant.not_listed.items() if reason != "not_candidates"
        )
        if others:
            return f"{chosen} was the only one with room of the {others + 1} nodes open to it."
        return f"{chosen} is the only node open to it, by its model, tier and pool."
    if not grant.by_cost:
        return f"{chosen} was next by the setting 'policy', which compares no costs."
    mine = next(one for one in nodes if one.chosen)
    other = min((one for one in nodes if not one.chosen), key=lambda one: one.expected_seconds)
    cost, next_cost = mine.expected_seconds, other.expected_seconds
    if next_cost == cost:
        return (
            f"{chosen} was taken at random among nodes that cost the same, {_seconds(cost)} with "
            "what the request costs its neighbours."
        )
    text = (
        f"{chosen} was expected to cost least: {_seconds(cost)}, against {_seconds(next_cost)} on "
        f"{other.name}"
    )
    reason = _main_reason(mine, other)
    return f"{text}, mostly because {reason}." if reason else f"{text}."


def _main_reason(mine: ComparedNode, other: ComparedNode) -> str | None:
    """The term that makes the most of the difference, in words; None: none stands out."""
    gains = {name: other.terms[name] - mine.terms[name] for name in mine.terms}
    term = max(gains, key=lambda name: gains[name])
    if gains[term] <= LEAST_DIFFERENCE * mine.expected_seconds:
        return None
    match term:
        case "queue":
            return f"{other.name} had other prompts to read for {_seconds(other.terms['queue'])}"
        case "reading" if mine.cached_tokens > other.cached_tokens:
            return f"it had {mine.cached_tokens} tokens of the prompt cached"
        case "reading":
            speeds = f"{mine.prefill_tps:.0f} tokens/s against {other.prefill_tps:.0f}"
            return f"it reads prompts faster ({speeds})"
        case "writing":
            speeds = f"{mine.decode_tps:.1f} tokens/s alone against {other.decode_tps:.1f}"
            return f"it writes faster ({speeds})"
        case "neighbours":
            others = f"{mine.slots_busy} others and {other.name} {other.slots_busy}"
            return f"it ran {others}, which slow each other"
    if other.doubts:
        return f"{other.name} {other.doubts[0]}"
    return f"it {mine.doubts[0]}" if mine.doubts else "the other was in doubt"


# What each slot has done.


TIMELINE_SECONDS = 600.0
MOST_LANES = 100  # slots that are told of


class SlotSpan(NamedTuple):
    """An attempt on a node: it holds slots from `begin` to `end`. Times are Unix time."""

    request: str  # the gateway's id
    lease: int  # with it unique
    node: str
    slots: int
    caller: str | None
    caller_name: str | None  # the key's name
    model: str
    begin: float
    writes: float | None  # when the first content came; None: it reads the prompt, or only read it
    end: float | None  # None: it runs
    outcome: str | None  # how it ended, in the word of metrics and logs
    resumes: bool  # whether it goes on with a response that another node began


class TimelineObject(msgspec.Struct):
    """The timeline as the admin API shows it."""

    at: Annotated[float, "Unix time; the next call's `after`"]
    since: Annotated[float, "Unix time from which every attempt is remembered; at the earliest ten "
        "minutes ago"]  # fmt: skip
    slots_total: Annotated[int, "slots of the fleet"]
    nodes: Annotated[dict[str, int], "slots by the name of each node that is told of, in the "
        "inventory's order; 100 slots at most, those of a sample of the nodes"]  # fmt: skip
    columns: Annotated[list[str], "names of a span's values: `request` (its id), `lease`, `node`, "
        "`slots` that it holds, `caller` and `caller_name` (null for viewers), `model`, `begin`, "
        "`writes` (when its first content came, or null), `end` (or null), `outcome`, `resumes` "
        "(whether it goes on with a response that another node began)"]  # fmt: skip
    spans: Annotated[list[Any], "attempts that run, and those that have ended in the last ten "
        "minutes, or after `after`"]  # fmt: skip


def sample_of(slots: Mapping[str, int], most: int = MOST_LANES) -> dict[str, int]:
    """As many nodes as have at most so many slots together, evenly spread over all of them."""
    total = sum(slots.values())
    if total <= most:
        return dict(slots)
    chosen: dict[str, int] = {}
    passed, left = 0.0, most
    for name, number in slots.items():
        # One is due whenever its share of the lanes that are to be has not been given.
        passed += number * most / total
        if left and most - left < passed:
            chosen[name] = min(number, left)
            left -= chosen[name]
    return chosen
