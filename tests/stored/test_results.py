"""The lines of output and error files, as clients read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from structlog.testing import capture_logs

from gateway.callers.ledger import Ledger, UsageRow
from gateway.store.failures import StoreUnavailable
from gateway.store.schema import usage
from gateway.stored.batch_rows import Batch
from gateway.stored.claims import BatchState, RequestState, put_back, release_lost
from gateway.stored.line_reader import LineError
from gateway.stored.results import ROW_BYTES, broken_line, response_line, unanswered_line
from tests.gateways import until
from tests.store.stores import LIMIT
from tests.stored.batch_place import BatchPlace, answer, batch_place, count, killed, line

BROKEN = LineError(3, 10, 5, "ä", True, "invalid_url", "It does not match.", "url")


def read(line: bytes) -> Any:
    """The value of a line, read as Python's clients do: by `str.splitlines`."""
    (text,) = line.decode().splitlines()
    assert line.endswith(b"\n")
    return json.loads(text)


def response(content: bytes, api: str = "openai", status: int = 200) -> Any:
    return read(response_line("r1", "c", api, status=status, request_id="q", content=content))


@pytest.mark.parametrize(
    "end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]
)
def test_no_character_divides_a_line(end: str) -> None:
    escaped = json.dumps({"text": f"a{end}b"}).encode()
    assert response(escaped)["response"]["body"] == {"text": f"a{end}b"}
    raw = json.dumps({"text": f"a{end}b"}, ensure_ascii=False).encode()
    assert response(raw)["response"]["body"] == {"text": f"a{end}b"}
    line = response_line("r", f"a{end}b", "openai", status=200, request_id="q", content=b"{}")
    assert read(line)["custom_id"] == f"a{end}b"


@pytest.mark.parametrize("content", [b"", b"nothing\n", b'{"a": "\xff"}', b'{"a": 1} x', b"[1,]"])
def test_what_is_no_json_becomes_a_text(content: bytes) -> None:
    assert response(content)["response"]["body"] == content.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("state", "code", "type_"),
    [
        (RequestState.EXPIRED, "batch_expired", "expired"),
        (RequestState.CANCELLED, "batch_cancelled", "canceled"),
        (RequestState.DONE, "result_lost", "errored"),
    ],
)
def test_a_line_without_an_answer_says_why(state: RequestState, code: str, type_: str) -> None:
    found = read(unanswered_line("r1", "c", "openai", 3, state))
    assert found["custom_id"] == "c"
    assert found["response"] is None
    assert found["error"]["code"] == code
    assert "line" in read(unanswered_line("r1", None, "openai", 3, state))["error"]
    found = read(unanswered_line("r1", "c", "anthropic", 3, state))
    assert (found["custom_id"], found["result"]["type"]) == ("c", type_)


def test_anthropic_s_errors_are_nested_twice() -> None:
    own = {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}
    found = response(json.dumps(own).encode(), "anthropic", 529)
    assert found["custom_id"] == "c"
    assert found["result"]["type"] == "errored"
    assert found["result"]["error"]["error"] == own["error"]
    assert found["result"]["error"]["request_id"] == "q"
    broken = read(broken_line("r1", "anthropic", BROKEN))
    assert broken["result"]["error"]["error"]["type"] == "invalid_request_error"
    message = {"type": "message", "content": []}
    succeeded = response(json.dumps(message).encode(), "anthropic")
    assert succeeded["result"] == {"type": "succeeded", "message": message}


@pytest.mark.parametrize(
    ("content", "status", "type_", "message"),
    [
        (b'{"error": {"message": "m"}}', 404, "not_found_error", "m"),
        (b'{"error": "m"}', 400, "invalid_request_error", "m"),
        (b"<html>", 502, "api_error", "The request failed with status 502."),
        (b"[]", 418, "invalid_request_error", "The request failed with status 418."),
        (b'{"error": {"message": 7}}', 429, "rate_limit_error", "The request failed with status"),
    ],
)
def test_other_errors_are_told_in_anthropic_s_form(
    content: bytes, status: int, type_: str, message: str
) -> None:
    error = response(content, "anthropic", status)["result"]["error"]
    assert error["type"] == "error"
    assert error["error"]["type"] == type_
    assert error["error"]["message"].startswith(message)


LINES = 2000
RUNS = """
import asyncio, sys
from pathlib import Path
from tests.stored.batch_place import answer, batch_place

async def main(url, path):
    async with batch_place(url, Path(path)) as here:
        task = asyncio.create_task(here.results.run())
        print("runs", flush=True)
        while rows := await here.claim(100):
            added = [here.results.add(r, answer(r, here.process.id)) for r in rows]
            assert all(await asyncio.gather(*added))
        print("done", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class AwayLedger:
    """A ledger whose store does not answer at first."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.is_away = True

    async def write_with(self, job: Callable[[Connection], Sequence[UsageRow]]) -> None:
        if self.is_away:
            raise StoreUnavailable("it is away", "wait")
        await self._ledger.write_with(job)


async def begun(here: BatchPlace, lines: int) -> Batch:
    batch = await here.create([line(f"c{n}") for n in range(lines)])
    await here.settle()
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 700, 1500])
async def test_a_killed_process_leaves_every_result_whole_and_once(
    store_url: str, tmp_path: Path, rows: int
) -> None:
    async with batch_place(store_url, tmp_path / "kept") as here:
        batch = await begun(here, LINES)
        await killed(here, RUNS, [store_url, str(tmp_path / "kept")], usage, rows)
        recorded = (await here.find(batch)).completed
        assert rows <= recorded < LINES

        def release(connection: Connection) -> int:
            return release_lost(connection, here.folder.id or "", here.process, here.time[0])

        await here.store.run(release)
        assert await here.answer() == LINES - recorded
        await here.settle()
        ended = await here.find(batch)
        assert (ended.state, ended.completed) == (BatchState.COMPLETED, LINES)
        found = await here.output(batch)
        assert [one["custom_id"] for one in found] == [f"c{n}" for n in range(LINES)]
        assert all(one["response"]["body"] == {"answer to": one["custom_id"]} for one in found)
        # Paid once.
        assert await here.store.run(count(usage)) == LINES
        assert (ended.completion_tokens, ended.cost) == (3 * LINES, LINES / 2)


async def test_a_result_that_nobody_wants_any_more_is_not_recorded(here: BatchPlace) -> None:
    batch = await begun(here, 2)
    task = asyncio.create_task(here.results.run())
    first, second = await here.claim()
    assert await here.results.add(first, answer(first, here.process.id))
    await here.batches.cancel(batch.owner, batch.id, batch.api)

    def end(connection: Connection) -> None:
        put_back(connection, here.process.id, [second.id], here.time[0])

    await here.store.run(end)
    assert not await here.results.add(second, answer(second, here.process.id))
    task.cancel()
    await here.settle()
    ended = await here.find(batch)
    assert (ended.state, ended.completed, ended.cancelled) == (BatchState.CANCELLED, 1, 1)
    assert await here.store.run(count(usage)) == 1
    assert len(await here.output(batch)) == 1


async def test_results_wait_for_a_store_that_is_away(
    here: BatchPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.stored.results.RETRY_SECONDS", 0.01)
    await begun(here, 10)
    rows = await here.claim()
    ledger = AwayLedger(here.ledger)
    here.results.ledger = ledger  # type: ignore[assignment]
    # Four of them fill what may wait.
    here.results.most_bytes = 4 * ROW_BYTES
    task = asyncio.create_task(here.results.run())
    added = [asyncio.create_task(here.results.add(r, answer(r, here.process.id))) for r in rows]
    await until(lambda: here.results.problem is not None)
    assert here.results.pending == 4
    ledger.is_away = False
    assert all(await asyncio.gather(*added))
    await until(lambda: here.results.problem is None)
    task.cancel()
    assert await here.store.run(count(usage)) == 10


class SilentLedger:
    """A ledger that writes, and never tells that it has."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.has_written = asyncio.Event()

    async def write_with(self, job: Callable[[Connection], Sequence[UsageRow]]) -> None:
        await self._ledger.write_with(job)
        self.has_written.set()
        await asyncio.Event().wait()


async def test_what_may_have_been_recorded_is_recorded_once(here: BatchPlace) -> None:
    batch = await begun(here, 5)
    rows = await here.claim()
    here.results.ledger = silent = SilentLedger(here.ledger)  # type: ignore[assignment]
    running = asyncio.create_task(here.results.run())
    added = [asyncio.create_task(here.results.add(r, answer(r, here.process.id))) for r in rows]
    await silent.has_written.wait()
    running.cancel()
    assert (await here.find(batch)).completed == 5
    here.results.ledger = here.ledger
    await here.results.close(LIMIT)
    assert all(await asyncio.gather(*added))
    found = await here.find(batch)
    assert (found.completed, found.cost) == (5, 2.5)
    assert await here.store.run(count(usage)) == 5


async def test_a_folder_that_fills_in_the_middle_delays_results_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.stored.results.RETRY_SECONDS", 0.01)
    room = [1 << 30]
    options = {"most_bytes": lambda: room[0]}
    url = f"sqlite:///{tmp_path}/gateway.db"
    async with batch_place(url, tmp_path / "kept", folder_options=options) as here:
        batch = await begun(here, 40)
        task, rows = asyncio.create_task(here.results.run()), await here.claim()
        room[0] = 1
        added = [here.results.add(row, answer(row, here.process.id)) for row in rows]
        waiting = [asyncio.create_task(one) for one in added[:20]]
        with capture_logs() as told:
            await until(lambda: here.results.problem is not None)
            assert (await here.find(batch)).pause_reason == "storage_full"
            await here.round()
        assert [one["event"] for one in told].count("results wait for the disk") == 1
        assert (await here.find(batch)).pause_reason == "storage_full"
        assert not any(one.done() for one in waiting)
        room[0] = 1 << 30
        assert all(await asyncio.gather(*waiting, *added[20:]))
        # The final file finds no room.
        room[0] = 1
        await here.settle()
        full = await here.find(batch)
        assert (full.state, full.pause_reason) == (BatchState.FINALIZING, "storage_full")
        assert here.kept("file") == [batch.input_file]
        room[0] = 1 << 30
        await here.settle()
        ended = await here.find(batch)
        assert (ended.state, ended.completed) == (BatchState.COMPLETED, 40)
        found = await here.output(batch)
        assert [one["custom_id"] for one in found] == [f"c{n}" for n in range(40)]
        assert await here.store.run(count(usage)) == 40
        task.cancel()
