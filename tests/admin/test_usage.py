"""`GET /admin/usage`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.callers.metered_gateway import ALICE, CHAT, VIP, chat, metered_gateway, recorded
from tests.web.bare_gateway import bare_gateway, error_of


async def test_operators_see_what_every_key_used_and_cost(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        for _ in range(3):
            await chat(running, ALICE)
        await chat(running, VIP)
        await chat(running, CHAT, **{"X-User-Id": "bob"})
        await recorded(running, 5)
        admin = running.admin
        told = (await admin.get("/admin/usage?by=key")).json()
        rows = {row["key"]: row for row in told["rows"]}
        requests = {key: row["requests"] for key, row in rows.items()}
        assert requests == {"alice": 3, "vip": 1, "chat": 1}
        vip = rows["vip"]
        price = (vip["prompt_tokens"] * 1000 + vip["completion_tokens"] * 2000) / 1e6
        assert vip["cost"] == pytest.approx(price)
        assert vip["gpu_cost"] == pytest.approx(price)
        alice = rows["alice"]
        assert alice["slot_seconds"] > 0
        tokens = alice["prompt_tokens"] * 1000 + alice["completion_tokens"] * 2000
        assert alice["gpu_cost"] == pytest.approx(tokens / 1e6)
        assert told["money"]["all_gpu"]["value"] == pytest.approx(told["total"]["gpu_cost"])
        assert set(told["money"]["tiers"]) == {"cpu", "gpu"}
        assert told["total"]["requests"] == told["rows_found"] + 2 == 5

        users = (await admin.get("/admin/usage?by=user,class&since=0d")).json()
        # The dearest first; on a node by the hour that is a matter of time.
        assert {(row["user"], row["class"], row["requests"]) for row in users["rows"]} == {
            (None, "premium", 1),
            (None, "normal", 3),
            ("bob", "normal", 1),
        }
        table = await admin.get("/admin/usage?by=key&format=csv")
        assert table.headers["content-type"].startswith("text/csv")
        lines = table.text.splitlines()
        assert lines[0].startswith("key,key_name,requests,failures,clients_left,")
        assert {line.split(",")[0] for line in lines[1:]} == {"alice", "vip", "chat"}


async def test_a_gateway_records_hours_and_sums_up_old_usage_by_itself(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path):
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert {"record the hours of nodes", "sum up old usage"} <= names


async def test_without_a_store_there_is_no_report_and_what_makes_no_sense_is_refused() -> None:
    async with bare_gateway() as gateway:
        for query in ("by=node", "format=xml", "user=bob"):
            response = await gateway.admin.get(f"/admin/usage?{query}")
            assert response.status_code == 400
            assert error_of(response)["param"] == query.partition("=")[0]
        response = await gateway.admin.get("/admin/usage")
    assert (response.status_code, error_of(response)["code"]) == (501, "not_supported")
    assert "retry-after" not in response.headers
