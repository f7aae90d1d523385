from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.admin.nodes import (
    LONGEST_DRAIN_DEADLINE,
    MOST_COLUMNS,
    DrainDeadlines,
    heat_map,
)
from gateway.errors import suggestion
from gateway.forward.in_flight import InFlightRegistry
from gateway.nodes.prompt_cache import PrefixHits
from tests.emulator import EmulatedNode
from tests.nodes.build import a_spec, take
from tests.virtual import in_virtual_time
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of

DEAD = "http://127.0.0.1:9"
CONTRACT = {
    "name", "url", "kind", "tier", "state", "reason", "slots_total", "slots_busy", "in_flight",
    "models", "context", "prefill_tps", "decode_tps", "requests", "failures", "cost_per_hour",
}  # fmt: skip


async def shown(gateway: BareGateway, name: str) -> dict[str, Any]:
    response = await gateway.admin.get(f"/admin/nodes/{name}")
    assert response.status_code == 200
    node: dict[str, Any] = response.json()
    return node


async def order(gateway: BareGateway, name: str, action: str) -> dict[str, Any]:
    response = await gateway.admin.post(f"/admin/nodes/{name}/{action}")
    assert response.status_code == 200
    node: dict[str, Any] = response.json()
    return node


@in_virtual_time
async def test_nodes_are_shown_in_their_order_with_their_work_and_no_key() -> None:
    async with (
        EmulatedNode(slots=3, context=2048, build="b42") as node,
        bare_gateway(
            a_spec("b", node.url, cost_per_hour=0.2, labels={"numa": "0"}, host="epyc"),
            a_spec("a", DEAD, model=["x", "y"], slots=4, standby=True, tier="gpu", api_key="sk-of"),
            serving=True,
        ) as gateway,
    ):
        assert (await gateway.chat(model="demo")).status_code == 200
        lease = take(gateway["b"])
        listed = await gateway.admin.get("/admin/nodes")
        nodes = listed.json()["nodes"]
        assert [one["name"] for one in nodes] == ["b", "a"]
        assert all(set(one) >= CONTRACT for one in nodes)
        assert nodes[0] == await shown(gateway, "b")
        lease.release()
    assert "sk-of" not in listed.text
    expected = {
        "url": node.url,
        "kind": "llama.cpp",
        "host": "epyc",
        "labels": {"numa": "0"},
        "state": "ready",
        "requests": 2,
        "slots_total": 3,
        "slots_busy": 1,
        "leased": 1,
        "in_flight": 1,
        "models": ["demo"],
        "context": 2048,
        "cost_per_hour": 0.2,
        "build": "b42",
        "drift": [],
        "endpoints": None,
        "endpoints_refused": ["embeddings", "rerank"],
        "purpose": "chat",
        "circuit": {"phase": "closed", "failures": 0, "open_for": None},
        "deadline_in": None,
    }
    assert {key: nodes[0][key] for key in expected} == expected
    dead = {"state": "standby", "tier": "gpu", "models": ["x", "y"], "prefill_tps": None}
    assert {key: nodes[1][key] for key in dead} == dead


@in_virtual_time
async def test_an_unknown_node_is_404_with_the_nearest_names() -> None:
    async with bare_gateway(a_spec("epyc-a", DEAD), a_spec("gpu", DEAD)) as gateway:
        for method, path in (
            ("GET", "epyc-b"), ("GET", "epyc-b/history"), ("POST", "epyc-b/drain"),
            ("POST", "epyc-b/resume"), ("POST", "epyc-b/probe"),
        ):  # fmt: skip
            response = await gateway.admin.request(method, f"/admin/nodes/{path}")
            error = error_of(response)
            assert (response.status_code, error["code"]) == (404, "node_not_found"), path
            assert "'epyc-a'" in error["message"]
            assert "gpu" not in error["message"]


# Drain and resume.


@in_virtual_time
async def test_a_drained_node_gets_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    drains = tmp_path / "drains"
    async with bare_gateway(
        node := EmulatedNode(), other := EmulatedNode(), folder=tmp_path, serving=True
    ) as gateway:
        result = await order(gateway, "a", "drain")
        assert (result["state"], result["draining"], result["deadline_in"]) == (
            "draining",
            True,
            None,
        )
        for _ in range(4):
            assert (await gateway.chat()).status_code == 200
        assert (node.requests, other.requests) == (0, 4)
        assert '"a"' in drains.read_text()

        result = await order(gateway, "a", "resume")
        assert (result["state"], result["draining"]) == ("ready", False)
        assert '"a"' not in drains.read_text()


@in_virtual_time
async def test_at_the_deadline_running_requests_are_evicted_and_may_be_retried() -> None:
    """Those of other nodes run on."""
    async with bare_gateway(
        node := EmulatedNode(slots=2, decode_tps=5, answer_tokens=500),
        other := EmulatedNode(slots=1, decode_tps=100, answer_tokens=60, model="other"),
        serving=True,
    ) as gateway:
        plain = asyncio.create_task(gateway.chat(model="demo"))
        stream = asyncio.create_task(gateway.chat(model="demo", stream=True))
        elsewhere = asyncio.create_task(gateway.chat(model="other"))
        await gateway.until(lambda: (node.busy, other.busy) == (2, 1))
        result = await order(gateway, "a", "drain?deadline=0.2")
        assert 0 < result["deadline_in"] <= 0.2
        refused, events = await asyncio.wait_for(asyncio.gather(plain, stream), 5)
        assert (await shown(gateway, "a"))["deadline_in"] is None
        assert (await elsewhere).status_code == 200
    assert (refused.status_code, error_of(refused)["code"]) == (503, "node_drained")
    assert refused.headers["retry-after"] == "1"
    assert "x-should-retry" not in refused.headers
    assert '"code":"node_drained"' in events.text
    assert "[DONE]" not in events.text


def test_a_deadline_of_no_seconds_is_told_on_the_gateways_own_event_loop() -> None:
    async def drain_now() -> tuple[float | None, float | None]:
        deadlines = DrainDeadlines(InFlightRegistry())
        deadlines.set("a", 0.0)
        before = deadlines.seconds_left("a")
        await asyncio.sleep(0.01)
        return before, deadlines.seconds_left("a")

    before, after = uvloop.run(drain_now())
    assert before == pytest.approx(0.0, abs=0.01)
    assert after is None


@in_virtual_time
async def test_another_deadline_replaces_one_and_resume_and_drain_without_one_end_it() -> None:
    async with bare_gateway(
        node := EmulatedNode(slots=1, decode_tps=100, answer_tokens=60), serving=True
    ) as gateway:
        running = asyncio.create_task(gateway.chat())
        await gateway.until(lambda: node.busy == 1)
        for action in ("resume", "drain"):
            await order(gateway, "a", "drain?deadline=0.3")
            assert (await order(gateway, "a", action))["deadline_in"] is None
        await order(gateway, "a", "drain?deadline=0.3")
        assert 900 < (await order(gateway, "a", "drain?deadline=1000"))["deadline_in"] <= 1000
        assert (await running).status_code == 200
        gateway.drain_deadlines.close()
        assert (await shown(gateway, "a"))["deadline_in"] is None


@pytest.mark.parametrize("word", ["soon", "-1", "nan", "inf", "", f"{LONGEST_DRAIN_DEADLINE + 1}"])
@in_virtual_time
async def test_an_invalid_deadline_changes_nothing(word: str) -> None:
    async with bare_gateway(EmulatedNode()) as gateway:
        response = await gateway.admin.post(f"/admin/nodes/a/drain?deadline={word}")
        assert (response.status_code, error_of(response)["param"]) == (400, "deadline")
        assert not gateway["a"].draining


# Probe.


async def test_a_probe_closes_the_circuit_of_a_node_that_answers() -> None:
    async with bare_gateway(
        EmulatedNode(), open=60.0, open_max=60.0, failures=1, serving=True
    ) as gateway:
        gateway.fleet.request_failed(gateway["a"], gateway.clock())
        result = await shown(gateway, "a")
        assert (result["state"], result["circuit"]["phase"]) == ("ejected", "open")
        assert 30 < result["circuit"]["open_for"] <= 66
        result = await order(gateway, "a", "probe")
        assert (result["state"], result["circuit"]["phase"]) == ("ready", "closed")
        assert (result["probe"]["answer"], result["probe"]["detail"]) == ("up", "")
        assert result["probe"]["seconds"] > 0
        assert (await gateway.chat()).status_code == 200


@in_virtual_time
async def test_a_probe_of_a_node_that_is_gone_says_why() -> None:
    async with bare_gateway(node := EmulatedNode(), interval=60.0, fall=1) as gateway:
        await node.kill()
        result = await order(gateway, "a", "probe")
    assert (result["probe"]["answer"], result["state"]) == ("refused", "down")
    assert "no connection" in result["probe"]["detail"]


@in_virtual_time
async def test_a_node_has_a_day_of_its_own() -> None:
    async with bare_gateway(EmulatedNode(slots=3)) as gateway:
        empty = (await gateway.admin.get("/admin/nodes/a/history")).json()
    assert (empty["node"], empty["points"]) == ("a", [])
    assert empty["columns"] == ["at", "busy", "slots", "prefill_tps", "decode_tps"]


def hits(requests: int, prompt: float, cached: float, length: float = 300.0) -> PrefixHits:
    return PrefixHits(requests, prompt, cached, length)


def test_the_map_has_the_nodes_prefixes_and_who_else_found_them() -> None:
    system, talk = -5, 77
    by_node = {
        "a": {talk: hits(2, 1000, 600, 500), system: hits(9, 9000, 2700)},
        "b": {system: hits(4, 4000, 1200, 280)},
        "c": {99: hits(1, 100, 70)},
    }
    map_ = heat_map(by_node, "a")
    assert map_["nodes"] == ["a", "b"]
    first, second = map_["prefixes"]
    assert first == {
        "prefix": "ffffff",
        "tokens": 300,
        "cells": [[9, 9000, 2700], [4, 4000, 1200]],
    }
    assert second["cells"] == [[2, 1000, 600], None]
    assert map_["complete"]
    assert heat_map(by_node, "d") == {"nodes": ["d"], "prefixes": [], "complete": True}


def test_the_map_is_bounded() -> None:
    map_ = heat_map({f"n{node}": {7: hits(1, 100, 70)} for node in range(100)}, "n5")
    assert (len(map_["nodes"]), map_["nodes"][0]) == (MOST_COLUMNS, "n5")
    assert not map_["complete"]


@in_virtual_time
async def test_the_map_tells_nothing_of_prompts() -> None:
    async with bare_gateway(EmulatedNode(slots=2, cache_ram=0), serving=True) as gateway:
        for turn in range(3):
            await gateway.chat("Tell me of the secret garden. " * 60 + str(turn))
        told = await gateway.admin.get("/admin/cache?node=a")
        assert (await gateway.admin.get("/admin/cache?node=z")).status_code == 404
    map_ = told.json()
    [row] = map_["prefixes"]
    assert row["tokens"] > 100
    assert len(row["prefix"]) == 6
    assert sum(cell[2] for cell in row["cells"] if cell) > 100
    assert "garden" not in told.text


# Names that somebody may have meant.


FLEET = [f"epyc-{number:03}-numa{number % 2}" for number in range(1000)]


@pytest.mark.parametrize(
    ("name", "meant"), [("epyc-041numa1", "epyc-041-numa1"), ("pyc-998-numa0", "epyc-998-numa0")]
)
def test_a_slip_is_understood_among_a_thousand(name: str, meant: str) -> None:
    assert f"'{meant}'" in suggestion(name, FLEET, "")


def test_what_is_like_nothing_gets_the_other_sentence() -> None:
    assert suggestion("gpu", FLEET, "Look there.") == "Look there."
    assert suggestion("gpu", [], "Look there.") == "Look there."
