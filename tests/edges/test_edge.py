"""Requests through an edge: as through the gateway itself, though the brain decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from gateway.callers.keys import hash_key
from gateway.edges.messages import Quarantined
from gateway.events import EdgeLost, RequestRecord
from gateway.nodes.node import LeasePhase, NodeState
from gateway.schedule.decision_log import Grant
from gateway.transport.pool import ConnectionPool
from gateway.watch.spans import EndedRequest
from tests.callers.build import all_accounts
from tests.edges.edge_beside import Edge, a_brain, an_edge
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.known import known
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "say something"}]
KEY = "lg_alice_" + "s" * 43
AS_ALICE = {"authorization": f"Bearer {KEY}"}


def alice(**more: Any) -> dict[str, Any]:
    """Settings with one key."""
    return {"keys": [{"id": "alice", "sha256": hash_key(KEY).sha256, **more}]}


def a_slow_node(**more: Any) -> EmulatedNode:
    return EmulatedNode(**{"slots": 1, "decode_tps": 20.0, "answer_tokens": 40, **more})


def records_of(running: Running) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    running.gateway.bus.subscribe(RequestRecord, found.append)
    return found


def ask(edge: Edge, **body: Any) -> asyncio.Task[httpx.Response]:
    headers = body.pop("headers", {})
    value = {"messages": MESSAGES, "stream": True, **body}
    return asyncio.create_task(edge.client.post(CHAT, json=value, headers=headers))


async def settled(running: Running, edge: Edge) -> None:
    """Wait until nothing is held, in either process."""
    await until(lambda: not running.held())
    await until(lambda: not edge.session.requests and len(edge.services.registry) == 0)


@in_virtual_time
async def test_a_stream_goes_through_and_is_recorded_by_the_brain(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [a_slow_node()]) as running, an_edge(running) as edge:
        records = records_of(running)
        answer = await ask(edge)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: records)
        (record,) = records
        assert (record.status, record.node, record.attempts) == (200, "node-0", 1)
        assert (record.model, record.stream, record.completion_tokens) == ("demo", True, 40)
        assert 1.9 < record.slot_seconds < 2.2
        assert record.queue_seconds < 0.01
        await settled(running, edge)
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()


@in_virtual_time
async def test_what_is_refused_is_recorded_once_and_leaves_nothing(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path, [a_slow_node()], alice()) as running,
        an_edge(running) as edge,
    ):
        records = records_of(running)
        for body, headers, status, reason in (
            ({"model": "nobody-has-it"}, AS_ALICE, 404, "model_not_found"),
            ({"messages": 7, "stream": 9, "n": "x"}, {"authorization": "Bearer no"}, 401, None),
            ({"max_tokens": 10, "n": 9}, AS_ALICE, 400, "invalid_request"),
        ):
            answer = await ask(edge, headers=headers, **body)
            assert answer.status_code == status, answer.text
            await until(lambda: records)
            record = records.pop()
            assert record.status == status
            assert reason is None or record.reason == reason
            assert record.attempts == 0
        await settled(running, edge)
        assert records == []


@in_virtual_time
async def test_requests_beyond_the_slots_wait_at_the_brain_and_can_be_told_where(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(tmp_path, [a_slow_node(answer_tokens=100)]) as running,
        an_edge(running) as edge,
    ):
        records = records_of(running)
        first = ask(edge, max_tokens=100)
        await until(lambda: running.gateway.fleet.nodes["node-0"].leased == 1)
        second = ask(edge, headers={"X-Gateway-Progress": "1"})
        await until(lambda: len(running.gateway.scheduler.queue_positions()) == 1)
        assert len(running.gateway.registry) == 2
        answers = await asyncio.gather(first, second)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert "queued position=1" in answers[1].text
        await until(lambda: len(records) == 2)
        assert records[0].queue_seconds < 0.1
        assert 4.0 < records[1].queue_seconds < 6.0
        await settled(running, edge)


@in_virtual_time
async def test_an_operator_sees_and_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    node = a_slow_node(answer_tokens=4000)
    async with running_gateway(tmp_path, [node]) as running, an_edge(running) as edge:
        runs, waits = ask(edge), ask(edge)
        await until(lambda: len(running.gateway.scheduler.queue_positions()) == 1)
        await asyncio.sleep(3.0)
        listed = (await running.admin.get("/admin/requests")).json()["requests"]
        assert [one["state"] for one in listed] == ["running", "waiting"]
        assert [one["node"] for one in listed] == ["node-0", None]
        prompt, tokens = next(iter(running.gateway.registry)).tokens_so_far()
        assert prompt > 0
        assert 30 < tokens < 70
        for one in listed:
            await running.admin.delete(f"/admin/requests/{one['id']}")
        answers = await asyncio.gather(runs, waits)
        assert all("An operator of the gateway has cancelled" in one.text for one in answers)
        await settled(running, edge)


@in_virtual_time
async def test_a_node_that_is_drained_in_a_hurry_is_left(tmp_path: Path) -> None:
    nodes = [a_slow_node(answer_tokens=400), a_slow_node(answer_tokens=400)]
    async with running_gateway(tmp_path, nodes) as running, an_edge(running) as edge:
        records = records_of(running)
        asked = ask(edge)
        await until(lambda: any(one.leased for one in running.gateway.fleet.nodes.values()))
        await asyncio.sleep(2.0)
        (busy,) = [name for name, node in running.gateway.fleet.nodes.items() if node.leased]
        await running.admin.post(f"/admin/nodes/{busy}/drain?deadline=0")
        answer = await asked
        assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: records)
        assert records[0].attempts == 2
        assert records[0].node != busy
        await settled(running, edge)


@in_virtual_time
async def test_a_failed_attempt_is_made_again_elsewhere(tmp_path: Path) -> None:
    nodes = [a_slow_node(), a_slow_node()]
    async with running_gateway(tmp_path, nodes) as running, an_edge(running) as edge:
        records = records_of(running)
        for node in nodes:
            node.faults.next("status", status=500)
        nodes[0].faults.clear()
        answers = await asyncio.gather(ask(edge), ask(edge))
        assert [answer.status_code for answer in answers] == [200, 200]
        await until(lambda: len(records) == 2)
        assert sorted(record.attempts for record in records) == [1, 2]
        await settled(running, edge)


# Limits.


@in_virtual_time
async def test_limits_are_the_brains_and_answers_tell_what_is_left(tmp_path: Path) -> None:
    settings = alice(limits={"rpm": 2, "tpm": 100_000})
    async with (
        running_gateway(tmp_path, [a_slow_node(slots=4)], settings) as running,
        an_edge(running) as edge,
    ):
        records = records_of(running)
        first = await ask(edge, headers=AS_ALICE)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        # One at the gateway itself counts on the same account.
        here = {"messages": MESSAGES}
        assert (await running.client.post(CHAT, json=here, headers=AS_ALICE)).status_code == 200
        refused = await ask(edge, headers=AS_ALICE)
        assert refused.status_code == 429
        assert "2 requests a minute (rpm)" in refused.text
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        await until(lambda: len(records) == 3)
        assert [record.status for record in records] == [200, 200, 429]
        await settled(running, edge)
        book = running.gateway.metering.limit_book
        (account,) = [one for one in all_accounts(book) if one.kind == "key"]
        assert (account.running, account.open, account.reserved_tokens) == (0, 0, 0)
        assert account.tokens.value(running.gateway.clock()) >= 80


@in_virtual_time
async def test_one_after_the_other_is_not_two_at_a_time(tmp_path: Path) -> None:
    settings = alice(limits={"concurrency": 1})
    node = a_slow_node(slots=4, answer_tokens=2)
    async with running_gateway(tmp_path, [node], settings) as running, an_edge(running) as edge:
        for _ in range(5):
            assert (await ask(edge, headers=AS_ALICE)).status_code == 200
        together = await asyncio.gather(*(ask(edge, headers=AS_ALICE) for _ in range(3)))
        assert sorted(answer.status_code for answer in together) == [200, 429, 429]


# Keys, settings and models.


@in_virtual_time
async def test_keys_settings_and_models_follow_the_brains(tmp_path: Path) -> None:
    node = a_slow_node(answer_tokens=1)
    async with (
        running_gateway(tmp_path, [node], alice()) as running,
        an_edge(running) as edge,
    ):
        assert (await ask(edge, headers=AS_ALICE)).status_code == 200
        assert edge.services.catalog.model_names() == ("demo",)
        assert edge.services.scheduler.most_slots_of_a_host() == 1
        running.write_settings({**alice(), "models": {"alias": {"use": "demo"}}})
        await running.gateway.reload()
        await until(lambda: "alias" in edge.services.settings.models, 1.0)
        bob = {"id": "bob", "sha256": hash_key("lg_bob_" + "t" * 43).sha256}
        running.write_settings({"keys": [bob]})
        await running.gateway.reload()
        await until(lambda: edge.services.key_ring.caller("alice") is None, 1.0)
        assert (await ask(edge, headers=AS_ALICE)).status_code == 401
        assert edge.services.key_ring.caller("bob") is not None
        # The last key goes: nobody is admitted, as at the brain.
        running.write_settings({"default_model": "demo"})
        await running.gateway.reload()
        await until(lambda: edge.services.key_ring.access.locked, 1.0)
        assert (await ask(edge)).status_code == 401


@in_virtual_time
async def test_a_node_that_changes_gets_new_connections_and_one_that_leaves_is_forgotten(
    tmp_path: Path,
) -> None:
    nodes = [a_slow_node(answer_tokens=2), a_slow_node(answer_tokens=2)]
    async with running_gateway(tmp_path, nodes) as running, an_edge(running) as edge:
        await asyncio.gather(ask(edge), ask(edge))
        known = edge.services._nodes.by_name
        assert set(known) == {"node-0", "node-1"}
        before = known["node-0"].connections
        assert isinstance(before, ConnectionPool)
        running.write_nodes([{"name": "node-0", "url": nodes[1].url, "host": "x"}])
        await running.gateway.reload()
        await until(lambda: running.gateway.fleet.nodes["node-0"].state is NodeState.READY)
        assert (await ask(edge)).status_code == 200
        assert known["node-0"].connections is not before
        await until(lambda: set(known) == {"node-0"})
        await until(lambda: before.closed)


# The end.


@in_virtual_time
async def test_what_runs_at_an_edge_that_dies_is_named_recorded_and_reclaimed(
    tmp_path: Path,
) -> None:
    node = a_slow_node(answer_tokens=4000)
    async with running_gateway(tmp_path, [node]) as running:
        gateway, records = running.gateway, records_of(running)
        lost: list[EdgeLost] = []
        gateway.bus.subscribe(EdgeLost, lost.append)
        brain = a_brain(gateway)
        async with an_edge(running, brain) as edge:
            runs = ask(edge, headers={"x-request-id": "runs"})
            await until(lambda: gateway.fleet.nodes["node-0"].leased == 1)
            waits = ask(edge, headers={"x-request-id": "waits"})
            await until(lambda: len(gateway.scheduler.queue_positions()) == 1)
            await asyncio.sleep(3.0)
            known(edge.services.link._transport).abort()
            await until(lambda: edge.lost and edge.broken)
            assert edge.broken == [("runs", "waits")]
            assert brain.sessions == {}
            assert [loss.requests for loss in brain.lost_edges(60.0)] == [("runs", "waits")]
            assert brain.lost_edges(-1.0) == []
            assert [(one.edge, one.requests) for one in lost] == [("edge-1", ("runs", "waits"))]
            await until(lambda: len(records) == 2)
            by_name = {record.x_request_id: record for record in records}
            assert {record.reason for record in records} == {"edge_died"}
            assert {record.status for record in records} == {502}
            assert 30 < by_name["runs"].completion_tokens < 70
            assert by_name["runs"].slot_seconds > 2.0
            assert by_name["waits"].completion_tokens == 0
            assert not gateway.scheduler.queue_positions()
            assert len(gateway.registry) == 0
            # The node still works: its slot is not given out yet.
            (lease,) = gateway.fleet.nodes["node-0"].leases
            assert lease.phase is LeasePhase.RECLAIM
            for task in (runs, waits):
                task.cancel()
            await until(lambda: not running.held())
        # Another one under its name serves on.
        async with an_edge(running, brain) as edge:
            assert (await ask(edge, max_tokens=3)).status_code == 200
    log = (tmp_path / "gateway.log").read_text()
    assert '"event":"edge died"' in log
    assert "runs, waits" in log
    assert "Traceback" not in log


@in_virtual_time
async def test_an_edge_that_was_told_to_end_is_no_failure(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [a_slow_node()]) as running:
        lost: list[EdgeLost] = []
        running.gateway.bus.subscribe(EdgeLost, lost.append)
        async with an_edge(running) as edge:
            assert (await ask(edge)).status_code == 200
        assert lost == []


# What else goes with a request.


@in_virtual_time
async def test_each_prompt_of_a_request_has_a_lease_of_its_own(tmp_path: Path) -> None:
    nodes = [a_slow_node(answer_tokens=20), a_slow_node(answer_tokens=20)]
    async with running_gateway(tmp_path, nodes) as running, an_edge(running) as edge:
        gateway, records = running.gateway, records_of(running)
        body = {"prompt": ["one", "two", "three"], "max_tokens": 20}
        asked = asyncio.create_task(edge.client.post("/v1/completions", json=body))
        await until(lambda: len(gateway.scheduler.queue_positions()) == 1)
        ids = [one.request.id for one in gateway.registry]
        assert ids == [ids[0], *(f"{ids[0]}.{number}" for number in range(3))]
        answer = await asked
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
        await until(lambda: records)
        (record,) = records
        assert record.completion_tokens == 60
        assert 2.7 < record.slot_seconds < 3.2
        await settled(running, edge)


@in_virtual_time
async def test_a_request_that_nodes_died_on_is_refused_at_every_edge(tmp_path: Path) -> None:
    nodes = [a_slow_node(answer_tokens=4) for _ in range(3)]
    settings = {"retries": {"attempts": 2, "backoff": 0.01, "backoff_max": 0.05}}
    async with running_gateway(tmp_path, nodes, settings) as running:
        brain = a_brain(running.gateway)
        async with an_edge(running, brain) as one, an_edge(running, brain, "edge-2") as other:
            for node in nodes:
                node.faults.set("reset")
            assert (await ask(one, seed=7)).status_code == 502
            quarantines = [
                running.gateway.proxy_context.quarantine,
                other.services.context.quarantine,
            ]
            await until(lambda: all(len(found) == 1 for found in quarantines))
            refused = await ask(other, seed=7)
            assert refused.status_code == 502
            assert "2 nodes died while they served this very request" in refused.text
            async with an_edge(running, brain, "edge-3") as new:
                await until(lambda: len(new.services.context.quarantine) == 1)
                assert (await ask(new, seed=7)).status_code == 502
            # A node that completes it after all clears it everywhere.
            for node in nodes:
                node.faults.clear()
            (digest,) = quarantines[0].entries
            quarantines[0].take(digest, None)
            brain.quarantined(Quarantined.of(digest, None))
            await until(lambda: not any(map(len, quarantines)))
            await until(lambda: len(one.services.context.quarantine) == 0)


class Exported:
    """In place of what sends traces: keeps them."""

    running = False
    traces: ClassVar[list[EndedRequest]] = []

    def __init__(self, *_: object) -> None:
        self.traces.clear()

    def export(self, request: EndedRequest) -> None:
        self.traces.append(request)

    def stop(self) -> None:
        """There is nothing to stop."""

    def close(self, _: float) -> None:
        """Nor to close."""


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_trace_has_what_the_brain_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr("gateway.watch.request_tracing.TraceExporter", Exported)
    parent = f"00-{'ab' * 16}-{'cd' * 8}-0"

    @in_virtual_time
    async def run() -> None:
        traces = {"endpoint": "http://127.0.0.1:9/v1/traces", "share": share}
        settings = {"telemetry": {"traces": traces}}
        node = a_slow_node()
        async with (
            running_gateway(tmp_path, [node], settings) as running,
            an_edge(running) as edge,
        ):
            if not share:
                # What was not chosen is traced after all when it fails.
                node.faults.set("status", status=500)
            flag = "1" if share else "0"
            await ask(edge, headers={"traceparent": parent + flag})
            await until(lambda: Exported.traces)
            (found,) = Exported.traces
            assert found.trace.trace_id == "ab" * 16
            assert found.trace.parent_id == "cd" * 8
            assert isinstance(found.decisions[0], Grant)
            assert found.record.status == (200 if share else 500)

    run()
