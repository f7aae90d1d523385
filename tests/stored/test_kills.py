"""A batch over a gateway that is killed again and again: every line once, and paid once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import Row, select

from gateway.store.schema import stored_requests, usage
from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.postgres import needs_postgres
from tests.store.stores import locked, opened
from tests.stored.kills import a_site, a_store, run_once


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=needs_postgres)])
async def test_every_line_has_one_result_though_the_gateway_is_killed(kind: str) -> None:
    with a_store(kind) as (url, server):
        found = await run_once(
            url, lines=400, kill_every=5.0, seconds=300.0, server=server, decode_tps=10.0
        )
    assert found.wrong == []
    assert (found.status, found.missing, found.doubles) == ("completed", 0, 0)
    assert (found.output, found.errors, found.ledger_rows) == (396, 4, 400)
    assert found.kills
    assert found.executions >= 400
    assert found.store_restarts == (0 if server is None else 2)


SAME = (
    "key", "model", "class", "tier", "node", "path", "stream", "prompt_tokens",
    "completion_tokens", "cost", "gpu_cost", "attempts", "status", "outcome",
)  # fmt: skip
"""What the ledger has of two like responses, whoever recorded them."""
ASK = {"input": "tell me a story", "max_output_tokens": 12, "background": True}


def rows(store_url: str, table: Any) -> dict[str, Row[Any]]:
    with opened(store_url) as store:
        found = store.run_now(lambda connection: connection.execute(select(table)).all())
    return {row.id: row for row in found}


def newest_log(folder: Path) -> Path:
    return max((folder / "state").rglob("events-*"), key=lambda path: path.name)


async def end_of(client: httpx.AsyncClient, id_: str) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = (await client.get(f"/v1/responses/{id_}")).json()
        if found["status"] not in {"queued", "in_progress"}:
            return found
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_response_that_had_ended_is_recorded_and_paid_once_by_the_next_process(
    store_url: str, tmp_path: Path
) -> None:
    async with (
        EmulatedNode(decode_tps=30, answer_tokens=1000) as node,
        a_site(tmp_path, [node], store_url) as (site, client),
    ):
        file = tmp_path / "nodes.yaml"
        nodes = yaml.safe_load(file.read_text())
        nodes["nodes"][0]["cost_per_million_tokens"] = {"prompt": 3, "completion": 5}
        file.write_text(yaml.safe_dump(nodes))
        await site.start()
        like = (await client.post("/v1/responses", json=ASK)).json()["id"]
        told = await end_of(client, like)
        id_ = (await client.post("/v1/responses", json=ASK)).json()["id"]
        await until(lambda: node.busy == 1)
        with locked(store_url, "usage"):  # so that no row of the ledger can be written
            log = newest_log(tmp_path)
            await until(lambda: b"\nevent: response.incomplete\n" in log.read_bytes())
            await site.kill()
        assert rows(store_url, stored_requests)[id_].state == "running"
        assert id_ not in rows(store_url, usage)
        for _ in range(2):
            await site.start()
            seen = await end_of(client, id_)
            assert seen["usage"] == told["usage"]
            await until(lambda: rows(store_url, stored_requests)[id_].ended_at is not None)
            await site.kill()
        assert node.requests == 2
    recorded, ledger = rows(store_url, stored_requests), rows(store_url, usage)
    assert {recorded[one].state for one in (id_, like)} == {"done"}
    assert recorded[id_].result_length == log.stat().st_size
    assert set(ledger) == {id_, like}
    for name in SAME:
        assert ledger[id_]._mapping[name] == ledger[like]._mapping[name], name
    assert ledger[id_].cost > 0
    assert 0 < ledger[id_].slot_seconds <= ledger[id_].ended_at - ledger[id_].started_at + 0.1
