"""Nodes and fleets for the tests of this folder: a clock that stands still, quick settings."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gateway.config.inventory import Inventory, NodeSpec
from gateway.config.settings import Settings
from gateway.events import EventBus, ModelsDiffer, NodeChanged, NodeDrift
from gateway.nodes.circuit import Circuit
from gateway.nodes.fleet import Fleet
from gateway.nodes.lifecycle import ProbeAnswer, ProbeResult
from gateway.nodes.node import Lease, Node, NodeState
from gateway.nodes.speed import ObservedTiming, Speed, sample_from_timings
from gateway.nodes.state_files import OperatorOrders, PropertiesStore
from gateway.transport.pool import ConnectionPool, open_node_pool
from tests.emulator import EmulatedNode
from tests.virtual import now

QUICK: dict[str, Any] = {
    "interval": 0.05,
    "timeout": 0.5,
    "discover_interval": 0.1,
    "open": 0.2,
    "open_max": 0.8,
    "slow_start": 0.0,
}


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> float:
        self.now += seconds
        return self.now


def learn_timings(
    speed: Speed, timings: Mapping[str, object], seen: ObservedTiming | None = None
) -> None:
    """Learn from llama.cpp's `timings`, and from what the gateway saw."""
    speed.learn(sample_from_timings(timings, seen))


class NoUpstream:
    """A node's pool that no test may use; it knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def no_upstream() -> ConnectionPool:
    return cast("ConnectionPool", NoUpstream())


def a_spec(name: str = "a", url: str = "http://127.0.0.1:9", **keys: Any) -> NodeSpec:
    return NodeSpec(name=name, url=url, **keys)


def a_node(
    clock: Clock | None = None,
    *,
    health: dict[str, Any] | None = None,
    state: NodeState = NodeState.READY,
    **keys: Any,
) -> Node:
    """A node that is up, without a fleet."""
    clock = clock or Clock()
    settings = Settings.model_validate({"health": health or {}})
    node = Node(
        spec=a_spec(**keys),
        upstream=no_upstream(),
        settings=settings,
        clock=clock,
        circuit=Circuit(settings.health, random.Random(7)),
    )
    up = ProbeResult(ProbeAnswer.UP, "")
    node.probe_history.record(up, rise=1, fall=1, sign_of_life=None)
    node.set_state(state, "")
    return node


def take(
    node: Node,
    slots: int = 1,
    *,
    stream: bool = True,
    expected_prefill: float | None = None,
    expected_total: float | None = None,
    wake: float = 0.0,
) -> Lease:
    now = node.clock()
    lease = Lease(node, slots, now, stream)
    lease.expect(expected_prefill, expected_total)
    node.take(lease, now, wake)
    return lease


def is_held(lease: Lease) -> bool:
    """Whether the lease's slots still count against its node."""
    return lease.released_at is None


@dataclass
class Running:
    """A running fleet and the events that it has published."""

    fleet: Fleet
    changes: list[NodeChanged] = field(default_factory=list)
    drifts: list[NodeDrift] = field(default_factory=list)
    model_differences: list[ModelsDiffer] = field(default_factory=list)
    capacity: int = 0
    """How often a slot may have become free."""

    def __getitem__(self, name: str) -> Node:
        return self.fleet.nodes[name]

    def state(self, name: str) -> NodeState:
        return self.fleet.nodes[name].state

    def states(self, name: str) -> list[str | None]:
        """The states that a node has gone through."""
        return [change.new_state for change in self.changes if change.node == name]

    async def until(self, condition: Callable[[], bool], limit: float = 30.0) -> None:
        async with asyncio.timeout(limit):
            while not condition():  # noqa: ASYNC110 - any condition of a test
                await asyncio.sleep(0.002)

    async def until_state(self, name: str, state: NodeState, limit: float = 30.0) -> None:
        try:
            await self.until(lambda: self[name].state is state, limit)
        except TimeoutError:
            node = self[name]
            raise AssertionError(f"{node.state} ({node.reason}), not {state}") from None


@asynccontextmanager
async def streamed(lease: Lease, **body: Any) -> AsyncIterator[Lease]:
    """A chat that runs under this lease, after its first content; at the end it is cut off."""
    data = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, **body})
    lines = b"content-type: application/json\r\n"
    address = lease.upstream.address
    head = address.request_head(b"POST", b"/v1/chat/completions", lines, len(data))
    async with lease.upstream.response(head, data.encode(), connect_timeout=30) as connection:
        lease.head_received(lease.node.clock())
        await connection.read()
        lease.content_received(lease.node.clock())
        yield lease


def inventory(*specs: NodeSpec) -> Inventory:
    return Inventory(nodes=specs)


@asynccontextmanager
async def a_fleet(
    *nodes: NodeSpec | EmulatedNode,
    connect: Callable[[NodeSpec], ConnectionPool] = open_node_pool,
    folder: Path | None = None,
    clock: Callable[[], float] = now,
    probed: bool = True,
    timeouts: dict[str, Any] | None = None,
    properties_store: PropertiesStore | None = None,
    **health: Any,
) -> AsyncIterator[Running]:
    """A running fleet with quick probes; `probed`: wait for its first probes.

    Emulated nodes, which are `a`, `b` and so on, are started before it and ended after it.
    """
    bus = EventBus()
    fleet = Fleet(
        connect=connect,
        settings=Settings.model_validate({"health": QUICK | health, "timeouts": timeouts or {}}),
        bus=bus,
        clock=clock,
        rng=random.Random(7),
        orders=OperatorOrders(None if folder is None else lambda name: folder / name),
        properties_store=properties_store,
    )
    running = Running(fleet)
    bus.subscribe(NodeChanged, running.changes.append)
    bus.subscribe(NodeDrift, running.drifts.append)
    bus.subscribe(ModelsDiffer, running.model_differences.append)

    free_slots: dict[Node, int] = {}

    def count() -> None:
        running.capacity += 1

    def count_change(node: Node | None) -> None:
        if node is not None:
            before, free_slots[node] = free_slots.get(node, 0), node.free_slots(clock())
            running.capacity += free_slots[node] > before

    fleet.subscribe(on_capacity=count, on_change=count_change)
    async with AsyncExitStack() as stack:
        specs = []
        for number, node in enumerate(nodes):
            if isinstance(node, EmulatedNode):
                url = (await stack.enter_async_context(node)).url
                specs.append(a_spec(chr(ord("a") + number), url))
            else:
                specs.append(node)
        await fleet.start(inventory(*specs))
        stack.push_async_callback(fleet.aclose)
        if probed:
            async with asyncio.timeout(30):
                await fleet.first_probes_done.wait()
        yield running
