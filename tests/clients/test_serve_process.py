"""`llama-gateway serve` as a process over real servers, whose inventory changes under load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.clients.site import HELLO, until_busy
from tests.gateway_processes import Succession, serving
from tests.gateways import NO_TLS
from tests.polling import eventually
from tests.servers import running_demo_servers

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
]

WORDS = 20  # tokens of an answer


def inventory(**urls: str) -> list[dict[str, str]]:
    return [{"name": name, "url": url} for name, url in urls.items()]


@dataclass(slots=True)
class Load:
    """Clients that send without a pause, half of them for streams; all answers must be complete."""

    client: httpx.AsyncClient
    url: str
    stopped: bool = False
    sent: int = 0
    answers: list[tuple[int, str]] = field(default_factory=list)
    """The number of each request, in the order of sending, and the node that answered."""

    async def ask_on(self, *, stream: bool) -> None:
        body = {"messages": HELLO, "max_tokens": WORDS, "stream": stream}
        while not self.stopped:
            number, self.sent = self.sent, self.sent + 1
            answer = await self.client.post(self.url, json=body)
            assert answer.status_code == 200, answer.text
            if stream:
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["timings"]["predicted_n"] == WORDS
            self.answers.append((number, answer.headers["x-gateway-node"]))

    async def more(self, answers: int = 20) -> set[str]:
        """The nodes that give the next `answers` answers to requests sent from now on."""
        start = self.sent

        async def given() -> set[str] | None:
            nodes = [node for number, node in self.answers if number >= start]
            return set(nodes) if len(nodes) >= answers else None

        return await eventually(given, 120)


async def until_state(gateway: Succession, name: str, state: str | None) -> None:
    async def is_so() -> bool | None:
        async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=60) as client:
            nodes = (await client.get(f"{gateway.admin_url}/admin/nodes")).json()["nodes"]
        return {node["name"]: node["state"] for node in nodes}.get(name) == state or None

    await eventually(is_so)


@pytest.mark.smoke
async def test_nodes_come_and_go_without_a_lost_request(tmp_path: Path) -> None:
    with running_demo_servers(2) as (one, two):
        async with (
            serving(tmp_path, inventory(one=one.url)) as gateway,
            httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=120) as client,
            asyncio.TaskGroup() as group,
        ):
            load = Load(client, f"{gateway.url}/v1/chat/completions")
            for number in range(6):
                group.create_task(load.ask_on(stream=number % 2 == 0))
            assert await load.more() == {"one"}

            # No reload command is needed: the file is watched.
            gateway.write_nodes(inventory(one=one.url, two=two.url))
            await until_state(gateway, "two", "ready")
            assert await load.more(30) == {"one", "two"}

            gateway.write_nodes(inventory(two=two.url))
            await until_state(gateway, "one", None)
            assert await load.more() == {"two"}
            await until_busy(one.url, 0)
            load.stopped = True
        assert gateway.logged("inventory")[0]["added"] == ["two"]
        assert gateway.logged("inventory")[-1]["removed"] == ["one"]
        assert {line["status"] for line in gateway.logged("request")} == {200}
