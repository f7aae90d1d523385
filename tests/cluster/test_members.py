"""Several gateways on one database, as their clients and operators see them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import new_key
from tests.cluster.certificates import Authority
from tests.emulator import EmulatedNode
from tests.gateway_processes import LIMIT, client_of, serving
from tests.polling import eventually
from tests.postgres import PostgresServer, needs_postgres
from tests.processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_postgres]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@dataclass(slots=True)
class Member:
    name: str
    client: httpx.AsyncClient
    admin: httpx.AsyncClient

    async def role(self) -> str | None:
        """Its own role once its edges serve, by its metrics: they are not the leader's."""
        with contextlib.suppress(httpx.TransportError):
            if (await self.client.get("/ready")).status_code == 200:
                prefix = 'llama_gateway_cluster_role{role="'
                for line in (await self.admin.get("/metrics")).text.splitlines():
                    if line.startswith(prefix) and line.endswith(" 1"):
                        return line.removeprefix(prefix).partition('"')[0]
        return None


@contextlib.asynccontextmanager
async def a_pair(
    folder: Path, node: EmulatedNode, url: str, **settings: Any
) -> AsyncIterator[tuple[Member, Member]]:
    """Two members over this node: the leader, and the one that follows."""
    authority = Authority(folder / "certificates")
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(node)
        members = []
        for name in ("gw-a", "gw-b"):
            listen = f"127.0.0.1:{free_port()}"
            cluster = {"name": "test", "member": name, "listen": listen, "term": 1.0}
            own = {
                "listen": {"port": 0, "edges": 1},
                "store": {"url": url},
                "batches": {"folder": str(folder / "files")},
                "cluster": {**cluster, "tls": authority.written(name)},
                **settings,
            }
            line = await stack.enter_async_context(serving(folder / name, node, settings=own))
            client, admin = client_of(line.url), client_of(line.admin_url)
            for one in (client, admin):
                await stack.enter_async_context(one)
            members.append(Member(name, client, admin))

        async def by_role() -> tuple[Member, Member] | None:
            found = {await member.role(): member for member in members}
            both = found.keys() == {"leader", "follower"}
            return (found["leader"], found["follower"]) if both else None

        yield await eventually(by_role, LIMIT)


async def test_keys_and_orders_may_go_to_any_member_and_the_audit_names_it(
    tmp_path: Path, server: PostgresServer
) -> None:
    admin_key = new_key()
    first = {"id": admin_key.id, "sha256": admin_key.sha256, "name": "first"}
    node = EmulatedNode(slots=2)
    async with a_pair(tmp_path, node, server.new_database(), keys=[first]) as members:
        leader, follower = members
        made = await follower.admin.post("/admin/keys", json={"name": "alice"})
        assert made.status_code in {200, 201}, made.text
        headers = {"authorization": f"Bearer {made.json()['key']}"}
        for member in members:

            async def served(member: Member = member) -> bool | None:
                answer = await member.client.post(CHAT, json=HELLO, headers=headers)
                return answer.status_code == 200 or None

            await eventually(served, 10)
            assert (await member.client.get("/v1/usage", headers=headers)).json()
        assert (await follower.admin.post("/admin/nodes/one/drain")).status_code == 200
        for member in members:
            nodes = (await member.admin.get("/admin/nodes")).json()["nodes"]
            assert nodes[0]["state"] == "draining"
        entries = (await leader.admin.get("/admin/audit?action=drain")).json()["entries"]
        assert entries[0]["details"]["member"] == follower.name


async def test_what_a_follower_passes_on_streams(tmp_path: Path, server: PostgresServer) -> None:
    node = EmulatedNode(slots=4, decode_tps=20, answer_tokens=1000)
    ask = {"input": "Tell a story", "max_output_tokens": 60, "background": True, "stream": True}
    async with a_pair(tmp_path, node, server.new_database()) as members:
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

            async def ended(member: Member = member) -> bool | None:
                found = (await member.client.get(f"/v1/responses/{begun}")).json()
                return found["status"] == "incomplete" or None

            await eventually(ended, 30)
