"""Background requests: what they ask of the gateway, their rows in real stores, and their ends."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, update

from gateway.errors import GatewayError
from gateway.http.heads import ANONYMOUS_OWNER
from gateway.store.schema import stored_requests
from gateway.stored import background_requests
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
from gateway.stored.folder import ID_FILE
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
from tests.gateways import Running, running_gateway, until
from tests.known import known
from tests.polling import eventually
from tests.store.stores import opened
from tests.stored.stored_rows import alone, do, limits


def fields(**body: Any) -> Any:
    return read_fields(json.dumps({"model": "m", "input": "hello", **body}).encode())


def test_a_conversation_is_put_before_the_input_within_the_limit() -> None:
    said = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}
    first = body_to_run(fields(), [], 1000)
    before = conversation_of(first, {"status": "completed", "output": [said]})
    items = json.loads(body_to_run(fields(input="go on"), before, 1000))["input"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert items[1] == said
    with pytest.raises(GatewayError) as refused:
        body_to_run(fields(input="go on"), before, 100)
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
        read_options(fields(**wrong))
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
