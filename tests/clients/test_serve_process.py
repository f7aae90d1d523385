"""`llama-gateway serve` as a process over real servers, reconfigured under load."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.site import HELLO, busy, until_busy
from tests.gateway_processes import Succession, serving
from tests.gateways import NO_TLS
from tests.servers import running_demo_servers

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
]

COMMAND = (sys.executable, "-m", "gateway")
WORDS = 20  # tokens of an answer


def inventory(**urls: str) -> list[dict[str, str]]:
    return [{"name": name, "url": url} for name, url in urls.items()]


async def admin(gateway: Succession, path: str) -> Any:
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=60) as client:
        return (await client.get(f"{gateway.admin_url}{path}")).json()


async def states(gateway: Succession) -> dict[str, str]:
    """The states of the nodes by the admin API."""
    nodes = (await admin(gateway, "/admin/nodes"))["nodes"]
    return {node["name"]: node["state"] for node in nodes}


@dataclass(slots=True)
class Load:
    """Clients that send without a pause, half of them for streams; all answers must be complete."""

    url: str
    sent: int = 0
    answers: list[tuple[int, str]] = field(default_factory=list)
    """The number of each request, in the order of sending, and the node that answered."""
    stopped: bool = False

    async def client(self, *, stream: bool) -> None:
        body = {"messages": HELLO, "max_tokens": WORDS, "stream": stream}
        async with httpx.AsyncClient(
            base_url=self.url, trust_env=False, verify=NO_TLS, timeout=120
        ) as client:
            while not self.stopped:
                number, self.sent = self.sent, self.sent + 1
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                if stream:
                    assert answer.text.endswith("data: [DONE]\n\n")
                else:
                    assert answer.json()["timings"]["predicted_n"] == WORDS
                self.answers.append((number, answer.headers["x-gateway-node"]))

    async def more(self, answers: int = 20) -> set[str]:
        """The nodes that give the next `answers` answers to requests sent from now on."""
        start = self.sent

        def given() -> list[str]:
            return [node for number, node in self.answers if number >= start]

        async with asyncio.timeout(120):
            while len(given()) < answers:  # noqa: ASYNC110 - many clients count
                await asyncio.sleep(0.01)
        return set(given())


@asynccontextmanager
async def under_load(url: str) -> AsyncIterator[Load]:
    load = Load(url)
    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(load.client(stream=number % 2 == 0))
        yield load
        load.stopped = True


async def until(condition: Callable[[], Awaitable[bool]], limit: float = 60.0) -> None:
    async with asyncio.timeout(limit):
        while not await condition():  # noqa: ASYNC110 - another process, without events
            await asyncio.sleep(0.02)


async def command(*arguments: str) -> tuple[int | None, str, str]:
    """Run a command of llama-gateway to its end. Returns status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.smoke
async def test_nodes_come_and_go_without_a_lost_request(tmp_path: Path) -> None:
    with running_demo_servers(2) as (one, two):
        async with (
            serving(tmp_path, inventory(one=one.url)) as gateway,
            under_load(gateway.url) as load,
        ):
            assert await load.more() == {"one"}

            # No reload command is needed: the file is watched.
            gateway.write_nodes(inventory(one=one.url, two=two.url))
            await until(lambda: state_is(gateway, "two", "ready"))
            assert await load.more(30) == {"one", "two"}

            gateway.write_nodes(inventory(two=two.url))
            await until(lambda: state_is(gateway, "one", None))
            assert await load.more() == {"two"}
            await until_busy(one.url, 0)
        assert gateway.logged("inventory")[0]["added"] == ["two"]
        assert gateway.logged("inventory")[-1]["removed"] == ["one"]
        assert {line["status"] for line in gateway.logged("request")} == {200}


async def state_is(gateway: Succession, name: str, state: str | None) -> bool:
    return (await states(gateway)).get(name) == state


async def test_a_node_is_drained_and_resumed_by_command_under_load(tmp_path: Path) -> None:
    with running_demo_servers(2) as (one, two):
        async with serving(tmp_path, inventory(one=one.url, two=two.url)) as gateway:
            admin = ("--admin-url", gateway.admin_url)
            await until(lambda: state_is(gateway, "one", "ready"))
            await until(lambda: state_is(gateway, "two", "ready"))
            async with under_load(gateway.url) as load:
                assert await load.more(30) == {"one", "two"}

                status, out, err = await command("nodes", "drain", "one", "--wait", *admin)
                assert (status, err) == (0, "")
                assert out.startswith("one: draining")
                assert await busy(one.url) == 0
                assert await load.more() == {"two"}
                assert await states(gateway) == {"one": "draining", "two": "ready"}

                status, out, _ = await command("nodes", "resume", "one", *admin)
                assert status == 0
                assert out.startswith("one: ready")
                assert await load.more(30) == {"one", "two"}
        assert {line["status"] for line in gateway.logged("request")} == {200}
