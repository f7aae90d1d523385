"""What other clients wait, and memory, while one client sends megabytes to a gateway process."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.emulator.process import emulator_process
from tests.gateway_processes import serving

pytestmark = pytest.mark.slow

SIZE = 24_000_000
TRIES = 5
"""What the gateway takes it takes each time; the machine does not stand still each time."""
CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Process:
    url: str
    pid: int

    @property
    def peak(self) -> int:
        """The process's peak memory in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError

    def forget_peak(self) -> int:
        """Reset the peak; returns the current memory."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return int(psutil.Process(self.pid).memory_info().rss)


SEND = """
import http.client, sys
host, path, body = sys.argv[1:]
connection = http.client.HTTPConnection(host, timeout=120)
connection.request("POST", path, open(body, "rb").read())
print(connection.getresponse().status)
"""
"""Runs in its own process, so that only the gateway's delay is measured."""


def of(item: bytes) -> bytes:
    return b",".join([item] * (SIZE // (len(item) + 1)))


def chat(content: bytes, more: bytes = b"") -> bytes:
    return b'{"messages":[{"role":"user","content":' + content + b"}]" + more + b"}"


def shapes() -> Iterator[tuple[str, bytes]]:
    """Name and body of each shape, one at a time, since each takes much memory."""
    yield "messages", b'{"messages":[' + of(b"{}") + b"]}"
    yield "parts", chat(b"[" + of(b'{"type":"text","text":"a"}') + b"]")
    yield "objects", chat(b'"a"', b',"a_url":1,"x":[' + of(b"{}") + b"]")
    yield "escapes", chat(b'"' + b"\\n" * (SIZE // 2) + b'"', b',"x":[' + b"[]," * 200 + b"1]")
    yield "ids", b'{"prompt":[' + of(b"1") + b"]}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_other_clients_wait_no_longer_than_beside_a_plain_text(tmp_path: Path) -> None:
    # The node reads all that is sent; in this process it would delay the measuring.
    async with AsyncExitStack() as stack:
        node = stack.enter_context(emulator_process())
        # Its node has no room for what is sent.
        nodes = [{"name": "a", "url": node.url, "context": 1000}]
        line = await stack.enter_async_context(serving(tmp_path, nodes))
        gateway = Process(line.url, line.first.pid)
        plain, _ = await _measured(tmp_path, gateway, chat(b'"' + b"a" * SIZE + b'"'))
        for shape, body in shapes():
            waited, grown = await _measured(tmp_path, gateway, body)
            for _ in range(TRIES - 1):
                if waited < plain + 1.0:
                    break
                waited, _ = await _measured(tmp_path, gateway, body)
            assert waited < plain + 1.0, f"{shape}: {waited} s, beside a plain text {plain} s"
            assert grown < 4 * SIZE, f"{shape}: {grown} bytes"


async def _measured(folder: Path, gateway: Process, body: bytes) -> tuple[float, int]:
    """The longest wait of another client meanwhile, and the memory that is used."""
    before = gateway.forget_peak()
    loop = asyncio.get_running_loop()
    worst = 0.0
    file = folder / "body"
    file.write_bytes(body)
    host = gateway.url.removeprefix("http://")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120, trust_env=False) as client:
        await client.get("/v1/models")
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SEND, host, CHAT, file, stdout=PIPE
        )
        status = asyncio.create_task(sender.communicate())
        while not status.done():
            began = loop.time()
            await client.get("/v1/models")
            worst = max(worst, loop.time() - began)
            await asyncio.sleep(0.005)
        assert int((await status)[0]) == 400
    return worst, gateway.peak - before
