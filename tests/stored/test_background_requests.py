"""Rows of background requests, in real stores."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, update

from gateway.errors import GatewayError
from gateway.http.heads import ANONYMOUS_OWNER
from gateway.store.schema import stored_requests
from gateway.stored import background_requests
from gateway.stored.background_requests import (
    ORPHAN_SECONDS,
    DeferredHead,
    add_background,
    decode_result,
    delete_background,
    end_background,
    find_background,
    waiting_owners,
)
from gateway.stored.claims import AskedRow, RequestKind, RequestState, StoredRow, put_back
from gateway.stored.files import kept_by
from gateway.stored.folder import ID_FILE, job
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.polling import eventually
from tests.store.stores import opened
from tests.stored.stored_rows import alone, limits

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
            store.run_now(job(add_background, row(1), most))
        with pytest.raises(GatewayError, match="1 requests of 10 bytes"):
            store.run_now(job(add_background, row(2), limits(waiting_bytes_per_key=15)))
        store.run_now(job(add_background, row(2), most))
        with pytest.raises(GatewayError, match="2 requests of 20 bytes"):
            store.run_now(job(add_background, row(3), most))
        store.run_now(job(add_background, row(3, "k2"), most))
        owners = store.run_now(lambda c: waiting_owners(c, "folder", 5.0))
        assert sorted(owners) == [("k1", KIND), ("k2", KIND)]
        for _ in range(2):
            cancelled = store.run_now(job(end_background, row(1), 5.0, also))
            assert cancelled is not None
            assert cancelled.state is RequestState.CANCELLED
        assert ended == [row(1).id]
        assert store.run_now(job(end_background, row(1, "k2"), 5.0, also)) is None
        for now, there in ((54.0, True), (56.0, False)):
            find = partial(find_background, owner="k1", id_=row(1).id, kind=KIND, now=now)
            found = store.run_now(find)
            assert (found is not None) is there
        for wanted in (row(2), None):
            gone = store.run_now(lambda c: delete_background(c, "k1", row(2).id, KIND, 5.0))
            assert gone == wanted


def test_a_result_is_read_as_it_was_written() -> None:
    head = DeferredHead(200, "content-type: application/json\r\n", "req_1")
    for content in (b"", b'{"a": 1}\n\n', b"\n"):
        assert decode_result(head.before(content)) == (head, content)


DEAD = "http://127.0.0.1:9"


async def test_late_requests_end_and_old_ones_are_removed_with_their_files(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [DEAD], wait_ready=False) as running:
        requests = running.gateway.background.requests
        assert requests is not None
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


BODY = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 40}


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
        requests, ledger = running.gateway.background.requests, running.gateway.ledger
        assert requests is not None
        assert ledger is not None
        # As another process does when the lease is over; its renewal may come in between.
        while node.requests < 2:
            await requests.storage.write(put_back, ledger.own.id, [id_], 0.0)
            with suppress(AssertionError):
                await until(lambda: node.requests == 2, 5.0)
            assert node.busy, "the first run must not end before"
        node.engine.decode_tps = 1e9
        assert (await ended(running, id_))["status"] == "incomplete"
        assert node.requests == 2


async def ended(running: Running, id_: str) -> dict[str, object]:
    async with asyncio.timeout(60):
        while True:
            found: dict[str, object] = (await running.client.get(f"/v1/responses/{id_}")).json()
            if found["status"] not in {"queued", "in_progress"}:
                return found
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("hurried")
async def test_requests_of_a_key_that_keeps_as_much_as_it_may_wait_until_there_is_room(
    tmp_path: Path,
) -> None:
    limits = {
        "file_bytes": 60_000, "bytes_per_key": 60_000, "background_at_once": 1,
    }  # fmt: skip
    ask = {"input": "tell me a story", "max_output_tokens": 100, "background": True}
    node = EmulatedNode(slots=1, decode_tps=1000, answer_tokens=1000)
    async with node, running_gateway(tmp_path, [node.url], {"batches": limits}) as running:
        api, requests = running.client, running.gateway.background.requests
        assert requests is not None

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
