"""Files of a gateway process that is killed in the middle of uploads."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.stored.folder import ID_FILE
from tests.emulator.raw_connection import raw_connection
from tests.gateways import until
from tests.web.raw_client import answer
from tests.web.test_files import form, head
from tests.web.two_keys import kept

SERVE = """
import asyncio, sys
from pathlib import Path
from tests.gateways import running_gateway

async def main():
    async with running_gateway(
        Path(sys.argv[1]), ["http://127.0.0.1:9"], wait_ready=False
    ) as running:
        print(running.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def process(folder: Path) -> AsyncIterator[str]:
    """Run a gateway in a process that is killed at the end; gives its URL."""
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, folder, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert made.stdout is not None
        async with asyncio.timeout(90):
            yield (await made.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.kill()
        await made.wait()


@pytest.mark.slow
async def test_after_a_kill_what_was_kept_is_there_and_no_more(tmp_path: Path) -> None:
    body, small = form(bytes(3_000_000)), form(b"small")
    async with process(tmp_path) as url, raw_connection(url) as wire, raw_connection(url) as other:
        await other.send(head(f"Content-Length: {len(small)}") + small)
        assert (await answer(other)).status == 200
        (made,) = kept(tmp_path)
        await wire.send(head(f"Content-Length: {len(body)}"))
        await wire.send(body[:2_000_000])
        await until(lambda: len(kept(tmp_path)) == 2)
    assert len(kept(tmp_path)) == 2, "the kill came in the middle"
    async with process(tmp_path) as url, raw_connection(url) as wire:
        await until(lambda: kept(tmp_path) == [made])
        assert (tmp_path / "state/batches" / ID_FILE).is_file()
        ask = head().replace(b"POST /v1/files ", f"GET /v1/files/{made}/content ".encode())
        await wire.send(ask)
        content = await answer(wire)
        assert (content.status, content.body) == (200, b"small")
