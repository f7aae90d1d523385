"""A place for tests of batches: a real store and folder, without gateway and nodes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection, func, select

from gateway.callers.ledger import ROW_COLUMNS, Ledger, UsageRow
from gateway.callers.processes import ProcessIdentity
from gateway.config.stored import BatchSettings
from gateway.events import RequestRecord
from gateway.forward.client_response import JSON_HEADER_LINE
from gateway.store.database import locate_store
from gateway.store.store import Store
from gateway.stored.batch_registry import BatchRegistry, BatchUpkeep, NewBatch
from gateway.stored.batch_rows import Batch, EndListener
from gateway.stored.claims import StoredRow, UnfinishedWork
from gateway.stored.files import FileRegistry
from gateway.stored.folder import ID_FILE, DiskThreads, Folder, Storage
from gateway.stored.results import LineResults
from gateway.stored.runner import Outcome
from tests.store.stores import LIMIT
from tests.stored.stored_rows import claim_any

CHAT = "/v1/chat/completions"
HOUR, DAY = 3600.0, 86400.0


def line(custom_id: str, **more: Any) -> dict[str, Any]:
    """A line of an input that can be run."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"say {custom_id}"}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **more}


def jsonl(lines: Iterable[Any]) -> bytes:
    """An input file; texts are lines that are no JSON."""
    texts = (one if isinstance(one, str) else json.dumps(one) for one in lines)
    return "".join(f"{text}\n" for text in texts).encode()


def usage_row(row: StoredRow, process: str) -> UsageRow:
    """What the ledger gets for a line that was answered."""
    values: dict[str, Any] = {
        "id": row.id, "process": process, "started_at": 1.0, "ended_at": 2.0, "key": row.owner,
        "model": "m", "class": "batch", "path": row.path, "stream": False, "prompt_tokens": 5,
        "cached_tokens": 1, "completion_tokens": 3, "slot_seconds": 1.0, "cost": 0.5,
        "attempts": 1, "status": 200, "outcome": "ok",
    }  # fmt: skip
    return tuple(values.get(name) for name in ROW_COLUMNS)


def answer(row: StoredRow, process: str, *, status: int = 200, content: bytes = b"") -> Outcome:
    """The outcome of a line: an answer that tells its `custom_id`."""
    body = content or json.dumps({"answer to": row.custom_id}).encode()
    record = RequestRecord(row.id, row.path)
    code = None if status < 400 else "node_failed"
    return Outcome(status, JSON_HEADER_LINE, body, usage_row(row, process), record, code)


@dataclass
class BatchPlace:
    """Registries, results and all that they need; `time` is the Unix time of all of them."""

    store: Store
    folder: Folder
    settings: BatchSettings
    files: FileRegistry
    batches: BatchRegistry
    ledger: Ledger
    results: LineResults
    process: ProcessIdentity
    time: list[float] = field(default_factory=lambda: [1_800_000_000.0])

    def pass_(self, seconds: float) -> None:
        self.time[0] += seconds

    async def upload(self, content: bytes = b"x", *, owner: str = "alice", **more: Any) -> str:
        given = {"name": "in.jsonl", "purpose": "batch", "seconds": None, **more}
        async with self.files.uploading(owner, None) as upload:
            for start in range(0, len(content), 1 << 20):
                await self.files.storage.on_disk(upload.write, content[start : start + (1 << 20)])
            return (await self.files.keep(upload, **given)).id

    async def create(self, lines: Iterable[Any] | bytes, **more: Any) -> Batch:
        """A new batch whose input is not read yet."""
        content = lines if isinstance(lines, bytes) else jsonl(lines)
        owner = more.get("owner", "alice")
        given = {"owner": owner, "api": "openai", "endpoint": CHAT, **more}
        return await self.batches.create(
            NewBatch(input_file=await self.upload(content, owner=owner), **given)
        )

    async def find(self, batch: Batch) -> Batch:
        return await self.batches.find(batch.owner, batch.id, batch.api)

    async def settle(self) -> None:
        """Do all that is due, as `BatchRegistry.run` does."""
        while await self.round():
            pass

    async def round(self) -> bool:
        """Do a round, and wait for what it has begun; whether that is anything."""
        upkeep = self.batches.upkeep
        with patch.object(upkeep, "_guarded", wraps=upkeep._guarded) as begun:
            await upkeep.round()
        if upkeep._tasks:
            await asyncio.wait(list(upkeep._tasks.values()))
        return begun.call_count > 0

    async def claim(self, limit: int = 1000) -> list[StoredRow]:
        assert self.folder.id is not None
        return await self.batches.storage.write(
            claim_any, self.folder.id, self.process.id, limit, self.time[0], 60.0
        )

    async def answer(
        self, limit: int = 10_000, status: Callable[[StoredRow], int] = lambda _: 200, **more: Any
    ) -> int:
        """Claim so many lines at most, and record an answer to each; how many those are."""
        task, rows = asyncio.create_task(self.results.run()), await self.claim(limit)
        added = [
            self.results.add(row, answer(row, self.process.id, status=status(row), **more))
            for row in rows
        ]
        assert all(await asyncio.gather(*added))
        task.cancel()
        return len(rows)

    async def output(self, batch: Batch, *, errors: bool = False) -> list[Any]:
        found = await self.batches.open_output(batch.owner, batch.id, batch.api, errors=errors)
        try:
            content = b"".join([piece async for piece in found.pieces])
        finally:
            await found.close()
        assert found.size in {None, len(content)}
        return [json.loads(one) for one in content.splitlines()]

    def kept(self, kind: str = "") -> list[str]:
        """Names of the folder's files, or of those of a kind."""
        names = (path.name for path in self.folder.location.iterdir() if path.name != ID_FILE)
        return sorted(name for name in names if not kind or name.startswith(f"{kind}-"))


@asynccontextmanager
async def batch_place(
    url: str,
    path: Path,
    *,
    folder_options: dict[str, Any] | None = None,
    on_end: EndListener | None = None,
    **settings: Any,
) -> AsyncIterator[BatchPlace]:
    """A place whose folder is `path`; run `results.run()` in a task where results are added."""
    chosen, now = BatchSettings(**settings), [1_800_000_000.0]
    store = Store(locate_store(url, path))
    store.start()
    threads = DiskThreads()
    try:
        assert await store.wait_opened(LIMIT)
        options: dict[str, Any] = {"most_bytes": lambda: chosen.folder_bytes}
        folder = Folder(path, now=lambda: now[0], **{**options, **(folder_options or {})})
        storage = Storage(store, folder, threads, lambda: chosen, lambda: now[0])
        files = FileRegistry(replace(storage, threads=DiskThreads()))
        upkeep = BatchUpkeep(storage, UnfinishedWork(storage), lambda: None, on_end)
        batches = BatchRegistry(storage, upkeep)
        process = ProcessIdentity.of_this_process(now[0])
        ledger = Ledger(store, process, lambda: now[0], time.monotonic, lambda *_: ())
        await ledger.start(LIMIT)
        await files.storage.on_disk(folder.open)
        results = LineResults(storage, ledger, process)
        yield BatchPlace(store, folder, chosen, files, batches, ledger, results, process, now)
        files.close()
    finally:
        threads.close()
        await store.aclose(LIMIT)


async def killed(
    here: BatchPlace, script: str, arguments: list[str], table: Any, rows: int
) -> None:
    """Start a program, and kill it (SIGKILL) when the table has so many rows.

    It prints a line when it begins.
    """
    child = _started(script, arguments)
    assert child.stdout is not None
    try:
        assert await asyncio.to_thread(child.stdout.readline)
        async with asyncio.timeout(LIMIT):
            while await here.store.run(count(table), write=False) < rows:
                assert child.poll() is None, "it has ended before"
                await asyncio.sleep(0.001)  # it needs the store, too
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(LIMIT)
        child.stdout.close()


def _started(script: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def count(table: Any, *conditions: Any) -> Callable[[Any], int]:
    """A job of the store: how many rows of the table there are."""
    return partial(_count, table, conditions)


def _count(table: Any, conditions: tuple[Any, ...], connection: Connection) -> int:
    return connection.scalar(select(func.count()).select_from(table).where(*conditions)) or 0
