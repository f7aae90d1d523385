"""A brain of a cluster as an edge sees it, over a real socketpair: it does what the test says."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from gateway.callers.keys import AnonymousAccess
from gateway.edges import messages
from gateway.edges.edge import EdgeServices
from gateway.edges.messages import NO_MODELS
from gateway.lease import AttemptReport, ExpectedReading, UsageReport
from gateway.transport.link import EdgeLink
from tests.forward.granted_lease import a_node_info
from tests.gateways import until
from tests.virtual import now

M = TypeVar("M")
ROUTE = messages.NodeRoute("127.0.0.1", 9, b"", b"host: x\r\n", None, None, 1)


class FakeBrain:
    """Greets, and notes what it is told; grants, adopts and books when it is called for that."""

    def __init__(self, epoch: int = 1, *, settings: dict[str, Any] | None = None) -> None:
        self.epoch = epoch
        self.settings = settings or {}
        self.keys: tuple[messages.KeyOnWire, ...] = ()
        self.told: list[Any] = []
        self.lost: list[str] = []
        self.greets = True
        self.link: EdgeLink
        self._lease_ids = itertools.count(epoch << 33)

    async def link_to(self, services: EdgeServices) -> None:
        """Be the brain of this edge from now on."""
        ours, theirs = socket.socketpair()
        self.link = EdgeLink(messages.ToBrain, self.receive, self.lost.append, now)
        await EdgeLink.over(ours, self.link)
        services.relink(theirs)

    async def lead(self, services: EdgeServices) -> None:
        """The same, and wait until it has told all that it carries."""
        await self.link_to(services)
        await until(lambda: self.all(messages.Carried))

    def cut(self) -> None:
        """The link is lost for both."""
        assert self.link._transport is not None
        self.link._transport.abort()

    def receive(self, message: Any) -> None:
        """Note what is told; answer hello."""
        self.told.append(message)
        if isinstance(message, messages.Hello) and self.greets:
            self.greet()

    def greet(self) -> None:
        """Tell what an edge must know."""
        tell = self.link.tell
        settings = msgspec.json.encode(self.settings)
        of_all = settings, b"k" * 32, True, 1, self.epoch, 1.0
        tell(messages.Configuration(messages.VERSION, *of_all))
        tell(messages.Keys(self.keys, (), True, AnonymousAccess(), last=True))
        tell(NO_MODELS)
        tell(messages.NodeMet(a_node_info("a"), ROUTE))

    def all(self, kind: type[M]) -> list[M]:
        """All messages of this kind that it was told."""
        return [one for one in self.told if isinstance(one, kind)]

    async def last(self, kind: type[M], count: int = 1) -> M:
        """The last message of this kind, once there are so many."""
        await until(lambda: len(self.all(kind)) >= count, seen=lambda: f"{self.told}")
        return self.all(kind)[-1]

    def grant(self, ask: int) -> int:
        """Grant a lease for this ask; returns its id."""
        lease_id, reading = next(self._lease_ids), ExpectedReading(10, 1.0, 2.0)
        self.link.tell(
            messages.Granted(
                ask, lease_id, "a", "demo", "demo.gguf", True, reading, 1, None, False, None
            )
        )
        return lease_id


class Ledger:
    """What all brains have booked: for each request, the leases that its row was charged for."""

    def __init__(self) -> None:
        self.rows: dict[str, frozenset[int]] = {}
        self.told_again: Counter[str] = Counter()

    def add(self, id_: str, charged: frozenset[int]) -> None:
        if id_ in self.rows:
            self.told_again[id_] += 1
            assert self.rows[id_] == charged, f"{id_}: other leases than before"
        self.rows[id_] = charged


class StrictBrain(FakeBrain):
    """Has slots, a queue and a ledger, and refuses what is no possible order of events."""

    def __init__(self, epoch: int, slots: int, ledger: Ledger) -> None:
        super().__init__(epoch)
        self.slots, self.ledger = slots, ledger
        self.requests: dict[str, set[int]] = {}
        """Admitted, and not accounted for; and the leases for which each is charged."""
        self.leases: dict[int, str] = {}  # that are held, and their requests
        self.ended: dict[int, str] = {}  # those that have ended and are not settled
        self.asks: dict[int, str] = {}
        self.adopts = True
        self.broken: list[str] = []  # the first rule that was broken
        self.pending: list[tuple[str, frozenset[int]] | None] = []
        """What is to be booked, in the order in which it was told; None: it is no row."""

    def receive(self, message: Any) -> None:
        super().receive(message)
        try:
            self._take(message)
        except (KeyError, AssertionError) as error:
            self.broken.append(f"{message}: {error!r}")
            raise

    def _take(self, message: Any) -> None:  # noqa: PLR0912 - one case for each message
        match message:
            case messages.CarriedRequest(opening=opening):
                assert self.adopts
                assert opening.id not in self.requests
                self.requests[opening.id] = set()
            case messages.CarriedLease(lease_id=id_, request=request, phase=phase):
                assert self.adopts
                assert request.id in self.requests
                assert id_ not in self.leases
                (self.ended if phase == "ended" else self.leases)[id_] = request.id
            case messages.Carried():
                assert self.adopts
                self.adopts = False
                self.link.tell(messages.Adopted())
            case messages.AskLease(ask=ask, request=request, opening=opening):
                assert not self.adopts
                assert (opening is None) == (request.id in self.requests)
                assert request.id not in self.asks.values(), "it waits already"
                assert request.id not in self.leases.values(), "it runs already"
                self.requests.setdefault(request.id, set())
                self.asks[ask] = request.id
            case messages.Withdraw(ask=ask):
                self.asks.pop(ask, None)
            case messages.GiveBack(lease_id=id_):
                del self.leases[id_]
            case messages.LeaseNews(lease_id=id_) | messages.ContentWentOn(lease_id=id_):
                assert id_ in self.leases
            case AttemptReport(lease_id=id_, response_began=began):
                request_id = self.leases.pop(id_)
                if began:
                    self.ended[id_] = request_id
            case UsageReport(lease_id=id_):
                self.requests[self.ended.pop(id_)].add(id_)
            case messages.Finished(record=record, opening=opening):
                whole = record.request_id
                if opening is not None:
                    assert whole not in self.requests
                    self.requests[whole] = set()
                self.pending.append((whole, frozenset(self.requests.pop(whole))))
            case messages.Turned():
                self.pending.append(None)

    def work(self) -> Iterator[None]:
        """One step of what a brain does by itself."""
        while len(self.leases) < self.slots and self.asks:
            ask = min(self.asks)
            request_id = self.asks.pop(ask)
            self.leases[self.grant(ask)] = request_id
            yield

    def book(self, count: int) -> None:
        """So many of the records are in the ledger for good."""
        some, self.pending = self.pending[:count], self.pending[count:]
        for row in some:
            if row is not None:
                self.ledger.add(*row)
        if some:
            self.link.tell(messages.Booked(len(some)))


async def a_clustered_edge(brain: FakeBrain, name: str = "gw-a/edge-1") -> EdgeServices:
    """An edge of a cluster, linked to this brain."""
    services = EdgeServices(name, clustered=True, clock=now)
    await brain.lead(services)
    await services.wait_ready(10.0)
    await asyncio.sleep(0)
    return services
