from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin import status
from gateway.admin.app import ADMIN_ROUTES, INDEX_PAGE
from gateway.admin.status import MOST_LISTED_WAITING, WHOLE_SECONDS
from gateway.callers.keys import new_key
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway, until
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of

DEAD = "http://127.0.0.1:9"


@in_virtual_time
async def test_status_shows_the_gateway_on_one_page() -> None:
    async with (
        EmulatedNode(slots=2) as node,
        bare_gateway(
            *(
                a_spec("a", node.url),
                a_spec("b", DEAD, model="demo"),
                a_spec("c", DEAD, model="demo"),
            ),
        ) as gateway,
    ):
        assert (await gateway.chat()).status_code == 200
        assert (await gateway.chat(model="nobody-has-it")).status_code == 404
        await asyncio.sleep(3.0)
        status = (await gateway.admin.get("/admin/status")).json()
        gateway.config_files.inventory_error = "nodes.yaml:3: nodes[0].slots: must be a number"
        gateway.config_files.settings_error = "gateway.yaml:1: models: must be a mapping"
        gateway.handler.begin_shutdown()
        later = (await gateway.admin.get("/admin/status")).json()
    assert status["version"] == "1.2.3"
    assert 3.0 <= status["uptime"] < 4.0
    started = datetime.fromisoformat(status["started_at"])
    assert timedelta(0) <= datetime.now(UTC) - started < timedelta(minutes=1)
    assert (status["ready"], status["reason"], status["in_flight"]) == (True, None, 0)
    assert status["queue"] == {"urgent": 0, "premium": 0, "normal": 0, "batch": 0}
    assert status["waiting"] == []
    assert status["nodes"] == {"ready": 1, "down": 2}
    assert (status["slots_total"], status["slots_busy"]) == (4, 0)
    assert (status["inventory_error"], status["settings_error"]) == (None, None)
    totals = status["totals"]
    assert (totals["requests"], totals["failures"], totals["clients_left"]) == (2, 1, 0)
    assert totals["failures_by_code"] == {"404": 1}
    assert totals["prompt_tokens"] > 0
    assert totals["completion_tokens"] > 0
    assert (later["ready"], later["reason"]) == (False, "shutting_down")
    assert later["inventory_error"] == "nodes.yaml:3: nodes[0].slots: must be a number"
    assert later["settings_error"] == "gateway.yaml:1: models: must be a mapping"


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
        response = await gateway.admin.get("/admin/status")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await gateway.until(lambda: len(gateway.registry) == 0)
        left = (await gateway.admin.get("/admin/status")).json()
    status = response.json()
    listed = status["waiting"]
    assert status["queue"] == {"urgent": 1, "premium": 0, "normal": MOST_LISTED_WAITING, "batch": 1}
    assert [one["position"] for one in listed] == [*range(1, MOST_LISTED_WAITING + 1)]
    assert listed[0]["class"] == "urgent"
    assert {one["model"] for one in listed} == {"demo"}
    assert all(one["expected_start"] >= 0 for one in listed)
    assert status["in_flight"] == MOST_LISTED_WAITING + 3
    assert "a secret" not in response.text
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


@in_virtual_time
async def test_nodes_metrics_are_on_one_page_whatever_some_nodes_answer() -> None:
    async with contextlib.AsyncExitStack() as stack:
        names = ("good", "other", "slow", "endless", "garbage", "refuses", "foreign")
        nodes = {name: await stack.enter_async_context(EmulatedNode()) for name in names}
        specs = [a_spec(name, node.url) for name, node in nodes.items()]
        gateway = await stack.enter_async_context(bare_gateway(*specs, timeout=2.0))
        await gateway.until(lambda: all(gateway[name].probe_history.up for name in names))
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
    monkeypatch.setattr(status, "AT_ONCE", 2)
    async with contextlib.AsyncExitStack() as stack:
        # In the order in which they are asked: the silent ones first.
        names = [*(f"silent-{number}" for number in range(10)), "good"]
        nodes = {name: await stack.enter_async_context(EmulatedNode()) for name in names}
        specs = [a_spec(name, node.url) for name, node in nodes.items()]
        gateway = await stack.enter_async_context(bare_gateway(*specs, timeout=2.0))
        await gateway.until(lambda: all(gateway[name].probe_history.up for name in names))
        for name in names[:-1]:
            nodes[name].faults.set("hang", path="/metrics")
        values = await scraped(gateway)
        assert [node for family, node in values if family == TOTAL] == ["good"]


MINUTES = 7
BODY = {"messages": [{"role": "user", "content": "tell me more"}], "max_tokens": 40}


@contextlib.asynccontextmanager
async def gateway_over(folder: Path, nodes: list[EmulatedNode]) -> AsyncIterator[Running]:
    folder.mkdir()  # noqa: ASYNC240 - a test's
    async with running_gateway(folder, [node.url for node in nodes]) as running:
        yield running


@contextlib.asynccontextmanager
async def two_gateways(folder: Path) -> AsyncIterator[tuple[Running, Running, list[EmulatedNode]]]:
    nodes = [EmulatedNode(slots=1, decode_tps=2.0) for _ in range(2)]
    async with (
        nodes[0],
        nodes[1],
        gateway_over(folder / "first", nodes) as first,
        gateway_over(folder / "second", nodes) as second,
    ):
        yield first, second, nodes


async def ask_now_and_then(*urls: str) -> None:
    """Two chats of 20 seconds at once, once a minute."""
    async with httpx.AsyncClient(timeout=600.0, trust_env=False, verify=NO_TLS) as client:
        for _ in range(MINUTES):
            sent = [client.post(f"{url}/v1/chat/completions", json=BODY) for url in urls]
            for answer in await asyncio.gather(*sent):
                assert answer.status_code == 200
            await asyncio.sleep(40.0)


async def told(running: Running) -> list[str]:
    return [problem.id for problem in await running.gateway.live.view.read_problems()]


@in_virtual_time
async def test_a_second_gateway_on_the_same_nodes_is_told(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (first, second, nodes):
        assert await told(first) == []
        # One who uses a node directly is none.
        await ask_now_and_then(nodes[0].url)
        assert await told(first) == []
        assert first.gateway.fleet.others_take_slots(first.gateway.fleet.nodes["node-0"])
        await ask_now_and_then(second.url, second.url)
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
        first = await admin.post("/admin/reload")
        second = await admin.post("/admin/reload")
        shown = (await admin.get("/admin/config")).json()
        nodes = (await admin.get("/admin/nodes")).json()["nodes"]
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json() == {
        "nodes": {"added": ["fresh"], "changed": ["node-0"], "removed": ["node-1"]},
        "settings": {"changed": ["limits", "queue"], "needs_restart": ["limits.connections"]},
    }
    assert not any(names for told in second.json().values() for names in told.values())
    assert shown["queue"]["max"] == 3
    assert [node["name"] for node in nodes] == ["node-0", "fresh"]


async def versions_of(running: Running, number: int) -> list[dict[str, Any]]:
    history = running.gateway.config_files.histories["gateway"]
    await until(lambda: len(history.versions()) >= number)
    files = (await running.admin.get("/admin/config/history")).json()["files"]
    found: list[dict[str, Any]] = files[0]["versions"]
    return found


@in_virtual_time
async def test_a_version_can_come_back_and_a_bad_rollback_writes_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [EmulatedNode()], {"queue": {"max": 1}}) as running:
        admin = running.admin
        [first] = await versions_of(running, 1)
        await unwatched()
        running.write_settings({"queue": {"max": "many"}})
        assert (await admin.post("/admin/reload")).status_code == 422
        running.write_settings({"queue": {"max": 2}})
        assert (await admin.post("/admin/reload")).status_code == 200
        newest, first = await versions_of(running, 2)
        assert (newest["in_force"], newest["on_disk"]) == (True, True)
        assert (first["in_force"], first["on_disk"]) == (False, False)
        done = await admin.post("/admin/config/rollback", json={"version": first["name"]})
        told = {"file": str(running.settings_file), "version": first["name"], "kept": None}
        assert done.json() == told
        [entry] = (await admin.get("/admin/audit?action=config")).json()["entries"]
        assert (entry["action"], entry["target"]) == ("config.rollback", first["name"])
        assert "max" not in str(entry["details"])

        async def refused(**body: str) -> tuple[int, str]:
            response = await admin.post("/admin/config/rollback", json=body)
            return response.status_code, error_of(response)["code"]

        name = first["name"]
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
