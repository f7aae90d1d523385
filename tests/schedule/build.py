"""Schedulers over nodes that are not probed, and requests for them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.events import EventBus
from gateway.lease import NOTHING_TRIED, LeaseRequest, Tried
from gateway.nodes.fleet import Fleet
from gateway.nodes.node import Node
from gateway.nodes.server_properties import ServerProperties
from gateway.nodes.state_files import OperatorOrders
from gateway.request.prompt_key import BLOCK_BYTES
from gateway.schedule.core.demand_model import DemandModel
from gateway.schedule.scheduler import LeaseRecord, Scheduler
from tests.known import known
from tests.lease_requests import a_lease_request
from tests.nodes.build import a_node, no_upstream

CALLER = "c"
_numbers = itertools.count()


def node(
    name: str = "a", *, slots: int = 2, models: tuple[str, ...] = ("demo",), **keys: Any
) -> Node:
    """A node that is ready."""
    made = a_node(name=name, url=f"http://{name}:1", slots=slots, **keys)
    made.properties = ServerProperties(models=models)
    return made


def a_request(model: str = "demo", *candidates: str, **keys: Any) -> LeaseRequest:
    fields = {"fairness_key": CALLER, "model_names": candidates or (model,), **keys}
    return a_lease_request(f"req_{next(_numbers)}", model, **fields)


def failed_on(*nodes: str) -> Tried:
    """These nodes have failed the request."""
    return Tried(failed_nodes=frozenset(nodes))


def refused_by(*nodes: str) -> Tried:
    """These nodes have refused the request for good."""
    return Tried(excluded_nodes=frozenset(nodes))


def a_scheduler(
    *nodes: Node,
    clock: Callable[[], float] | None = None,
    seed: int = 7,
    yield_slot: Callable[[str], bool] = lambda _: False,
    **settings: Any,
) -> Scheduler:
    """A scheduler over these nodes; its clock is theirs by default, and stands still."""
    chosen = clock or (nodes[0].clock if nodes else lambda: 0.0)
    fleet = Fleet(
        connect=lambda _: no_upstream(),
        settings=Settings(),
        bus=EventBus(),
        clock=chosen,
        rng=random.Random(seed),
        orders=OperatorOrders(),
    )
    for one in nodes:
        one.clock = chosen
        one.on_lease_released = fleet.lease_released
        fleet.nodes[one.name] = one
    fleet.model_index.set_nodes(nodes)
    chosen_settings = Settings(**settings)
    return Scheduler(fleet, chosen_settings, chosen, random.Random(seed), yield_slot=yield_slot)


def set_nodes(scheduler: Scheduler, *nodes: Node) -> None:
    """Put these nodes, and no others, in the inventory."""
    fleet = scheduler.fleet
    for one in [*fleet.nodes.values(), *nodes]:
        one.removed = one not in nodes
        one.on_lease_released = fleet.lease_released
    fleet.nodes.clear()
    fleet.nodes.update({one.name: one for one in nodes})
    fleet.model_index.set_nodes(nodes)
    scheduler.capacity_changed()


async def settle() -> None:
    """Let tasks go as far as they can without the clock."""
    for _ in range(8):
        await asyncio.sleep(0)


async def take_lease(
    scheduler: Scheduler,
    request: LeaseRequest,
    tried: Tried = NOTHING_TRIED,
    age: float = 0.0,
    *,
    response_started: bool = False,
) -> LeaseRecord:
    """The scheduler's record of a request's lease."""
    granted = scheduler.lease_now(request, tried, age) or await scheduler.wait_for_lease(
        request, tried, age, response_started=response_started
    )
    return scheduler.records[granted.id]


def lease_at_once(scheduler: Scheduler, request: LeaseRequest) -> LeaseRecord:
    """The same of a request that does not have to wait."""
    return scheduler.records[known(scheduler.lease_now(request)).id]


async def start_lease(
    scheduler: Scheduler, request: LeaseRequest, *tried: Any, **more: Any
) -> asyncio.Task[LeaseRecord]:
    """The task of `take_lease`, which has its lease or waits."""
    task = asyncio.create_task(take_lease(scheduler, request, *tried, **more))
    await settle()
    return task


@dataclass(slots=True)
class Belief:
    """The tokens of a prompt that its node was believed to have cached, and had."""

    believed: float
    cached: float
    prompt: float
    block: float  # tokens of one block


def noted_beliefs(monkeypatch: pytest.MonkeyPatch) -> list[Belief]:
    """Note one for each request that ends from now on."""
    found: list[Belief] = []
    learn = DemandModel.learn

    def noting(model: DemandModel, placement: Any, request: Any, report: Any, *more: Any) -> None:
        used = report.reported
        block = used.prompt_tokens * BLOCK_BYTES / request.size.prompt_key.size
        believed = placement.cached.get(placement.row.index, 0.0)
        found.append(Belief(believed, used.cached_tokens, used.prompt_tokens, block))
        learn(model, placement, request, report, *more)

    monkeypatch.setattr(DemandModel, "learn", noting)
    return found
