"""What an edge carries from one brain to the next: requests that are open, and their leases.

In a cluster the brain may be replaced while requests wait and run. Between two links the edge tells
nothing; the next brain is told how things stand instead. A request is carried until the ledger has
its record for good, and so are the leases that it has used: what a brain has counted and not booked
when it is lost, the next one counts again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal

import structlog
from msgspec.structs import replace

from gateway.callers.limits import Accounts
from gateway.edges import messages
from gateway.events import RequestRecord
from gateway.lease import GrantedLease, LeaseRequest, UsageReport
from gateway.transport.link import EdgeLink

log = structlog.get_logger()
MOST_UNBOOKED = 4096  # records of each kind that are kept until the ledger has them
TOLD_AT_ONCE = 128  # messages that are told in one turn of the event loop


class Uplink:
    """The link to the brain of the moment. While there is none, what is told gets lost."""

    tell: Callable[[Any], None]

    def __init__(self, link: EdgeLink) -> None:
        self.use(link)

    def use(self, link: EdgeLink) -> None:
        """A new link takes the place of the last one; it is to be opened."""
        self.link = link
        self.shut()

    def shut(self) -> None:
        """The link is lost, or another one is coming."""
        self._backlog: deque[Any] = deque()
        self.tell, self.is_open = lambda _: None, False

    def open(self, first: Iterator[Any]) -> None:
        """Tell these first and then all that is told from now on, in short steps."""
        self._backlog = deque()
        self.tell, self.is_open = self._backlog.append, True
        asyncio.get_running_loop().call_soon(self._go_on, first, self._backlog)

    def _go_on(self, first: Iterator[Any], backlog: deque[Any]) -> None:
        if backlog is not self._backlog:
            return
        some = list(islice(first, TOLD_AT_ONCE))
        while backlog and len(some) < TOLD_AT_ONCE:
            some.append(backlog.popleft())
        for message in some:
            self.link.tell(message)
        if some:
            asyncio.get_running_loop().call_soon(self._go_on, first, backlog)
        else:
            self.tell = self.link.tell


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease that the edge has; in a cluster, also one that a request has used."""

    lease: GrantedLease
    request: LeaseRequest
    granted_at: float
    rests_on: float  # when the brain had heard of the edge for the last time before, at least
    shares_pool: bool
    started: bool = False  # whether its request is being written, or was
    phase: messages.Phase = "sent"
    tokens: int = 0  # events of content that have come
    ended_at: float | None = None
    usage: UsageReport | None = None  # what its response took
    excused: bool | None = None  # whether its node may be silent; None: it is not known
    excused_at: float = 0.0  # when that was told; or asked, while it is not known
    asks: bool = False  # whether the brain is being asked

    def carried(self, now: float, phase: messages.Phase, tokens: int) -> messages.CarriedLease:
        """What another brain must know of it, which was in this phase."""
        lease, until = self.lease, now if self.ended_at is None else self.ended_at
        return messages.CarriedLease(
            lease.id, self.request, lease.node.name, lease.model, lease.served_name, lease.stream,
            lease.reading, lease.slots, lease.fallback, until - self.granted_at, phase, tokens,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """A request that was taken in, until it is told of as finished; in a cluster, as booked."""

    opening: messages.Opening
    accounts: Accounts
    tell_rates: Callable[[messages.Rates | None], None]
    record: RequestRecord
    received_at: float = 0.0  # known once it is told
    admission: Literal["due", "told", "refused"] = "due"
    """Whether it is to be admitted with the next lease that it asks for."""
    released: bool = False  # whether its response has ended
    leases: dict[int, HeldLease] = field(default_factory=dict)
    """Those under which it was sent; in a cluster only."""

    def opening_with(
        self, request: LeaseRequest, age: float, now: float
    ) -> messages.Opening | None:
        """What is told of it with the first lease that it, or a prompt of it, asks for."""
        if self.admission != "due":
            return None
        self.admission, self.received_at = "told", now - age
        opening, is_whole = self.opening, request.id == self.opening.id
        return replace(opening, age=age, request=None if is_whole else opening.request)

    def carried(self, now: float) -> messages.CarriedRequest:
        """What another brain must know of it."""
        opening = replace(self.opening, age=now - self.received_at)
        return messages.CarriedRequest(opening, messages.EndedRecord.of(self.record), self.released)


Ended = messages.Finished | messages.Turned


class EdgeRequests:
    """The requests at an edge, and the records of those that have ended, until they are booked."""

    def __init__(self, uplink: Uplink, *, clustered: bool) -> None:
        self._uplink = uplink
        self.clustered = clustered
        self.open: dict[str, AdmittedRequest] = {}
        self.dropped = 0  # records that were not kept until they were booked
        self._unbooked: dict[type, deque[tuple[int, Ended]]] = {
            messages.Finished: deque(), messages.Turned: deque()
        }  # fmt: skip
        """By kind, with their numbers on this link."""
        self._told = self._booked = 0  # on this link

    def whole(self, request_id: str) -> AdmittedRequest | None:
        """The request of this id, or of which one prompt has it."""
        found = self.open.get(request_id)
        return self.open.get(request_id.rpartition(".")[0]) if found is None else found

    def leases_of(self, request_id: str) -> dict[int, HeldLease]:
        """The leases under which a request was sent, its prompts' included."""
        whole = self.whole(request_id)
        return {} if whole is None else whole.leases

    def ended(self, message: Ended) -> None:
        """Tell that a request is over, and keep that until it is booked."""
        if not self.clustered:
            self._forget(message)
        else:
            self._told += 1
            kept = self._unbooked[type(message)]
            kept.append((self._told, message))
            if len(kept) > MOST_UNBOOKED:
                self._forget(kept.popleft()[1])
                self.dropped += 1
                if self.dropped % MOST_UNBOOKED == 1:
                    log.error("records can't be kept until they are booked", dropped=self.dropped)
        self._uplink.tell(message)

    def booked(self, told: messages.Booked) -> None:
        """The ledger has so many more of those that were told on this link."""
        self._booked += told.count
        for kept in self._unbooked.values():
            while kept and kept[0][0] <= self._booked:
                self._forget(kept.popleft()[1])

    def carried(
        self, clock: Callable[[], float]
    ) -> Iterator[messages.CarriedRequest | messages.CarriedLease]:
        """What another brain must know of them; it may be read later, in steps."""
        known = [one for one in self.open.values() if one.admission == "told"]
        # What happens to a lease from now on is told later: so now must be told what was before.
        leases = [
            (lease, lease.phase, lease.tokens) for one in known for lease in one.leases.values()
        ]
        return chain(
            (one.carried(clock()) for one in known),
            (lease.carried(clock(), phase, tokens) for lease, phase, tokens in leases),
        )

    def unbooked(self) -> Iterable[UsageReport | Ended]:
        """What the next brain is told again, once it has taken over what is carried."""
        usage = [
            held.usage
            for one in self.open.values()
            if one.admission == "told"
            for held in one.leases.values()
            if held.usage is not None
        ]
        again = [message for kept in self._unbooked.values() for _, message in kept]
        self._told, self._booked = len(again), 0
        numbered = enumerate(again, 1)
        for kept in self._unbooked.values():
            some = list(islice(numbered, len(kept)))
            kept.clear()
            kept.extend(some)
        return chain(usage, again)

    @property
    def are_booked(self) -> bool:
        """Whether nothing has ended that is not booked."""
        return not any(self._unbooked.values())

    def _forget(self, message: Ended) -> None:
        if isinstance(message, messages.Finished):
            self.open.pop(message.record.request_id, None)
