"""A brain of a cluster as an edge sees it, over a real socketpair: it does what the test says."""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Any, TypeVar

import msgspec

from gateway.callers.keys import AnonymousAccess
from gateway.edges import messages
from gateway.edges.edge import EdgeServices
from gateway.edges.messages import NO_MODELS
from gateway.lease import ExpectedReading
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
        ours, theirs = socket.socketpair()
        self.link = EdgeLink(messages.ToBrain, self.receive, self.lost.append, now)
        await EdgeLink.over(ours, self.link)
        services.relink(theirs)

    async def lead(self, services: EdgeServices) -> None:
        """The same, and wait until it has told all that it carries."""
        await self.link_to(services)
        await until(lambda: self.all(messages.Carried))

    def cut(self) -> None:
        assert self.link._transport is not None
        self.link._transport.abort()

    def receive(self, message: Any) -> None:
        self.told.append(message)
        if isinstance(message, messages.Hello) and self.greets:
            self.greet()

    def greet(self) -> None:
        tell = self.link.tell
        settings = msgspec.json.encode(self.settings)
        of_all = settings, b"k" * 32, True, 1, self.epoch, 1.0
        tell(messages.Configuration(messages.VERSION, *of_all))
        tell(messages.Keys(self.keys, (), True, AnonymousAccess(), last=True))
        tell(NO_MODELS)
        tell(messages.NodeMet(a_node_info("a"), ROUTE))

    def all(self, kind: type[M]) -> list[M]:
        return [one for one in self.told if isinstance(one, kind)]

    async def last(self, kind: type[M], count: int = 1) -> M:
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


async def a_clustered_edge(brain: FakeBrain, name: str = "gw-a/edge-1") -> EdgeServices:
    services = EdgeServices(name, clustered=True, clock=now)
    await brain.lead(services)
    await services.wait_ready(10.0)
    await asyncio.sleep(0)
    return services
