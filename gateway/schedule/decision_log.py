"""The decision log: recent decisions about requests, kept in numbers so that they can be explained.

A request's decisions are those of one id: that it was queued, that it was granted a lease (once for
each attempt), that it was refused. They hold no text, and the log holds a bounded number of each
kind, the newest. Refusals have a place of their own, so that a flood of them pushes nothing else
out. What runs for each request costs next to nothing: words are found when somebody asks
(`admin/why.py`).

`PredictionAccuracy` counts for metrics how well expectations agree with what came of requests. A
ratio of 2 means that it took twice as long as was expected when the slot was granted. Only attempts
that were not cut short count, and whose tokens their node has told.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import msgspec

from gateway.errors import GatewayError
from gateway.lease import NOTHING_TRIED, LeaseRequest, Tried, Usage
from gateway.schedule.core.requests import Comparison, Deferral, QueuedRequest
from gateway.terms import Priority

# Leases that are remembered: at 5 requests a second, those of a quarter of an hour.
MOST_GRANTS = 4096
MOST_QUEUEINGS = 2048
MOST_REFUSALS = 1024
MOST_FOLLOWED = 4096  # requests whose decisions are collected while they run
MOST_COLLECTED = 256  # decisions that are collected of each, the first
LONGEST_REASON = 500


class Queueing(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A request found no room, and waits."""

    request_id: str
    at: float  # monotonic seconds; so are all times here
    received_at: float
    priority: Priority
    ahead: int | None
    """About how many go before it; None: not counted, as none of its nodes is alive."""
    predicted_wait: float | None  # seconds; None: nothing measured to predict it from
    waiting: int
    expires_at: float  # until when it may wait


class Refusal(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A request was refused by the scheduler, at once or after a wait."""

    request_id: str
    at: float
    received_at: float
    status: int
    code: str
    message: str
    """For the client, of at most `LONGEST_REASON`; it may quote the client. Empty: not kept over a
    restart."""


class Grant(msgspec.Struct, eq=False, gc=False):
    """A request was granted a lease: one attempt, what was expected, and what came of it.

    It holds nothing large of the request, so that it may be kept for long.
    """

    request_id: str
    at: float
    received_at: float
    lease_id: int
    model: str
    tier: str
    caller: str = ""  # its id; empty: a version before this one has kept it
    node: str | None = None  # where it runs, if `comparison` does not tell
    # What was expected of the request on its node, and of others.
    slots: int = 1
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    expected_ttft: float = 0.0
    """Seconds from the grant until the prompt was expected to have been read."""
    expected_seconds: float = 0.0  # from the grant until the answer was expected to end
    comparison: Comparison | None = None  # what its node was compared with; None: nothing was kept
    # What made the choice another one than that of most requests.
    deferral: Deferral | None = None  # the last time that it was deferred to a busy node
    tried: Tried | None = None  # what earlier attempts have shown; None: it was the first
    resumes: bool = False  # whether it continues a response on another node
    times_yielded: int = 0
    fallback: str | None = None  # why it is not of the tier of its class
    out: Mapping[str, int] | None = None
    """Nodes that serve its model and had no room, by the reason; None: all had."""
    # What came of it.
    first_content_at: float | None = None
    ended_at: float | None = None
    outcome: str | None = None
    """How the attempt ended, in the word of metrics and logs; None: it runs."""
    status: int = 0  # of its response; 0: none
    used: tuple[int, int, int] | None = None
    """Tokens of the prompt, those of them that were cached, and of the answer; None: no response,
    or not counted yet."""
    reported: bool = False  # whether the node has reported these tokens; else they are estimates

    @property
    def ran_on(self) -> str | None:
        """The node; None: an earlier version has not kept it."""
        return self.node if self.comparison is None else self.comparison.chosen.name

    def content_began(self, now: float) -> None:
        """The first content has come."""
        if self.first_content_at is None:
            self.first_content_at = now

    def ended(self, outcome: str, status: int, now: float) -> None:
        """The attempt is over."""
        self.outcome, self.status, self.ended_at = outcome, status, now

    def settled(self, usage: Usage, *, reported: bool) -> None:
        """It is known what its response took."""
        self.used = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        self.reported = reported


Decision = Queueing | Refusal | Grant


@dataclass(slots=True)
class RememberedRequest:
    """What the log has of one request."""

    decisions: list[Decision] = field(default_factory=list)  # the oldest first
    parts: set[str] = field(default_factory=set)
    """Of a request of several prompts: the ids of those that it was run in."""


@dataclass(slots=True, eq=False)
class DecisionLog:
    """The newest decisions of each kind, the oldest first."""

    clock: Callable[[], float]
    grants: deque[Grant] = field(default_factory=lambda: deque(maxlen=MOST_GRANTS))
    queueings: deque[Queueing] = field(default_factory=lambda: deque(maxlen=MOST_QUEUEINGS))
    refusals: deque[Refusal] = field(default_factory=lambda: deque(maxlen=MOST_REFUSALS))
    followed: dict[str, list[Decision]] = field(default_factory=dict)
    """What was decided about the requests that are followed, by their ids."""
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    # Written by the scheduler.

    def granted(
        self,
        placement: QueuedRequest,
        request: LeaseRequest,
        tried: Tried,
        lease_id: int,
        model: str,
        tier: str,
        node: str | None = None,
        fallback: str | None = None,
        out: Mapping[str, int] | None = None,
    ) -> Grant:
        """A placement has become a lease; `node`: where it runs, if nodes were not compared.

        What is expected of it is kept as it is now, since its row moves its ends later.
        """
        at = placement.placed_at
        grant = Grant(
            placement.id, at, placement.received_at, lease_id, model, tier, request.caller.id, node,
            placement.slots, placement.prompt_tokens, placement.completion_tokens,
            placement.prefill_ends - at, placement.ends - at, placement.comparison,
            placement.deferral, None if tried is NOTHING_TRIED else tried,
            request.wanted.resume_key is not None, request.caller.times_yielded, fallback,
            out or None,
        )  # fmt: skip
        self.grants.append(grant)
        if self.followed:
            self._collect(grant)
        return grant

    def queued(self, queueing: Queueing) -> None:
        """A request waits from now on."""
        self.queueings.append(queueing)
        self._collect(queueing)

    def refused(
        self, request: LeaseRequest, error: GatewayError, received_at: float, now: float
    ) -> None:
        """A request is refused, at once or after a wait."""
        message = error.message[:LONGEST_REASON]
        refusal = Refusal(request.id, now, received_at, error.status, error.code, message)
        self.refusals.append(refusal)
        self._collect(refusal)

    def by_kind(self) -> tuple[tuple[type[Decision], deque[Any]], ...]:
        """The decisions of each kind."""
        return (Grant, self.grants), (Queueing, self.queueings), (Refusal, self.refusals)

    def restore(self, earlier: Sequence[Decision]) -> None:
        """Remember decisions of an earlier process, too. A lease that is there is replaced."""
        for kind, log in self.by_kind():
            found = {_identity(one): one for one in (*log, *earlier) if type(one) is kind}
            log.clear()
            log.extend(sorted(found.values(), key=lambda one: one.at))
            if log:
                self.started_at = min(self.started_at, log[0].at)

    # Collected for those who need all of one request, however long it runs.

    def follow(self, request_id: str) -> None:
        """Collect the decisions about this request from now on, until `take`."""
        if len(self.followed) >= MOST_FOLLOWED:
            del self.followed[next(iter(self.followed))]
        self.followed[request_id] = []

    def take(self, request_id: str) -> list[Decision] | None:
        """What was decided about a request since `follow`, and no more; None: it is unknown."""
        return self.followed.pop(request_id, None)

    def follow_none(self) -> None:
        """Collect no more of any request."""
        self.followed.clear()

    def _collect(self, one: Decision) -> None:
        found = self.followed.get(one.request_id)
        if found is None and "." in one.request_id:
            found = self.followed.get(one.request_id.rpartition(".")[0])
        if found is not None and len(found) < MOST_COLLECTED:
            found.append(one)

    # Read by those who explain.

    def find(self, request_ids: Iterable[str]) -> dict[str, RememberedRequest]:
        """What is remembered about each of these requests. One look at the whole log."""
        found = {request_id: RememberedRequest() for request_id in request_ids}
        for one in chain[Decision](self.queueings, self.refusals, self.grants):
            if (known := found.get(one.request_id)) is not None:
                known.decisions.append(one)
            elif (whole := found.get(one.request_id.rpartition(".")[0])) is not None:
                whole.parts.add(one.request_id)
        for request in found.values():
            request.decisions.sort(key=lambda one: one.at)
        return found

    def reaches_back_to(self) -> float:
        """Since when every grant is remembered."""
        grants = self.grants
        return grants[0].at if len(grants) == grants.maxlen else self.started_at


def _identity(one: Decision) -> object:
    # Times are read back to some digits.
    return one.request_id, one.lease_id if isinstance(one, Grant) else round(one.at, 2)


RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
# Shorter expectations say nothing: a ratio of milliseconds is that of the network's whims.
LEAST_SECONDS = 0.01


@dataclass(slots=True, eq=False)
class RatioCounts:
    """How often each ratio was met; the last count is of those above all bounds."""

    bounds: ClassVar = RATIO_BOUNDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(RATIO_BOUNDS) + 1))
    sum: float = 0.0

    def count(self, ratio: float) -> None:
        """Count a ratio."""
        self.counts[bisect_left(RATIO_BOUNDS, ratio)] += 1
        self.sum += ratio


@dataclass(slots=True, eq=False)
class PredictionAccuracy:
    """Counts of this gateway, over its restarts."""

    first_token: RatioCounts = field(default_factory=RatioCounts)
    completion: RatioCounts = field(default_factory=RatioCounts)
    cached_expected: float = 0.0
    """Tokens that nodes were believed to have cached of the prompts that they got."""
    cached_found: int = 0  # tokens of the same prompts that they had cached

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not (
            any(self.first_token.counts) or any(self.completion.counts) or self.cached_found
        )

    def restore(self, earlier: PredictionAccuracy) -> None:
        """Go on from an earlier process's counts. Raises: ValueError."""
        if any(
            len(ratios.counts) != len(RATIO_BOUNDS) + 1 or min(ratios.counts) < 0
            for ratios in (earlier.first_token, earlier.completion)
        ):
            raise ValueError("counts of other classes")
        cached = earlier.cached_expected, earlier.cached_found
        sums = earlier.first_token.sum, earlier.completion.sum, *cached
        if not all(0 <= one < math.inf for one in sums):
            raise ValueError("no sums")
        self.first_token, self.completion = earlier.first_token, earlier.completion
        self.cached_expected, self.cached_found = cached

    def settled(self, grant: Grant) -> None:
        """A complete response's tokens are known."""
        if grant.used is None:
            return
        first, ended, comparison = grant.first_content_at, grant.ended_at, grant.comparison
        if first is not None and grant.expected_ttft >= LEAST_SECONDS:
            self.first_token.count((first - grant.at) / grant.expected_ttft)
        if ended is not None and grant.expected_seconds >= LEAST_SECONDS:
            self.completion.count((ended - grant.at) / grant.expected_seconds)
        if comparison is not None:
            prompt, cached, _ = grant.used
            if comparison.own:
                self.cached_expected += min(comparison.cached_on_chosen, prompt)
            self.cached_found += cached
