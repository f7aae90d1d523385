"""Slots of class `batch`: the room for its stored work, and what it gives up to higher classes.

Whoever feeds the scheduler with stored work asks for the room (`room_for_batch`), so that as much
is offered as fills the slots outside the reserve, and no more.

Running requests yield to one that would have to wait. Only requests that say so yield
(`LeaseCaller.yields`), and only in decode: what they have written so far is kept, and they go on
later, on any node. What a yield costs is that their prompt and that text are read once more.

`choose_yields` is the policy, on plain numbers. The scheduler asks those that it has chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gateway.config.keys import NodeLabels
from gateway.lease import BatchRoom
from gateway.schedule.admission import Waiter
from gateway.schedule.candidates import FleetSync
from gateway.schedule.core.requests import CandidateSet, NodeSlots, QueuedRequest
from gateway.terms import Endpoint, Priority


def room_for_batch(
    rows: Iterable[NodeSlots], seconds: float, now: float, *, waiting: int = 0, ahead: int = 0
) -> BatchRoom:
    """The room on these rows, and what is expected to come free within so many `seconds`.

    `waiting`: requests of class `batch` that wait for them; `ahead`: slots for which higher classes
    wait.
    """
    nodes = slots = free = soon = 0
    for row in rows:
        if not row.alive or row.reserved_for is not None:
            continue
        nodes += 1
        slots += _unreserved(row, row.capacity, busy=0)
        now_free = row.capacity - row.busy
        room = _unreserved(row, now_free, busy=row.busy)
        ending = sum(
            placement.slots for placement in row.running if placement.seconds_left(now) <= seconds
        )
        free += room
        soon += _unreserved(row, now_free + ending, busy=row.busy - ending) - room
    return BatchRoom(slots, free, soon, waiting, ahead, nodes)


def _unreserved(row: NodeSlots, free: int, *, busy: int) -> int:
    """Slots that `batch` may take of a row with so many `free`; of an idle row at least one."""
    if row.kept_from_batch:
        return 0
    return max(free - row.batch_reserve, 1 if free > 0 and busy <= 0 else 0, 0)


def rows_for_batch(
    fleet_sync: FleetSync, model_names: Sequence[str], endpoint: Endpoint, labels: NodeLabels
) -> tuple[NodeSlots, ...]:
    """The rows of the first of these names that an alive node of the pool serves.

    Those of CPU nodes; of a model that only GPU nodes have, theirs.
    """
    rows: tuple[NodeSlots, ...] = ()
    for name in model_names:
        service = fleet_sync.service((name, endpoint, False, False, labels))
        rows = service.cpu.rows or service.gpu.rows
        if any(row.alive for row in rows):
            break
    return rows


def slots_waited_for(
    waiters: Iterable[Waiter], model_names: Collection[str], labels: NodeLabels
) -> tuple[int, int]:
    """Slots for which requests wait that share a model name and pool: of `batch`, of others."""
    names, waiting, ahead = frozenset(model_names), 0, 0
    for waiter in waiters:
        request = waiter.request
        wanted = request.wanted
        same_pool = not (labels and wanted.node_labels) or labels == wanted.node_labels
        if not same_pool or names.isdisjoint(wanted.model_names):
            continue
        if request.caller.priority is Priority.BATCH:
            waiting += request.size.slots
        else:
            ahead += request.size.slots
    return waiting, ahead


LEAST_SECONDS_LEFT = 3.0  # seconds. A request that is expected to end sooner ends by itself.
# Seconds for which a request decodes that has yielded before, until it may yield again.
LEAST_DECODE_SECONDS = 10.0
MOST_YIELDS = 4  # times that one request yields; then it runs to its end
MOST_COMPARED = 256  # running requests that are compared, the oldest first
# Times that the policy is asked for one waiting request, as long as those that it names refuse.
MOST_CHOICES = 4
IN_VAIN_SECONDS = 0.25  # seconds after which it is worth a try again to find some that may yield
MOST_KINDS = 64  # kinds of waiting requests for which it is remembered that none may
# Seconds after which others are asked for a request that has not got its slot.
ASK_AGAIN_SECONDS = 5.0


class YieldCandidate(NamedTuple):
    """A running request that may be asked to yield."""

    lease_id: int
    row: int  # the index of its row
    slots: int
    priority: Priority
    decode_seconds: float | None
    """For which it has decoded under this lease; None: its prompt is being read."""
    seconds_left: float  # until it is expected to end
    repetition_seconds: float
    """That a node needs to read again what it has: its prompt and its text so far."""
    times_yielded: int  # before this lease


def may_yield(one: YieldCandidate, priority: Priority) -> bool:
    """Whether a running request may be asked to yield to one of this class."""
    return (
        one.priority > priority
        and one.decode_seconds is not None
        and one.times_yielded < MOST_YIELDS
        and (not one.times_yielded or one.decode_seconds >= LEAST_DECODE_SECONDS)
        and one.seconds_left > max(LEAST_SECONDS_LEFT, one.repetition_seconds)
    )


def choose_yields(
    priority: Priority, missing: Mapping[int, int], running: Iterable[YieldCandidate]
) -> tuple[int, ...]:
    """The lease ids that are to yield to a request of this class; empty: it must wait.

    `missing`: the slots that it lacks on each row that serves it. All that yield are on one row,
    and give it what it lacks there: those whose repetition costs least.
    """
    by_row: dict[int, list[YieldCandidate]] = {}
    for one in running:
        if one.row in missing and may_yield(one, priority):
            by_row.setdefault(one.row, []).append(one)
    best: tuple[float, tuple[int, ...]] | None = None
    for row, candidates in by_row.items():
        candidates.sort(key=lambda one: (one.repetition_seconds / one.slots, one.lease_id))
        lacking, cost, chosen = missing[row], 0.0, []
        for one in candidates:
            if lacking <= 0:
                break
            lacking -= one.slots
            cost += one.repetition_seconds
            chosen.append(one.lease_id)
        if lacking <= 0 and chosen and (best is None or cost < best[0]):
            best = cost, tuple(chosen)
    return () if best is None else best[1]


def missing_slots(queued: QueuedRequest) -> Iterator[dict[int, int]]:
    """The slots that a waiting request lacks on each row that may serve it, tier by tier.

    Nothing for a model name of which a row has room already: it is about to be placed there, or
    waits for another row of its own accord. Rows that have failed it are left out.
    """
    for tiers in queued.groups:
        alive = [_alive_rows(candidates, queued) for candidates in tiers]
        if not any(alive):
            continue  # A later name counts only when no node of this one is alive.
        found = [
            {
                row.index: max(
                    queued.slots - (row.capacity - row.busy),
                    # A slot's tokens, of a pool that lacks them.
                    int(row.tokens_short(queued.tokens_needed) > 0.0),
                )
                for row in rows
            }
            for rows in alive
        ]
        if all(lacking > 0 for rows in found for lacking in rows.values()):
            yield from found
        return


def _alive_rows(candidates: CandidateSet, queued: QueuedRequest) -> list[NodeSlots]:
    return [
        row
        for row in candidates.rows
        if row.alive
        and row.capacity >= queued.slots
        and row.reserved_for is None
        and row.index not in queued.excluded
        and row.index not in queued.failed
    ]
