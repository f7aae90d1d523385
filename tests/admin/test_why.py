from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.admin.why import MOST_LANES, SlotSpan, TimelineEndpoint, sample_of
from gateway.callers.keys import AdminRole
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.gateways import Running, answered, until
from tests.known import known
from tests.polling import eventually
from tests.stored.batch_gateway import HEADERS, ended, gateway_over, lines, output, submit
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of
from tests.web.test_route_tables import ADMIN_KEYS, bearer, gateway_with_keys

SECRET = "the launch code is 7391"


@asynccontextmanager
async def two_nodes(
    **settings: Any,
) -> AsyncIterator[tuple[BareGateway, EmulatedNode, EmulatedNode]]:
    """A fast node `a` and a slow one `b`, each with one slot, whose speeds have been measured."""
    async with bare_gateway(
        fast := EmulatedNode(slots=1, decode_tps=20, prefill_tps=200, cache_ram=1 << 20),
        slow := EmulatedNode(slots=1, decode_tps=5, prefill_tps=50),
        settings=settings,
        serving=True,
    ) as gateway:
        for number in range(6):
            await ask(gateway, f"before-{number}")
        yield gateway, fast, slow


async def ask(gateway: BareGateway, tag: str, text: str = SECRET, **body: Any) -> httpx.Response:
    response = await gateway.chat(text, headers={"x-request-id": tag}, stream=True, **body)
    await gateway.until(lambda: len(gateway.registry) == 0)
    return response


@asynccontextmanager
async def three_asked(
    **settings: Any,
) -> AsyncIterator[tuple[BareGateway, list[asyncio.Task[httpx.Response]]]]:
    """Both nodes are busy with `r0` and `r1`, and `r2` waits."""
    async with two_nodes(**settings) as (gateway, _, _):
        tasks = [asyncio.create_task(ask(gateway, f"r{number}")) for number in range(3)]
        await gateway.until(lambda: len(gateway.scheduler.waiters) == 1)
        yield gateway, tasks
        await asyncio.gather(*tasks)


async def why(gateway: BareGateway, name: str) -> Any:
    found = await answered(gateway.admin, f"/admin/requests/{name}/why")
    assert "launch" not in str(found)
    assert found["id"] == name
    return found["requests"]


@in_virtual_time
async def test_a_served_request_tells_what_its_node_was_compared_with() -> None:
    async with two_nodes() as (gateway, _, _):
        await ask(gateway, "it")
        (request,) = await why(gateway, "it")
        (by_own_id,) = await why(gateway, request["id"])
        ended = gateway.ended[-1]
    assert by_own_id["id"] == request["id"]
    assert (request["state"], request["request_id"]) == ("finished", "it")
    (decision,) = request["decisions"]
    assert (decision["kind"], decision["attempt"], decision["node"]) == ("granted", 1, "a")
    nodes = decision["nodes"]
    assert [(one["name"], one["chosen"]) for one in nodes] == [("a", True), ("b", False)]
    for one in nodes:
        assert sum(one["terms"].values()) == pytest.approx(one["expected_seconds"], abs=0.005)
    assert nodes[0]["expected_seconds"] < nodes[1]["expected_seconds"]
    assert nodes[0]["decode_tps"] == pytest.approx(20, rel=0.2)
    assert "writes faster" in decision["summary"]
    assert decision["summary"] == request["summary"]
    predicted, actual = decision["predicted"], decision["actual"]
    assert predicted["seconds"] == pytest.approx(actual["seconds"], rel=0.3)
    assert actual["ttft"] <= actual["seconds"]
    assert actual["completion_tokens"] == ended.completion_tokens > 0
    assert (actual["outcome"], actual["status"], actual["reported"]) == ("ok", 200, True)
    assert request["outcome"]["ttft"] == pytest.approx(ended.ttft, abs=0.001)
    assert request["outcome"]["completion_tokens"] == ended.completion_tokens


@in_virtual_time
async def test_a_waiting_request_tells_its_place_and_the_nodes_that_it_waits_for() -> None:
    async with three_asked() as (gateway, tasks):
        (running,) = await why(gateway, "r0")
        (request,) = await why(gateway, "r2")
        await asyncio.gather(*tasks)
        (ended,) = await why(gateway, "r2")
    assert running["state"] == "running"
    assert running["decisions"][0]["actual"]["outcome"] is None
    assert (request["state"], request["outcome"]) == ("waiting", None)
    waiting = request["waiting"]
    assert waiting["position"] == 1
    assert waiting["expected_start"] > 0
    assert {one["name"] for one in waiting["nodes"]} == {"a", "b"}
    assert all(one["free_in"] > 0 for one in waiting["nodes"])
    assert waiting["nodes"][0]["expected_seconds"] <= waiting["nodes"][1]["expected_seconds"]
    assert "no" in request["summary"].lower()
    assert [one["kind"] for one in ended["decisions"]] == ["queued", "granted"]
    queued, granted = ended["decisions"]
    assert queued["waited"] == pytest.approx(granted["seconds"], abs=0.1)
    assert granted["not_listed"] == {"full": 1}
    assert ended["waiting"] is None


@in_virtual_time
async def test_a_refused_request_tells_why_it_was() -> None:
    async with three_asked(queue={"max": 1}) as (gateway, _):
        refused = await gateway.chat(SECRET, headers={"x-request-id": "late"})
        assert refused.status_code == 429
        (request,) = await why(gateway, "late")
        # This one never comes to the scheduler.
        await gateway.chat(SECRET, n=10_000, headers={"x-request-id": "odd"})
        (odd,) = await why(gateway, "odd")
    assert (request["state"], request["outcome"]["reason"]) == ("refused", "queue_full")
    (decision,) = request["decisions"]
    assert (decision["kind"], decision["status"]) == ("refused", 429)
    assert decision["code"] == "queue_full"
    assert decision["message"] in request["summary"]
    assert (odd["state"], odd["decisions"]) == ("refused", [])
    assert "400 invalid_request" in odd["summary"]


@pytest.mark.parametrize("content", [0, 5], ids=["retried", "resumed"])
@in_virtual_time
async def test_each_attempt_is_told_with_its_end(content: int) -> None:
    async with two_nodes() as (gateway, fast, _):
        fast.faults.next("reset", after_events=content)
        assert "error" not in (await ask(gateway, "it", max_tokens=20)).text
        (request,) = await why(gateway, "it")
    first, second = request["decisions"]
    assert (first["node"], second["node"]) == ("a", "b")
    assert first["actual"]["outcome"] not in {None, "ok"}
    assert second["actual"]["outcome"] == "ok"
    assert (second["resumes"], first["actual"]["ttft"] is not None) == (bool(content),) * 2
    if not content:
        assert second["failed_nodes"] == ["a"]
        assert second["not_listed"] == {"failed": 1}
        assert "After a had failed it" in request["summary"]


@in_virtual_time
async def test_an_unknown_id_is_told_since_when_requests_are_remembered() -> None:
    async with two_nodes() as (gateway, _, _):
        response = await gateway.admin.get("/admin/requests/nothing/why")
    assert (response.status_code, error_of(response)["code"]) == (404, "request_not_found")
    assert "now those since 20" in error_of(response)["message"]


async def why_of(running: Running, name: str) -> Any:
    found = await answered(running.admin, f"/admin/requests/{name}/why")
    assert "write text" not in str(found)
    (request,) = found["requests"]
    return request


@pytest.mark.usefixtures("hurried")
async def test_batch_lines_and_background_responses_are_explained_by_id(tmp_path: Path) -> None:
    async with gateway_over(tmp_path, EmulatedNode(slots=2, decode_tps=400)) as running:
        batch = await ended(running, await submit(running, lines(4)))
        results = await output(running, batch["output_file_id"])
        line = await why_of(running, results[-1]["response"]["request_id"])
        body = {"model": "demo", "input": "write text 1", "background": True, "store": True}
        response = await running.client.post("/v1/responses", json=body, headers=HEADERS)
        assert response.status_code == 200, response.text
        path = f"/v1/responses/{response.json()['id']}"

        async def completed() -> bool | None:
            shown = await running.client.get(path, headers=HEADERS)
            return shown.json()["status"] == "completed" or None

        await eventually(completed)
        await until(lambda: len(running.gateway.registry) == 0)
        background = await why_of(running, response.json()["id"])
    assert line["class"] == "batch"
    assert line["decisions"][-1]["kind"] == "granted"
    for request in (line, background):
        assert request["state"] == "finished"
        assert request["decisions"][-1]["actual"]["outcome"] == "ok"


UNIX = 1_700_000_000.0
"""Unix time when the virtual clock is at 0."""


def spans(
    gateway: BareGateway, after: float = 0.0, *, shows_callers: bool = True
) -> list[SlotSpan]:
    name_of = gateway.key_sync.key_ring.name_of
    endpoint = TimelineEndpoint(gateway.scheduler, lambda: UNIX + now(), name_of)
    return endpoint.read(after, shows_callers=shows_callers).spans


@in_virtual_time
async def test_an_attempt_reads_then_writes_and_then_has_ended() -> None:
    async with bare_gateway(
        EmulatedNode(slots=2, decode_tps=10, prefill_tps=100), serving=True
    ) as gateway:
        asked = asyncio.create_task(ask(gateway, "it", "word " * 300, max_tokens=50))
        await gateway.until(lambda: bool(gateway.scheduler.records))
        (reads,) = spans(gateway)
        await gateway.until(lambda: gateway.registry.top_level()[0].tokens_so_far()[1] > 5)
        (writes,) = spans(gateway)
        await asked
        (ended,) = spans(gateway)
        ended_at = UNIX + now()
    assert (reads.writes, reads.end, reads.outcome) == (None, None, None)
    assert (reads.node, reads.slots, reads.resumes) == ("a", 1, False)
    writing, end = known(writes.writes), known(ended.end)
    assert (writing - writes.begin > 2, writes.end) == (True, None)
    assert (end - known(ended.writes) > 2, ended.outcome) == (True, "ok")
    assert end == pytest.approx(ended_at, abs=1)
    # The three are of one request, and begin alike.
    assert ended[:7] == writes[:7] == reads[:7]


@in_virtual_time
async def test_callers_are_told_to_operators_alone() -> None:
    async with gateway_with_keys() as (gateway, _):
        viewer = bearer(ADMIN_KEYS[AdminRole.VIEWER].text)
        response = await gateway.admin.get("/admin/timeline", headers=viewer)
        assert response.status_code == 200
        assert response.json()["columns"] == list(SlotSpan._fields)
        for after in ("yesterday", "-1", "nan"):
            wrong = await gateway.admin.get(f"/admin/timeline?after={after}", headers=viewer)
            assert (wrong.status_code, error_of(wrong)["param"]) == (400, "after"), after
    async with bare_gateway(EmulatedNode(), serving=True) as gateway:
        await ask(gateway, "it", max_tokens=5)
        (shown,) = spans(gateway)
        (hidden,) = spans(gateway, shows_callers=False)
    assert shown.caller == "anonymous:127.0.0.1"
    assert hidden == shown._replace(caller=None)


@each_case("slots", [[4] * 1000, [64] * 30, [1, 300, 1], [7] * 20, [2] * 51])
def test_a_large_fleet_is_told_by_a_sample_that_is_spread_over_it(slots: list[int]) -> None:
    fleet = {f"n{number}": one for number, one in enumerate(slots)}
    sample = sample_of(fleet)
    assert MOST_LANES - max(slots) < sum(sample.values()) <= MOST_LANES
    assert all(lanes <= fleet[name] for name, lanes in sample.items())
    places = [int(name[1:]) for name in sample]
    steps = {after - before for before, after in pairwise(places)}
    assert len(slots) < 4 or 0 < min(steps) >= max(steps) - 2
    assert sample_of(dict.fromkeys("abc", 4)) == dict.fromkeys("abc", 4)


@asynccontextmanager
async def slow_gateway(**settings: Any) -> AsyncIterator[tuple[BareGateway, EmulatedNode]]:
    """One node with one slot, busy for minutes with each request."""
    async with bare_gateway(
        node := EmulatedNode(slots=1, decode_tps=10, answer_tokens=2000),
        settings=settings,
        serving=True,
    ) as gateway:
        yield gateway, node


async def listed(gateway: BareGateway) -> Any:
    return (await answered(gateway.admin, "/admin/requests"))["requests"]


async def cancel(gateway: BareGateway, name: str) -> httpx.Response:
    return await gateway.admin.delete(f"/admin/requests/{name}")


async def start(gateway: BareGateway, **body: Any) -> asyncio.Task[httpx.Response]:
    """A request that has got the slot, or a place in the queue."""
    task = asyncio.create_task(gateway.chat(SECRET, **body))
    before, queue = len(gateway.registry), gateway.scheduler
    await gateway.until(lambda: len(gateway.registry) == before + 1)
    await gateway.until(lambda: gateway["a"].leased + len(queue.queue_positions()) == before + 1)
    return task


@in_virtual_time
async def test_running_and_queued_requests_are_listed_without_their_text() -> None:
    async with slow_gateway(models={"alias": {"use": "demo"}}) as (gateway, _):
        tasks = [await start(gateway, stream=True, headers={"x-request-id": "one"})]
        headers = {"x-request-id": "two", "x-priority": "batch"}
        tasks.append(await start(gateway, model="alias", n=1, headers=headers))
        running, waiting = await listed(gateway)
        for task in tasks:
            task.cancel()
        await gateway.until(lambda: len(gateway.registry) == 0)
        assert await listed(gateway) == []
    assert SECRET not in str((running, waiting))
    expected = {
        "request_id": "one", "state": "running", "position": None, "node": "a", "attempts": 1,
        "class": "normal", "model": "demo", "stream": True, "slots": 1,
        "path": "/v1/chat/completions", "caller": "anonymous:127.0.0.1",
    }  # fmt: skip
    assert {name: running[name] for name in expected} == expected
    assert running["id"] != running["request_id"]
    assert running["prompt_tokens_estimate"] > 0
    expected = {
        "request_id": "two", "state": "waiting", "position": 1, "node": None, "class": "batch",
        "model": "alias", "stream": False,
    }  # fmt: skip
    assert {name: waiting[name] for name in expected} == expected
    assert 0 < waiting["queue_seconds"] <= waiting["seconds"] < 30


@in_virtual_time
async def test_a_waiting_request_can_be_cancelled() -> None:
    async with slow_gateway() as (gateway, _):
        first, second = await start(gateway), await start(gateway)
        name = (await listed(gateway))[1]["id"]
        answer = await cancel(gateway, name)
        refused = await asyncio.wait_for(second, 30)
        assert not first.done()
        assert gateway.scheduler.queue_positions() == []
        assert [one["id"] for one in await listed(gateway)] != [name]
        first.cancel()
    assert (answer.json()["id"], answer.json()["cancelled"]) == (name, True)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "cancelled")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" in refused.headers


@in_virtual_time
async def test_a_stream_that_is_cancelled_twice_ends_with_its_error_event_and_frees_its_slot() -> (
    None
):
    async with slow_gateway() as (gateway, node):
        task = await start(gateway, stream=True)
        await gateway.until(lambda: any(lease.last_content_at for lease in gateway["a"].leases))
        name = (await listed(gateway))[0]["id"]
        answers = await asyncio.gather(cancel(gateway, name), cancel(gateway, name))
        assert [answer.status_code in {200, 404} for answer in answers] == [True, True]
        response = await asyncio.wait_for(task, 30)
        await gateway.until(lambda: (node.busy, gateway["a"].leased) == (0, 0))
        assert gateway["a"].failures == 0, "no fault of the node's"
    assert response.status_code == 200
    assert '"code":"cancelled"' in response.text.strip().split("\n\n")[-1]
    assert "[DONE]" not in response.text


@in_virtual_time
async def test_a_request_is_found_by_its_x_request_id_unless_two_have_it() -> None:
    async with slow_gateway() as (gateway, _):
        tags = ("a/b:c", "same", "same")
        tasks = [await start(gateway, headers={"x-request-id": tag}) for tag in tags]
        for tag in ("same", "nobody"):
            refused = await cancel(gateway, tag)
            assert (refused.status_code, error_of(refused)["code"]) == (404, "request_not_found")
        assert len(await listed(gateway)) == 3
        answer = await cancel(gateway, "a/b:c")
        assert (answer.status_code, answer.json()["request_id"]) == (200, "a/b:c")
        assert (await asyncio.wait_for(tasks[0], 30)).status_code == 503
        other = await gateway.admin.get("/admin/requests/nobody")
        assert (other.status_code, other.headers["allow"]) == (405, "DELETE")
        for task in tasks:
            task.cancel()
