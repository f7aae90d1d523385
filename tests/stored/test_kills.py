"""Batches and background requests of a gateway that is killed: each has its result, paid once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from sqlalchemy import Row, select

from gateway.store.schema import stored_requests, usage
from gateway.stored.response_log import TERMINAL_TYPES
from tests.callers.kills import Site, rows_of
from tests.emulator import EmulatedNode, expected_chat_text
from tests.emulator.language_model import expected_text
from tests.emulator.request_body import render_chat
from tests.gateways import until
from tests.polling import eventually
from tests.postgres import needs_postgres
from tests.store.stores import locked, opened
from tests.stored.following import Follower
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


CHAT = "/v1/chat/completions"
LIMIT = 60.0
UNFINISHED = {"queued", "in_progress"}


@dataclass(slots=True)
class Place:
    """A gateway that can be killed, its node of one slot, and its client."""

    site: Site
    node: EmulatedNode
    client: httpx.AsyncClient

    async def ask(self, kind: str, text: str, tokens: int) -> str:
        """Ask for so many tokens in the background; the path of the result."""
        if kind == "response":
            body = {"model": "demo", "input": text, "background": True, "max_output_tokens": tokens}
            made = await self.client.post("/v1/responses", json=body)
            assert made.status_code == 200, made.text
            return f"/v1/responses/{made.json()['id']}"
        body = {"model": "demo", "messages": messages(text), "max_tokens": tokens}
        made = await self.client.post(CHAT, json=body, headers={"Prefer": "respond-async"})
        assert made.status_code == 202, made.text
        return str(made.headers["location"])

    async def text(self, path: str) -> str:
        """The text of the result, once it is there."""

        async def ended() -> httpx.Response | None:
            found = await self.client.get(path)
            assert found.status_code in {200, 202}, found.text
            if found.status_code == 202 or found.json().get("status") in UNFINISHED:
                return None
            return found

        result = (await eventually(ended, LIMIT)).json()
        if "output" in result:
            return str(result["output"][0]["content"][0]["text"])
        return str(result["choices"][0]["message"]["content"])

    async def paid(self) -> list[str]:
        """Ids of the ledger's rows; none is left open."""
        found, left_open = await asyncio.to_thread(rows_of, self.site.store_url)
        assert left_open == 0
        return [row["id"] for row in found]


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def expected(kind: str, text: str, tokens: int) -> str:
    if kind == "response":
        return expected_text(render_chat(messages(text)), tokens)
    return expected_chat_text(messages(text), tokens)


def id_of(path: str) -> str:
    return path.rpartition("/")[2]


@asynccontextmanager
async def place(folder: Path, decode_tps: float) -> AsyncIterator[Place]:
    """One request runs at a time."""
    settings, store_url = {"batches": {"background_at_once": 1}}, f"sqlite:///{folder}/store.db"
    async with (
        EmulatedNode(slots=1, decode_tps=decode_tps, answer_tokens=100_000) as node,
        a_site(folder, [node], store_url, settings) as (site, client),
    ):
        await site.start()
        yield Place(site, node, client)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["response", "deferred"])
async def test_what_waits_runs_after_the_restart_once(tmp_path: Path, kind: str) -> None:
    async with place(tmp_path, decode_tps=20) as here:
        first = await here.ask(kind, "the first", 60)
        await until(lambda: here.node.busy == 1, LIMIT)
        second = await here.ask(kind, "the second", 8)
        await here.site.kill()
        found = rows(here.site.store_url, stored_requests).values()
        assert {one.id: one.state for one in found} == {
            id_of(first): "running", id_of(second): "waiting",
        }  # fmt: skip
        await here.site.start()
        assert await here.text(second) == expected(kind, "the second", 8)
        assert await here.text(first) == expected(kind, "the first", 60)
        # The first one ran twice, for one payment.
        assert here.node.requests == 3
        await here.site.stop()
        assert sorted(await here.paid()) == sorted([id_of(first), id_of(second)])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.smoke
async def test_a_response_that_runs_goes_on_from_its_events(tmp_path: Path) -> None:
    async with place(tmp_path, decode_tps=20) as here:
        path = await here.ask("response", "tell me", 60)
        follower, again = Follower(path), Follower(path)
        await follower.follow(here.client, until_event=14)
        before = follower.text
        await here.site.kill()
        await here.site.start()
        await follower.follow(here.client)
        assert follower.events[-1]["type"] in TERMINAL_TYPES - {"response.failed"}
        text = expected("response", "tell me", 60)
        assert follower.text == text == await here.text(path)
        await again.follow(here.client)
        assert again.data == follower.data
        # The node was asked for the rest alone.
        assert here.node.requests == 2
        assert before in msgspec.json.decode(here.node.seen[-1].body)["prompt"]
        await here.site.stop()
        assert await here.paid() == [id_of(path)]
