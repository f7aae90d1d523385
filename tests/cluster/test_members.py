"""Several gateways on one database, as their clients and operators see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import new_key
from tests.cluster.members import MemberProcess, running_members
from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.polling import eventually
from tests.postgres import PostgresServer, needs_postgres, running_postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_postgres]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
TAKEOVER = 15.0
"""Seconds for another member to lead, on a busy machine; the term is one."""


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with running_postgres() as started:
        yield started


async def roles_of(members: dict[str, MemberProcess]) -> dict[str, str]:
    return {name: await member.until_role("leader", "follower") for name, member in members.items()}


async def leader_of(members: dict[str, MemberProcess]) -> MemberProcess:
    async def look() -> MemberProcess | None:
        for member in members.values():
            if await member.role() == "leader":
                return member
        return None

    return await eventually(look, TAKEOVER)


async def stream(client: httpx.AsyncClient, tokens: int, number: int) -> str:
    """The text of a streamed answer, which must be whole."""
    body = {
        "messages": [{"role": "user", "content": f"Tell story {number}"}],
        "max_tokens": tokens, "stream": True,
    }  # fmt: skip
    text = ""
    async with client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += (event["choices"][0]["delta"] or {}).get("content") or ""
            elif line == "data: [DONE]":
                return text
    raise AssertionError("the stream has no end")


async def until_booked(server: PostgresServer, url: str, count: int) -> int:
    """Wait until so many requests are in the ledger, all well; returns all their tokens."""
    database = url.rpartition("/")[2]

    async def look() -> list[tuple[Any, ...]] | None:
        wanted = "SELECT outcome, completion_tokens FROM usage"
        rows = await asyncio.to_thread(server.execute, wanted, database)
        return rows if len(rows) == count and {row[0] for row in rows} == {"ok"} else None

    return sum(row[1] for row in await eventually(look, 60))


@contextlib.asynccontextmanager
async def a_pair(
    folder: Path, node: EmulatedNode, url: str, **settings: Any
) -> AsyncIterator[tuple[MemberProcess, MemberProcess]]:
    """Two members over this node: the leader, and the one that follows."""
    async with node, running_members(folder, node, url, ("gw-a", "gw-b"), **settings) as members:
        await roles_of(members)
        leader = await leader_of(members)
        (follower,) = [one for one in members.values() if one is not leader]
        yield leader, follower


async def test_streams_run_on_and_requests_are_served_when_the_leader_is_killed(
    tmp_path: Path, server: PostgresServer
) -> None:
    url = server.new_database()
    node = EmulatedNode(slots=16, decode_tps=10, answer_tokens=1000)
    async with node, running_members(tmp_path, node, url) as members:
        await roles_of(members)
        leader = await leader_of(members)
        others = [one for one in members.values() if one is not leader]
        streams = [
            asyncio.create_task(stream(one.client, 100, number))
            for one in others
            for number in range(2)
        ]
        await until(lambda: node.busy == 4)
        await leader.line.kill()
        killed_at = time.monotonic()
        answers = await asyncio.gather(*(one.client.post(CHAT, json=HELLO) for one in others))
        waited = time.monotonic() - killed_at
        assert [answer.status_code for answer in answers] == [200, 200]
        assert waited < TAKEOVER
        node.engine.decode_tps = 1000
        texts = await asyncio.gather(*streams)
        assert all(len(text.split()) > 80 for text in texts)
        assert sorted([await one.role() for one in others]) == ["follower", "leader"]
        assert await until_booked(server, url, 6) == 4 * 100 + 2 * 4


async def test_keys_and_orders_may_go_to_any_member_and_the_audit_names_it(
    tmp_path: Path, server: PostgresServer
) -> None:
    url = server.new_database()
    node = EmulatedNode(slots=2)
    admin_key = new_key()
    first = {"id": admin_key.id, "sha256": admin_key.sha256, "name": "first"}
    async with a_pair(tmp_path, node, url, keys=[first]) as members:
        leader, follower = members
        made = await follower.admin.post("/admin/keys", json={"name": "alice"})
        assert made.status_code in {200, 201}, made.text
        headers = {"authorization": f"Bearer {made.json()['key']}"}
        for member in members:

            async def served(member: MemberProcess = member) -> bool | None:
                answer = await member.client.post(CHAT, json=HELLO, headers=headers)
                return answer.status_code == 200 or None

            await eventually(served, 10)
            usage = (await member.client.get("/v1/usage", headers=headers)).json()
            assert usage
        drained = await follower.admin.post("/admin/nodes/one/drain")
        assert drained.status_code == 200
        for member in members:
            nodes = (await member.admin.get("/admin/nodes")).json()["nodes"]
            assert nodes[0]["state"] == "draining"
        entries = (await leader.admin.get("/admin/audit?action=drain")).json()["entries"]
        assert entries[0]["details"]["member"] == follower.name


async def test_without_the_database_each_serves_alone_and_is_whole_again_without_a_restart(
    tmp_path: Path, server: PostgresServer
) -> None:
    url = server.new_database()
    node = EmulatedNode(slots=4, decode_tps=200, answer_tokens=1000)
    async with node, running_members(tmp_path, node, url, ("gw-a", "gw-b")) as members:
        await roles_of(members)
        for member in members.values():
            assert (await member.client.post(CHAT, json=HELLO)).status_code == 200
        server.stop()
        for member in members.values():
            await member.until_role("alone")
            found = await member.cluster()
            assert (found["role"], found["leader"]) == ("alone", None)
            answer = await member.client.post(CHAT, json=HELLO)
            assert answer.status_code == 200
        server.start()
        await roles_of(members)
        for member in members.values():
            assert (await member.client.post(CHAT, json=HELLO)).status_code == 200
        await until_booked(server, url, 6)


async def test_a_member_that_ends_lets_another_one_lead_and_its_streams_end_well(
    tmp_path: Path, server: PostgresServer
) -> None:
    url = server.new_database()
    node = EmulatedNode(slots=4, decode_tps=20, answer_tokens=1000)
    async with a_pair(tmp_path, node, url) as members:
        leader, other = members
        streams = [asyncio.create_task(stream(one.client, 100, 1)) for one in members]
        await until(lambda: node.busy == 2)
        leader.line.first.send_signal(signal.SIGTERM)
        await other.until_role("leader")
        assert (await other.client.post(CHAT, json=HELLO)).status_code == 200
        await asyncio.gather(*streams)
        assert await leader.line.status() == 0
        await until_booked(server, url, 3)


async def test_a_member_is_succeeded_while_it_streams(
    tmp_path: Path, server: PostgresServer
) -> None:
    url = server.new_database()
    node = EmulatedNode(slots=16, decode_tps=20, answer_tokens=1000)
    async with a_pair(tmp_path, node, url) as members:
        leader, _ = members
        streams = [asyncio.create_task(stream(one.client, 200, 1)) for one in members]
        await until(lambda: node.busy == 2)
        await leader.line.succeed()
        async with httpx.AsyncClient(base_url=leader.line.url, trust_env=False) as client:
            answer = await client.post(CHAT, json=HELLO, timeout=60)
            assert answer.status_code == 200
        node.engine.decode_tps = 1000
        await asyncio.gather(*streams)
        await until_booked(server, url, 3)


async def test_what_a_follower_passes_on_streams(tmp_path: Path, server: PostgresServer) -> None:
    url = server.new_database()
    node = EmulatedNode(slots=4, decode_tps=20, answer_tokens=1000)
    ask = {"input": "Tell a story", "max_output_tokens": 60, "background": True, "stream": True}
    async with a_pair(tmp_path, node, url) as members:
        _, follower = members
        async with follower.admin.stream("GET", "/admin/live") as live:
            async for line in live.aiter_lines():
                if line == "event: snapshot":
                    break
        begun = None
        async with follower.client.stream("POST", "/v1/responses", json=ask) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    begun = begun or json.loads(line[6:])["response"]["id"]
                if "output_text.delta" in line:
                    break
        # It runs on without its client, who finds it at any member.
        node.engine.decode_tps = 1000
        for member in members:

            async def ended(member: MemberProcess = member) -> bool | None:
                found = (await member.client.get(f"/v1/responses/{begun}")).json()
                return found["status"] == "incomplete" or None

            await eventually(ended, 30)
