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
from tests.gateways import NO_TLS, Running, answered, running_gateway, until
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time, now
from tests.web.bare_gateway import BareGateway, bare_gateway, error_of

DEAD = "http://127.0.0.1:9"


@in_virtual_time
async def test_status_shows_the_gateway_on_one_page() -> None:
    faults = {
        "inventory_error": "nodes.yaml:3: nodes[0].slots: must be a number",
        "settings_error": "gateway.yaml:1: models: must be a mapping",
    }
    dead = [a_spec(name, DEAD, model="demo") for name in "bc"]
    async with bare_gateway(EmulatedNode(slots=2), *dead, serving=True) as gateway:
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
    expected = {
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
        node := EmulatedNode(slots=1, decode_tps=10, answer_tokens=2000), serving=True
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
    async with bare_gateway(admin_hosts=("gateway.example",)) as gateway:
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


@contextlib.asynccontextmanager
async def over(*names: str) -> AsyncIterator[tuple[BareGateway, dict[str, EmulatedNode]]]:
    async with contextlib.AsyncExitStack() as stack:
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
    monkeypatch.setattr(status, "AT_ONCE", 2)
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
