"""`GET /admin/timeline`: what each slot has done in the last ten minutes, for a picture of it.

It is read from the decision log, which remembers each lease anyway: a request pays nothing for it.
Of a fleet with more than `MOST_LANES` slots it tells a sample of the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.guard import identity_of
from gateway.callers.keys import AdminRole
from gateway.schedule.decision_log import Grant
from gateway.schedule.scheduler import Scheduler
from gateway.web.asgi import JsonResponse, number_parameter

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


@dataclass(frozen=True, slots=True)
class TimelineEndpoint:
    """The endpoint of the timeline."""

    scheduler: Scheduler
    now: Callable[[], float]
    name_of: Callable[[str], str | None]  # the name of the key with this id

    async def show(self, request: Request) -> Response:
        """Attempts that run and that have ended lately; callers are named for operators alone."""
        after = number_parameter(request, "after", 0.0, math.inf, "a Unix time")
        shows_callers = identity_of(request).role >= AdminRole.OPERATOR
        return JsonResponse(self.read(after or 0.0, shows_callers=shows_callers))

    def read(self, after: float, *, shows_callers: bool) -> TimelineObject:
        """What runs, and what has ended after this Unix time and within the last ten minutes."""
        scheduler, at = self.scheduler, self.now()
        log, shift = scheduler.decision_log, at - scheduler.clock()
        earliest = max(after, at - TIMELINE_SECONDS)
        # A router's slots are those of its models.
        slots = {
            node.name: node.slots_now
            for node in scheduler.fleet.nodes.values()
            if not node.is_router and node.slots_now
        }
        lanes = sample_of(slots)
        return TimelineObject(
            round(at, 2),
            round(max(log.reaches_back_to() + shift, at - TIMELINE_SECONDS), 2),
            sum(slots.values()),
            lanes,
            list(SlotSpan._fields),
            [
                self._span(grant, node, shift, shows_caller=shows_callers)
                for grant, node in self._attempts(earliest - shift)
                if node is not None and node in lanes and grant.slots
            ],
        )

    def _attempts(self, earliest: float) -> Iterator[tuple[Grant, str | None]]:
        """Those that run or have ended since `earliest`, each with its node."""
        for record in self.scheduler.records.values():
            if record.grant.ended_at is None:
                yield record.grant, record.node.name
        for grant in self.scheduler.decision_log.grants:
            if grant.ended_at is not None and grant.ended_at > earliest:
                yield grant, grant.ran_on

    def _span(self, grant: Grant, node: str, shift: float, *, shows_caller: bool) -> SlotSpan:
        def unix(at: float | None) -> float | None:
            return None if at is None else round(at + shift, 2)

        return SlotSpan(
            grant.request_id,
            grant.lease_id,
            node,
            grant.slots,
            grant.caller if shows_caller else None,
            self.name_of(grant.caller) if shows_caller else None,
            grant.model,
            round(grant.at + shift, 2),
            unix(grant.first_content_at),
            unix(grant.ended_at),
            grant.outcome,
            grant.resumes,
        )


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
