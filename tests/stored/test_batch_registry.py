"""Batches from the intake of their lines to their removal, over real stores and a real folder.

And these lines: as they are read, and as results are written.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection
from structlog.testing import capture_logs

from gateway.callers.ledger import Ledger, UsageRow
from gateway.errors import GatewayError
from gateway.store.failures import StoreLocked
from gateway.store.schema import batches, files, stored_requests, usage
from gateway.stored.background_requests import add_background
from gateway.stored.batch_registry import CLEAN_SECONDS, NewBatch
from gateway.stored.batch_rows import Batch
from gateway.stored.claims import BatchState, RequestState, put_back, release_lost
from gateway.stored.files import (
    kept_by,
    read_files,
)
from gateway.stored.folder import ID_FILE, FolderFull, job
from gateway.stored.line_reader import (
    Line,
    LineError,
    LineReader,
    LineSpec,
    TooManyLines,
    raw_lines,
)
from gateway.stored.results import broken_line, response_line, unanswered_line
from tests.gateways import until
from tests.store.stores import LIMIT
from tests.stored.batch_place import (
    CHAT,
    DAY,
    HOUR,
    BatchPlace,
    answer,
    batch_place,
    count,
    jsonl,
    line,
)
from tests.stored.stored_rows import alone, limits


async def test_a_deleted_batch_leaves_nothing(here: BatchPlace) -> None:
    batch = await here.create([line("a"), "x"])
    await here.settle()
    deletion = here.batches.delete("alice", batch.id, "openai")
    assert await refused(deletion) == (400, "batch_in_progress")
    await here.answer()
    await here.settle()
    await here.batches.delete("alice", batch.id, "openai")
    assert await here.store.run(count(batches)) == 0
    assert await here.store.run(count(stored_requests)) == 0
    assert (here.kept("results"), here.kept("file")) == ([], [batch.input_file])
    assert await here.store.run(count(files, files.c.deleted_at.is_(None))) == 1


LINES, RESULTS = 4000, 2000
PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.stored.batch_place import batch_place

async def main(does, url, path):
    async with batch_place(url, Path(path)) as here:
        print(does, flush=True)
        if does == "reads":
            await here.settle()
        while await here.answer(100):
            pass

asyncio.run(main(*sys.argv[1:]))
"""


async def killed(here: BatchPlace, does: str, table: Any, rows: int) -> None:
    """Start a process that reads the input or runs lines, and kill it at so many rows."""
    url = here.store.location.url.render_as_string(hide_password=False)
    command = [sys.executable, "-c", PROGRAM, does, url, str(here.folder.location)]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert await child.stdout.readline()
        async with asyncio.timeout(LIMIT):
            while await here.store.run(count(table), write=False) < rows:
                assert child.returncode is None, "it has ended before"
                await asyncio.sleep(0.001)  # it needs the store, too
    finally:
        child.kill()
        await child.wait()


def broken(number: int) -> bool:
    return number % 10 == 3


def lines() -> list[object]:
    return ["{" if broken(n) else line(f"c{n}") for n in range(LINES)]


async def check_whole(here: BatchPlace, batch: Batch) -> None:
    """Check that each line has one row, and each broken one its error line."""
    found = await here.find(batch)
    assert (found.state, found.total) == (BatchState.IN_PROGRESS, LINES)
    assert found.failed == LINES // 10
    assert await here.store.run(count(stored_requests)) == LINES
    waiting = stored_requests.c.state == RequestState.WAITING.value
    assert await here.store.run(count(stored_requests, waiting)) == LINES - LINES // 10
    errors = await here.output(batch, errors=True)
    assert [one["error"]["line"] for one in errors] == [n + 1 for n in range(LINES) if broken(n)]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 1500, 3000])
async def test_a_killed_intake_begins_again_and_doubles_nothing(
    here: BatchPlace, rows: int
) -> None:
    batch = await here.create(lines())
    await killed(here, "reads", stored_requests, rows)
    await here.settle()
    await check_whole(here, batch)


async def test_two_processes_may_read_the_same_input(
    here: BatchPlace, store_url: str, tmp_path: Path
) -> None:
    batch = await here.create(lines())
    async with batch_place(store_url, tmp_path / "kept") as other:
        await asyncio.gather(here.settle(), other.settle())
    await check_whole(here, batch)


async def test_an_input_that_is_gone_fails_the_batch(here: BatchPlace) -> None:
    batch = await here.create([line("a")])
    assert batch.input_file is not None
    here.folder.delete(batch.input_file)
    await here.settle()
    ended = await here.find(batch)
    assert ended.state is BatchState.FAILED
    assert ended.errors is not None
    assert ended.errors[0]["code"] == "file_not_found"


async def ran(here: BatchPlace, lines: int, **more: Any) -> Batch:
    """A batch whose lines have ended, every third with an error of a node."""
    batch = await here.create([line(f"c{n}") for n in range(lines)], **more)
    await here.settle()
    await here.answer(status=lambda row: 502 if (row.number or 0) % 3 == 0 else 200)
    return await here.find(batch)


async def test_of_two_processes_that_end_a_batch_one_has_its_files(
    here: BatchPlace, store_url: str, tmp_path: Path
) -> None:
    batch = await ran(here, 30)
    async with batch_place(store_url, tmp_path / "kept") as other:
        ends = [one.batches.upkeep.end(batch.id) for one in (here, other)]
        found = await asyncio.gather(*ends)
    assert sum(one is not None for one in found) == 1
    ended = await here.find(batch)
    assert (ended.completed, ended.failed) == (20, 10)
    output, errors = await here.output(batch), await here.output(batch, errors=True)
    assert {one["response"]["status_code"] for one in output} == {200}
    assert {one["response"]["status_code"] for one in errors} == {502}
    ids = [one["custom_id"] for one in output + errors]
    assert sorted(ids) == sorted(f"c{n}" for n in range(30))
    assert here.kept("file") == sorted(
        str(name) for name in (ended.input_file, ended.output_file, ended.error_file)
    )
    assert await here.store.run(count(files)) == 3


async def test_a_store_that_refuses_the_end_leaves_no_file(store_url: str, tmp_path: Path) -> None:
    refuses = [True]

    def on_end(_: Connection, __: Batch) -> None:
        if refuses:
            refuses.pop()
            raise StoreLocked("it is locked", "wait")

    async with batch_place(store_url, tmp_path / "kept", on_end=on_end) as here:
        batch = await ran(here, 3)
        with pytest.raises(StoreLocked):
            await here.batches.upkeep.end(batch.id)
        assert here.kept("file") == [batch.input_file]
        assert (await here.find(batch)).state is BatchState.FINALIZING
        await here.settle()
        assert len(await here.output(batch)) == 2


async def test_what_is_old_is_removed(store_url: str, tmp_path: Path) -> None:
    async with batch_place(store_url, tmp_path / "kept", keep=10 * DAY) as here:
        batch = await here.create([line("a"), "x"])
        await here.settle()
        await here.answer()
        await here.results.close(1.0)
        await here.settle()
        here.pass_(10 * DAY + 1)
        assert await here.batches.upkeep.remove_due() == 0  # kept since its deadline
        here.pass_(DAY)
        assert await here.batches.upkeep.remove_due() == 1
        assert await here.store.run(count(batches)) == 0
        assert await here.store.run(count(stored_requests)) == 0
        assert here.kept("results") == []
        assert await here.files.clean(orphans=False) == 3
        assert here.kept("file") == []
        with pytest.raises(Exception, match="No batch found"):
            await here.find(batch)


def make_old(here: BatchPlace, name: str) -> None:
    old = here.time[0] - CLEAN_SECONDS - 1
    os.utime(here.folder.path(name), (old, old))


async def test_old_files_that_no_unfinished_batch_needs_are_removed(here: BatchPlace) -> None:
    ended, runs = await here.create([line("a")]), await here.create([line("a"), line("b")])
    await here.settle()
    last = (runs.id, "b")
    await here.record(row for row in await here.claim() if (row.batch, row.custom_id) != last)
    await here.settle()
    assert (await here.find(ended)).state is BatchState.COMPLETED
    orphan = await asyncio.to_thread(here.folder.open_appended, "results")
    requests = await here.batches.new_requests()
    await here.batches.storage.on_disk(requests.finish)
    for name in here.kept("results") + here.kept("requests"):
        make_old(here, name)
    young = await asyncio.to_thread(here.folder.open_appended, "results")
    young.close()
    os.utime(here.folder.path(young.name), (here.time[0], here.time[0]))
    # Nobody writes it any more but this one, and those of `LineResults`.
    assert await here.batches.upkeep.clean() == 1
    assert (len(here.kept("results")), here.kept("requests")) == (4, [])
    await here.results.close(1.0)
    orphan.close()
    assert await here.batches.upkeep.clean() == 2
    assert len(here.kept("results")) == 2
    assert young.name in here.kept("results")
    assert len(await here.output(runs)) == 1
    assert len(await here.output(ended)) == 1


BOM = b"\xef\xbb\xbf"
BODY = '{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":%s}'


def lines_of(content: bytes, most_lines: int = 1000, line_bytes: int = 2000) -> list[Line]:
    reader = LineReader(
        io.BytesIO(content), CHAT, most_lines=most_lines, line_bytes=line_bytes, rest=lambda: None
    )
    found: list[Line] = []
    while some := reader.read_some():
        found += some
    return found


def only(content: bytes | str | dict[str, Any], **options: Any) -> Line:
    if isinstance(content, dict):
        content = json.dumps(content)
    data = content.encode() if isinstance(content, str) else content
    (found,) = lines_of(data, **options)
    return found


def spec(content: bytes | str | dict[str, Any], **options: Any) -> LineSpec:
    found = only(content, **options)
    assert isinstance(found, LineSpec), found
    return found


def error(content: bytes | str | dict[str, Any], **options: Any) -> LineError:
    found = only(content, **options)
    assert isinstance(found, LineError), found
    return found


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r\n\r\n \t\n", b" \n\n\n"])
@pytest.mark.parametrize("begin", [b"", BOM, BOM + b"\n", b"\n\r\n", b"  "])
def test_marks_empty_lines_and_any_end_make_no_difference(begin: bytes, end: bytes) -> None:
    text = json.dumps(line("a")).encode()
    content = begin + text + end
    found = spec(content)
    assert found.number == 1 + begin.count(b"\n")
    assert (
        content[found.offset : found.offset + found.length]
        == json.dumps(line("a")["body"]).encode()
    )


pieces = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [b"\n", b"\r\n", BOM, b"\xe2\x80\xa8", b" ", b"{", b"x" * 150, b'{"custom_id":"a",']
            + [json.dumps(line(one)).encode() for one in ("a", "b", "ä", "\u2028")]
            + [json.dumps(line("long", more="x" * 200)).encode()]
        ),
    ),
    max_size=20,
)


@given(pieces, st.sampled_from([1, 10, 5000]))
def test_lines_are_those_of_the_file(parts: list[bytes], most: int) -> None:
    content = b"".join(parts)
    found = list(raw_lines(io.BytesIO(content), most))
    expected = content.split(b"\n")
    if not expected[-1]:
        del expected[-1]
    assert [one.number for one in found] == list(range(1, len(expected) + 1))
    for one, text in zip(found, expected, strict=True):
        assert content[one.offset : one.offset + one.length] == text
        assert one.data == (None if len(text) > most else text)


@given(pieces, st.integers(0, 8))
def test_a_file_may_not_have_more_lines_than_the_most(parts: list[bytes], most: int) -> None:
    content = b"".join(parts)
    if len(lines_of(content, line_bytes=200)) > most:
        with pytest.raises(TooManyLines):
            lines_of(content, line_bytes=200, most_lines=most)


@given(pieces)
def test_each_custom_id_has_one_line(parts: list[bytes]) -> None:
    found = lines_of(b"\n".join(parts))
    specs = [one for one in found if isinstance(one, LineSpec)]
    assert len({one.custom_id for one in specs}) == len(specs)
    # A row may have the `custom_id` of its line only if no other has it.
    known = [one.custom_id for one in found if isinstance(one, LineSpec) or one.is_first]
    assert len(set(known)) == len(known)


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"{}{}", "invalid_json_line", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        (b"{" * 1500, "invalid_json_line", None),
        (b'{"x":' + b"[" * 900 + b"]" * 900 + b"}", "missing_required_parameter", "custom_id"),
        (b'{"custom_id": 7}', "invalid_type", "custom_id"),
        (b'{"custom_id": ""}', "missing_required_parameter", "custom_id"),
        (b'{"custom_id": "a\\u0000"}', "invalid_custom_id", "custom_id"),
        (BODY.replace("POST", "GET") % "{}", "invalid_method", "method"),
        (BODY.replace("/v1", "http://x/v1") % "{}", "invalid_url", "url"),
        (BODY % "[]", "invalid_type", "body"),
        (BODY % '{"stream": true}', "streaming_unsupported", "body.stream"),
        (BODY % '{"stream": tru}', "invalid_json_line", None),
    ],
)
def test_a_broken_line_has_an_error_of_its_own(
    content: bytes | str, code: str, param: str | None
) -> None:
    found = error(content)
    assert (found.code, found.param) == (code, param)
    told = content.encode() if isinstance(content, str) else content
    before, itself, after = lines_of(jsonl([line("1")]) + told + b"\n" + jsonl([line("2")]))
    assert isinstance(before, LineSpec)
    assert isinstance(after, LineSpec)
    assert (itself.number, after.number) == (2, 3)


def test_the_first_line_with_a_custom_id_has_it_and_later_ones_get_errors() -> None:
    a, b, c, d = lines_of(jsonl([line("a"), line("b", url="x"), line("a"), line("b")]))
    assert isinstance(a, LineSpec)
    assert isinstance(b, LineError)
    assert b.is_first
    for again in (c, d):
        assert isinstance(again, LineError)
        assert (again.code, again.is_first) == ("duplicate_custom_id", False)


def test_a_line_that_is_too_long_is_an_error_of_its_own() -> None:
    long = line("a", more="x" * 5000)
    first, second = lines_of(jsonl([long, line("b")]))
    assert isinstance(first, LineError)
    assert (first.code, first.custom_id) == ("line_too_long", None)
    assert first.length == len(json.dumps(long))
    assert isinstance(second, LineSpec)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({}, 0),
        ({"max_tokens": -1}, 0),
        ({"max_tokens": "7"}, 0),
        ({"max_tokens": 10**18}, 1_000_000_000),
        ({"max_tokens": 1e300}, 1_000_000_000),
        ({"max_tokens": 7, "n_predict": 12}, 12),
        ({"max_tokens": 7, "n_predict": -1}, 0),
    ],
)
def test_the_longest_answer_is_estimated(fields: dict[str, Any], expected: int) -> None:
    assert spec(line("a", body={"messages": [], **fields})).max_tokens == expected


def test_prompts_that_begin_alike_share_a_number() -> None:
    def prefix(*texts: str, **more: Any) -> int:
        messages = [{"role": "user", "content": text} for text in texts]
        body = {"model": "m", "messages": messages, **more}
        return spec(line("a", body=body), line_bytes=10_000).prefix

    long = "word " * 250
    assert prefix("short") == 0
    assert prefix(long, "one") == prefix(long, "two", temperature=0.5) > 0
    assert prefix("other " + long) != prefix(long)
    assert prefix(long, "one", tools=[{"a": long}]) == prefix("x", tools=[{"a": long}])
    assert prefix(long) < 1 << 63


def test_memory_is_bounded_whatever_the_file_holds(tmp_path: Path) -> None:
    with (tmp_path / "one endless line").open("w+b") as file:
        file.truncate(64 << 20)
        reader = LineReader(file, CHAT, most_lines=9, line_bytes=1 << 20, rest=lambda: None)
        tracemalloc.start()
        (found,) = reader.read_some()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (found.length, isinstance(found, LineError)) == (64 << 20, True)
    assert peak < 4 << 20


BROKEN = LineError(3, 10, 5, "ä", True, "invalid_url", "It does not match.", "url")


def value_of(line: bytes) -> Any:
    """The value of a line, read as Python's clients do: by `str.splitlines`."""
    (text,) = line.decode().splitlines()
    assert line.endswith(b"\n")
    return json.loads(text)


def response(content: bytes, api: str = "openai", status: int = 200) -> Any:
    return value_of(response_line("r1", "c", api, status=status, request_id="q", content=content))


@pytest.mark.parametrize(
    "end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]
)
def test_no_character_divides_a_line(end: str) -> None:
    escaped = json.dumps({"text": f"a{end}b"}).encode()
    assert response(escaped)["response"]["body"] == {"text": f"a{end}b"}
    raw = json.dumps({"text": f"a{end}b"}, ensure_ascii=False).encode()
    assert response(raw)["response"]["body"] == {"text": f"a{end}b"}
    line = response_line("r", f"a{end}b", "openai", status=200, request_id="q", content=b"{}")
    assert value_of(line)["custom_id"] == f"a{end}b"


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
    found = value_of(unanswered_line("r1", "c", "openai", 3, state))
    assert found["custom_id"] == "c"
    assert found["response"] is None
    assert found["error"]["code"] == code
    assert "line" in value_of(unanswered_line("r1", None, "openai", 3, state))["error"]
    found = value_of(unanswered_line("r1", "c", "anthropic", 3, state))
    assert (found["custom_id"], found["result"]["type"]) == ("c", type_)


def test_anthropic_s_errors_are_nested_twice() -> None:
    own = {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}
    found = response(json.dumps(own).encode(), "anthropic", 529)
    assert found["custom_id"] == "c"
    assert found["result"]["type"] == "errored"
    assert found["result"]["error"]["error"] == own["error"]
    assert found["result"]["error"]["request_id"] == "q"
    broken = value_of(broken_line("r1", "anthropic", BROKEN))
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


async def begun(here: BatchPlace, lines: int) -> Batch:
    batch = await here.create([line(f"c{n}") for n in range(lines)])
    await here.settle()
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 700, 1500])
async def test_a_killed_process_leaves_every_result_whole_and_once(
    here: BatchPlace, rows: int
) -> None:
    batch = await begun(here, RESULTS)
    await killed(here, "runs", usage, rows)
    recorded = (await here.find(batch)).completed
    assert rows <= recorded < RESULTS

    def release(connection: Connection) -> int:
        return release_lost(connection, here.folder.id or "", here.process, here.time[0])

    await here.store.run(release)
    assert await here.answer() == RESULTS - recorded
    await here.settle()
    ended = await here.find(batch)
    assert (ended.state, ended.completed) == (BatchState.COMPLETED, RESULTS)
    found = await here.output(batch)
    assert [one["custom_id"] for one in found] == [f"c{n}" for n in range(RESULTS)]
    assert all(one["response"]["body"] == {"answer to": one["custom_id"]} for one in found)
    # Paid once.
    assert await here.store.run(count(usage)) == RESULTS
    assert (ended.completion_tokens, ended.cost) == (5 * RESULTS, RESULTS / 4)


async def test_a_result_that_nobody_wants_any_more_is_not_recorded(here: BatchPlace) -> None:
    batch = await begun(here, 2)
    first, second = await here.claim()
    assert await here.record([first]) == [True]
    await here.batches.cancel(batch.owner, batch.id, batch.api)

    def end(connection: Connection) -> None:
        put_back(connection, here.process.id, [second.id], here.time[0])

    await here.store.run(end)
    assert await here.record([second]) == [False]
    await here.settle()
    ended = await here.find(batch)
    assert (ended.state, ended.completed, ended.cancelled) == (BatchState.CANCELLED, 1, 1)
    assert await here.store.run(count(usage)) == 1
    assert len(await here.output(batch)) == 1


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
    assert (found.completed, found.cost) == (5, 1.25)
    assert await here.store.run(count(usage)) == 5


async def test_a_folder_without_room_delays_intake_results_and_end_and_loses_nothing(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.stored.results.RETRY_SECONDS", 0.01)
    room = [1 << 30]
    options = {"most_bytes": lambda: room[0]}
    async with batch_place(store_url, tmp_path / "kept", folder_options=options) as here:
        batch = await here.create([*(line(f"c{n}") for n in range(40)), "broken"])
        room[0] = 1
        await here.settle()
        paused = await here.find(batch)
        assert (paused.state, paused.pause_reason) == (BatchState.VALIDATING, "storage_full")
        with pytest.raises(FolderFull):
            here.folder.check_room(1)
        with monkeypatch.context() as patched, capture_logs() as told:
            patched.setattr("gateway.stored.batch_registry.RETRY_SECONDS", 0.0)
            for _ in range(3):
                await here.round()
        assert told == []  # once is enough
        room[0] = 1 << 30
        await here.settle()
        begun = await here.find(batch)
        assert (begun.state, begun.paused_at, begun.total) == (BatchState.IN_PROGRESS, None, 41)
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


async def ids(here: BatchPlace, owner: str = "alice") -> list[str]:
    page = await here.files.storage.read(read_files, owner, here.time[0], 100)
    return [file.id for file in page.files]


async def refusal(asked: Any) -> GatewayError:
    with pytest.raises(GatewayError) as error:
        await asked
    return error.value


async def refused(asked: Any) -> tuple[int, str]:
    error = await refusal(asked)
    return error.status, error.code


async def test_an_expired_file_is_gone_at_once_and_its_bytes_soon(
    store_url: str, tmp_path: Path
) -> None:
    async with batch_place(store_url, tmp_path / "kept", keep=10 * DAY) as here:
        long, short = await here.upload(), await here.upload(seconds=3600)
        here.pass_(3600)
        assert await ids(here) == [long]
        assert await refused(here.files.find("alice", short)) == (404, "file_not_found")
        assert await refused(here.files.open_content("alice", short)) == (404, "file_not_found")
        assert len(here.kept()) == 2
        assert await here.files.clean() == 1
        assert (here.kept(), await here.store.run(count(files))) == ([long], 1)
        here.pass_(10 * DAY)
        assert await here.files.clean() == 1
        assert (here.kept(), await here.store.run(count(files))) == ([], 0)


async def test_a_deletion_that_was_cut_short_is_finished_later(
    here: BatchPlace, tmp_path: Path
) -> None:
    id_ = await here.upload()
    here.folder.location.rename(tmp_path / "away")
    await here.files.delete("alice", id_)
    assert await ids(here) == []
    assert await refused(here.files.delete("alice", id_)) == (404, "file_not_found")
    (tmp_path / "away").rename(here.folder.location)
    assert (here.kept(), await here.store.run(count(files))) == ([id_], 1)
    assert await here.files.clean() == 1
    assert (here.kept(), await here.store.run(count(files))) == ([], 0)


async def test_a_file_of_another_host_is_listed_and_not_read(
    store_url: str, tmp_path: Path
) -> None:
    async with (
        batch_place(store_url, tmp_path / "one") as one,
        batch_place(store_url, tmp_path / "two") as two,
    ):
        id_ = await one.upload()
        assert await ids(two) == [id_]
        assert await refused(two.files.open_content("alice", id_)) == (503, "file_elsewhere")
        # Deleted here, removed there.
        await two.files.delete("alice", id_)
        assert await two.files.clean() == 0
        assert one.kept() == [id_]
        assert await one.files.clean() == 1
        assert one.kept() == []


async def test_a_store_that_is_away_is_told_and_nothing_is_lost(here: BatchPlace) -> None:
    id_ = await here.upload()
    async with here.files.uploading("alice", None) as upload:
        await here.files.storage.on_disk(upload.write, b"text")
        await here.store.aclose(LIMIT)
        keeping = here.files.keep(upload, name="a", purpose="batch", seconds=None)
        assert await refused(keeping) == (503, "store_unavailable")
        # Whether it has a row can't be told, so the file stays until that is known.
        assert len(here.kept()) == 2
    assert await refused(here.files.find("alice", id_)) == (503, "store_unavailable")
    assert await refused(here.upload()) == (503, "store_unavailable")


KB = 1000


async def kept(here: BatchPlace, owner: str = "alice") -> int:
    job = partial(kept_by, owner=owner, now=here.time[0])
    return (await here.store.run(job, write=False)).bytes


def on_disk(here: BatchPlace) -> int:
    return sum(path.stat().st_size for path in here.folder.location.iterdir()
               if not path.name.endswith(ID_FILE))  # fmt: skip


async def messages(here: BatchPlace, lines: int, *, owner: str = "alice", **more: Any) -> Batch:
    """A message batch with a body of its own."""
    new = await here.batches.new_requests()
    await here.batches.storage.on_disk(
        new.write, jsonl([line(f"c{n}", url="/v1/messages") for n in range(lines)])
    )
    size = new.size
    name = await here.batches.storage.on_disk(new.finish)
    given = {"owner": owner, "api": "anthropic", "endpoint": "/v1/messages", **more}
    return await here.batches.create(NewBatch(**given, requests=name, requests_bytes=size))


async def test_the_rows_say_what_the_folder_holds_at_every_step(here: BatchPlace) -> None:
    seen = [(await kept(here), on_disk(here))]
    made: list[Any] = []
    for step in (
        here.upload(b"x" * 700, purpose="user_data"),
        messages(here, 3),
        here.create([line("a"), line("b"), "broken"]),
        here.settle(),
        here.answer(2, content=b'"%b"' % (b"x" * 300)),
    ):
        made.append(await step)
        seen.append((await kept(here), on_disk(here)))
    _, of_messages, of_lines, _, _ = made
    assert all(counted == held for counted, held in seen), seen
    assert sorted(seen) == seen
    assert len({counted for counted, _ in seen}) == len(seen)
    assert await kept(here, "bob") == 0
    # After the end results are in files with rows, and of the rest nothing is left.
    while await here.answer(10):
        await here.settle()
    assert {(await here.find(one)).state for one in (of_messages, of_lines)} == {
        BatchState.COMPLETED
    }
    assert here.kept("requests") == []
    await here.results.close(HOUR)
    await here.batches.upkeep.clean()
    assert here.kept("results") == []
    assert await kept(here) == on_disk(here) > 0
    await here.batches.delete("alice", of_messages.id, "anthropic")
    assert await kept(here) == on_disk(here)
    page = await here.files.storage.read(read_files, "alice", here.time[0], 100)
    for file in page.files:
        await here.files.delete("alice", file.id)
    assert (await kept(here), on_disk(here)) == (0, 0)


async def test_a_key_at_its_bound_gets_429_for_everything_and_others_do_not(
    store_url: str, tmp_path: Path
) -> None:
    bounds: dict[str, Any] = {"file_bytes": 2 * KB, "bytes_per_key": 2 * KB}
    async with batch_place(store_url, tmp_path / "kept", **bounds) as here:
        input_file = await here.upload(jsonl([line("a")]))
        await here.upload(b"x" * (2 * KB - await kept(here)), purpose="user_data")
        given: dict[str, Any] = {
            "owner": "alice", "api": "openai", "endpoint": "/v1/chat/completions",
        }  # fmt: skip
        for asked in (
            here.upload(b"x"),
            messages(here, 1),
            here.batches.create(NewBatch(**given, input_file=input_file)),
            here.batches.check_room("alice", 0),
        ):
            error = await refusal(asked)
            assert (error.status, error.code, error.retryable) == (429, "insufficient_quota", False)
            assert "2000 bytes ('batches.bytes_per_key'): delete" in error.message
        assert here.kept("requests") == []
        await here.batches.check_room("bob", 2 * KB)
        await messages(here, 1, owner="bob")


async def test_batches_of_a_full_key_pause_and_lose_nothing_until_there_is_room(
    store_url: str, tmp_path: Path
) -> None:
    bounds: dict[str, Any] = {"file_bytes": 9 * KB, "bytes_per_key": 10 * KB}
    async with batch_place(store_url, tmp_path / "kept", **bounds) as here:
        batch = await here.create([line(f"c{n}") for n in range(4)])
        room = await here.upload(b"x" * 6 * KB, purpose="user_data")
        await here.settle()
        # Its results bring the key to its bound; those that ran meanwhile are recorded.
        for row in await here.claim(3):
            assert await here.record([row], content=b'"%b"' % (b"x" * 2 * KB)) == [True]
            await here.batches.upkeep.round()
        paused = await here.find(batch)
        assert (paused.pause_reason, paused.completed) == ("key_storage_full", 3)
        assert here.batches.upkeep.full_owners == {"alice"}
        assert await kept(here) > 10 * KB
        other = await here.create([line("a")], owner="bob")
        await here.settle()
        assert (await here.find(other)).paused_at is None
        assert await here.answer(9) == 1  # bob's
        # By hand it goes on for a moment only.
        await here.batches.resume("alice", batch.id, "openai")
        await here.batches.upkeep.round()
        assert (await here.find(batch)).pause_reason == "key_storage_full"
        await here.files.delete("alice", room)
        await here.batches.upkeep.round()
        assert (await here.find(batch)).paused_at is None
        assert here.batches.upkeep.full_owners == frozenset()
        assert await here.answer(9) == 1
        await here.settle()
        assert [one["custom_id"] for one in await here.output(batch)] == ["c0", "c1", "c2", "c3"]


async def test_two_processes_together_keep_no_more_than_one_may(
    store_url: str, tmp_path: Path
) -> None:
    bounds: dict[str, Any] = {"file_bytes": KB, "bytes_per_key": KB}
    async with (
        batch_place(store_url, tmp_path / "one", **bounds) as one,
        batch_place(store_url, tmp_path / "two", **bounds) as two,
    ):
        places = (one, two)
        uploads = [here.upload(b"x" * 100) for _ in range(8) for here in places]
        requests = [
            places[n % 2].store.run(
                job(add_background, alone(n, result_length=0), limits(bytes_per_key=KB))
            )
            for n in range(8)
        ]
        ended = await asyncio.gather(*uploads, *requests, return_exceptions=True)
        made = sum(isinstance(one, str) or one is None for one in ended)
        assert made == 10
        assert await kept(one) == await kept(two) == KB
        kept_files = await one.store.run(count(files))
        assert kept_files == len(one.kept("file")) + len(two.kept("file"))


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
