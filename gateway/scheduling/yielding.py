"""Yielding: which running batch requests give up their slots for one that would have to wait.

Only requests that say so yield (`LeaseCaller.yields`), and only in decode: what they have written
so far is kept, and they go on later, on any node. What a yield costs is that their prompt and that
text are read once more.

`choose_yields` is the policy, on plain numbers. `YieldRequests` asks those that it has chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from gateway.fleet.slot_occupancy import LeasePhase
from gateway.request import Priority
from gateway.scheduling.lease_granter import LeaseRecord
from gateway.scheduling.node_slots import CandidateSet, NodeSlots, QueuedRequest, TierSets

LEAST_SECONDS_LEFT = 3.0
"""Seconds. A request that is expected to end sooner ends by itself."""

LEAST_DECODE_SECONDS = 10.0
"""Seconds for which a request decodes that has yielded before, until it may yield again."""

MOST_YIELDS = 4
"""Times that one request yields; then it runs to its end."""

MOST_COMPARED = 256
"""Running requests that are compared, the oldest first."""

MOST_CHOICES = 4
"""Times that the policy is asked for one waiting request, as long as those that it names refuse."""

IN_VAIN_SECONDS = 0.25
"""Seconds after which it is worth a try again to find some that may yield."""

MOST_KINDS = 64
"""Kinds of waiting requests for which it is remembered that none may."""

ASK_AGAIN_SECONDS = 5.0
"""Seconds after which others are asked for a request that has not got its slot."""


class YieldCandidate(NamedTuple):
    """A running request that may be asked to yield."""

    lease_id: int
    row: int
    """The index of its row."""
    slots: int
    priority: Priority
    decode_seconds: float | None
    """For which it has decoded under this lease; None: its prompt is being read."""
    seconds_left: float
    """Until it is expected to end."""
    repetition_seconds: float
    """That a node needs to read again what it has: its prompt and its text so far."""
    times_yielded: int
    """Before this lease."""


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


@dataclass(slots=True, eq=False)
class YieldRequests:
    """Asks running requests to yield, each lease at most once."""

    records: dict[int, LeaseRecord]
    """Those of the leases that may be asked, by lease id; of the `LeaseGranter`."""
    yield_slot: Callable[[str], bool]
    """Asks the request with this id to give up its slot and wait again; whether it does."""
    _in_vain: dict[tuple[tuple[TierSets, ...], Priority, int], float] = field(default_factory=dict)
    """When nobody was found for a request of such candidates, class and slots."""

    def make_room(self, queued: QueuedRequest, now: float) -> bool:
        """Have running requests yield to one that waits; whether it is to get its slots so.

        For requests of one kind it is tried in vain once in `IN_VAIN_SECONDS`, however many wait.
        """
        kind = queued.groups, queued.priority, queued.slots
        if not self.records or now - self._in_vain.get(kind, -math.inf) < IN_VAIN_SECONDS:
            return False
        if queued.slots and self._make_room(queued, now):
            return True
        if len(self._in_vain) >= MOST_KINDS:
            self._in_vain.clear()
        self._in_vain[kind] = now
        return False

    def _make_room(self, queued: QueuedRequest, now: float) -> bool:
        for missing in missing_slots(queued):
            for _ in range(MOST_CHOICES):
                running = [
                    yield_candidate(lease_id, record, now)
                    for lease_id, record in islice(self.records.items(), MOST_COMPARED)
                    if record.placement is not None
                ]
                chosen = choose_yields(queued.priority, missing, running)
                if not chosen:
                    break
                for lease_id in chosen:
                    record = self.records.pop(lease_id)
                    assert record.placement is not None
                    # Those that can't be resumed refuse; then others are chosen.
                    if self.yield_slot(record.request.id):
                        missing[record.placement.row.index] -= record.lease.slots
                if min(missing.values()) <= 0:
                    return True
        return False


def yield_candidate(lease_id: int, record: LeaseRecord, now: float) -> YieldCandidate:
    """A running request in numbers; its record has a placement."""
    placement, request, decode_began = record.placement, record.request, None
    assert placement is not None
    row, decoded = placement.row, 0.0
    if record.lease.phase is LeasePhase.DECODE:
        decode_began = placement.prefill_ends
        decoded = (now - decode_began) / row.per_output_token if row.per_output_token else 0.0
    return YieldCandidate(
        lease_id,
        row.index,
        record.lease.slots,
        request.caller.priority,
        None if decode_began is None else now - decode_began,
        placement.seconds_left(now),
        (placement.queued.prompt_tokens + decoded) / row.prefill_tps,
        request.caller.times_yielded,
    )
