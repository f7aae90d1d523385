"""Healthy clients lose nothing beside slow ones, which send or read as little as they can.

docs/security.md has the figures of 10,000 slow clients, by an instrument of revision 539aa2f3.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from tests.bench import node_replies
from tests.bench.scenarios import CHAT, EMBEDDED, EMBEDDINGS, chat, chat_body, post
from tests.bench.targets import TARGETS, gateway, running
from tests.bench.upstream import Script, Upstream
from tests.chaos.client import Client, ReceivedResponse
from tests.known import known

NODES, SLOTS = 20, 256  # slow readers keep their slots
TOKENS = 1500  # tokens of a stream: 280 kB, more than the kernel's buffers take
SLOW, ADDRESSES, CONNECTIONS, HEALTHY = 300, 20, 400, 5
ARRIVE, ALONE, BESIDE, SETTLE = 3.0, 2.0, 24.0, 5.0  # seconds
PAUSE = 2.0  # seconds between two bytes
PERIOD = 0.2  # seconds from one request of a healthy client to its next
BODY_BYTES, BODY_STEP = 1_000_000, 100
SETTINGS = {
    "queue": {"max": 10000},
    "limits": {"connections": CONNECTIONS},
    "logging": {"access": False, "level": "warning"},
}


def pieces(kind: str) -> Iterator[bytes]:
    """What a client sends that is slow in its head, in its body, or reads its stream slowly."""
    request = chat(stream=True)
    if kind == "head":
        yield request[:20]
        yield from (request[at : at + 1] for at in range(20, len(request)))
    elif kind == "body":
        length = b"Content-Length: %d" % BODY_BYTES
        head = post(CHAT, b"").replace(b"Content-Length: 0", length)
        yield head + b'{"messages":[{"role":"user","content":"'
        yield from itertools.repeat(b"x" * BODY_STEP, BODY_BYTES // BODY_STEP)
    else:
        yield request
        yield from itertools.repeat(b"")


@dataclass(slots=True)
class Crowd:
    """Slow clients, which come back whenever they are disconnected."""

    url: str
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    open: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """Responses by kind and status, as `head 408`."""

    async def client(self, number: int) -> None:
        kind = ("head", "body", "read")[number % 3]
        source = f"127.0.0.{2 + number // 3 % ADDRESSES}"
        await asyncio.sleep(ARRIVE * number / SLOW)
        while True:
            async with Client(self.url, slow=kind == "read", source=source) as client:
                with suppress(OSError):
                    reader, writer = await client.connected()
                    self.open += 1
                    try:
                        await self._be_slow(reader, writer, kind)
                    finally:
                        self.open -= 1
            await asyncio.sleep(self.rng.uniform(0.5, 1.5))

    async def _be_slow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str
    ) -> None:
        begun = False
        for piece in pieces(kind):
            writer.write(piece)
            pause = PAUSE * self.rng.uniform(0.5, 1.5)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    if not (data := await reader.read(4096)):
                        return
                    if not begun:
                        begun = True
                        self.seen[f"{kind} {data[9:12].decode()}"] += 1
                    if kind == "read":
                        await asyncio.sleep(pause)


def problem(response: ReceivedResponse, *, stream: bool) -> str:
    """What is wrong with a response, or nothing."""
    body = bytes(response.body)
    if response.status != 200 or response.broke:
        return f"{response.status} {response.broke}"
    if stream:
        return "" if body.count(b'"content":') >= TOKENS and b"[DONE]" in body else "cut stream"
    return "" if body == node_replies.EMBEDDING else "wrong body"


async def ask_on(url: str, source: str, outcomes: Counter[str]) -> None:
    """Send requests at a steady rate: most on a kept connection, every tenth on a new one."""
    async with Client(url, source=source) as client:
        for number in itertools.count(1):
            began, stream = time.monotonic(), number % 20 == 0
            if number % 10 == 5:
                client.close()
            path, body = (CHAT, chat_body(stream=True)) if stream else (EMBEDDINGS, EMBEDDED)
            try:
                found = problem(await client.send(path, body), stream=stream)
            except TimeoutError:
                found = "no end"
            outcomes[found] += 1
            await asyncio.sleep(max(0.0, began + PERIOD - time.monotonic()))


@pytest.mark.slow
async def test_healthy_clients_lose_nothing_beside_slow_ones(tmp_path: Path) -> None:
    target = replace(
        TARGETS["gateway"], command=lambda binary, plan: gateway(binary, plan, SETTINGS)
    )
    outcomes: Counter[str] = Counter()
    async with (
        Upstream(NODES, SLOTS, Script(TOKENS, 0.0, burst=50)) as upstream,
        running(target, tmp_path, upstream.ports, 0) as begun,
    ):
        process, url = psutil.Process(known(begun.pid)), "http://{}:{}".format(*begun.address)
        crowd, open_ones = Crowd(url), list[int]()
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(ask_on(url, f"127.1.0.{number + 1}", outcomes))
                for number in range(HEALTHY)
            ]
            await asyncio.sleep(ALONE)
            files = process.num_fds()
            slow = [group.create_task(crowd.client(number)) for number in range(SLOW)]
            until = time.monotonic() + ARRIVE + BESIDE
            while time.monotonic() < until:
                await asyncio.sleep(1.0)
                open_ones.append(crowd.open)
            for task in slow:
                task.cancel()
            await asyncio.sleep(SETTLE)
            assert process.num_fds() <= files + 50
            for task in asking:
                task.cancel()
    assert set(outcomes) == {""}
    assert outcomes[""] > 50
    assert max(open_ones) > 150
    assert {"head 408", "read 200"} <= set(crowd.seen)
    assert "Traceback" not in (tmp_path / "gateway.log").read_text(errors="replace")
