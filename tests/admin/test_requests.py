from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.emulator import EmulatedNode
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of

SECRET = "the launch code is 7391"


@asynccontextmanager
async def slow_gateway(**settings: Any) -> AsyncIterator[tuple[BareGateway, EmulatedNode]]:
    """One node with one slot, busy for minutes with each request."""
    async with bare_gateway(
        node := EmulatedNode(slots=1, decode_tps=10, answer_tokens=2000),
        settings=settings,
        serving=True,
    ) as gateway:
        yield gateway, node


async def listed(gateway: BareGateway) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = (await gateway.admin.get("/admin/requests")).json()["requests"]
    return requests


async def cancel(gateway: BareGateway, name: str) -> httpx.Response:
    return await gateway.admin.delete(f"/admin/requests/{name}")


async def start(
    gateway: BareGateway, node: EmulatedNode, **body: Any
) -> asyncio.Task[httpx.Response]:
    """A request that has got a slot, or a place in the queue."""
    before = len(gateway.registry)
    waits = node.busy > 0
    queued = len(gateway.scheduler.queue_positions())
    task = asyncio.create_task(gateway.chat(SECRET, **body))
    await gateway.until(lambda: len(gateway.registry) == before + 1)
    await gateway.until(
        lambda: len(gateway.scheduler.queue_positions()) == queued + 1 if waits else node.busy == 1
    )
    return task


async def end(*tasks: asyncio.Task[httpx.Response]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@in_virtual_time
async def test_running_and_queued_requests_are_listed_without_their_text() -> None:
    async with slow_gateway(models={"alias": {"use": "demo"}}) as (gateway, node):
        first = await start(gateway, node, stream=True, headers={"x-request-id": "one"})
        second = await start(
            gateway,
            node,
            model="alias",
            n=1,
            headers={"x-request-id": "two", "x-priority": "batch"},
        )
        text = (await gateway.admin.get("/admin/requests")).text
        running, waiting = await listed(gateway)
        await end(first, second)
        await gateway.until(lambda: len(gateway.registry) == 0)
        assert await listed(gateway) == []
    assert SECRET not in text
    assert (running["request_id"], running["state"], running["position"]) == (
        "one", "running", None
    )  # fmt: skip
    assert (running["node"], running["attempts"]) == ("a", 1)
    assert (running["class"], running["model"], running["stream"]) == ("normal", "demo", True)
    assert (running["slots"], running["path"]) == (1, "/v1/chat/completions")
    assert running["id"] != running["request_id"]
    assert running["caller"] == "anonymous:127.0.0.1"
    assert running["prompt_tokens_estimate"] > 0
    assert (waiting["state"], waiting["position"], waiting["node"]) == ("waiting", 1, None)
    assert (waiting["class"], waiting["model"], waiting["stream"]) == ("batch", "alias", False)
    assert 0 < waiting["queue_seconds"] <= waiting["seconds"] < 30


@pytest.mark.parametrize("tools", [40, 400])
@in_virtual_time
async def test_the_estimate_of_a_prompt_is_the_schedulers_tools_included(tools: int) -> None:
    some = {"type": "object", "properties": {"path": {"type": "string", "description": "a " * 90}}}
    each = {"type": "function", "function": {"name": "read", "parameters": some}}
    async with slow_gateway() as (gateway, node):
        node.engine.context = 1_000_000
        tasks = [await start(gateway, node, tools=[each] * tools) for _ in range(2)]
        shown = await listed(gateway)
        why = (await gateway.admin.get(f"/admin/requests/{shown[0]['id']}/why")).json()
        await end(*tasks)
        await gateway.until(lambda: len(gateway.registry) == 0)
    predicted = why["requests"][0]["decisions"][0]["predicted"]["prompt_tokens"]
    assert predicted > 60 * tools
    for one in shown:
        assert one["prompt_tokens_estimate"] == pytest.approx(predicted, rel=0.01)


@in_virtual_time
async def test_a_waiting_request_can_be_cancelled() -> None:
    async with slow_gateway() as (gateway, node):
        first = await start(gateway, node)
        second = await start(gateway, node)
        name = (await listed(gateway))[1]["id"]
        answer = await cancel(gateway, name)
        refused = await asyncio.wait_for(second, 30)
        assert not first.done()
        assert gateway.scheduler.queue_positions() == []
        assert [one["id"] for one in await listed(gateway)] != [name]
        await end(first)
    assert answer.json()["id"] == name
    assert answer.json()["cancelled"] is True
    assert (refused.status_code, error_of(refused)["code"]) == (503, "cancelled")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" in refused.headers


@in_virtual_time
async def test_a_running_request_can_be_cancelled_also_twice() -> None:
    async with slow_gateway() as (gateway, node):
        task = await start(gateway, node)
        name = (await listed(gateway))[0]["id"]
        answers = await asyncio.gather(cancel(gateway, name), cancel(gateway, name))
        assert answers[0].status_code == 200
        assert answers[1].status_code in {200, 404}
        refused = await asyncio.wait_for(task, 30)
        assert gateway["a"].failures == 0, "no fault of the node's"
        event = gateway.ended[-1]
    assert (refused.status_code, error_of(refused)["code"]) == (503, "cancelled")
    assert "operator" in error_of(refused)["message"]
    assert (event.status, event.reason) == (503, "cancelled")


@in_virtual_time
async def test_a_stream_that_is_cancelled_ends_with_its_error_event_and_frees_its_slot() -> None:
    async with slow_gateway() as (gateway, node):
        task = await start(gateway, node, stream=True)
        await gateway.until(lambda: any(lease.last_content_at for lease in gateway["a"].leases))
        await cancel(gateway, (await listed(gateway))[0]["id"])
        response = await asyncio.wait_for(task, 30)
        await gateway.until(lambda: node.busy == 0)
        await gateway.until(lambda: gateway["a"].leased == 0)
    assert response.status_code == 200
    assert '"code":"cancelled"' in response.text.strip().split("\n\n")[-1]
    assert "[DONE]" not in response.text


@in_virtual_time
async def test_a_request_is_found_by_its_x_request_id_unless_two_have_it() -> None:
    async with slow_gateway() as (gateway, node):
        tags = ("a/b:c", "same", "same")
        tasks = [await start(gateway, node, headers={"x-request-id": tag}) for tag in tags]
        for tag in ("same", "nobody"):
            refused = await cancel(gateway, tag)
            assert (refused.status_code, error_of(refused)["code"]) == (404, "request_not_found")
        assert len(await listed(gateway)) == 3
        answer = await cancel(gateway, "a/b:c")
        assert (answer.status_code, answer.json()["request_id"]) == (200, "a/b:c")
        assert (await asyncio.wait_for(tasks[0], 30)).status_code == 503
        other = await gateway.admin.get("/admin/requests/nobody")
        assert (other.status_code, other.headers["allow"]) == (405, "DELETE")
        await end(*tasks)
