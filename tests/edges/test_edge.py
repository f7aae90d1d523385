"""Requests through an edge: as through the gateway itself, though the brain decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from gateway.callers.keys import hash_key
from gateway.edges.messages import Quarantined
from gateway.events import EdgeLost, RequestRecord
from gateway.nodes.node import LeasePhase
from gateway.schedule.decision_log import Grant
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
    await until(lambda: not running.held())
    await until(lambda: not edge.session.requests and len(edge.services.registry) == 0)


@in_virtual_time
async def test_requests_go_through_and_are_recorded_once_by_the_brain(tmp_path: Path) -> None:
    node, settings = a_slow_node(answer_tokens=100), alice(limits={"concurrency": 3})
    async with running_gateway(tmp_path, [node], settings) as running, an_edge(running) as edge:
        records = records_of(running)
        answer = await ask(edge, headers=AS_ALICE, max_tokens=40)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: records)
        record = records.pop()
        assert (record.status, record.node, record.attempts) == (200, "node-0", 1)
        assert (record.model, record.stream, record.completion_tokens) == ("demo", True, 40)
        assert 1.9 < record.slot_seconds < 2.2
        assert record.queue_seconds < 0.01
        # What is refused leaves nothing, so that it is not counted with what comes after it.
        for body, headers, status, reason in (
            ({"model": "nobody-has-it"}, AS_ALICE, 404, "model_not_found"),
            ({"messages": 7, "stream": 9, "n": "x"}, {"authorization": "Bearer no"}, 401, None),
            ({"max_tokens": 10, "n": 9}, AS_ALICE, 400, "invalid_request"),
        ):
            answer = await ask(edge, headers=headers, **body)
            assert answer.status_code == status, answer.text
            await until(lambda: records)
            record = records.pop()
            assert (record.status, record.attempts) == (status, 0)
            assert reason is None or record.reason == reason
        # Each prompt has a lease, what is beyond the slots waits at the brain, and is told so.
        body = {"prompt": ["one", "two"], "max_tokens": 100}
        prompts = asyncio.create_task(
            edge.client.post("/v1/completions", json=body, headers=AS_ALICE)
        )
        await until(lambda: len(running.gateway.scheduler.queue_positions()) == 1)
        ids = [one.request.id for one in running.gateway.registry]
        assert ids == [ids[0], *(f"{ids[0]}.{number}" for number in range(2))]
        waits = await ask(edge, headers=AS_ALICE | {"X-Gateway-Progress": "1"})
        assert "queued position=1" in waits.text
        assert len((await prompts).json()["choices"]) == 2
        await until(lambda: len(records) == 2)
        assert sorted(record.completion_tokens for record in records) == [100, 200]
        assert max(record.queue_seconds for record in records) > 4.0
        together = await asyncio.gather(*(ask(edge, headers=AS_ALICE) for _ in range(5)))
        assert sorted(answer.status_code for answer in together) == [200] * 3 + [429] * 2
        await settled(running, edge)
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()


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
async def test_a_node_that_fails_or_is_drained_in_a_hurry_is_left(tmp_path: Path) -> None:
    nodes = [a_slow_node(answer_tokens=400), a_slow_node(answer_tokens=400)]
    async with running_gateway(tmp_path, nodes) as running, an_edge(running) as edge:
        records, fleet = records_of(running), running.gateway.fleet.nodes
        nodes[0].faults.next("status", status=500)
        answers = await asyncio.gather(ask(edge), ask(edge))
        asked = ask(edge)
        await until(lambda: any(one.leased for one in fleet.values()))
        await asyncio.sleep(2.0)
        (busy,) = [name for name, node in fleet.items() if node.leased]
        await running.admin.post(f"/admin/nodes/{busy}/drain?deadline=0")
        for answer in (*answers, await asked):
            assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: len(records) == 3)
        assert sorted(record.attempts for record in records[:2]) == [1, 2]
        assert (records[2].attempts, records[2].node == busy) == (2, False)
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


# What else goes with a request.


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


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_trace_has_what_the_brain_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    exporter = Mock()
    monkeypatch.setattr("gateway.watch.request_tracing.TraceExporter", Mock(return_value=exporter))
    flag = "1" if share else "0"
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-0{flag}"}

    @in_virtual_time
    async def run() -> None:
        traces = {"endpoint": "http://127.0.0.1:9/v1/traces", "share": share}
        settings, node = {"telemetry": {"traces": traces}}, a_slow_node()
        async with (
            running_gateway(tmp_path, [node], settings) as running,
            an_edge(running) as edge,
        ):
            if not share:
                # What was not chosen is traced after all when it fails.
                node.faults.set("status", status=500)
            await ask(edge, headers=parent)
            await until(lambda: exporter.export.called)
            [[found], _] = exporter.export.call_args
            assert (found.trace.trace_id, found.trace.parent_id) == ("ab" * 16, "cd" * 8)
            assert isinstance(found.decisions[0], Grant)
            assert found.record.status == (200 if share else 500)

    run()
