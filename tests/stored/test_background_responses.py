"""Background requests: what they ask, their rows in real stores, their event logs and their runs.

What is in a log whatever a crash has left, and how a run goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import Connection, update

from gateway.api import sse
from gateway.api.json_values import JsonObject
from gateway.api.resuming import named_event
from gateway.app.assembly import Gateway
from gateway.errors import GatewayError
from gateway.http.heads import ANONYMOUS_OWNER
from gateway.store.schema import stored_requests
from gateway.stored import background_requests, response_log
from gateway.stored.background_requests import (
    ORPHAN_SECONDS,
    add_background,
    delete_background,
    end_background,
    find_background,
    waiting_owners,
)
from gateway.stored.claims import AskedRow, RequestKind, RequestState, StoredRow, put_back
from gateway.stored.files import kept_by
from gateway.stored.folder import ID_FILE, DiskThreads, Folder, FolderError
from gateway.stored.response_events import (
    NotRepeated,
    Repetition,
    ResponseEvents,
    queued_response,
)
from gateway.stored.response_log import (
    TERMINAL_TYPES,
    Extent,
    LogBroken,
    LogEnded,
    LogFull,
    ResponseLog,
    ResponseLogs,
    event_data,
    split_events,
)
from gateway.stored.runner import Outcome
from gateway.web.background import (
    MOST_ECHOED_BYTES,
    body_to_run,
    conversation_of,
    echoed_fields,
    read_fields,
    read_options,
)
from tests.each_case import each_case
from tests.emulator import EmulatedNode
from tests.forward.proxy_over_nodes import A_FIRST, proxy_over
from tests.gateways import Running, running_gateway, until
from tests.known import known
from tests.polling import eventually
from tests.servers import start_demo_servers
from tests.store.stores import opened
from tests.stored.stored_rows import alone, do, limits, to_run


def asked_fields(**body: Any) -> Any:
    return read_fields(json.dumps({"model": "m", "input": "hello", **body}).encode())


def test_a_conversation_is_put_before_the_input_within_the_limit() -> None:
    said = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}
    first = body_to_run(asked_fields(), [], 1000)
    before = conversation_of(first, {"status": "completed", "output": [said]})
    items = json.loads(body_to_run(asked_fields(input="go on"), before, 1000))["input"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert items[1] == said
    with pytest.raises(GatewayError) as refused:
        body_to_run(asked_fields(input="go on"), before, 100)
    assert (refused.value.status, refused.value.param) == (413, "previous_response_id")
    for status in ("queued", "in_progress", "failed", "cancelled"):
        with pytest.raises(GatewayError, match="previous response"):
            conversation_of(b'{"input": "x"}', {"status": status, "output": []})


@each_case(
    "wrong",
    [
        {"background": "yes"},
        {"store": 1},
        {"previous_response_id": 5},
        {"previous_response_id": "resp_1", "conversation": "conv_1"},
        {"metadata": {str(n): "x" for n in range(17)}},
        {"metadata": {"a": 1}},
        {"background_options": {"completion_window": "1h"}},
    ],
)
def test_fields_of_a_wrong_form_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(GatewayError) as refused:
        read_options(asked_fields(**wrong))
    assert refused.value.status == 400


def test_a_response_repeats_no_more_than_some_bytes_of_its_request() -> None:
    long = "x" * MOST_ECHOED_BYTES
    fields = read_fields(msgspec.json.encode({"tools": [long], "user": "ann", "other": 1}))
    assert echoed_fields(fields, ("tools", "user")) == {"user": "ann"}


KIND = RequestKind.DEFERRED


def row(number: int, owner: str = "k1") -> StoredRow:
    given: dict[str, Any] = {"kind": KIND, "owner": owner, "length": 10, "folder": "folder"}
    return alone(number, **given, created_at=float(number), keep_until=100.0, deadline=50.0)


def test_requests_are_bounded_cancelled_once_and_deleted(tmp_path: Path) -> None:
    ended: list[str] = []

    def also(_: Connection, found: StoredRow) -> None:
        ended.append(found.id)

    with opened(f"sqlite:///{tmp_path}/gateway.db") as store:
        most = limits(waiting_per_key=2, waiting_bytes_per_key=100)
        for _ in range(2):
            do(store, add_background, row(1), most)
        with pytest.raises(GatewayError, match="1 requests of 10 bytes"):
            do(store, add_background, row(2), limits(waiting_bytes_per_key=15))
        do(store, add_background, row(2), most)
        with pytest.raises(GatewayError, match="2 requests of 20 bytes"):
            do(store, add_background, row(3), most)
        do(store, add_background, row(3, "k2"), most)
        owners = do(store, waiting_owners, "folder", 5.0)
        assert sorted(owners) == [("k1", KIND), ("k2", KIND)]
        for _ in range(2):
            cancelled = known(do(store, end_background, row(1), 5.0, also))
            assert cancelled.state is RequestState.CANCELLED
        assert ended == [row(1).id]
        assert do(store, end_background, row(1, "k2"), 5.0, also) is None
        for now, there in ((54.0, True), (56.0, False)):
            found = do(store, find_background, owner="k1", id_=row(1).id, kind=KIND, now=now)
            assert (found is not None) is there
        for wanted in (row(2), None):
            assert do(store, delete_background, "k1", row(2).id, KIND, 5.0) == wanted


DEAD = "http://127.0.0.1:9"


async def test_late_requests_end_and_old_ones_are_removed_with_their_files(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [DEAD], wait_ready=False) as running:
        requests = known(running.gateway.background.requests)
        asked = AskedRow(RequestKind.RESPONSE, "k1", "/v1/responses", "normal")
        body, given = b'{"input": "x", "stream": true}', {"model": "m"}
        late, old = [
            await requests.add(asked, body, seconds=seconds, keep_seconds=60.0, echoed=given)
            for seconds in (0.0, 3600.0)
        ]
        await requests.clean()
        found = await requests.wait_ended(late, 20.0)
        await requests.wait_ended(old, 20.0)
        assert found.state is RequestState.EXPIRED
        assert (await requests.response(found))["status"] == "failed"
        events = b"".join([piece async for piece in requests.follow(found)])
        assert events.count(b"event: response.failed\n") == 1
        for row in (late, old):
            over = update(stored_requests).where(stored_requests.c.id == row.id)
            over = over.values(keep_until=time.time() - 1)
            await requests.storage.write(Connection.execute, over)
        folder = tmp_path / "state/batches"
        left_over = folder / f"request-{'0' * 32}"
        left_over.write_bytes(b"text")
        before = time.time() - ORPHAN_SECONDS - 10
        os.utime(left_over, (before, before))
        await requests.clean(orphans=True)
        assert [path.name for path in folder.iterdir()] == [ID_FILE]


@pytest.mark.usefixtures("hurried")
async def test_a_response_that_its_process_has_lost_and_claims_anew_has_one_run_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_requests, "RENEW_SECONDS", 0.0)
    ask = {"input": "tell me a story", "max_output_tokens": 60, "background": True}
    node = EmulatedNode(slots=4, decode_tps=4, answer_tokens=1000)
    async with node, running_gateway(tmp_path, [node.url]) as running:
        id_ = (await running.client.post("/v1/responses", json=ask)).json()["id"]
        await until(lambda: node.busy == 1)
        requests = known(running.gateway.background.requests)
        own = known(running.gateway.ledger).own
        # As another process does when the lease is over; its renewal may come in between.
        while node.requests < 2:
            await requests.storage.write(put_back, own.id, [id_], 0.0)
            with suppress(AssertionError):
                await until(lambda: node.requests == 2, 5.0)
            assert node.busy, "the first run must not end before"
        node.engine.decode_tps = 1e9
        assert (await ended(running, id_))["status"] == "incomplete"
        assert node.requests == 2


async def ended(running: Running, id_: str) -> dict[str, object]:
    async def look() -> dict[str, object] | None:
        found: dict[str, object] = (await running.client.get(f"/v1/responses/{id_}")).json()
        return None if found["status"] in {"queued", "in_progress"} else found

    return await eventually(look)


@pytest.mark.usefixtures("hurried")
async def test_requests_of_a_key_that_keeps_as_much_as_it_may_wait_until_there_is_room(
    tmp_path: Path,
) -> None:
    limits = {"file_bytes": 60_000, "bytes_per_key": 60_000, "background_at_once": 1}
    ask = {"input": "tell me a story", "max_output_tokens": 100, "background": True}
    node = EmulatedNode(slots=1, decode_tps=1000, answer_tokens=1000)
    async with node, running_gateway(tmp_path, [node.url], {"batches": limits}) as running:
        api, requests = running.client, known(running.gateway.background.requests)

        async def keeps(size: int) -> bool | None:
            job = partial(kept_by, owner=ANONYMOUS_OWNER, now=time.time())
            return (await requests.storage.read(job)).bytes == size or None

        upload = {"file": ("x", b"x" * 50_000)}
        sent = await api.post("/v1/files", data={"purpose": "user_data"}, files=upload)
        file = sent.json()["id"]
        first, second = [(await api.post("/v1/responses", json=ask)).json()["id"] for _ in range(2)]
        assert (await ended(running, first))["status"] == "incomplete"
        owner = ANONYMOUS_OWNER
        row = await requests.find(owner, first, RequestKind.RESPONSE)
        assert (await requests.wait_ended(row, 20)).state is RequestState.DONE
        folder = requests.storage.folder.location
        logs = sum(path.stat().st_size for path in folder.glob("*-*") if path.name != "folder-id")
        assert logs > 60_000
        await eventually(lambda: keeps(logs))
        refused = await api.post("/v1/responses", json=ask)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
        assert len(list(folder.glob("request-*"))) == 2  # Nothing is left of that one.
        assert (await api.get(f"/v1/responses/{second}")).json()["status"] == "queued"
        before = time.time()
        assert (await api.delete(f"/v1/files/{file}")).status_code == 200
        assert (await ended(running, second))["status"] == "incomplete"
        found = await requests.find(owner, second, RequestKind.RESPONSE)
        assert found.started_at is not None
        assert found.started_at >= before


def a_folder(path: Path) -> Folder:
    folder = Folder(path / "folder", most_bytes=lambda: 1 << 30, spare_bytes=0)
    folder.open()
    return folder


@asynccontextmanager
async def open_logs(path: Path, most: int = 1 << 26) -> AsyncIterator[ResponseLogs]:
    """The logs of a folder, with their loops."""
    threads = DiskThreads()
    logs = ResponseLogs(a_folder(path), threads, lambda: most)
    loop = asyncio.create_task(logs.run())
    try:
        yield logs
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        threads.close()


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[ResponseLogs]:
    async with open_logs(tmp_path) as made:
        yield made


async def logged(logs: ResponseLogs, name: str) -> list[JsonObject]:
    """The data of all events of a log."""
    log = await logs.open(name)
    return [event_data(one) async for part in log.events() for one in split_events(part)]


END: dict[str, Any] = {"type": "response.completed", "response": {}}


def values(count: int, size: int = 3) -> list[dict[str, Any]]:
    return [{"type": "response.x", "d": "a" * size} for _ in range(count)]


def a_log(path: Path) -> tuple[Folder, str]:
    """The folder and the name of a new log."""
    folder = a_folder(path)
    return folder, response_log.create_log(folder)


def events(first: int, count: int) -> bytes:
    kind = {"type": "response.x"}
    numbered = [kind | {"sequence_number": first + at, "d": "a" * 10} for at in range(count)]
    return b"".join(map(named_event, numbered))


def test_whatever_is_torn_off_the_whole_events_before_it_stay(tmp_path: Path) -> None:
    folder, name = a_log(tmp_path)
    whole = events(0, 4)
    ends = [0, *(at + 2 for at in range(len(whole)) if whole.startswith(b"\n\n", at))]
    for size in range(len(whole) + 1):
        folder.path(name).write_bytes(whole[:size])
        found = response_log.scan_log(folder, name)
        assert found.size == max(end for end in ends if end <= size)
        assert found.events == ends.index(found.size)


@pytest.mark.parametrize(
    ("between", "found"),
    [(b"\0" * 5000, 3), (b"junk\n\n", 3), (events(9, 1), 3), (b": note\n\n", 3), (b": run\n", 6)],
)
def test_what_is_no_next_event_or_comment_of_one_ends_the_log(
    tmp_path: Path, between: bytes, found: int
) -> None:
    folder, name = a_log(tmp_path)
    whole = events(0, 3) + between + events(3, 3)
    folder.path(name).write_bytes(whole)
    log = response_log.scan_log(folder, name)
    assert (log.events, log.size) == (found, len(events(0, 3) if found == 3 else whole))


async def a_log_with(logs: ResponseLogs, events: list[dict[str, Any]]) -> ResponseLog:
    """A new log whose events are on the disk."""
    log = await logs.create()
    await log.append(events)
    await log.flush()
    return log


async def test_events_are_numbered_and_found_again(logs: ResponseLogs) -> None:
    log = await logs.create()
    assert response_log.scan_log(logs.folder, log.name) == Extent()
    await log.append(values(2))
    assert (log.extent.events, log.next_number) == (0, 2)
    await log.flush()
    assert log.extent.events == 2
    for some in (values(2000, 100), values(1, 600_000), [END]):
        await log.append(some)
    await log.flush()
    assert log.ended
    assert await log.last_event() == END | {"sequence_number": 2003}
    with pytest.raises(LogEnded):
        await log.append(values(1))
    found = await logged(logs, log.name)
    assert [value["sequence_number"] for value in found] == list(range(2004))
    assert [value["type"] for value in found][-2:] == ["response.x", "response.completed"]
    assert response_log.scan_log(logs.folder, log.name) == log.extent
    assert logs.folder.path(log.name).stat().st_mode & 0o777 == 0o600


async def test_a_log_has_a_limit_which_its_end_may_pass(tmp_path: Path) -> None:
    async with open_logs(tmp_path, most=1000) as logs:
        log = await logs.create()
        await log.append(values(2, 300))
        with pytest.raises(LogFull, match=r"1000 bytes \(limits\.response_bytes\)"):
            await log.append(values(1, 300))
        await log.append([END | {"response": {"text": "a" * 900}}])
        await log.flush()
        assert (log.ended, log.extent.events) == (True, 3)


async def test_pending_bytes_are_bounded(logs: ResponseLogs) -> None:
    log = await logs.create()
    for _ in range(200):
        await log.append(values(1, 4000))
        waiting = log.next_number - log.extent.events
        assert waiting * 4000 <= response_log.MOST_PENDING_BYTES + 8000


async def test_a_disk_that_fails_fails_the_log_and_no_other(logs: ResponseLogs) -> None:
    broken, good = await a_log_with(logs, values(1)), await logs.create()
    with logs.folder.path(broken.name).open("ab") as file:
        file.write(b"of another process")
    await broken.append(values(1))
    await good.append(values(1))
    with pytest.raises(FolderError, match="another size"):
        await broken.flush()
    with pytest.raises(FolderError):
        await broken.append(values(1))
    assert broken.broken
    await good.flush()
    assert good.extent.events == 1


async def test_a_torn_log_is_written_on_behind_its_whole_events(logs: ResponseLogs) -> None:
    name = (await a_log_with(logs, values(3))).name
    await until(lambda: len(logs._open) == 0)
    with logs.folder.path(name).open("ab") as file:
        file.write(events(3, 1)[:-9])  # as a kill or a power cut may leave it
    again = await logs.open(name, to_write=True)
    assert again.next_number == 3
    await again.append([END])
    await again.flush()
    assert [one["sequence_number"] for one in await logged(logs, name)] == [0, 1, 2, 3]


async def test_nobody_waits_for_logs_that_have_closed(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as logs, asyncio.timeout(60):
        early = await logs.create()
        await logs.close()
        late = await logs.create()
        for log in (early, late):
            with pytest.raises(LogBroken):
                await log.append(values(1))
            await log.flush()


async def write(log: ResponseLog, count: int, rng: random.Random) -> None:
    """Write so many events and the end, in groups and with pauses."""
    while log.next_number < count:
        await log.append(values(rng.randint(1, 9), 2 * (log.next_number % 5)))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.02)
    await log.append([END])
    await log.flush()


async def read(logs: ResponseLogs, name: str, after: int = -1) -> bytes:
    return b"".join([piece async for piece in logs.follow(name, after)])


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def numbers(data: bytes) -> list[int]:
    return [event_data(event)["sequence_number"] for event in split_events(data)]


async def test_each_sees_all_events_once_from_any_point(
    logs: ResponseLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "SILENCE_SECONDS", 600.0)  # the machine may stand still
    rng = random.Random(1)
    log = await logs.create()
    files, most = open_files(), 0
    # Fifty wait for what comes last: followers that wait hold no file open.
    readers = {asyncio.create_task(read(logs, log.name, 599)): 599 for _ in range(50)}
    writing = asyncio.create_task(write(log, 600, rng))
    while not writing.done():
        most = max(most, open_files())
        after = rng.choice([-1, 0, rng.randint(-1, 600)])
        readers[asyncio.create_task(read(logs, log.name, after))] = after
        await asyncio.sleep(0.02)
    last = log.next_number - 1
    for after in (-1, 0, last - 1, last, last + 5):
        readers[asyncio.create_task(read(logs, log.name, after))] = after
    whole = logs.folder.path(log.name).read_bytes()
    for reader, after in readers.items():
        data = await reader
        assert numbers(data) == list(range(after + 1, last + 1))
        assert whole.endswith(data)
    assert most <= files + 40
    del log
    await until(lambda: len(logs._open) == 0)


async def test_silence_is_broken_by_a_comment(
    logs: ResponseLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "SILENCE_SECONDS", 0.05)
    log = await logs.create()
    pieces = logs.follow(log.name, 3)
    assert await anext(pieces) == sse.HEARTBEAT
    await log.append(values(4))
    assert await anext(pieces) == sse.HEARTBEAT
    await log.append(values(1))
    while (piece := await anext(pieces)) == sse.HEARTBEAT:
        pass
    assert numbers(piece) == [4]
    await pieces.aclose()


async def test_a_log_of_another_process_is_followed_too(tmp_path: Path) -> None:
    async with open_logs(tmp_path) as ours, open_logs(tmp_path) as theirs:
        log = await a_log_with(theirs, values(1))
        reader = asyncio.create_task(read(ours, log.name))
        await write(log, 200, random.Random(1))
        data = await reader
        assert numbers(data) == list(range(log.next_number))


@pytest.mark.slow
async def test_one_that_reads_nothing_holds_nobody_up(logs: ResponseLogs) -> None:
    log = await logs.create()
    slow = logs.follow(log.name)
    await log.append(values(1))
    first = await anext(slow)
    reader = asyncio.create_task(read(logs, log.name))
    await write(log, 20_000, random.Random(2))
    data = await reader
    rest = [first, *[piece async for piece in slow]]
    assert b"".join(rest) == data
    assert max(map(len, rest)) <= 2 * response_log.READ_BYTES


async def test_followers_that_can_return_are_cut_the_others_stay(logs: ResponseLogs) -> None:
    log, done = await logs.create(), await a_log_with(logs, [*values(1), END])
    await log.append(values(1))
    cut, kept = logs.follow(log.name), logs.follow(log.name, can_return=False)
    for pieces in (cut, kept):
        assert numbers(await anext(pieces)) == [0]
    ahead = logs.follow(log.name, 7)
    waits = [asyncio.ensure_future(anext(pieces)) for pieces in (cut, kept, ahead)]
    await until(lambda: len(log.waiters) == 3)
    logs.cut()
    for wait in (waits[0], waits[2]):
        with pytest.raises(LogBroken):
            await wait
    with pytest.raises(LogBroken):
        await read(logs, log.name, -1)
    assert numbers(await read(logs, done.name, -1)) == [0, 1]
    await log.append([END])
    assert numbers(await waits[1]) == [1]
    await kept.aclose()


def a_run(*deltas: str) -> list[dict[str, Any]]:
    """Events of an item with this text."""
    values = [{"type": "response.output_text.delta", "delta": delta} for delta in deltas]
    text = "".join(deltas)
    added = {"type": "response.output_item.added", "item": {"id": "i"}}
    return [added, *values, {"type": "response.output_item.done", "item": {"text": text}}]


def test_the_same_text_passes_however_it_is_cut_and_no_other() -> None:
    for seen in range(1, 5):
        repetition = Repetition(a_run("one ", "te", "xt")[:seen])
        parts = [repetition.new_part(value) for value in a_run("on", "e t", "ext")]
        assert repetition.new_part(END) == END
        said = "".join(part.get("delta", "") for part in parts if part is not None)
        assert said == "one text".removeprefix("".join(("one ", "te", "xt")[: seen - 1]))
    for seen, other in ((2, "other text"), (9, "one"), (9, "one text more")):
        repetition = Repetition(a_run("one ", "te", "xt")[:seen])
        with pytest.raises(NotRepeated):
            list(map(repetition.new_part, a_run(other)))


RESPONSE = "resp_00000000000aff"


def a_body(**fields: Any) -> dict[str, Any]:
    body = {"input": "say something", "temperature": 0, "max_output_tokens": 40, "stream": True}
    return body | fields


def now() -> float:
    return 200.0


async def begin(logs: ResponseLogs, **fields: Any) -> ResponseEvents:
    response = queued_response(RESPONSE, 100.0, a_body(**fields))
    return await ResponseEvents.create(logs, response, now)


async def run(app: Gateway, events: ResponseEvents, **fields: Any) -> Outcome:
    row = to_run(RESPONSE, "anonymous:127.0.0.1", "/v1/responses")
    return await app.background.runner.run(row, json.dumps(a_body(**fields)).encode(), events)


def text_of(values: Sequence[JsonObject]) -> str:
    return "".join(v["delta"] for v in values if v["type"] == "response.output_text.delta")


def check_whole(values: Sequence[JsonObject], end: str = "response.completed") -> JsonObject:
    """Check all that clients rely on; returns the response at the end."""
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    assert values[0]["type"] == "response.created"
    kinds = [value["type"] for value in values]
    assert [kind for kind in kinds if kind in TERMINAL_TYPES] == [end], values[-1]
    assert kinds[-1] == end
    ids = {value["response"]["id"] for value in values if "response" in value}
    assert ids == {values[0]["response"]["id"]}
    items: dict[int, str] = {}
    for value in values:
        if value["type"] == "response.output_item.added":
            assert value["output_index"] == len(items)
            items[value["output_index"]] = value["item"]["id"]
        elif "item_id" in value:
            assert value["item_id"] == items[value["output_index"]]
        elif "item" in value:
            assert value["item"]["id"] == items[value["output_index"]]
    response: JsonObject = values[-1]["response"]
    assert [item["id"] for item in response["output"]] == list(items.values())
    if end != "response.failed":
        assert response["output"][-1]["content"][-1]["text"] == text_of(values)
    return response


async def node_events() -> bytes:
    """The events of a node, with a function call behind the text."""
    async with EmulatedNode(answer_tokens=5) as node, httpx.AsyncClient(trust_env=False) as client:
        body = {"input": "say something", "temperature": 0, "stream": True}
        stream = (await client.post(f"{node.url}/v1/responses", json=body)).content
    *values, end = map(event_data, split_events(stream))
    call = {"id": "fc_n", "type": "function_call", "name": "f", "arguments": "{}"}
    call["call_id"] = "call_n"
    end["response"]["output"].append(call)
    values += [
        {"type": "response.output_item.added", "item": call | {"arguments": ""}},
        {"type": "response.function_call_arguments.delta", "item_id": "fc_n", "delta": "{}"},
        {"type": "response.output_item.done", "item": call},
    ]
    return b"".join(map(named_event, [*values, end]))


async def test_events_get_our_numbers_and_ids(logs: ResponseLogs) -> None:
    events = await begin(logs)
    stream = await node_events()
    await events.write(stream)
    await events.close()
    values = await logged(logs, events.name)
    response: dict[str, Any] = values[-1]["response"]
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    assert values[-1]["type"] == "response.completed"
    assert response["usage"]["output_tokens"] == 5
    kinds = [value["type"].removeprefix("response.") for value in values[:4]]
    assert kinds == ["created", "queued", "in_progress", "output_item.added"]
    assert [values[n]["response"]["status"] for n in range(3)] == [
        "queued", "queued", "in_progress",
    ]  # fmt: skip
    call = response["output"][1]
    assert call["id"] == "fc_00000000000aff0001"
    assert call["call_id"] == "call_00000000000aff0001"
    for value in map(event_data, split_events(stream)):
        assert value.get("item_id", "of a node") not in json.dumps(values)


@pytest.mark.parametrize("seed", range(20))
async def test_any_cut_of_the_bytes_gives_the_same_log(logs: ResponseLogs, seed: int) -> None:
    rng = random.Random(seed)
    whole = await node_events()
    pieces = list(sse.split(whole))
    found = []
    for cuts in (0, rng.randrange(1, len(pieces))):
        events = await begin(logs)
        at = sorted(rng.sample(range(1, len(pieces)), cuts))
        for start, end in zip([0, *at], [*at, len(pieces)], strict=True):
            await events.write(b"".join(pieces[start:end]))
            if rng.random() < 0.1:
                await events._log.flush()
        await events.close()
        found.append(logs.folder.path(events.name).read_bytes())
    assert found[0] == found[1]


async def test_a_cancelled_response_ends_as_failed_with_what_it_has(logs: ResponseLogs) -> None:
    events = await begin(logs)
    await events.write(b"".join(list(sse.split(await node_events()))[:7]))
    await events.cancel()
    values = await logged(logs, events.name)
    response = check_whole(values, "response.failed")
    assert (response["status"], response["error"]) == ("cancelled", None)
    assert response["output"][0]["content"][0]["text"] == text_of(values) != ""
    assert await events.response() == response
    await events.close()


async def test_of_two_that_end_a_response_that_never_ran_one_is_first(logs: ResponseLogs) -> None:
    first = await begin(logs)
    name = first.name
    assert ((await first.response())["status"], (await first.response())["output"]) == (
        "queued", [],
    )  # fmt: skip
    await first.close()
    both = [await ResponseEvents.reopen(logs, name, now) for _ in range(2)]
    assert [events.begun for events in both] == [None, None]
    ends = [events.fail("server_error", "an end") for events in both]
    await asyncio.gather(*ends)
    for events in both:
        await events.close()
    kinds = [value["type"] for value in await logged(logs, name)]
    assert kinds == ["response.created", "response.queued", "response.failed"]


async def test_an_error_event_becomes_a_failed_response(tmp_path: Path) -> None:
    node, fields = EmulatedNode(), {"tools": [{"type": "function", "name": "f"}]}
    async with proxy_over(tmp_path, node) as proxy, open_logs(tmp_path) as logs:
        events = await begin(logs, **fields)
        node.faults.next("reset", after_events=8)
        outcome = await run(proxy.app, events, **fields)
        assert outcome.failed_on_nodes
        assert not events.ended
        await events.finish(outcome.error_code, outcome.content)
        await events.close()
        values = await logged(logs, events.name)
        response = check_whole(values, "response.failed")
        assert (response["status"], response["error"]["code"]) == ("failed", "node_failed")
        assert all("error" not in value for value in values)


async def uninterrupted(
    app: Gateway, logs: ResponseLogs, **body: Any
) -> tuple[list[JsonObject], Outcome]:
    """The events of a run, and what it ended with."""
    events = await begin(logs, **body)
    outcome = await run(app, events, **body)
    await events.close()
    return await logged(logs, events.name), outcome


async def gone_on(
    app: Gateway, logs: ResponseLogs, cut: int, **body: Any
) -> tuple[list[JsonObject], Outcome]:
    """The same of a run whose process is gone after so many tokens; the next one goes on."""
    events = await begin(logs, **body)
    await cut_run(app, events, cut, **body)
    events = await ResponseEvents.reopen(logs, events.name, now)
    assert events.begun is not None
    outcome = await run(app, events, **body)
    await events.finish(outcome.error_code, outcome.content)
    await events.close()
    return await logged(logs, events.name), outcome


async def cut_run(app: Gateway, events: ResponseEvents, tokens: int, **body: Any) -> None:
    """Run it, and end the run after so many tokens as the end of the process does."""
    stopped, written, seen = asyncio.Event(), events.write, 0

    async def write(events: bytes) -> None:
        nonlocal seen
        for event in sse.split(events):
            if not stopped.is_set():
                await written(event)
                seen += b".delta\n" in event
                if seen >= tokens:
                    stopped.set()

    events.write = write  # type: ignore[method-assign]
    running = asyncio.create_task(run(app, events, **body))
    await stopped.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await events.close()


TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


@pytest.mark.parametrize(
    ("cut", "body"), [(1, {}), (4, {}), (9, {}), (25, {}), (7, {"tools": TOOLS})]
)
async def test_a_lost_run_goes_on_where_it_was_or_is_run_anew_to_the_same_text(
    tmp_path: Path, cut: int, body: dict[str, Any]
) -> None:
    """What no node can continue, as with tools, is run anew."""
    nodes = (EmulatedNode(), EmulatedNode())
    async with (
        proxy_over(tmp_path, *nodes, nodes=A_FIRST) as proxy,
        open_logs(tmp_path) as logs,
    ):
        expected, outcome = await uninterrupted(proxy.app, logs, **body)
        values, again = await gone_on(proxy.app, logs, cut, **body)
        response, first = check_whole(values), expected[-1]["response"]
        assert text_of(values) == text_of(expected)
        for name in ("input_tokens", "output_tokens", "total_tokens"):
            assert response["usage"][name] == first["usage"][name]
        assert response["model"] == first["model"] == "demo"
        assert again.usage is not None
        assert outcome.record.completion_tokens == again.record.completion_tokens
        assert outcome.record.prompt_tokens == again.record.prompt_tokens


async def test_what_may_come_out_otherwise_fails(tmp_path: Path) -> None:
    async with proxy_over(tmp_path, EmulatedNode()) as proxy, open_logs(tmp_path) as logs:
        values, outcome = await gone_on(proxy.app, logs, 7, tools=TOOLS, temperature=1)
        assert outcome.error_code == "response_interrupted"
        response = check_whole(values, "response.failed")
        assert response["error"]["code"] == "response_interrupted"
        assert response["output"][0]["content"][0]["text"] == text_of(values) != ""


STORY = {
    "input": [{"role": "user", "content": "tell me a story"}], "instructions": "be long",
    "max_output_tokens": 300, "temperature": 0, "seed": 7, "ignore_eos": True,
}  # fmt: skip


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(600)
async def test_a_real_response_goes_on_from_its_log(tmp_path: Path) -> None:
    settings = {"health": {"interval": 0.5}}
    async with (
        start_demo_servers(2, slots=1, context=4096, extra=("--exact",)) as urls,
        running_gateway(tmp_path, urls, settings) as running,
        open_logs(tmp_path) as logs,
    ):
        expected, first = await uninterrupted(running.gateway, logs, **STORY)
        usage = check_whole(expected, "response.incomplete")["usage"]
        for cut in (1, 2, 7, 30, 101, 222, 299):
            values, again = await gone_on(running.gateway, logs, cut, **STORY)
            response = check_whole(values, "response.incomplete")
            assert text_of(values) == text_of(expected), f"cut after {cut} tokens"
            assert response["usage"]["input_tokens"] == usage["input_tokens"]
            assert response["usage"]["output_tokens"] == usage["output_tokens"] == 300
            assert again.record.completion_tokens == first.record.completion_tokens == 300
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
