"""Many requests of one key beside another key: bodies, the queue, and paths without slots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.access.fair_share import FairShare
from gateway.access.keys import new_key
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import RawConnection, raw_connection
from tests.gateways import until
from tests.virtual import in_virtual_time
from tests.web.raw_client import HELLO, Answer, Public, answer, public, request

A, B, WEB = new_key(), new_key(), new_key()
KEYS = [
    {"id": A.id, "sha256": A.sha256, "max_class": "urgent", "class": "normal"},
    {"id": B.id, "sha256": B.sha256, "max_class": "urgent", "class": "normal"},
    {"id": WEB.id, "sha256": WEB.sha256, "trust_user_headers": True},
]


def key(one: Any) -> str:
    return f"Authorization: Bearer {one.text}"


@asynccontextmanager
async def shared(
    folder: Path, node: EmulatedNode | None = None, **settings: Any
) -> AsyncIterator[Public]:
    """A gateway with keys; at the end no body is counted."""
    async with public(folder, {"keys": KEYS, **settings}, node, well=False) as gate:
        yield gate
        body_memory = gate.running.gateway.handler.body_memory
        await until(lambda: not gate.running.gateway.registry)
        await until(lambda: body_memory.fair_share == FairShare())
        assert (body_memory.total_bytes, body_memory.allocation_count) == (0, 0)


async def begun(stack: AsyncExitStack, gate: Public, size: int, *fields: str) -> RawConnection:
    """A body that stops after so many bytes."""
    wire = await stack.enter_async_context(raw_connection(gate.url))
    holdings = gate.running.gateway.handler.body_memory.fair_share
    before = dict(holdings.by_caller)
    await wire.send(request(b" " * size, *fields, length=90_000))
    await until(lambda: holdings.by_caller != before)
    return wire


async def refused(wire: RawConnection) -> bool:
    """Whether it got 429; it may have got nothing yet."""
    try:
        data = await wire.some(0.05)
    except TimeoutError:
        return False
    assert b"HTTP/1.1 429" in data
    assert b"queue_full" in data
    assert b"retry-after" in data.lower()
    return True


@in_virtual_time
async def test_bodies_of_one_key_are_evicted_for_another(tmp_path: Path) -> None:
    limits = {"buffered_bytes": 80_000, "body_bytes": 100_000}
    async with shared(tmp_path, limits=limits) as gate, AsyncExitStack() as stack:
        held = [await begun(stack, gate, 10_000, key(A)) for _ in range(7)]
        for _ in range(3):
            async with raw_connection(gate.url) as wire:
                await wire.send(request(b" " * 10_000, key(A), length=90_000))
                assert (await answer(wire)).status == 429, "a key alone leaves a reserve"
        found = await gate.ask(request({**HELLO, "max_tokens": 1, "x": "x" * 25_000}, key(B)))
        assert found.status == 200
        # The newest bodies of the other key were evicted, and no more than needed.
        assert [await refused(wire) for wire in held] == [False] * 4 + [True] * 3


@in_virtual_time
async def test_a_key_gains_no_memory_by_sending_more(tmp_path: Path) -> None:
    limits = {"buffered_bytes": 80_000, "body_bytes": 100_000}
    async with shared(tmp_path, limits=limits) as gate, AsyncExitStack() as stack:
        first = [await begun(stack, gate, 5_000, key(A)) for _ in range(14)]
        second = [await begun(stack, gate, 5_000, key(B)) for _ in range(7)]
        async with raw_connection(gate.url) as wire:
            await wire.send(request(b" " * 5_000, key(B), length=90_000))
            assert (await answer(wire)).status == 429
        assert not any([await refused(wire) for wire in second])
        assert sum([await refused(wire) for wire in first]) == 7


@in_virtual_time
async def test_the_body_of_a_queued_request_is_evicted_for_another_key(tmp_path: Path) -> None:
    limits = {"buffered_bytes": 80_000, "body_bytes": 100_000}
    node = EmulatedNode(slots=1, decode_tps=5)
    async with shared(tmp_path, node, limits=limits) as gate:
        body = {**HELLO, "max_tokens": 20, "x": "x" * 12_000}
        theirs = [asyncio.create_task(gate.ask(request(body, key(A)))) for _ in range(5)]
        await until(lambda: len(gate.running.gateway.scheduler.queue_positions()) == 4)
        found = asyncio.create_task(gate.ask(request({**body, "x": "x" * 20_000}, key(B))))
        await until(lambda: any(task.done() for task in theirs))
        response_of = [task.result().status for task in theirs if task.done()]
        assert response_of == [429]
        assert (await found).status == 200
        assert Counter([(await task).status for task in theirs]) == {200: 4, 429: 1}


@in_virtual_time
async def test_a_request_of_several_prompts_is_evicted_until_its_first_has_started(
    tmp_path: Path,
) -> None:
    limits = {"buffered_bytes": 80_000, "body_bytes": 100_000}
    node = EmulatedNode(slots=1, decode_tps=20)
    async with shared(tmp_path, node, limits=limits) as gate:
        body = {"prompt": ["a", "b"], "max_tokens": 20, "x": "x" * 12_000}
        data = request(body, key(A), path="/v1/completions")
        theirs = [asyncio.create_task(gate.ask(data)) for _ in range(5)]
        # The second prompt of the first request is queued, and the first prompts of the others.
        await until(lambda: len(gate.running.gateway.scheduler.queue_positions()) == 5)
        other = {**HELLO, "max_tokens": 20, "x": "x" * 20_000}
        found = asyncio.create_task(gate.ask(request(other, key(B))))
        await until(lambda: any(task.done() for task in theirs))
        assert [task.result().status for task in theirs if task.done()] == [429]
        assert not theirs[0].done()
        assert (await found).status == 200
        assert Counter([(await task).status for task in theirs]) == {200: 4, 429: 1}


@in_virtual_time
async def test_a_callers_only_body_may_use_the_reserve(tmp_path: Path) -> None:
    # A body counts twice while it is prepared.
    limits = {"buffered_bytes": 200_000, "body_bytes": 100_000}
    async with shared(tmp_path, limits=limits) as gate:
        found = await gate.ask(request({**HELLO, "max_tokens": 1, "x": "x" * 95_000}, key(A)))
        assert found.status == 200


@in_virtual_time
async def test_three_hundred_requests_of_one_key_do_not_exclude_another(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=50)
    async with shared(tmp_path, node, queue={"max": 24}) as gate:
        body = {**HELLO, "max_tokens": 3}
        crowd = [asyncio.create_task(gate.ask(request(body, key(A)))) for _ in range(300)]
        await until(lambda: sum(task.done() for task in crowd) > 250)
        for data in (request(body, key(B)), request(body, key(B), "X-Priority: batch")):
            assert (await gate.ask(data)).status == 200
        fates = Counter([(await task).status for task in crowd])
        assert set(fates) == {200, 429}
        assert fates[200] >= 20


@in_virtual_time
async def test_naming_users_gives_a_key_no_more_places_in_the_queue(tmp_path: Path) -> None:
    node = EmulatedNode(slots=1, decode_tps=50)
    async with shared(tmp_path, node, queue={"max": 24}) as gate:
        body = {**HELLO, "max_tokens": 3}

        async def by(user: int) -> Answer:
            return await gate.ask(request(body, key(WEB), f"X-User-Id: u{user}"))

        crowd = [asyncio.create_task(by(user)) for user in range(100)]
        await until(lambda: sum(task.done() for task in crowd) > 60)
        assert len(gate.running.gateway.scheduler.queue_positions()) <= 21
        assert (await gate.ask(request(body, key(B)))).status == 200
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


@pytest.mark.parametrize("path", ["/apply-template", "/tokenize", "/v1/messages/count_tokens"])
@in_virtual_time
async def test_requests_without_a_slot_reach_a_node_few_at_a_time(
    tmp_path: Path, path: str
) -> None:
    node = EmulatedNode(slots=2)
    async with shared(tmp_path, node, queue={"slotless": 4}) as gate:
        node.faults.set("hang", path=path)
        body = {**HELLO, "content": "x", "max_tokens": 3}
        scheduler = gate.running.gateway.scheduler

        def asked(who: Any) -> asyncio.Task[Answer]:
            return asyncio.create_task(gate.ask(request(body, key(who), path=path)))

        crowd = [asked(A) for _ in range(16)]
        await until(lambda: len(scheduler.queue_positions()) == 14)
        row = scheduler.dispatcher.placement_state.rows[0]
        assert row.slotless_by_caller == {A.id: 2}
        status = (await gate.running.client.get(f"{gate.running.admin_url}/admin/status")).json()
        assert status["queue"]["normal"] == 14
        others = [asked(B) for _ in range(3)]
        await until(lambda: len(scheduler.queue_positions()) == 15)
        assert row.slotless_by_caller == {A.id: 2, B.id: 2}
        # They take neither slots nor places in the queue for slots.
        found = await gate.ask(request({**HELLO, "max_tokens": 1}, key(B)))
        assert found.status == 200
        node.faults.clear()
        for task in crowd + others:
            task.cancel()
        await asyncio.gather(*crowd, *others, return_exceptions=True)
        await until(lambda: row.slotless_running == 0)


@in_virtual_time
async def test_requests_without_a_slot_queue_in_order_and_within_their_deadline(
    tmp_path: Path,
) -> None:
    node = EmulatedNode(slots=1)
    async with shared(tmp_path, node, queue={"slotless": 1}) as gate:
        body = {"content": "x"}
        response_of = await asyncio.gather(
            *(gate.ask(request(body, key(A), path="/tokenize")) for _ in range(20))
        )
        assert {one.status for one in response_of} == {200}
        node.faults.set("hang", path="/tokenize")
        held = asyncio.create_task(gate.ask(request(body, key(A), path="/tokenize")))
        scheduler = gate.running.gateway.scheduler
        await until(lambda: scheduler.dispatcher.placement_state.rows[0].slotless_running == 1)
        late = await gate.ask(request(body, key(B), "X-Request-Timeout: 0.5", path="/tokenize"))
        assert (late.status, late.code) == (503, "queue_timeout")
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
