"""`GET /admin/requests/{id}/why`: why a request went where it went, and what came of it.

The numbers are the scheduler's own, from its decision log and, for a request that waits, from the
queue as it is now. The sentences are made of these figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.nodes import pool_json
from gateway.errors import CLIENT_CLOSED_STATUS, GatewayError, truncate_echo
from gateway.events import RequestRecord
from gateway.forward.in_flight import InFlightRegistry
from gateway.schedule.admission import Waiter
from gateway.schedule.candidates import FAILURE_PENALTY, SAME_HOST_PENALTY, TRIAL_BONUS
from gateway.schedule.core.placement_state import (
    MOST_COMPARED_ROWS,
    Comparison,
    Deferral,
    RowFigures,
)
from gateway.schedule.core.selection import cost_of_figures, uncached_tokens
from gateway.schedule.core.wait_queue import prospects
from gateway.schedule.decision_log import (
    MOST_GRANTS,
    Decision,
    Grant,
    Queueing,
    RememberedRequest,
)
from gateway.schedule.scheduler import Scheduler
from gateway.watch.history import FleetHistory
from gateway.web.asgi import JsonResponse

MOST_MATCHES = 20  # requests of one `X-Request-ID` that are explained
MOST_DECISIONS = 50  # decisions about one request that are told, the newest
MOST_PARTS = 100  # parts of a request of several prompts that are named
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Found:
    """A request of the id that was asked for."""

    id: str
    record: RequestRecord | None  # None: only the scheduler remembers it
    ended_at: float | None  # None: it waits or runs
    caller: str | None = None


@dataclass(frozen=True, slots=True)
class WhyEndpoints:
    """The endpoint that explains requests."""

    scheduler: Scheduler
    registry: InFlightRegistry
    history: FleetHistory
    wall_clock: Callable[[], float]  # seconds since 1970

    async def why(self, request: Request) -> Response:
        """Why requests of this id, or with this `X-Request-ID`, went where they went."""
        name = request.path_params["id"]
        log = self.scheduler.decision_log
        found = self._matches(name)
        remembered = log.find(one.id for one in found)
        since = self._time(log.reaches_back_to())
        if not found:
            raise GatewayError(
                404,
                "request_not_found",
                f"No request '{truncate_echo(name)}' is remembered. Ask for the id in the log or "
                f"for the response's X-Request-ID. The last {MOST_GRANTS} decisions are kept, now "
                f"those since {since}; the log and the ledger reach further back.",
                param="id",
            )
        return JsonResponse(
            {
                "id": truncate_echo(name),
                "remembered_since": since,
                "requests": [self._request_json(one, remembered[one.id]) for one in found],
            }
        )

    def _matches(self, name: str) -> list[_Found]:
        """The one of this own id, then the newest first: those in flight, those that have ended.

        A client may send the gateway's own id of another request as its `X-Request-ID`.
        """
        matches: dict[str, _Found] = {}
        for one in self._all_matches(name):
            matches.setdefault(one.id, one)
        if not matches and (known := self.scheduler.decision_log.find([name])[name].decisions):
            last = known[-1]
            ended_at = last.ended_at if isinstance(last, Grant) else last.at
            matches[name] = _Found(name, None, ended_at)
        newest = sorted(
            matches.values(), key=lambda one: (one.id != name, -(one.ended_at or math.inf))
        )
        return newest[:MOST_MATCHES]

    def _all_matches(self, name: str) -> Iterator[_Found]:
        for in_flight in reversed([*self.registry]):
            request = in_flight.request
            if name in {request.id, request.x_request_id}:
                yield _Found(request.id, in_flight.record, None)
        for record in self.history.find(name):
            yield _Found(record.request_id, record, record.ended_at)

    # As JSON. Times are in seconds, sizes in tokens.

    def _request_json(self, found: _Found, remembered: RememberedRequest) -> Json:
        now, record = self.scheduler.clock(), found.record
        decisions = remembered.decisions
        waiter = self.scheduler.waiters.by_request_id(found.id)
        state = _state(found, waiter)
        ended_at = now if found.ended_at is None else found.ended_at
        received_at = decisions[0].received_at if decisions else None
        if record is not None and found.ended_at is not None:
            received_at = found.ended_at - record.duration_seconds
        answer: Json = {
            "id": found.id,
            "request_id": found.id if record is None else record.x_request_id,
            "state": state,
            "path": None if record is None else record.path,
            "class": None if record is None else record.priority.label,
            "model": None if record is None else record.model,
            "caller": None if record is None else record.caller,
            "received_at": None if received_at is None else self._time(received_at),
            "seconds": None if received_at is None else _rounded(ended_at - received_at),
            "outcome": None if record is None or found.ended_at is None else _outcome(record),
            "waiting": None if waiter is None else self._waiting(waiter, now),
            "decisions": [*self._decisions(decisions, now)],
            "parts": sorted(remembered.parts)[:MOST_PARTS],
        }
        answer["summary"] = _of_request(answer)
        return answer

    def _decisions(self, decisions: list[Decision], now: float) -> Iterator[Json]:
        attempt = 0
        for index, one in enumerate(decisions):
            attempt += isinstance(one, Grant)
            if index < len(decisions) - MOST_DECISIONS:
                continue
            later = decisions[index + 1].at if index + 1 < len(decisions) else now
            told: Json = {"at": self._time(one.at), "seconds": _rounded(one.at - one.received_at)}
            if isinstance(one, Grant):
                told |= {"kind": "granted", "attempt": attempt, **grant_json(one, now)}
                told["summary"] = _of_grant(told)
            elif isinstance(one, Queueing):
                told |= {"kind": "queued", **_queueing_json(one, later)}
                told["summary"] = _of_queueing(told)
            else:
                status, code = one.status, one.code
                told |= {"kind": "refused", "status": status, "code": code, "message": one.message}
                # Messages are not kept over a restart.
                more = f": {one.message}" if one.message else "."
                told["summary"] = f"It was refused with {status} {code}{more}"
            yield told

    def _waiting(self, waiter: Waiter, now: float) -> Json:
        """The place of a request in the queue now, and the nodes that it waits for."""
        queued = waiter.queued
        needed = queued.tokens_needed
        place = self.scheduler.queue_position(waiter.request.id)
        found = prospects(queued, now)
        nodes, deferred_to = self.scheduler.fleet_sync.nodes, queued.deferred_to
        return {
            "position": None if place is None else place.position,
            "expected_start": None if place is None else _rounded(place.expected_seconds),
            "waited": _rounded(now - waiter.queued_at),
            "expires_in": _rounded(max(0.0, waiter.expires_at - now)),
            "deferred_to": None if deferred_to is None else deferred_to.name,
            "tokens_needed": None if math.isinf(needed) else round(needed),
            "nodes_alive": len(found),
            "nodes": [
                {
                    "name": row.name,
                    "state": nodes[row.index].state.value if row.index in nodes else "removed",
                    "slots_busy": row.busy,
                    "slots_total": row.total,
                    "pool": pool_json(row),
                    "free_in": _rounded(wait),
                    "cached_tokens": round(queued.cached.get(row.index, 0.0)),
                    "expected_seconds": _rounded(cost),
                }
                for row, wait, cost in found[:MOST_COMPARED_ROWS]
            ],
        }

    def _time(self, at: float) -> str:
        """A monotonic time as people and programs read it."""
        seconds = self.wall_clock() - (self.scheduler.clock() - at)
        text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
        return text.replace("+00:00", "Z")


def _state(found: _Found, waiter: Waiter | None) -> str:
    record = found.record
    if waiter is not None:
        return "waiting"
    if found.ended_at is None:
        return "running"
    if record is not None and record.status == CLIENT_CLOSED_STATUS:
        return "left"
    if record is not None and record.status >= 400:
        return "failed" if record.attempts else "refused"
    return "finished"


def _outcome(record: RequestRecord) -> Json:
    return {
        "status": record.status,
        "reason": record.reason,
        "node": record.node,
        "tier": record.tier,
        "attempts": record.attempts,
        "queue_seconds": _rounded(record.queue_seconds),
        "ttft": _rounded(record.ttft),
        "seconds": _rounded(record.duration_seconds),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "cost": round(record.cost, 6),
    }


def _queueing_json(queueing: Queueing, later: float) -> Json:
    return {
        "class": queueing.priority.label,
        "ahead": queueing.ahead,
        "waiting": queueing.waiting,
        "predicted_wait": _rounded(queueing.predicted_wait),
        "may_wait": _rounded(queueing.expires_at - queueing.at),
        "waited": _rounded(later - queueing.at),
    }


def grant_json(grant: Grant, now: float) -> Json:
    """A lease that was granted: what its node was compared with, predicted and actual figures."""
    granted, predicted, circumstances = grant.granted, grant.predicted, grant.circumstances
    comparison, tried = predicted.comparison, circumstances.tried
    prompt, completion = predicted.prompt_tokens, predicted.completion_tokens
    cached = 0.0 if comparison is None else min(comparison.cached_on_chosen, prompt)
    return {
        "node": None if comparison is None else comparison.chosen.name,
        "model": granted.model,
        "tier": granted.tier,
        "fallback": circumstances.fallback,
        "slots": granted.slots,
        "resumes": circumstances.resumes,
        "yielded": circumstances.times_yielded,
        "failed_nodes": [] if tried is None else sorted(tried.failed_nodes),
        "excluded_nodes": [] if tried is None else sorted(tried.excluded_nodes),
        "deferral": None
        if circumstances.deferral is None
        else _deferral_json(circumstances.deferral),
        "by_cost": comparison is None or comparison.by_cost,
        "nodes": [] if comparison is None else _compared(comparison, prompt, completion),
        "not_listed": _not_listed(grant),
        "predicted": {
            "ttft": _rounded(predicted.ttft),
            "seconds": _rounded(predicted.seconds),
            "prompt_tokens": round(prompt),
            "cached_tokens": round(cached),
            "completion_tokens": round(completion),
        },
        "actual": _actual(grant, now),
    }


def _actual(grant: Grant, now: float) -> Json:
    first, ended, used = grant.first_content_at, grant.ended_at, grant.used
    prompt, cached, completion = (None, None, None) if used is None else used
    return {
        "outcome": grant.outcome,
        "status": grant.status or None,
        "ttft": None if first is None else _rounded(first - grant.at),
        "seconds": _rounded((now if ended is None else ended) - grant.at),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "reported": grant.reported,
    }


def _deferral_json(deferral: Deferral) -> Json:
    return {
        "node": deferral.node,
        "wait": _rounded(deferral.wait_seconds),
        "expected_seconds": _rounded(deferral.cost_there),
        "expected_seconds_at_once": _rounded(deferral.cost_at_once),
        "cached_tokens": round(deferral.cached),
    }


def _not_listed(grant: Grant) -> Json:
    """Nodes that are not listed, by the reason."""
    comparison, out = grant.predicted.comparison, grant.circumstances.out
    if comparison is None:
        return {}
    nodes = comparison.nodes
    found = {
        "slower": nodes.with_room - 1 - len(comparison.others),
        **out,
        "not_candidates": nodes.fleet - nodes.with_room - sum(out.values()),
    }
    return {reason: count for reason, count in found.items() if count > 0}


def _compared(comparison: Comparison, prompt: float, completion: float) -> list[Json]:
    """The rows of a comparison, the least cost first."""
    rows = [comparison.chosen, *comparison.others]
    told = [_row_json(comparison, row, prompt, completion) for row in rows]
    return sorted(told, key=lambda one: (one["expected_seconds"], not one["chosen"]))


def _row_json(comparison: Comparison, row: RowFigures, prompt: float, completion: float) -> Json:
    """A row's expected cost and its terms, which add up to it (`selection.py`)."""
    speed, work, own = row.speed, row.work, comparison.own_figures(row)
    uncached, busy = uncached_tokens(own, prompt), work.busy
    reading = uncached / speed.prefill_tps
    slowed = completion * speed.token_step * busy
    held_up = reading * busy + work.decode_slowdown * comparison.remaining(row)
    return {
        "name": row.name,
        "chosen": row is comparison.chosen,
        "measured": speed.measured,
        "expected_seconds": _rounded(cost_of_figures(comparison, row, prompt, completion)),
        "terms": {
            "queue": _rounded(comparison.prefill_wait(row)),
            "reading": _rounded(reading),
            "writing": _rounded(completion * speed.token_base),
            "neighbours": _rounded(slowed + held_up),
            "doubt": _rounded(speed.penalty + own.penalty),
        },
        "slowed_by_neighbours": _rounded(slowed),
        "holds_up_neighbours": _rounded(held_up),
        "doubts": _of_doubts(speed.penalty - speed.wake, own.penalty, speed.wake),
        "cached_tokens": round(min(own.cached, prompt)),
        "cached_saves": _rounded((prompt - uncached) / speed.prefill_tps),
        "prefill_tps": _rounded(speed.prefill_tps),
        "decode_tps": _rounded(1 / speed.token_base),
        "slots_busy": busy,
        "slots_total": row.total,
        "pool_tokens": row.pool,
        "pool_used": work.pool_used,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


# Sentences, made of the figures above.

# Share of the better cost by which two nodes differ at least for one reason to be named.
LEAST_DIFFERENCE = 0.05
# Tokens, and share of the prompt, by which the cache must have been mistaken to be named.
LEAST_CACHE_MISS, LEAST_CACHE_MISS_SHARE = 64, 0.2

_OUTCOMES = {
    "ok": "answered",
    "client_closed": "was left by its client",
    "cancelled": "was cancelled",
    "yielded": "gave up its slot to a higher class",
    "moved": "was moved away by a drain",
    "pool_full": "was ended by the node, whose slots had no room left for their tokens together",
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
        failures = round(penalty / FAILURE_PENALTY)
        found.append(
            "failed its last request" if failures == 1 else f"failed its last {failures} requests"
        )
    elif penalty == -TRIAL_BONUS:
        found.append("was ejected, and needs one request on trial")
    if own_penalty >= SAME_HOST_PENALTY / 2:
        found.append("shares a host with a node that failed this request, or is on trial")
    elif own_penalty < 0:
        found.append("is explored, or served the session's last request")
    return found


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 or not value else f"{value:.2f} s"


def _of_request(request: Json) -> str:
    """The whole story in one or two sentences."""
    decisions, waiting, outcome = request["decisions"], request["waiting"], request["outcome"]
    grants = [one for one in decisions if one["kind"] == "granted"]
    if waiting is not None:
        return _of_waiting(waiting)
    parts = []
    if grants:
        parts.append(grants[-1]["summary"])
        if len(grants) > 1:
            parts.insert(0, f"{len(grants)} attempts; about the last:")
    elif decisions:
        parts.append(decisions[-1]["summary"])
    elif request["parts"]:
        parts.append(
            "It has several prompts, which ran as requests of their own: ask for one of the parts."
        )
    elif outcome is not None and outcome["reason"]:
        parts.append(
            f"It was refused before it came to the scheduler: {outcome['status']} "
            f"{outcome['reason']}."
        )
    elif request["state"] == "running":
        parts.append("It runs, and the decision about it is no longer remembered.")
    else:
        parts.append("The decision about it is no longer remembered.")
    return " ".join(parts)


def _of_waiting(waiting: Json) -> str:
    """Why a request waits."""
    place = f"place {waiting['position']} of the queue" if waiting["position"] else "the queue"
    start = waiting["expected_start"]
    when = (
        "it is not known when it starts" if start is None else f"starts in about {_seconds(start)}"
    )
    nodes = waiting["nodes"]
    if waiting["deferred_to"] is not None:
        why = (
            f"It waits for {waiting['deferred_to']}, which has its prompt cached and is expected "
            "to finish it sooner than a node that is free"
        )
    elif not nodes:
        why = "No node that could serve it is up"
    elif any(not one["free_in"] for one in nodes if one["free_in"] is not None):
        why = "A slot is free, but others go before it, or the slot is kept for other classes"
    elif any(one["pool"] and one["slots_busy"] < one["slots_total"] for one in nodes):
        needed = waiting["tokens_needed"]
        why = "A slot is free, but in the pool of tokens that the node's slots share there is no "
        why += "room for it: it is to run alone" if needed is None else f"room for {needed}"
    else:
        why = f"None of the {waiting['nodes_alive']} nodes that could serve it has a free slot"
        if waiting["nodes_alive"] == 1:
            why = f"The only node that could serve it, {nodes[0]['name']}, has no free slot"
    return f"{why}. {place[:1].upper()}{place[1:]}; {when}."


def _of_queueing(queueing: Json) -> str:
    text = "No node had room for it: it was queued"
    if queueing["ahead"] is not None:
        text += f" behind {queueing['ahead']} of its class or above"
    predicted = queueing["predicted_wait"]
    text += "" if predicted is None else f", with {_seconds(predicted)} to wait as predicted"
    return f"{text}; it waited {_seconds(queueing['waited'])}."


def _of_grant(grant: Json) -> str:
    chosen, nodes = grant["node"], grant["nodes"]
    text = _why_chosen(chosen, nodes, grant)
    if grant["failed_nodes"]:
        text = f"After {', '.join(grant['failed_nodes'])} had failed it, {text}"
    if grant["resumes"]:
        text += " It goes on there with the response that another node had begun."
    if grant["deferral"] is not None and grant["deferral"]["node"] == chosen:
        deferral = grant["deferral"]
        text += (
            " It waited for this node though another was free: "
            f"{_seconds(deferral['expected_seconds'])} with the wait, against "
            f"{_seconds(deferral['expected_seconds_at_once'])}, since "
            f"{deferral['cached_tokens']} tokens of its prompt are cached here."
        )
    if grant["fallback"]:
        text += f" It left its class's tier, since {_FALLBACKS[grant['fallback']]}."
    if any(one["chosen"] and not one["measured"] for one in nodes):
        text += " The node's speed was not measured yet: the figures are guesses."
    return f"{text} {_came_of(grant)}"


def _why_chosen(chosen: str, nodes: list[Json], grant: Json) -> str:
    if len(nodes) < 2:
        others = sum(
            count for reason, count in grant["not_listed"].items() if reason != "not_candidates"
        )
        if others:
            return f"{chosen} was the only one with room of the {others + 1} nodes open to it."
        return f"{chosen} is the only node open to it, by its model, tier and pool."
    if not grant["by_cost"]:
        return f"{chosen} was next by the setting 'policy', which compares no costs."
    mine = next(one for one in nodes if one["chosen"])
    other = min(
        (one for one in nodes if not one["chosen"]), key=lambda one: one["expected_seconds"]
    )
    cost, next_cost = mine["expected_seconds"], other["expected_seconds"]
    if next_cost == cost:
        return (
            f"{chosen} was taken at random among nodes that cost the same, {_seconds(cost)} with "
            "what the request costs its neighbours."
        )
    text = (
        f"{chosen} was expected to cost least: {_seconds(cost)}, against {_seconds(next_cost)} on "
        f"{other['name']}"
    )
    reason = _main_reason(mine, other)
    return f"{text}, mostly because {reason}." if reason else f"{text}."


def _main_reason(mine: Json, other: Json) -> str | None:
    """The term that makes the most of the difference, in words; None: none stands out."""
    gains = {name: other["terms"][name] - mine["terms"][name] for name in mine["terms"]}
    term = max(gains, key=lambda name: gains[name])
    if gains[term] <= LEAST_DIFFERENCE * mine["expected_seconds"]:
        return None
    return _REASONS[term](mine, other)


def _of_reading(mine: Json, other: Json) -> str:
    if mine["cached_tokens"] > other["cached_tokens"]:
        return f"it had {mine['cached_tokens']} tokens of the prompt cached"
    return (
        f"it reads prompts faster ({mine['prefill_tps']:.0f} tokens/s against "
        f"{other['prefill_tps']:.0f})"
    )


def _of_doubt(mine: Json, other: Json) -> str:
    if other["doubts"]:
        return f"{other['name']} {other['doubts'][0]}"
    return f"it {mine['doubts'][0]}" if mine["doubts"] else "the other was in doubt"


_REASONS: dict[str, Callable[[Json, Json], str]] = {
    "queue": lambda _, other: (
        f"{other['name']} had other prompts to read for {_seconds(other['terms']['queue'])}"
    ),
    "reading": _of_reading,
    "writing": lambda mine, other: (
        f"it writes faster ({mine['decode_tps']:.1f} tokens/s alone against "
        f"{other['decode_tps']:.1f})"
    ),
    "neighbours": lambda mine, other: (
        f"it ran {mine['slots_busy']} others and {other['name']} {other['slots_busy']}, which slow "
        "each other"
    ),
    "doubt": _of_doubt,
}


def _came_of(grant: Json) -> str:
    actual, predicted = grant["actual"], grant["predicted"]
    outcome = actual["outcome"]
    if outcome is None:
        return f"It runs there for {_seconds(actual['seconds'])} now."
    word = _OUTCOMES.get(outcome, f"failed ({outcome})")
    text = f"It {word} after {_seconds(actual['seconds'])}"
    if outcome == "ok":
        text += f" ({_seconds(predicted['seconds'])} predicted)"
    expected, cached = predicted["cached_tokens"], actual["cached_tokens"]
    if cached is not None and actual["reported"]:
        missed = max(LEAST_CACHE_MISS, LEAST_CACHE_MISS_SHARE * (actual["prompt_tokens"] or 0))
        if abs(expected - cached) >= missed:
            text += (
                f"; {expected} tokens of the prompt were expected to be cached, and {cached} were"
            )
    return f"{text}."
