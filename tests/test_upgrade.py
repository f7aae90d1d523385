"""Handovers under load: no client is refused or disconnected."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import Connection, select

from gateway.callers.keys import ApiKey, new_key
from gateway.nodes.state_files import PropertiesStore
from gateway.store.database import locate_store
from gateway.store.schema import open_requests, processes
from gateway.store.store import Store
from tests.callers.build import read_rows
from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import RawConnection, post, raw_connection
from tests.gateway_processes import LIMIT, asked, client_of, serving
from tests.gateways import until
from tests.nodes.build import a_spec
from tests.polling import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = int(os.environ.get("UPGRADE_REQUESTS", "400"))
"""Least requests per handover. docs/upgrades.md has the run with 10,000."""
CLIENTS = 8
UPGRADES = 3
KEY = new_key("team")
KEYED = {"keys": [{"id": KEY.id, "sha256": KEY.sha256}]}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ACTIVATED = """
import os, sys
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES="public:admin")
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.executable, [sys.executable, "-m", "gateway", *sys.argv[3:]])
"""


@dataclass(slots=True)
class Asking:
    """What clients do while one process takes over from another."""

    answered: int = 0
    over: bool = False

    async def until(self, answered: int) -> None:
        async with asyncio.timeout(3 * LIMIT):
            while self.answered < answered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def ask_on(client: httpx.AsyncClient, asking: Asking, *, stream: bool) -> None:
    """Ask one question after the other; each answer must be whole."""
    while not asking.over:
        answer = await client.post("/v1/chat/completions", json=HELLO | {"stream": stream})
        assert answer.status_code == 200, answer.text
        if stream:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["usage"]["completion_tokens"] == 4
        asking.answered += 1


EACH_ANEW = httpx.Limits(max_keepalive_connections=0)
"""Each request comes to the process that accepts connections."""


@pytest.mark.parametrize("edges", [pytest.param(0, marks=pytest.mark.smoke), 2])
async def test_no_request_fails_during_handovers(edges: int, tmp_path: Path) -> None:
    listen = {"port": 0, "edges": edges}
    async with (
        asked(tmp_path, node := EmulatedNode(slots=64), listen=listen) as (line, keeping, _),
        client_of(line.url, limits=EACH_ANEW) as coming,
    ):
        asking = Asking()
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                client = keeping if number % 2 else coming
                group.create_task(ask_on(client, asking, stream=number % 3 == 0))
            for done in range(1, UPGRADES + 1):
                # So far through them, whatever the speed of this machine.
                await asking.until(REQUESTS * done // (UPGRADES + 1))
                await line.succeed()
            # The last one has its share of them too.
            await asking.until(asking.answered + REQUESTS // (UPGRADES + 1))
            asking.over = True
        await keeping.aclose()
        await line.until("ended", UPGRADES)
        assert len({line.first.pid, *(entry["pid"] for entry in line.logged("succeeded"))}) == 4
        assert node.requests == asking.answered >= REQUESTS
        assert {entry["status"] for entry in line.logged("request")} == {200}


@pytest.mark.parametrize("edges", [0, 1])
async def test_a_running_stream_is_finished_by_its_process(edges: int, tmp_path: Path) -> None:
    node, listen = EmulatedNode(slots=4, answer_tokens=40), {"port": 0, "edges": edges}
    async with asked(tmp_path, node, listen=listen) as (line, client, _):
        node.faults.next("hang", after_events=5)
        body = HELLO | {"stream": True, "max_tokens": 40}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            parts = answer.aiter_bytes()
            data = await anext(parts)
            await line.succeed()
            node.faults.release()
            data += b"".join([part async for part in parts])
        assert data.endswith(b"data: [DONE]\n\n")
        assert data.count(b'"content":"') == 40
        # The kept connection has one more reply, which is its last.
        last = await client.post("/v1/chat/completions", json=HELLO)
        assert (last.status_code, last.headers["connection"]) == (200, "close")
        await line.until("ended")
        after = await client.post("/v1/chat/completions", json=HELLO)
        assert (after.status_code, after.headers.get("connection")) == (200, None)


@pytest.mark.parametrize("left", ["listen: {port: nonsense}\n", "# nothing but a comment\n", None])
async def test_a_successor_that_can_not_start_or_finds_emptied_settings_changes_nothing(
    left: str | None, tmp_path: Path
) -> None:
    async with asked(tmp_path, EmulatedNode(), **KEYED) as (line, client, _):
        file = tmp_path / "gateway.yaml"
        settings = file.read_text()
        file.unlink()
        if left is not None:
            file.write_text(left)
        os.kill(line.first.pid, signal.SIGUSR2)
        entry = await line.until("no successor")
        assert "before it was ready" in entry["why"]
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 401
        good = {"x-api-key": KEY.text}
        reply = await client.post("/v1/chat/completions", json=HELLO, headers=good)
        assert reply.status_code == 200
        file.write_text(settings)
        await line.succeed()
        await line.until("listening", 2)


@pytest.mark.parametrize("anonymous", [True, False])
async def test_a_successor_without_keys_does_not_unlock_the_gateway(
    anonymous: bool, tmp_path: Path
) -> None:
    async with asked(tmp_path, EmulatedNode(), **KEYED) as (line, client, _):
        file = tmp_path / "gateway.yaml"
        text = yaml.safe_load(file.read_text()) | {"keys": [], "allow_anonymous": anonymous}
        # Of its successors, one after another.
        for _ in range(2):
            file.write_text(yaml.safe_dump(text))
            await line.succeed()
            reply = await client.post("/v1/chat/completions", json=HELLO)
            assert reply.status_code == 401
        assert line.logged("locked")


@pytest.mark.smoke
async def test_drains_and_remembered_models_survive_a_handover(tmp_path: Path) -> None:
    async with asked(tmp_path, node := EmulatedNode()) as (line, _, admin):
        assert (await admin.post("/admin/nodes/one/drain")).status_code < 300
        await line.succeed()
        await admin.aclose()
        await line.until("ended")
        async with client_of(line.admin_url) as again:
            assert (await again.get("/admin/nodes/one")).json()["state"] == "draining"
    folder = tmp_path / "state" / "llama-gateway"
    # Each process has closed the store, which both had open.
    files = {file.name.partition("-")[0]: file for file in sorted(folder.iterdir())}
    assert {"drains", "seen", "gateway.db"} <= set(files)
    assert not list(folder.glob("gateway.db-*"))
    assert PropertiesStore(files["seen"]).recall(a_spec("one", node.url)).models == ("demo",)


@pytest.mark.parametrize("edges", [0, 2])
async def test_sockets_of_systemd_are_used_and_passed_to_a_successor(
    edges: int, tmp_path: Path
) -> None:
    settings = {"listen": {"port": 0, "edges": edges}}
    with (
        socket.create_server(("127.0.0.1", 0)) as public,
        socket.create_server(("127.0.0.1", 0)) as admin,
    ):
        for sock in (public, admin):
            sock.set_inheritable(True)
        numbers = [str(sock.fileno()) for sock in (public, admin)]
        command = (sys.executable, "-c", ACTIVATED, *numbers)
        async with (
            EmulatedNode() as node,
            serving(tmp_path, node, *command, settings=settings) as line,
        ):
            assert line.url.endswith(f":{public.getsockname()[1]}")
            await line.succeed()
            await line.until("listening", 2)
            async with client_of(line.url) as client:
                answer = await client.post("/v1/chat/completions", json=HELLO)
            assert answer.status_code == 200


SPENT, PAIR, COUNTED = new_key("spent"), new_key("pair"), new_key("counted")
SETTINGS = {
    "keys": [
        {"id": "spent", "sha256": SPENT.sha256, "limits": {"budget": "0.01/month"}},
        {"id": "pair", "sha256": PAIR.sha256, "limits": {"concurrency": 2}},
        {"id": "counted", "sha256": COUNTED.sha256, "limits": {"tokens_per_day": 100_000}},
    ]
}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PRICE = {"prompt": 0.0, "completion": 100_000.0}
KEPT = 40
"""Connections to the old process: each has one more reply after the hand-over."""


async def status(kept: RawConnection, key: str) -> int:
    """The status of one chat on a connection that is never made anew."""
    await kept.send(post("/v1/chat/completions", CHAT, f"Authorization: Bearer {key}\r\n"))
    head = await kept.head()
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    await kept.reader.readexactly(length)
    return int(head.split(b" ")[1])


def bearer(key: ApiKey | str) -> dict[str, str]:
    return {"authorization": f"Bearer {key if isinstance(key, str) else key.text}"}


def opened(folder: Path) -> Store:
    store = Store(locate_store(f"sqlite:///{folder}/state/llama-gateway/gateway.db", folder))
    store.start()
    return store


def left(connection: Connection) -> tuple[int, int]:
    """Open requests and processes in the store."""
    requests = connection.execute(select(open_requests)).all()
    return len(requests), len(connection.execute(select(processes)).all())


async def test_limits_keys_and_the_ledger_hold_while_both_processes_live(tmp_path: Path) -> None:
    admitted = 0
    refused: list[tuple[int, str | None]] = []
    async with (
        AsyncExitStack() as stack,
        EmulatedNode(slots=64) as node,
        serving(tmp_path, node, settings=SETTINGS, cost_per_million_tokens=PRICE) as line,
        client_of(line.url, limits=EACH_ANEW) as client,
        client_of(line.admin_url, limits=EACH_ANEW) as admin,
    ):
        store = opened(tmp_path)

        async def ask(key: ApiKey | str, **body: Any) -> httpx.Response:
            nonlocal admitted
            response = await client.post(
                "/v1/chat/completions", json=CHAT | body, headers=bearer(key)
            )
            admitted += response.status_code == 200
            return response

        async def recorded(count: int) -> list[dict[str, Any]]:
            async def look() -> list[dict[str, Any]] | None:
                rows = await store.run(read_rows)
                return rows if len(rows) >= count else None

            return await eventually(look, LIMIT)

        async def opened_requests(count: int) -> None:
            async def look() -> bool | None:
                return (await store.run(left))[0] >= count or None

            await eventually(look, LIMIT)

        made = (await admin.post("/admin/keys", json={"name": "alice"})).json()["key"]
        assert (await ask(SPENT)).status_code == 200
        for _ in range(3):
            assert (await ask(COUNTED)).status_code == 200
        kept = [await stack.enter_async_context(raw_connection(line.url)) for _ in range(KEPT)]
        for one in kept:
            assert await status(one, made) == 200
            admitted += 1
        # One request of each of these keys hangs in the old process.
        node.faults.next("hang", n=2, after_events=2)
        hanging = [asyncio.create_task(ask(key, stream=True)) for key in (PAIR, made)]
        rows = await recorded(admitted)
        used = sum(
            row["prompt_tokens"] + row["completion_tokens"]
            for row in rows
            if row["key"] == "counted"
        )
        await opened_requests(2)

        over = asyncio.Event()

        async def ask_on() -> None:
            """A key with nothing left asks all the time, of whichever process accepts."""
            while not over.is_set():
                response = await ask(SPENT)
                refused.append((response.status_code, response.headers.get("x-gateway-reason")))

        asking = asyncio.create_task(ask_on())
        await line.succeed()
        # The successor knows all of it before its first answer.
        told = (await client.get("/v1/usage", headers=bearer(COUNTED))).json()
        assert [one["used"] for one in told["limits"]] == [used]
        told = (await client.get("/v1/usage", headers=bearer(PAIR))).json()
        assert [one["used"] for one in told["limits"]] == [1]
        before = len(refused)
        await until(lambda: len(refused) >= before + 3, LIMIT)
        over.set()
        await asking
        assert set(refused) == {(429, "insufficient_quota")}

        # The limit holds across both.
        node.faults.next("hang", after_events=2)
        hanging.append(asyncio.create_task(ask(PAIR, stream=True)))
        await opened_requests(3)
        assert (await ask(PAIR)).headers["x-gateway-reason"] == "rate_limit_exceeded"
        # The old process hears of it within a second.
        admitted += await until_answered(kept, PAIR.text, 429)

        # One of them revokes a key, since both accept admin connections. The other hears of it,
        # and the old process refuses it on its connections.
        assert (await admin.delete("/admin/keys/alice")).status_code == 200
        async with asyncio.timeout(LIMIT):
            while (await ask(made)).status_code != 401:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        admitted += await until_answered(kept, made, 401)
        assert await status(kept[-1], made) == 401

        # What runs is served to its end, by the process that has it.
        assert len(line.logged("ended")) == 0
        node.faults.release()
        for response in await asyncio.gather(*hanging):
            assert response.status_code == 200
            assert response.text.endswith("data: [DONE]\n\n")
        for one in kept:
            await one.leave()
        await line.until("ended")

        # Each request once, and nothing is left of the old process.
        rows = await recorded(admitted)
        assert len(rows) == len({row["id"] for row in rows}) == admitted
        assert {row["outcome"] for row in rows} == {"ok"}
        assert len({row["process"] for row in rows}) == 2
        assert await store.run(left) == (0, 1)
        assert await store.aclose(LIMIT)


async def until_answered(kept: list[RawConnection], key: str, wanted: int) -> int:
    """Use one connection after the other until this is the answer; how many had another one.

    Each has one reply left, so the old process is asked only now and then.
    """
    served = 0
    while (found := await status(kept[-1], key)) != wanted:
        assert found == 200
        await kept.pop().leave()
        served += 1
        assert len(kept) > 2, f"{served} requests of a key that should get {wanted} were served"
        await asyncio.sleep(0.1)
    await kept.pop().leave()
    return served
