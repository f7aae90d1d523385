"""The members of a cluster as processes of this machine, on one PostgreSQL."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.certificates import Authority
from tests.emulator import EmulatedNode
from tests.gateway_processes import LIMIT, Succession, serving
from tests.polling import eventually
from tests.processes import free_port


@dataclass(slots=True)
class MemberProcess:
    """A member: its process, and clients of its listeners."""

    name: str
    line: Succession
    client: httpx.AsyncClient
    admin: httpx.AsyncClient

    async def cluster(self) -> dict[str, Any]:
        """What it says of the cluster."""
        found: dict[str, Any] = (await self.admin.get("/admin/status")).json()["cluster"]
        return found

    async def role(self) -> str:
        """Its own role, by its metrics: they are not the leader's."""
        text = (await self.admin.get("/metrics")).text
        prefix = 'llama_gateway_cluster_role{role="'
        lines = [one for one in text.splitlines() if one.startswith(prefix) and one.endswith(" 1")]
        return lines[0].removeprefix(prefix).partition('"')[0]

    async def until_role(self, *roles: str) -> str:
        """Wait until it has one of these roles and its edges serve; which one it is."""

        async def look() -> str | None:
            with contextlib.suppress(httpx.TransportError):
                role = await self.role()
                if role in roles and (await self.client.get("/ready")).status_code == 200:
                    return role
            return None

        return await eventually(look, LIMIT)


@contextlib.asynccontextmanager
async def running_members(
    folder: Path,
    node: EmulatedNode,
    url: str,
    names: tuple[str, ...] = ("gw-a", "gw-b", "gw-c"),
    **settings: Any,
) -> AsyncIterator[dict[str, MemberProcess]]:
    """These members over one node; `url`: of their database. They share a folder of files."""
    authority = Authority(folder / "certificates")
    async with contextlib.AsyncExitStack() as stack:
        found: dict[str, MemberProcess] = {}
        for name in names:
            cluster = {
                "name": "test",
                "member": name,
                "listen": f"127.0.0.1:{free_port()}",
                "term": 1.0,
                "tls": authority.written(name),
            }
            own: Mapping[str, Any] = {
                "listen": {"port": 0, "edges": 1},
                "store": {"url": url},
                "batches": {"folder": str(folder / "files")},
                "cluster": cluster,
                **settings,
            }
            line = await stack.enter_async_context(serving(folder / name, node, settings=own))
            clients = [
                await stack.enter_async_context(
                    httpx.AsyncClient(base_url=base, trust_env=False, timeout=LIMIT)
                )
                for base in (line.url, line.admin_url)
            ]
            found[name] = MemberProcess(name, line, *clients)
        yield found
