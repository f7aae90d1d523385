"""Several gateways on one database, as their clients and operators see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.keys import new_key
from tests.cluster.members import MemberProcess, running_members
from tests.emulator import EmulatedNode
from tests.polling import eventually
from tests.postgres import PostgresServer, needs_postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_postgres]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


async def roles_of(members: dict[str, MemberProcess]) -> dict[str, str]:
    return {name: await member.until_role("leader", "follower") for name, member in members.items()}


async def until_booked(server: PostgresServer, url: str, count: int) -> None:
    """Wait until so many requests are in the ledger, all well."""
    wanted, database = "SELECT outcome FROM usage", url.rpartition("/")[2]

    async def look() -> bool | None:
        return (
            await asyncio.to_thread(server.execute, wanted, database) == [("ok",)] * count or None
        )

    await eventually(look)


@contextlib.asynccontextmanager
async def a_pair(
    folder: Path, node: EmulatedNode, url: str, **settings: Any
) -> AsyncIterator[tuple[MemberProcess, MemberProcess]]:
    """Two members over this node: the leader, and the one that follows."""
    async with node, running_members(folder, node, url, ("gw-a", "gw-b"), **settings) as members:

        async def by_role() -> dict[str, MemberProcess] | None:
            # On a busy machine another one may come to lead between two looks.
            found = {role: members[name] for name, role in (await roles_of(members)).items()}
            return found if len(found) == 2 else None

        found = await eventually(by_role)
        yield found["leader"], found["follower"]


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
