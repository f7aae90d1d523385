"""What operators see and do through the admin API: the gateway, its nodes, and requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.app import ADMIN_ROUTES, INDEX_PAGE
from gateway.admin.nodes import LONGEST_DRAIN_DEADLINE, MOST_COLUMNS, DrainDeadlines, heat_map
from gateway.admin.status import MOST_LISTED_WAITING, WHOLE_SECONDS
from gateway.admin.why import MOST_LANES, RequestEndpoints, SlotSpan, sample_of
from gateway.callers.keys import AdminRole, new_key
from gateway.forward.in_flight import InFlightRegistry
from gateway.nodes.prompt_cache import PrefixHits
from gateway.watch.history import FleetHistory
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.emulator.routed_model import HostMemory, ModelFile
from tests.emulator.router import EmulatedRouter
from tests.gateways import NO_TLS, Running, answered, running_gateway, until
from tests.known import known
from tests.nodes.build import a_spec, take
from tests.polling import eventually
from tests.servers import demo_model, running_router
from tests.stored.batch_gateway import HEADERS, ended, gateway_over, lines, output, submit
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of
from tests.web.test_route_tables import ADMIN_KEYS, bearer, gateway_with_keys

DEAD = "http://127.0.0.1:9"


@in_virtual_time
async def test_status_shows_the_gateway_on_one_page() -> None:
    faults = {
        "inventory_error": "nodes.yaml:3: nodes[0].slots: must be a number",
        "settings_error": "gateway.yaml:1: models: must be a mapping",
    }
    dead = [a_spec(name, DEAD, model="demo") for name in "bc"]
    async with bare_gateway(EmulatedNode(slots=2), *dead) as gateway:
        assert (await gateway.chat()).status_code == 200
        assert (await gateway.chat(model="nobody-has-it")).status_code == 404
        await asyncio.sleep(3.0)
        status = await answered(gateway.admin, "/admin/status")
        for name, fault in faults.items():
            setattr(gateway.config_files, name, fault)
        gateway.handler.begin_shutdown()
        later = await answered(gateway.admin, "/admin/status")
    assert 3.0 <= status["uptime"] < 4.0
    started = datetime.fromisoformat(status["started_at"])
    assert timedelta(0) <= datetime.now(UTC) - started < timedelta(minutes=1)
    expected: dict[str, Any] = {
        "version": "1.2.3", "ready": True, "reason": None, "in_flight": 0, "waiting": [],
        "queue": {"urgent": 0, "premium": 0, "normal": 0, "batch": 0},
        "nodes": {"ready": 1, "down": 2}, "slots_total": 4, "slots_busy": 0,
        **dict.fromkeys(faults),
    }  # fmt: skip
    assert {name: status[name] for name in expected} == expected
    totals = status["totals"]
    assert (totals["requests"], totals["failures"], totals["clients_left"]) == (2, 1, 0)
    assert totals["failures_by_code"] == {"404": 1}
    assert min(totals["prompt_tokens"], totals["completion_tokens"]) > 0
    expected = {"ready": False, "reason": "shutting_down", **faults}
    assert {name: later[name] for name in expected} == expected


@in_virtual_time
async def test_status_lists_queued_requests_in_order_up_to_a_limit() -> None:
    async with bare_gateway(
        node := EmulatedNode(slots=1, decode_tps=10, answer_tokens=2000)
    ) as gateway:
        tasks = [asyncio.create_task(gateway.chat())]
        await gateway.until(lambda: node.busy == 1)
        for wanted in ("batch", "urgent", *["normal"] * MOST_LISTED_WAITING):
            headers = {"x-priority": wanted}
            tasks.append(asyncio.create_task(gateway.chat("a secret", headers=headers)))
            await gateway.until(lambda: len(gateway.scheduler.queue_positions()) == len(tasks) - 1)
        status = await answered(gateway.admin, "/admin/status")
        for task in tasks:
            task.cancel()
        await gateway.until(lambda: len(gateway.registry) == 0)
        left = await answered(gateway.admin, "/admin/status")
    listed = status["waiting"]
    assert status["queue"] == {"urgent": 1, "premium": 0, "normal": MOST_LISTED_WAITING, "batch": 1}
    assert [one["position"] for one in listed] == [*range(1, MOST_LISTED_WAITING + 1)]
    assert listed[0]["class"] == "urgent"
    assert {one["model"] for one in listed} == {"demo"}
    assert all(one["expected_start"] >= 0 for one in listed)
    assert status["in_flight"] == MOST_LISTED_WAITING + 3
    assert "a secret" not in str(status)
    totals = left["totals"]
    assert (totals["clients_left"], totals["failures"]) == (MOST_LISTED_WAITING + 3, 0)


@in_virtual_time
async def test_hosts_of_the_settings_are_allowed_and_others_are_not() -> None:
    async with bare_gateway(settings={"admin": {"hosts": ["gateway.example"]}}) as gateway:
        good = await gateway.admin.get("/health", headers={"host": "gateway.example:8001"})
        bad = await gateway.admin.get("/health", headers={"host": "evil.example"})
        page = await gateway.admin.post("/admin/reload", headers={"origin": "https://evil.example"})
        for path in ("/admin", "/admin/", "/slots", "/v1/models", "/admin/nodes/"):
            response = await gateway.admin.get(path)
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found"), path
    assert (good.status_code, good.json()) == (200, {"status": "ok"})
    assert (bad.status_code, error_of(bad)["code"]) == (403, "host_not_allowed")
    assert (page.status_code, error_of(page)["code"]) == (403, "origin_not_allowed")
    assert bad.headers["x-request-id"].startswith("adm_")


@in_virtual_time
async def test_the_index_lists_exactly_the_served_paths() -> None:
    paths = re.findall(r"^(GET|POST|PUT|PATCH|DELETE) +(\S+)", INDEX_PAGE, re.MULTILINE)
    async with bare_gateway(a_spec("a", DEAD)) as gateway:
        assert (await gateway.admin.get("/")).text == INDEX_PAGE
        for method, path in paths:
            asked = path.replace("{name}", "a").replace("{id}", "unknown")
            wrong = await gateway.admin.request("PROPFIND", asked)
            assert wrong.status_code == 405, asked
            assert method in wrong.headers["allow"]
    assert len(paths) == len(ADMIN_ROUTES)


TOTAL = "llamacpp:tokens_predicted_total"


async def scraped(gateway: BareGateway) -> dict[tuple[str, str], float]:
    response = await gateway.admin.get("/metrics/nodes")
    assert response.status_code == 200
    return {
        (sample.name, sample.labels["node"]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


@asynccontextmanager
async def over(*names: str) -> AsyncIterator[tuple[BareGateway, dict[str, EmulatedNode]]]:
    async with AsyncExitStack() as stack:
        nodes = {name: await stack.enter_async_context(EmulatedNode()) for name in names}
        specs = [a_spec(name, node.url) for name, node in nodes.items()]
        gateway = await stack.enter_async_context(bare_gateway(*specs, timeout=2.0))
        await gateway.until(lambda: all(gateway[name].probe_history.up for name in names))
        yield gateway, nodes


@in_virtual_time
async def test_nodes_metrics_are_on_one_page_whatever_some_nodes_answer() -> None:
    names = ("good", "other", "slow", "endless", "garbage", "refuses", "foreign")
    async with over(*names) as (gateway, nodes):
        for name, fault in (
            ("slow", {"kind": "hang"}),
            ("garbage", {"kind": "garbage"}),
            ("refuses", {"kind": "status", "status": 501}),
            ("foreign", {"kind": "status", "status": 200, "body": "<html>hello</html>"}),
            ("endless", {"kind": "status", "status": 200, "body": f"{TOTAL} 1\n" * 200_000}),
        ):
            nodes[name].faults.set(**fault, path="/metrics")
        began = now()
        values = await scraped(gateway)
        assert now() - began <= WHOLE_SECONDS
        assert {name: values["llama_gateway_node_metrics_up", name] for name in names} == {
            name: float(name in {"good", "other"}) for name in names
        }
        assert {node for family, node in values if family == TOTAL} == {"good", "other"}


@in_virtual_time
async def test_silent_nodes_hide_no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admin.status.AT_ONCE", 2)
    # In the order in which they are asked: the silent ones first.
    silent = [f"silent-{number}" for number in range(10)]
    async with over(*silent, "good") as (gateway, nodes):
        for name in silent:
            nodes[name].faults.set("hang", path="/metrics")
        values = await scraped(gateway)
        assert [node for family, node in values if family == TOTAL] == ["good"]


BODY = {"messages": [{"role": "user", "content": "tell me more"}], "max_tokens": 40}


async def ask_now_and_then(client: httpx.AsyncClient, *urls: str) -> None:
    """Two chats of 20 seconds at once, once a minute, for seven minutes."""
    for _ in range(7):
        sent = [client.post(f"{url}/v1/chat/completions", json=BODY) for url in urls]
        assert {answer.status_code for answer in await asyncio.gather(*sent)} == {200}
        await asyncio.sleep(40.0)


async def told(running: Running) -> list[str]:
    return [problem.id for problem in await running.gateway.live.view.read_problems()]


@in_virtual_time
async def test_a_second_gateway_on_the_same_nodes_is_told(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    async with (
        EmulatedNode(slots=1, decode_tps=2.0) as one,
        EmulatedNode(slots=1, decode_tps=2.0) as other,
        running_gateway(folders[0], [one.url, other.url]) as first,
        running_gateway(folders[1], [one.url, other.url]) as second,
        httpx.AsyncClient(timeout=600.0, trust_env=False, verify=NO_TLS) as client,
    ):
        assert await told(first) == []
        # One who uses a node directly is none.
        await ask_now_and_then(client, one.url)
        assert await told(first) == []
        assert first.gateway.fleet.others_take_slots(first.gateway.fleet.nodes["node-0"])
        await ask_now_and_then(client, second.url, second.url)
        assert await told(first) == ["second_gateway"]
        assert "nodes_used_by_others 2" in (await first.admin.get("/metrics")).text
        # The one that all requests came through has seen no other.
        await asyncio.sleep(600.0)
        assert await told(first) == await told(second) == []


async def unwatched() -> None:
    """Let nothing but the admin API reload the files."""
    watching = [task for task in asyncio.all_tasks() if task.get_name() == "watch the files"]
    assert watching
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


@in_virtual_time
async def test_a_reload_reports_changes_and_what_needs_a_restart(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as two,
        running_gateway(tmp_path, [one := EmulatedNode(), "http://127.0.0.1:9"]) as running,
    ):
        admin = running.admin
        await unwatched()
        running.write_nodes(
            [{"name": "node-0", "url": one.url, "slots": 2}, {"name": "fresh", "url": two.url}]
        )
        running.write_settings({"queue": {"max": 3}, "limits": {"connections": 77}})
        first, second = [await answered(admin, "/admin/reload", "POST") for _ in range(2)]
        shown = await answered(admin, "/admin/config")
        nodes = (await answered(admin, "/admin/nodes"))["nodes"]
    assert first == {
        "nodes": {"added": ["fresh"], "changed": ["node-0"], "removed": ["node-1"]},
        "settings": {"changed": ["limits", "queue"], "needs_restart": ["limits.connections"]},
    }
    assert not any(names for told in second.values() for names in told.values())
    assert shown["queue"]["max"] == 3
    assert [node["name"] for node in nodes] == ["node-0", "fresh"]


async def versions_of(running: Running, number: int) -> Any:
    history = running.gateway.config_files.histories["gateway"]
    await until(lambda: len(history.versions()) >= number)
    return (await answered(running.admin, "/admin/config/history"))["files"][0]["versions"]


@in_virtual_time
async def test_a_version_can_come_back_and_a_bad_rollback_writes_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()], {"queue": {"max": 1}}) as running:
        admin = running.admin
        [first] = await versions_of(running, 1)
        await unwatched()
        running.write_settings({"queue": {"max": "many"}})
        assert (await admin.post("/admin/reload")).status_code == 422
        running.write_settings({"queue": {"max": 2}})
        await answered(admin, "/admin/reload", "POST")
        newest, first = await versions_of(running, 2)
        assert (newest["in_force"], newest["on_disk"]) == (True, True)
        assert (first["in_force"], first["on_disk"]) == (False, False)
        name = first["name"]
        done = await answered(admin, "/admin/config/rollback", "POST", json={"version": name})
        assert done == {"file": str(running.settings_file), "version": name, "kept": None}
        [entry] = (await admin.get("/admin/audit?action=config")).json()["entries"]
        assert (entry["action"], entry["target"]) == ("config.rollback", name)
        assert "max" not in str(entry["details"])

        async def refused(**body: str) -> tuple[int, str]:
            response = await admin.post("/admin/config/rollback", json=body)
            return response.status_code, error_of(response)["code"]

        assert await refused(version="gateway-1999") == (404, "version_not_found")
        assert await refused(version="../gateway.yaml") == (404, "version_not_found")
        assert await refused(name=name) == (400, "invalid_request")
        assert await refused(version=name, more="") == (400, "invalid_request")
        text = running.settings_file.read_text()
        running.settings_file.write_text(f"# Managed by Ansible (gateway): no\n{text}")
        assert await refused(version=name) == (409, "file_managed")
        # A folder stands where the file would be: nobody may replace it.
        running.settings_file.unlink()
        running.settings_file.mkdir()
        (running.settings_file / "x").write_text("")
        assert await refused(version=name) == (409, "file_not_writable")


@in_virtual_time
async def test_each_setting_says_where_it_comes_from_and_no_hash_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE", "77")
    key = new_key("team")
    own = {"id": key.id, "sha256": key.sha256, "name": "Team"}
    settings = {"queue": {"max": "${QUEUE}", "max_wait": 60}, "keys": [own]}
    async with running_gateway(tmp_path, [EmulatedNode()], settings) as running:
        await versions_of(running, 1)
        response = await running.admin.get("/admin/config/origins")
        shown = await running.admin.get("/admin/config")
        lines = [line.strip() for line in running.settings_file.read_text().splitlines()]
    rows = {row["key"]: row for row in response.json()["values"]}
    for name, value, by, line in (
        ("queue.max", 77, "QUEUE", "max: ${QUEUE}"),
        ("queue.max_wait", 60.0, None, "max_wait: 60"),
        ("keys[0].name", "Team", None, "name: Team"),
        ("resume", "text", None, None),
        ("admin.port", 0, "--admin-port", None),
    ):
        row = rows[name]
        assert (row["value"], row["by"]) == (value, by)
        assert (row["line"] and lines[row["line"] - 1]) == line
    assert (shown.json()["queue"]["max"], shown.json()["keys"][0]["id"]) == (77, "team")
    assert key.sha256 not in response.text + shown.text
    assert response.json()["complete"]


# Nodes, and the models that they serve.


CONTRACT = {
    "name", "url", "kind", "tier", "state", "reason", "slots_total", "slots_busy", "in_flight",
    "models", "context", "prefill_tps", "decode_tps", "requests", "failures", "cost_per_hour",
}  # fmt: skip


async def shown(gateway: BareGateway, name: str) -> Any:
    return await answered(gateway.admin, f"/admin/nodes/{name}")


async def order(gateway: BareGateway, what: str) -> Any:
    """Have an operator do something with a node or a model, such as `nodes/a/drain`."""
    return await answered(gateway.admin, f"/admin/{what}", "POST")


@in_virtual_time
async def test_nodes_are_shown_in_their_order_with_their_work_and_no_key() -> None:
    async with (
        EmulatedNode(slots=3, context=2048, build="b42") as node,
        bare_gateway(
            a_spec("b", node.url, cost_per_hour=0.2, labels={"numa": "0"}, host="epyc"),
            a_spec("a", DEAD, model=["x", "y"], slots=4, standby=True, tier="gpu", api_key="sk-of"),
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
        "url": node.url, "kind": "llama.cpp", "host": "epyc", "labels": {"numa": "0"},
        "state": "ready", "requests": 2, "slots_total": 3, "slots_busy": 1, "leased": 1,
        "in_flight": 1, "models": ["demo"], "context": 2048, "cost_per_hour": 0.2, "build": "b42",
        "drift": [], "endpoints": None, "endpoints_refused": ["embeddings", "rerank"],
        "purpose": "chat", "circuit": {"phase": "closed", "failures": 0, "open_for": None},
        "deadline_in": None,
    }  # fmt: skip
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


@in_virtual_time
async def test_a_drained_node_gets_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    async with bare_gateway(
        node := EmulatedNode(), other := EmulatedNode(), folder=tmp_path
    ) as gateway:
        result = await order(gateway, "nodes/a/drain")
        (drains,) = tmp_path.glob("drains-*")  # noqa: ASYNC240 - a small folder
        assert (result["state"], result["deadline_in"]) == ("draining", None)
        assert result["draining"]
        for _ in range(4):
            assert (await gateway.chat()).status_code == 200
        assert (node.requests, other.requests) == (0, 4)
        assert '"a"' in drains.read_text()

        result = await order(gateway, "nodes/a/resume")
        assert (result["state"], result["draining"]) == ("ready", False)
        assert '"a"' not in drains.read_text()


@in_virtual_time
async def test_at_the_deadline_running_requests_are_evicted_and_may_be_retried() -> None:
    """Those of other nodes run on."""
    async with bare_gateway(
        node := EmulatedNode(slots=2, decode_tps=5, answer_tokens=500),
        other := EmulatedNode(slots=1, decode_tps=100, answer_tokens=60, model="other"),
    ) as gateway:
        plain = asyncio.create_task(gateway.chat(model="demo"))
        stream = asyncio.create_task(gateway.chat(model="demo", stream=True))
        elsewhere = asyncio.create_task(gateway.chat(model="other"))
        await gateway.until(lambda: (node.busy, other.busy) == (2, 1))
        result = await order(gateway, "nodes/a/drain?deadline=0.2")
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


@pytest.mark.parametrize("word", ["soon", "-1", "nan", "inf", "", f"{LONGEST_DRAIN_DEADLINE + 1}"])
@in_virtual_time
async def test_an_invalid_deadline_changes_nothing(word: str) -> None:
    async with bare_gateway(EmulatedNode()) as gateway:
        response = await gateway.admin.post(f"/admin/nodes/a/drain?deadline={word}")
        assert (response.status_code, error_of(response)["param"]) == (400, "deadline")
        assert not gateway["a"].draining


async def test_a_probe_closes_the_circuit_of_a_node_that_answers_and_says_why_one_does_not() -> (
    None
):
    async with bare_gateway(
        node := EmulatedNode(), open=60.0, open_max=60.0, failures=1
    ) as gateway:
        gateway.fleet.request_failed(gateway["a"], gateway.clock())
        result = await shown(gateway, "a")
        assert (result["state"], result["circuit"]["phase"]) == ("ejected", "open")
        assert 30 < result["circuit"]["open_for"] <= 66
        result = await order(gateway, "nodes/a/probe")
        assert (result["state"], result["circuit"]["phase"]) == ("ready", "closed")
        assert (result["probe"]["answer"], result["probe"]["detail"]) == ("up", "")
        assert result["probe"]["seconds"] > 0
        assert (await gateway.chat()).status_code == 200
        await node.kill()
        result = await order(gateway, "nodes/a/probe")
    assert result["probe"]["answer"] == "refused"
    assert "no connection" in result["probe"]["detail"]


@in_virtual_time
async def test_the_map_of_cached_prefixes_tells_nothing_of_prompts_and_is_bounded() -> None:
    async with bare_gateway(EmulatedNode(slots=2, cache_ram=0)) as gateway:
        for turn in range(3):
            await gateway.chat("Tell me of the secret garden. " * 60 + str(turn))
        told = await gateway.admin.get("/admin/cache?node=a")
        assert (await gateway.admin.get("/admin/cache?node=z")).status_code == 404
    many = heat_map({f"n{node}": {7: PrefixHits(1, 100, 70, 300)} for node in range(100)}, "n5")
    assert (len(many["nodes"]), many["nodes"][0], many["complete"]) == (MOST_COLUMNS, "n5", False)
    map_ = told.json()
    [row] = map_["prefixes"]
    assert row["tokens"] > 100
    assert len(row["prefix"]) == 6
    assert sum(cell[2] for cell in row["cells"] if cell) > 100
    assert "garden" not in told.text


ALIASES: dict[str, Any] = {
    "models": {"helper": {"use": ["demo", "org/other"]}, "alias": {"use": "demo"}}
}


@asynccontextmanager
async def two_models(
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[BareGateway, EmulatedNode]]:
    async with bare_gateway(
        one := EmulatedNode(slots=1, decode_tps=20),
        EmulatedNode(slots=1, decode_tps=20, model="org/other"),
        settings=settings,
    ) as gateway:
        yield gateway, one


@in_virtual_time
async def test_a_paused_model_takes_no_request_and_others_do() -> None:
    async with two_models() as (gateway, _):
        for _ in range(2):  # Twice is the same as once.
            assert (await order(gateway, "models/demo/pause"))["paused"]
        refused = await gateway.chat(model="demo")
        served = await gateway.chat(model="org/other")
        listed = await gateway.public.get("/v1/models")
        status = (await gateway.admin.get("/admin/status")).json()
        metrics = (await gateway.admin.get("/metrics")).text
        for _ in range(2):
            assert not (await order(gateway, "models/demo/resume"))["paused"]
        again = await gateway.chat(model="demo")
        after = (await gateway.admin.get("/metrics")).text
        unknown = await gateway.admin.post("/admin/models/dem/pause")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "model_paused")
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-should-retry"] == "false"
    assert (served.status_code, again.status_code) == (200, 200)
    assert {one["id"] for one in listed.json()["data"]} == {"demo", "org/other"}
    assert status["models_paused"] == ["demo"]
    assert 'llama_gateway_model_paused{model="demo"} 1' in metrics
    assert "llama_gateway_model_paused{" not in after
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    assert "'demo'" in error_of(unknown)["message"]


@in_virtual_time
async def test_an_alias_goes_on_with_the_models_that_are_left() -> None:
    async with two_models(ALIASES) as (gateway, _):
        await order(gateway, "models/demo/pause")
        helped = await gateway.chat(model="helper")
        refused = await gateway.chat(model="alias")
        await order(gateway, "models/org/other/pause")
        none_left = await gateway.chat(model="helper")
        models = (await answered(gateway.admin, "/admin/models"))["models"]
        await order(gateway, "models/demo/resume")
        await order(gateway, "models/helper/pause")
        by_alias = await gateway.chat(model="helper")
        by_name = await gateway.chat(model="demo")
    assert helped.status_code == 200
    assert {one.status_code for one in (refused, none_left, by_alias)} == {503}
    assert by_name.status_code == 200
    paused = {one["name"] for one in models if one["paused"]}
    assert paused == {"demo", "org/other", "helper", "alias"}
    helper = next(one for one in models if one["name"] == "helper")
    assert helper["stands_for"] == ["demo", "org/other"]
    assert (helper["nodes"], helper["slots_total"]) == ({"ready": 2}, 2)


@pytest.mark.parametrize(("name", "other"), [("hidden", "nick"), ("nick", "hidden")])
@in_virtual_time
async def test_a_pause_and_a_cap_hold_for_a_models_other_names(name: str, other: str) -> None:
    capped = {"models": {"hidden": {"max_tokens": 2}}}
    async with bare_gateway(
        EmulatedNode(model="hidden", aliases=("nick",)), settings=capped
    ) as gateway:
        served = await gateway.chat(model="nick", max_tokens=50)
        paused = await order(gateway, f"models/{name}/pause")
        refused = await gateway.chat(model=other)
        models = (await answered(gateway.admin, "/admin/models"))["models"]
        status = (await gateway.admin.get("/admin/status")).json()
        await order(gateway, f"models/{name}/resume")
        again = await gateway.chat(model="nick")
    assert served.json()["usage"]["completion_tokens"] == 2
    assert paused["paused"]
    assert (refused.status_code, error_of(refused)["code"]) == (503, "model_paused")
    assert [(one["name"], one["paused"]) for one in models] == [("hidden", True), ("nick", True)]
    assert status["models_paused"] == [name]
    assert again.status_code == 200


# Models on demand: which ones routers have loaded, and orders about them.


GIB = 1 << 30
FILES = {name: ModelFile(memory=4 * GIB, load_seconds=3.0) for name in ("a", "org/b", "c")}
SIZES: dict[str, Any] = {"models": {name: {"memory": "4GiB"} for name in FILES}}


@asynccontextmanager
async def one_router(
    folder: Path, settings: dict[str, Any] = SIZES
) -> AsyncIterator[tuple[Running, EmulatedRouter]]:
    memory, plain = HostMemory(64 * GIB), EmulatedNode(model="plain")
    router = EmulatedRouter(FILES, models_max=0, memory=memory, slots=2, decode_tps=20)
    async with router, plain:
        nodes = [
            {"name": "r1", "url": router.url, "memory": "9GiB"},
            {"name": "a1", "url": plain.url},
        ]
        async with running_gateway(folder, nodes, settings) as running:
            await until(lambda: "r1/a" in running.gateway.fleet.nodes)
            yield running, router


async def placements(running: Running) -> dict[str, dict[str, Any]]:
    found = await answered(running.admin, "/admin/placements")
    return {one["name"]: one for one in found["placements"]}


async def done(running: Running, order: str, model: str, state: str | None = None) -> Any:
    body = {"order": order, "model": model, "node": "r1"}
    found = await answered(running.admin, "/admin/placements", "POST", json=body)
    if state is not None:
        await state_is(running, f"r1/{model}", state)
    return found


async def refused(running: Running, order: str, model: str, node: str = "r1") -> dict[str, Any]:
    body = {"order": order, "model": model, "node": node}
    response = await running.admin.post("/admin/placements", json=body)
    assert response.status_code >= 400, response.text
    return {"status": response.status_code, **response.json()["error"]}


async def state_is(running: Running, name: str, state: str) -> None:
    nodes = running.gateway.fleet.nodes
    await until(lambda: nodes[name].state.value == state, 60, lambda: nodes[name].reason)


@in_virtual_time
async def test_a_model_is_loaded_and_unloaded_by_order(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, _):
        before = await placements(running)
        loading = await done(running, "load", "org/b", "ready")
        loaded = (await placements(running))["r1/org/b"]
        listed = (await running.admin.get("/admin/placements")).json()
        unloading = await done(running, "unload", "org/b", "unloaded")
        audit = (await running.admin.get("/admin/audit?action=placements")).json()["entries"]
        metrics = (await running.admin.get("/metrics")).text
    assert list(before) == ["r1/a", "r1/c", "r1/org/b"]
    assert (before["r1/a"]["state"], before["r1/a"]["since"]) == ("unloaded", None)
    assert loading["state"] == "loading"
    assert (loaded["node"], loaded["model"], loaded["memory"]) == ("r1", "org/b", 4 * GIB)
    assert loaded["since"].endswith("Z")
    assert loaded["loads"] == 1
    assert 3 <= loaded["load_seconds"] < 5
    assert "an operator has ordered it" in loading["reason"]
    assert listed["hosts"] == {"127.0.0.1": {"memory": 9 * GIB, "used": 4 * GIB, "unknown": 0}}
    assert "an operator has ordered it" in unloading["reason"]
    assert [(one["action"], one["target"], one["outcome"]) for one in audit] == [
        ("placements.unload", "r1/org/b", "done"),
        ("placements.load", "r1/org/b", "done"),
    ]
    reason = 'llama_gateway_model_unloads_total{node="r1",model="org/b",reason="operator"} 1'
    assert reason in metrics


@in_virtual_time
async def test_an_unload_waits_for_what_runs_and_a_drain_ends_it(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, router):
        await done(running, "load", "a", "ready")
        asked = asyncio.create_task(running.chat(model="a", max_tokens=60))
        await until(lambda: router.models["a"].node.busy == 1)
        reason = (await done(running, "unload", "a"))["reason"]
        state = (await placements(running))["r1/a"]["state"]
        answer = await asked
        await state_is(running, "r1/a", "unloaded")
        await done(running, "load", "a", "ready")
        asked = asyncio.create_task(running.chat(model="a", max_tokens=900))
        await until(lambda: router.models["a"].node.busy == 1)
        drained = (await running.admin.post("/admin/nodes/r1/drain?deadline=1")).json()
        ended = await asked
    assert reason == "it ends its requests and is unloaded then: an operator has ordered it"
    assert (state, answer.status_code) == ("unloading", 200)
    assert drained["in_flight"] == 1
    assert (ended.status_code, ended.json()["error"]["code"]) == (503, "node_drained")


@in_virtual_time
async def test_a_pin_is_kept_over_a_restart_and_ends_with_unpin(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, _):
        pinned = await done(running, "pin", "a", "ready")
        problem = await refused(running, "unload", "a")
    async with one_router(tmp_path) as (running, _):
        await state_is(running, "r1/a", "ready")
        again = (await placements(running))["r1/a"]
        unpinned = await done(running, "unpin", "a")
        await done(running, "unload", "a", "unloaded")
    assert pinned["pinned_by"] == again["pinned_by"] == "operator"
    assert unpinned["pinned_by"] is None
    assert (problem["status"], problem["code"]) == (409, "placement_refused")
    assert problem["message"] == "r1/a is pinned by an operator: take the pin out."


@in_virtual_time
async def test_what_does_not_fit_is_refused_or_a_problem_with_the_figures(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, router):
        for name in ("a", "org/b"):
            await done(running, "pin", name, "ready")
        problems = [await refused(running, order, "c") for order in ("load", "pin")]
        node = {"name": "r1", "url": router.url, "memory": "9GiB", "preload": ["c"]}
        running.write_nodes([node])
        assert (await running.admin.post("/admin/reload")).status_code == 200
        await asyncio.sleep(130)
        (not_kept,) = await running.gateway.live.view.read_problems()
    for problem in problems:
        assert problem["status"] == 409
        assert "it takes 4 GiB, and 127.0.0.1 has 9 GiB for models, 8 GiB of" in problem["message"]
        assert "Unpin or unload another" in problem["message"]
    assert not_kept.id == "not_kept:c:r1"
    assert "127.0.0.1 has 9 GiB for models, 8 GiB of them taken" in not_kept.cause


@in_virtual_time
async def test_orders_that_make_no_sense_name_the_remedy(tmp_path: Path) -> None:
    pinned = {"models": {**SIZES["models"], "a": {"memory": "4GiB", "pin": ["r1"]}}}
    async with one_router(tmp_path, pinned) as (running, _):
        await state_is(running, "r1/a", "ready")
        found = [
            await refused(running, "load", "aa"),
            await refused(running, "load", "a", "r2"),
            await refused(running, "load", "plain", "a1"),
            await refused(running, "drop", "a"),
            await refused(running, "unpin", "a"),
        ]
        await running.admin.post("/admin/nodes/r1/drain")
        drained = await refused(running, "load", "c")
    assert [one["status"] for one in found] == [404, 404, 400, 400, 409]
    assert "has no model 'aa'. Did you mean 'a'?" in found[0]["message"]
    assert "There is no node 'r2'." in found[1]["message"]
    assert "is no router" in found[2]["message"]
    assert "gateway.yaml" in found[4]["message"]
    assert "llama-gateway nodes resume r1" in drained["message"]


@in_virtual_time
async def test_an_instance_is_a_node_by_its_own_name_and_counts_once(tmp_path: Path) -> None:
    async with one_router(tmp_path) as (running, _):
        await done(running, "load", "org/b", "ready")
        paths = ("/admin/nodes/r1/org/b", "/admin/nodes/r1%2Forg%2Fb")
        shown = [(await running.admin.get(path)).json() for path in paths]
        drained = (await running.admin.post("/admin/nodes/r1/org/b/drain")).json()
        nodes = (await running.admin.get("/admin/nodes")).json()["nodes"]
        status = (await running.admin.get("/admin/status")).json()
        problems = await running.gateway.live.view.read_problems()
    assert [(one["name"], one["router"], one["slots_total"]) for one in shown] == [
        ("r1/org/b", "r1", 2)
    ] * 2
    assert drained["state"] == "draining"
    assert status["nodes"] == {"ready": 2}
    assert next(one["reason"] for one in nodes if one["name"] == "r1").endswith(
        "1 of 3 models are loaded"
    )
    assert status["slots_total"] == 2 + 2 == sum(one["slots_total"] for one in nodes)
    assert {one["name"]: one["slots_total"] for one in nodes} == {
        "r1": 0, "r1/a": 0, "r1/c": 0, "r1/org/b": 2, "a1": 2,
    }  # fmt: skip
    assert [one.id for one in problems] == ["draining"]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.binary_only("the wheel's server has no router mode")
async def test_orders_on_a_real_router(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("a", "b"):
        (models / f"{name}.gguf").symlink_to(demo_model())
    (models / "cut.gguf").write_bytes(demo_model().read_bytes()[:100_000])
    with running_router(models, slots=2, context=4096, extra=("--models-max", "0")) as router:
        node = {"name": "r1", "url": router.url, "memory": "1GiB"}
        async with running_gateway(tmp_path, [node], {"store": {"url": "off"}}) as running:
            await until(lambda: "r1/cut" in running.gateway.fleet.nodes)
            await done(running, "load", "cut", "failed")
            await done(running, "pin", "a", "ready")
            found = await placements(running)
            problems = await running.gateway.live.view.read_problems()
            await done(running, "unpin", "a")
            await done(running, "unload", "a", "unloaded")
    assert "its log says why" in found["r1/cut"]["reason"]
    assert found["r1/a"]["memory"] > demo_model().stat().st_size
    assert (found["r1/a"]["loads"], found["r1/a"]["pinned_by"]) == (1, "operator")
    assert [one.id for one in problems] == ["model_out:cut", "load_failed:r1/cut"]


# Requests: why they ran where they did, what runs, and how it is ended.


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
    history = FleetHistory(gateway.bus)
    endpoints = RequestEndpoints(
        gateway.registry, gateway.scheduler, history, lambda: UNIX + now(), None, name_of
    )
    return endpoints.read_timeline(after, shows_callers=shows_callers).spans


@in_virtual_time
async def test_an_attempt_reads_then_writes_and_then_has_ended() -> None:
    async with bare_gateway(EmulatedNode(slots=2, decode_tps=10, prefill_tps=100)) as gateway:
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
    async with bare_gateway(EmulatedNode()) as gateway:
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
