"""What the ledger tells operators: of usage, and of requests that have ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import ApiKey
from tests.callers.ledger_rows import a_row, add_rows
from tests.callers.metered_gateway import ALICE, CHAT, VIP, chat, metered_gateway, recorded
from tests.gateways import Running, answered, until
from tests.known import known
from tests.web.bare_gateway import bare_gateway, error_of


async def test_operators_see_what_every_key_used_and_cost(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert {"record the hours of nodes", "sum up old usage"} <= tasks
        for _ in range(3):
            await chat(running, ALICE)
        await chat(running, VIP)
        await chat(running, CHAT, **{"X-User-Id": "bob"})
        await recorded(running, 5)
        told = await answered(running.admin, "/admin/usage?by=key")
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

        assert (alice["key_name"], vip["key_name"]) == ("Alice", "vip")
        answer = await running.admin.get("/admin/usage?by=key&format=csv")
        assert answer.headers["content-type"].startswith("text/csv")
        assert answer.text.startswith("key,key_name,requests,failures,clients_left,")


async def test_without_a_store_there_is_no_report_and_what_makes_no_sense_is_refused() -> None:
    async with bare_gateway() as gateway:
        for query in ("by=node", "format=xml", "user=bob"):
            response = await gateway.admin.get(f"/admin/usage?{query}")
            assert response.status_code == 400
            assert error_of(response)["param"] == query.partition("=")[0]
        response = await gateway.admin.get("/admin/usage")
    assert (response.status_code, error_of(response)["code"]) == (501, "not_supported")
    assert "retry-after" not in response.headers


# `GET /admin/requests/ended`, and `why` of a request that only the ledger still knows.


async def secret_chat(running: Running, key: ApiKey, **body: Any) -> str:
    """The id of a chat of which no report may tell a word."""
    messages = [{"role": "user", "content": "the launch code is 7391"}]
    headers = body.pop("headers", None)
    response = await running.chat(key, headers, messages=messages, max_tokens=8, **body)
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


async def requests(running: Running, path: str) -> Any:
    found = await answered(running.admin, f"/admin/requests/{path}")
    assert "launch" not in str(found)
    return found["requests"]


async def test_what_has_ended_is_found_with_times_and_the_name_of_its_key(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await secret_chat(running, VIP, stream=True, headers={"x-request-id": "mine"})
        own = await secret_chat(running, ALICE)
        await recorded(running, 2)
        latest, first = await requests(running, "ended")
        by_key = await requests(running, "ended?key=Alice&outcome=ok&limit=1")
        assert await requests(running, "ended?outcome=failed") == []
    assert (latest["id"], latest["client_request_id"]) == (own, None)
    assert (latest["key"], latest["key_name"], latest["group"]) == ("alice", "Alice", "team")
    assert (first["client_request_id"], first["stream"]) == ("mine", True)
    assert first["id"] != "mine"
    assert 0 <= first["wait_seconds"] < first["ttft_seconds"] <= first["seconds"] + 0.05
    for one in (latest, first):
        on_node = one["prefill_seconds"] + one["decode_seconds"]
        assert 0 < on_node <= one["seconds"] + 0.05
        assert one["resumptions"] == 0
    assert [one["id"] for one in by_key] == [own]


async def test_what_memory_has_forgotten_is_explained_by_the_ledger_if_it_knows(
    tmp_path: Path,
) -> None:
    async with metered_gateway(tmp_path) as running:
        old = a_row(
            1, started_at=1_800_000_000.0, ended_at=1_800_000_009.5, wait_seconds=2.5,
            ttft_seconds=4.0, prefill_seconds=1.5, decode_seconds=5.5, attempts=2, resumptions=1,
            cached_tokens=30, client_request_id="mine",
        )  # fmt: skip
        older = a_row(
            2, ended_at=1_799_000_000.0, wait_seconds=None, resumptions=None, status=0,
            outcome="lost", client_request_id="mine",
        )  # fmt: skip
        store = known(running.gateway.store)
        await store.run(lambda connection: add_rows(connection, [old, older]))
        (by_id,) = await requests(running, "r1/why")
        _, lost = await requests(running, "mine/why")
        remembered = await secret_chat(running, ALICE)
        await until(lambda: len(running.gateway.registry) == 0)
        (live,) = await requests(running, f"{remembered}/why")
        for name in ("nobody", "a%00b", "%ff"):
            response = await running.admin.get(f"/admin/requests/{name}/why")
            assert (response.status_code, error_of(response)["code"]) == (404, "request_not_found")
            assert "nor in the ledger" in error_of(response)["message"]
        for query in ("since=soon", "by=key"):
            response = await running.admin.get(f"/admin/requests/ended?{query}")
            assert response.status_code == 400
            assert error_of(response)["param"] == query.partition("=")[0]
    assert (by_id["from"], by_id["state"], by_id["decisions"]) == ("ledger", "finished", [])
    assert (by_id["id"], by_id["request_id"], by_id["caller"]) == ("r1", "mine", "team-a")
    assert (by_id["received_at"], by_id["seconds"]) == ("2027-01-15T08:00:00.000Z", 9.5)
    assert by_id["summary"] == (
        "The decisions about it are no longer remembered; this is what the ledger keeps. It waited "
        "2.5 s in the queue. It ran on cpu-a, the last of 2 attempts: 1.5 s to read 70 tokens of "
        "the prompt (30 were cached), 5.5 s to write 10. Its stream was resumed once. It was "
        "answered after 9.5 s."
    )
    assert (lost["id"], lost["state"], lost["outcome"]["reason"]) == ("r2", "failed", "lost")
    assert "how long it waited, and when its first token came" in lost["unknown"]
    assert (live["from"], live["row"], live["unknown"]) == ("memory", None, [])
