"""Which requests may wait, and those that do: by caller, and for shedding.

The queue is bounded by count and by the predicted wait. A class is admitted while the queue is
filled less than its share, so that lower classes are refused first. A class that was refused for
its predicted wait stays refused until that has fallen some way below the limit: else every slot
that comes free would admit one request and refuse the next.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from gateway import errors
from gateway.callers.fair_share import FairShare, soft_limit
from gateway.config.scheduling import DEFAULT_QUEUE_SHARE
from gateway.config.settings import Settings
from gateway.lease import GrantedLease, LeaseCaller, LeaseRequest, Tried
from gateway.nodes.router import ModelLoad
from gateway.schedule.candidates import NodeCandidates, NodesByModel, nodes_of
from gateway.schedule.core.requests import QueuedRequest
from gateway.terms import Priority


# A struct of msgspec, since one is made for each request.
class Waiter(msgspec.Struct, eq=False):
    """A request that asks for a lease: where it may go, and if it must wait, its place there."""

    request: LeaseRequest
    tried: Tried
    candidates: NodeCandidates
    queued: QueuedRequest  # its entry in the wait queue
    queued_at: float
    expires_at: float = math.inf  # when it has waited long enough; monotonic seconds
    granted: asyncio.Future[GrantedLease] = None  # type: ignore[assignment] # set before it waits
    nodes_down_since: float | None = None  # since when every node that could serve it has been down
    response_started: bool = False
    """Whether its client has the head of a response, with a heartbeat."""
    serial: int = 0  # of those that wait, the oldest have the least; 0: it has not waited yet
    timer: asyncio.TimerHandle | None = None  # of its check at `due_at`
    yield_asked_at: float = -math.inf  # when running requests were last asked to yield to it

    @property
    def shed_key(self) -> tuple[int, float, int]:
        """Sorts its user's requests by class, then by age."""
        return int(self.request.caller.priority), self.queued_at, self.serial

    @property
    def can_shed(self) -> bool:
        """Whether it can be refused to make room for another.

        Not once it, or the request that it is a part of, has been at a node: its response may have
        begun.
        """
        return not (self.tried.was_sent or self.request.caller.admitted or self.granted.done())

    @property
    def due_at(self) -> float:
        """When it is to be checked: its wait expires, or another tier opens for it."""
        return min(self.expires_at, self.candidates.fallback_at)

    def set_candidates(
        self, candidates: NodeCandidates, queued: QueuedRequest | None = None
    ) -> None:
        """Replace its candidates; and its entry in the queue, if it has left that."""
        self.candidates, self.queued = candidates, queued or self.queued

    def wait(self, expires_at: float, granted: asyncio.Future[GrantedLease], now: float) -> None:
        """It waits from now on, until `granted` has its lease."""
        self.expires_at, self.granted, self.queued_at = expires_at, granted, now
        self.nodes_down_since = None if self.candidates.any_alive() else now

    def number(self, serial: int) -> None:
        """Set `serial`, the first time that it waits."""
        self.serial = self.serial or serial

    def raise_to(self, priority: Priority) -> None:
        """Let it wait in this class, and yield no more; it is not in the queue meanwhile."""
        caller = replace(self.request.caller, priority=priority, patient=True, yields=False)
        self.request = replace(self.request, caller=caller)

    def note_yield_asked(self, now: float) -> None:
        """Running requests were asked to yield to it."""
        self.yield_asked_at = now

    def note_response_started(self) -> None:
        """Its client has the head of a response."""
        self.response_started = True

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """It is checked by this timer and no other."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer

    def expiry_error(
        self, settings: Settings, retry_after: float, now: float
    ) -> errors.GatewayError | None:
        """Why it may not wait any longer; None: it may. `retry_after`: seconds to advise.

        While all its nodes are down it waits `retries.wait_for_node`; but if a standby node is
        starting, it waits as for any slot.
        """
        starting_in = None
        is_alive = self.candidates.any_alive()
        if not is_alive:
            starting_in = standby_ready_in(self.candidates.by_model, settings.elastic.cooldown, now)
        if is_alive or starting_in is not None:
            self.nodes_down_since = None
        elif self.nodes_down_since is None:
            self.nodes_down_since = now
        # What a request has that has yielded is kept until its time limit.
        down_since = None if self.request.caller.times_yielded else self.nodes_down_since
        if down_since is not None:
            until = down_since + settings.retries.wait_for_node
            names = ", ".join(repr(name) for name in self.request.wanted.model_names)
            failed = hindered_loads(self.candidates.by_model)
            again_at = min(
                (one.retry_at if one.failures else until for _, one in failed), default=0.0
            )
            if failed and (now >= until or again_at > until):
                reasons = [(name, one.hindrance.rstrip(".")) for name, one in failed]
                return errors.load_failed(names, reasons, max(retry_after, again_at - now))
            if now >= until:
                return errors.no_node(f"Every node for {names} is out.", retry_after)
        if now < self.expires_at:
            return None
        waited = now - self.queued_at
        if starting_in is not None:
            return errors.starting(
                f"The node for it is still being started after {waited:.0f} s; "
                f"it is expected in {starting_in:.0f} s.",
                starting_in,
            )
        return errors.queue_timeout(f"No slot came free in {waited:.0f} s.", retry_after)


_shed_key = attrgetter("shed_key")


@dataclass(slots=True, eq=False)
class Waiters:
    """All waiting requests."""

    fair_share: FairShare = field(default_factory=FairShare)
    """How many places each caller and user holds."""
    _by_queued: dict[QueuedRequest, Waiter] = field(default_factory=dict)
    _by_request_id: dict[str, Waiter] = field(default_factory=dict)
    _by_user: dict[tuple[str, str], list[Waiter]] = field(default_factory=dict)
    """By caller and user: the highest class first, within a class the oldest."""
    _patient: dict[str, dict[Waiter, None]] = field(default_factory=dict)
    """Those that are patient, by caller, in the order in which they came."""
    _serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __len__(self) -> int:
        return len(self._by_queued)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._by_queued.values())

    def __contains__(self, queued: QueuedRequest) -> bool:
        return queued in self._by_queued

    def get(self, queued: QueuedRequest) -> Waiter | None:
        """The waiter of this entry in the wait queue."""
        return self._by_queued.get(queued)

    def by_request_id(self, request_id: str) -> Waiter | None:
        """The waiter of one request."""
        return self._by_request_id.get(request_id)

    def add(self, waiter: Waiter) -> None:
        """It waits from now on."""
        self._by_queued[waiter.queued] = waiter
        self._by_request_id[waiter.request.id] = waiter
        waiter.number(next(self._serials))
        user = caller_and_user(waiter.request)
        self.fair_share.add(user[0], 1, user[1])
        insort(self._by_user.setdefault(user, []), waiter, key=_shed_key)
        if waiter.request.caller.patient:
            self._patient.setdefault(user[0], {})[waiter] = None

    def pop(self, queued: QueuedRequest) -> Waiter | None:
        """Take out the waiter of this entry; it does not wait any more."""
        if (waiter := self._by_queued.pop(queued, None)) is not None:
            self._by_request_id.pop(waiter.request.id, None)
            waiter.set_timer(None)
            user = caller_and_user(waiter.request)
            self.fair_share.remove(user[0], 1, user[1])
            waiting = self._by_user[user]
            del waiting[bisect_left(waiting, waiter.shed_key, key=_shed_key)]
            if not waiting:
                del self._by_user[user]
            if waiter.request.caller.patient:
                del self._patient[user[0]][waiter]
                if not self._patient[user[0]]:
                    del self._patient[user[0]]
        return waiter

    def longest_waits(self, now: float) -> dict[Priority, float]:
        """Seconds for which the oldest waiting request of each class has waited."""
        since: dict[Priority, float] = {}
        for waiter in self:
            priority = waiter.request.caller.priority
            since[priority] = min(waiter.queued_at, since.get(priority, math.inf))
        return {priority: max(0.0, now - queued_at) for priority, queued_at in since.items()}

    def newest_sheddable(self, caller: str, user: str) -> Waiter | None:
        """A user's newest request that can be shed, of its lowest class.

        One whose response has begun with heartbeats is the last choice, since its error comes in a
        response of status 200.
        """
        begun: Waiter | None = None
        for waiter in reversed(self._by_user.get((caller, user), ())):
            if not waiter.can_shed:
                continue
            if not waiter.response_started:
                return waiter
            begun = begun or waiter
        return begun

    def newest_patient(self, caller: str) -> Waiter | None:
        """A caller's newest patient request that can be shed."""
        patient = reversed(self._patient.get(caller, {}))
        return next((waiter for waiter in patient if waiter.can_shed), None)


def caller_and_user(request: LeaseRequest) -> tuple[str, str]:
    """The caller of a request, and the user that it names: else the caller itself."""
    return request.caller.id, request.caller.fairness_key


def hindered_loads(nodes_by_model: NodesByModel) -> list[tuple[str, ModelLoad]]:
    """The loads that have failed or can't have room, by node, if no other node may serve."""
    nodes = [*nodes_of(nodes_by_model)]
    failed = [(node.name, node.load) for node in nodes if node.load and node.load.hindrance]
    return failed if len(failed) == len(nodes) else []


def standby_ready_in(nodes_by_model: NodesByModel, cooldown: float, now: float) -> float | None:
    """Seconds until a standby node among these is expected to work; None: none will."""
    return min(
        (
            node.lifecycle.ready_in(now, cooldown)
            for node in nodes_of(nodes_by_model)
            if node.spec.standby and node.startable
        ),
        default=None,
    )


MOST_REFUSED_CALLERS = 4096  # pairs of class and caller that are remembered as refused for the wait


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """What one class may take of the queue; waits in seconds."""

    most_waiting: int  # requests in the whole queue from which on the class is refused
    refuse_above: float
    reopen_below: float  # predicted wait below which it is admitted again
    max_wait: float  # the longest that one of its requests waits


def class_limits(settings: Settings, priority: Priority) -> ClassLimits:
    """The limits of one class."""
    queue, label = settings.queue, priority.label
    rule = settings.classes.get(label)  # type: ignore[call-overload]
    share = DEFAULT_QUEUE_SHARE[label]
    max_wait = queue.max_wait
    if rule is not None:
        share = share if rule.queue_share is None else rule.queue_share
        max_wait = max_wait if rule.max_wait is None else rule.max_wait
    wait = share * max_wait
    return ClassLimits(math.ceil(share * queue.max), wait, queue.reopen * wait, max_wait)


@dataclass(slots=True)
class Admission:
    """Decides by the settings in force; remembers which classes are refused for the wait."""

    settings: Settings
    limits: dict[Priority, ClassLimits] = field(init=False)  # what each class may take
    _refused: set[tuple[Priority, str]] = field(default_factory=set)
    """By class and caller: a caller with few waiting requests waits less than one with many."""

    def __post_init__(self) -> None:
        self.configure(self.settings)

    def configure(self, settings: Settings) -> None:
        """Put changed settings in force."""
        self.settings = settings
        self.limits = {priority: class_limits(settings, priority) for priority in Priority}

    def admit(
        self, waiter: Waiter, waiting: int, predicted: float | None, retry_after: float, now: float
    ) -> float:
        """Until when a request may wait beside `waiting` others.

        Raises: GatewayError, as `check`, or when its client will have stopped waiting before.
        """
        caller, deadline = waiter.request.caller, waiter.queued.deadline
        until = now + self.limits[caller.priority].max_wait
        if caller.yields or caller.patient:
            # Work that can wait, as long as its deadline allows.
            until, predicted = math.inf, None
        if deadline is not None:
            if predicted is not None and now + predicted > deadline:
                raise errors.queue_timeout(
                    f"A slot is expected in {predicted:.0f} s: longer than this client will wait.",
                    max(1.0, now + predicted - deadline),
                )
            until = min(until, deadline)
        # A request that was admitted once is not refused because its node failed it.
        if not (waiter.tried.was_sent or caller.admitted):
            self.check(caller, waiting, predicted, retry_after)
        return until

    def check(
        self, caller: LeaseCaller, waiting: int, predicted: float | None, retry_after: float
    ) -> None:
        """See whether one more request of the caller may wait. Raises: GatewayError, if not.

        `predicted` is its expected wait, None where that is unknown; `retry_after` the time until
        one fewer waits. Both in seconds.
        """
        priority, key = caller.priority, (caller.priority, caller.id)
        limits = self.limits[priority]
        if waiting >= limits.most_waiting:
            raise errors.queue_full(
                f"{waiting} requests wait already. Try again later.", retry_after
            )
        if predicted is None or predicted <= limits.reopen_below:
            self._refused.discard(key)
            return
        if predicted > limits.refuse_above:
            if len(self._refused) >= MOST_REFUSED_CALLERS:
                self._refused.clear()
            self._refused.add(key)
        if predicted > limits.max_wait:
            raise errors.queue_timeout(
                f"A slot is expected in {predicted:.0f} s, and no request of the class "
                f"'{priority.label}' waits longer than {limits.max_wait:.0f} s.",
                predicted - limits.reopen_below,
            )
        if key in self._refused:
            raise errors.queue_full(
                f"A slot is expected in {predicted:.0f} s: the queue is too long for the class "
                f"'{priority.label}' now. Try again later.",
                max(1.0, predicted - limits.reopen_below),
            )


def queue_room(
    request: LeaseRequest, waiters: Waiters, admission: Admission
) -> tuple[int, Waiter | None]:
    """Waiting requests, as far as they count for this one, and the one that is shed for it.

    It waits within its caller's fair share of the queue.
    """
    caller, user = caller_and_user(request)
    waiting, most = len(waiters), admission.settings.queue.max
    count = admission.limits[request.caller.priority].most_waiting
    fair_share = waiters.fair_share
    if fair_share.held_by(caller) >= soft_limit(most) or not fair_share.fits(caller, 1, count):
        # Its caller has its share; within that, another of the caller's users may have more.
        displaced = _newest(waiters, fair_share.larger_user(caller, 1, user))
        if displaced is None and not request.caller.patient:
            displaced = waiters.newest_patient(caller)
        return max(waiting, count) if displaced is None else count - 1, displaced
    if waiting < count:
        return waiting, None
    for other in fair_share.victims(caller, 1, count):
        displaced = _newest(waiters, *((other, name) for name in fair_share.users_by_size(other)))
        if displaced is not None:
            # A lower class is not shed while its own share of the queue leaves room.
            needed = waiting >= admission.limits[displaced.request.caller.priority].most_waiting
            return count - 1, displaced if needed else None
    return count - 1 if waiting < most else waiting, None


def _newest(waiters: Waiters, *users: tuple[str, str] | None) -> Waiter | None:
    for user in users:
        waiter = None if user is None else waiters.newest_sheddable(*user)
        if waiter is not None:
            return waiter
    return None


RATE_WINDOW = 60.0  # seconds over which completions are counted
DEFAULT_RETRY_AFTER = 5.0  # seconds to advise while no rate has been measured
LONGEST_RETRY_AFTER = 600.0  # seconds; no longer `Retry-After` is sent


class CompletionRate:
    """Completed requests per second over the last minute."""

    def __init__(self) -> None:
        self.total = 0  # requests completed since the start
        self._ends: deque[float] = deque(maxlen=1024)

    def completed(self, now: float) -> None:
        """A request has released its slot."""
        self.total += 1
        self._ends.append(now)

    def seconds_until(self, ahead: int, now: float) -> float | None:
        """Seconds until `ahead` more requests are completed; None while fewer than two were."""
        ends = self._ends
        while ends and ends[0] < now - RATE_WINDOW:
            ends.popleft()
        per_second = len(ends) / max(now - ends[0], 1e-3) if len(ends) >= 2 else None
        return None if per_second is None else ahead / per_second

    def retry_after(self, ahead: int, now: float) -> float:
        """Whole seconds of `Retry-After` for a request that would be behind `ahead` others."""
        wait = self.seconds_until(ahead, now)
        whole = math.ceil(DEFAULT_RETRY_AFTER if wait is None else wait)
        return min(LONGEST_RETRY_AFTER, max(1.0, float(whole)))


def combine_waits(
    completion_rate: CompletionRate, slots: int, ahead: int, by_work: float | None, now: float
) -> float | None:
    """The lower of two predictions of the wait behind `ahead` others, seconds; None: unknown.

    One is by the rate at which slots came free, once as many have as there are `slots`; the other,
    `by_work`, by the work that runs and waits. The lower one, since a wrong refusal costs more than
    a wait in vain. With nobody ahead it depends on the lengths of one or two answers, so only half
    of it is believed.
    """
    if by_work is not None and not math.isfinite(by_work):
        by_work = None
    if not ahead:
        return None if by_work is None else by_work / 2
    by_rate = None
    if completion_rate.total >= slots:
        by_rate = completion_rate.seconds_until(ahead + 1, now)
    return min((one for one in (by_rate, by_work) if one is not None), default=None)
