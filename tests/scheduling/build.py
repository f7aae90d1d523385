"""Schedulers over nodes that are not probed, and requests for them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

from gateway.config.routing import HealthSettings, TimeoutSettings
from gateway.config.settings import Settings
from gateway.events import EventBus
from gateway.fleet.fleet import Fleet
from gateway.fleet.node import Lease, Node
from gateway.fleet.server_properties import ServerProperties
from gateway.fleet.state_files import DrainedNodes
from gateway.request import Caller, Priority, Request
from gateway.scheduling.scheduler import Scheduler
from tests.fleet.build import a_node, no_upstream

CALLER = Caller("c", "c", Priority.NORMAL)
_numbers = itertools.count()


def node(
    name: str = "a", *, slots: int = 2, models: tuple[str, ...] = ("demo",), **keys: Any
) -> Node:
    """A node that is ready."""
    made = a_node(name=name, url=f"http://{name}:1", slots=slots, **keys)
    made.properties = ServerProperties(models=models)
    return made


def a_request(
    model: str = "demo", *candidates: str, received_at: float = 0.0, **keys: Any
) -> Request:
    number = next(_numbers)
    return Request(
        id=f"req_{number}",
        x_request_id=f"req_{number}",
        path="/v1/chat/completions",
        header_lines=b"",
        bodies={},
        model_in_body=model,
        caller=keys.pop("caller", CALLER),
        priority=keys.pop("priority", Priority.NORMAL),
        model=model,
        model_names=candidates or (model,),
        endpoint=keys.pop("endpoint", "chat"),
        received_at=received_at or float(number),
        **keys,
    )


def a_scheduler(
    *nodes: Node,
    clock: Callable[[], float] | None = None,
    seed: int = 7,
    **settings: Any,
) -> Scheduler:
    """A scheduler over these nodes; its clock is theirs by default, and stands still."""
    chosen = clock or (nodes[0].clock if nodes else lambda: 0.0)
    fleet = Fleet(
        connect=lambda _: no_upstream(),
        health=HealthSettings(),
        timeouts=TimeoutSettings(),
        bus=EventBus(),
        clock=chosen,
        rng=random.Random(seed),
        drained_nodes=DrainedNodes(None),
    )
    for one in nodes:
        one.clock = chosen
        one.on_lease_released = fleet.lease_released
        fleet.nodes[one.name] = one
    fleet.model_index.set_nodes(nodes)
    return Scheduler(fleet, Settings(**settings), chosen, random.Random(seed))


async def settle() -> None:
    """Let tasks go as far as they can without the clock."""
    for _ in range(8):
        await asyncio.sleep(0)


async def start_lease(scheduler: Scheduler, request: Request) -> asyncio.Task[tuple[Lease, str]]:
    """The task of a request's lease, which has been granted or waits."""
    task = asyncio.create_task(scheduler.lease(request))
    await settle()
    return task
