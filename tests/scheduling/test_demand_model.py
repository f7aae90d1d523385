"""What the demand model predicts, and what it learns."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gateway.fleet.node import Lease, Node
from gateway.lease import LeaseRequest, PromptKey
from gateway.scheduling.demand_model import LONG_PROMPT_BYTES, ReportedTokens
from gateway.scheduling.scheduler import Scheduler
from tests.scheduling.build import a_request, a_scheduler, node


def leased(scheduler: Scheduler, request: LeaseRequest) -> Lease:
    granted = scheduler.lease_now(request)
    assert granted is not None
    return granted[0]


def serve(
    scheduler: Scheduler, request: LeaseRequest, reported: ReportedTokens | None, **keys: bool
) -> Lease:
    """Place a request, end it and learn from it."""
    lease = leased(scheduler, request)
    lease.release()
    scheduler.demand_model.answer_ended(request)
    complete = keys.pop("complete", reported is not None)
    scheduler.demand_model.learn(lease, request, reported, 30.0, complete=complete)
    return lease


@pytest.fixture
def nodes() -> list[Node]:
    return [node("a"), node("b")]


def prompt_request(*blocks: int, size: int = 4000) -> LeaseRequest:
    prompt = PromptKey(blocks, size / 4, size=size)
    return a_request(prompt_key=prompt, text_bytes=size, max_tokens=100)


def believed_cached(scheduler: Scheduler, lease: Lease) -> float:
    """Prompt tokens that its node was believed to have cached."""
    row = scheduler.dispatcher.placement_state.by_name[lease.node.name]
    cached: float = lease.placement.queued.cached.get(row.index, 0.0)
    return cached


def test_lengths_are_learnt_from_reported_tokens(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    for _ in range(30):
        serve(
            scheduler, a_request(text_bytes=1000, max_tokens=4000), ReportedTokens(500.0, 0.0, 20.0)
        )
    request = a_request(text_bytes=1000, max_tokens=4000)
    queued = leased(scheduler, request).placement.queued
    assert queued.prompt_tokens == pytest.approx(500.0, rel=0.1)
    assert queued.completion_tokens == pytest.approx(20.0, rel=0.5)


def test_a_request_that_generates_nothing_decodes_nothing(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = a_request(endpoint="embeddings", generates=False, text_bytes=1000)
    assert leased(scheduler, request).placement.queued.completion_tokens <= 1.0


def test_a_node_that_has_a_prompt_cached_gets_the_next_turn(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    first_node = serve(scheduler, prompt_request(1, 2, 3), ReportedTokens(1000.0, 0.0, 20.0)).node
    for _ in range(5):
        assert (
            serve(scheduler, prompt_request(1, 2, 3, 4), ReportedTokens(1100.0, 1000.0, 20.0)).node
            is first_node
        )


def test_an_answer_without_reported_tokens_leaves_nothing_cached(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    serve(scheduler, prompt_request(1, 2, 3), None)
    assert scheduler.prompt_cache.lookup(PromptKey((1, 2, 3), 1000.0)).cached == {}


def test_ended_answers_are_learnt_before_a_long_prompt_is_placed(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    demand_model, first = scheduler.demand_model, prompt_request(1, 2, 3)
    lease = leased(scheduler, first)
    scheduler.learn_pending = lambda: demand_model.learn(
        lease, first, ReportedTokens(1000.0, 0.0, 5.0), 5.0, complete=True
    )
    lease.release()
    demand_model.answer_ended(first)
    leased(scheduler, prompt_request(7, size=LONG_PROMPT_BYTES - 1)).release()
    assert demand_model.learning_pending
    assert believed_cached(scheduler, leased(scheduler, prompt_request(1, 2, 3, 4))) > 900
    assert not demand_model.learning_pending


async def test_ended_answers_are_learnt_before_their_slots_are_given_out() -> None:
    only = node(slots=1)
    moments = itertools.count()
    scheduler = a_scheduler(only, clock=lambda: float(next(moments)))
    demand_model, first = scheduler.demand_model, prompt_request(1, 2, 3)
    lease = leased(scheduler, first)
    scheduler.learn_pending = lambda: demand_model.learn(
        lease, first, ReportedTokens(1000.0, 0.0, 5.0), 5.0, complete=True
    )
    waiting = asyncio.create_task(scheduler.lease(prompt_request(1, 2, 3, 4)))
    await asyncio.sleep(0)
    lease.release()
    demand_model.answer_ended(first)
    async with asyncio.timeout(30.0):
        granted, _ = await waiting
    assert believed_cached(scheduler, granted) > 900


def test_a_short_prompt_leaves_no_learning_pending(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    scheduler.demand_model.answer_ended(prompt_request(1, size=LONG_PROMPT_BYTES - 1))
    assert not scheduler.demand_model.learning_pending


def test_an_answer_of_a_removed_node_leaves_nothing_cached(nodes: list[Node]) -> None:
    scheduler = a_scheduler(*nodes)
    request = prompt_request(1, 2, 3)
    lease = leased(scheduler, request)
    del scheduler.fleet.nodes[lease.node.name]
    scheduler.fleet.model_index.set_nodes(scheduler.fleet.nodes.values())
    scheduler.capacity_changed()
    lease.release()
    scheduler.demand_model.answer_ended(request)
    scheduler.demand_model.learn(
        lease, request, ReportedTokens(1000.0, 0.0, 5.0), 5.0, complete=True
    )
    assert scheduler.prompt_cache.lookup(PromptKey((1, 2, 3), 1000.0)).cached == {}
    assert not scheduler.demand_model.learning_pending


def test_a_wide_request_takes_the_slots_that_a_learnt_limit_leaves() -> None:
    one = node(kind="openai")
    one.spec = one.spec.model_copy(update={"slots": None})
    scheduler = a_scheduler(one)
    assert one.most_slots > one.slots_total
    lease = leased(scheduler, a_request(slots=one.slots_total + 1))
    assert lease.slots == one.slots_total
