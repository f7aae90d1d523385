"""A place for tests of batches: a real store and folder, without gateway and nodes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection, func, select

from gateway.callers.ledger import Ledger
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
from tests.stored.stored_rows import claim_any, usage_of

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


def answer(row: StoredRow, process: str, *, status: int = 200, content: bytes = b"") -> Outcome:
    """The outcome of a line: an answer that tells its `custom_id`."""
    body = content or json.dumps({"answer to": row.custom_id}).encode()
    record = RequestRecord(row.id, row.path)
    code = None if status < 400 else "node_failed"
    return Outcome(status, JSON_HEADER_LINE, body, usage_of(row, process), record, code)


@dataclass
class BatchPlace:
    """Registries, results and all that they need; `time` is the Unix time of all of them."""

    store: Store
    folder: Folder
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

    async def record(
        self,
        rows: Iterable[StoredRow],
        status: Callable[[StoredRow], int] = lambda _: 200,
        **more: Any,
    ) -> list[bool]:
        """Record an answer to each of these lines; whether it was taken."""
        task = asyncio.create_task(self.results.run())
        added = [
            self.results.add(row, answer(row, self.process.id, status=status(row), **more))
            for row in rows
        ]
        taken = await asyncio.gather(*added)
        task.cancel()
        return taken

    async def answer(self, limit: int = 10_000, **more: Any) -> int:
        """Claim so many lines at most, and record an answer to each; how many those are."""
        taken = await self.record(await self.claim(limit), **more)
        assert all(taken)
        return len(taken)

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
        yield BatchPlace(store, folder, files, batches, ledger, results, process, now)
        files.close()
    finally:
        threads.close()
        await store.aclose(LIMIT)


def count(table: Any, *conditions: Any) -> Callable[[Connection], int]:
    """A job of the store: how many rows of the table there are."""
    asked = select(func.count()).select_from(table).where(*conditions)
    return lambda connection: connection.scalar(asked) or 0
