from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta

from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.app import ADMIN_ROUTES, INDEX_PAGE
from gateway.admin.status import MOST_LISTED_WAITING
from tests.emulator import EmulatedNode
from tests.nodes.build import a_spec
from tests.virtual import in_virtual_time
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
            serving=True,
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


async def waits(gateway: BareGateway, count: int) -> None:
    await gateway.until(lambda: len(gateway.scheduler.queue_positions()) == count)


@in_virtual_time
async def test_status_lists_queued_requests_in_order_up_to_a_limit() -> None:
    async with bare_gateway(
        node := EmulatedNode(slots=1, decode_tps=10, answer_tokens=2000), serving=True
    ) as gateway:
        tasks = [asyncio.create_task(gateway.chat())]
        await gateway.until(lambda: node.busy == 1)
        for wanted in ("batch", "urgent"):
            queued = len(tasks)
            tasks.append(
                asyncio.create_task(gateway.chat("a secret", headers={"x-priority": wanted}))
            )
            await waits(gateway, queued)
        await gateway.until(
            lambda: all(one.waited_seconds > 0.001 for one in gateway.scheduler.queue_positions())
        )
        response = await gateway.admin.get("/admin/status")
        few = response.json()
        tasks += [asyncio.create_task(gateway.chat()) for _ in range(MOST_LISTED_WAITING)]
        await waits(gateway, MOST_LISTED_WAITING + 2)
        many = (await gateway.admin.get("/admin/status")).json()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await gateway.until(lambda: len(gateway.registry) == 0)
        left = (await gateway.admin.get("/admin/status")).json()
    assert few["queue"] == {"urgent": 1, "premium": 0, "normal": 0, "batch": 1}
    assert sorted(one["class"] for one in few["waiting"]) == ["batch", "urgent"]
    assert [one["position"] for one in few["waiting"]] == [1, 2]
    assert {one["model"] for one in few["waiting"]} == {"demo"}
    assert all(0 < one["seconds"] < 60 for one in few["waiting"])
    assert all(one["expected_start"] >= 0 for one in few["waiting"])
    assert few["in_flight"] == 3
    assert "a secret" not in response.text
    assert (len(many["waiting"]), sum(many["queue"].values())) == (
        MOST_LISTED_WAITING,
        MOST_LISTED_WAITING + 2,
    )
    assert left["totals"]["clients_left"] == MOST_LISTED_WAITING + 3
    assert left["totals"]["failures"] == 0


@in_virtual_time
async def test_metrics_are_served_as_prometheus_text() -> None:
    async with bare_gateway(EmulatedNode(slots=2), a_spec("b", DEAD), serving=True) as gateway:
        assert (await gateway.chat()).status_code == 200
        gateway.config_files.inventory_error = "something"
        response = await gateway.admin.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = {
        (sample.name.removeprefix("llama_gateway_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert values["requests_total", "200", "demo", "normal"] == 1
    assert values["node_state", "a", "ready"] == values["node_state", "b", "down"] == 1
    assert values["node_state", "b", "ready"] == 0
    assert (values["node_slots_total", "a"], values["node_slots_busy", "a"]) == (2, 0)
    assert (values["queue_depth", "batch"], values["in_flight",]) == (0, 0)
    assert (values["inventory_error",], values["retry_budget",]) == (1, 10)


@in_virtual_time
async def test_health_and_readiness_are_those_of_the_public_listener() -> None:
    async with bare_gateway(EmulatedNode(), admin_key="k") as gateway:
        assert (await gateway.admin.get("/health")).json() == {"status": "ok"}
        assert (await gateway.admin.get("/ready")).status_code == 200
        gateway.handler.begin_shutdown()
        response = await gateway.admin.get("/ready")
    assert (response.status_code, error_of(response)["code"]) == (503, "shutting_down")


@in_virtual_time
async def test_hosts_of_the_settings_are_allowed_and_others_are_not() -> None:
    async with bare_gateway(admin_hosts=("gateway.example",)) as gateway:
        good = await gateway.admin.get("/health", headers={"host": "gateway.example:8001"})
        bad = await gateway.admin.get("/health", headers={"host": "evil.example"})
        page = await gateway.admin.post("/admin/reload", headers={"origin": "https://evil.example"})
    assert good.status_code == 200
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


@in_virtual_time
async def test_every_other_path_is_404() -> None:
    async with bare_gateway() as gateway:
        for path in ("/admin", "/admin/", "/slots", "/v1/models", "/admin/nodes/"):
            response = await gateway.admin.get(path)
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found"), path
