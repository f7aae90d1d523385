"""`/v1/messages/batches` of a whole gateway: every call, every state, and bad input.

No node is up here, so that no request runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types.messages import MessageBatch

from gateway.access.keys import ApiKey, new_key
from gateway.batches.batch_rows import Batch
from gateway.batches.request_rows import BatchState
from gateway.web.message_batches import message_batch_object
from tests.emulator.raw_connection import raw_connection
from tests.gateways import Running, running_gateway, until
from tests.polling import eventually
from tests.web.raw_client import answer
from tests.web.test_files import kept

pytestmark = pytest.mark.usefixtures("hurried")

DEAD = "http://127.0.0.1:9"
ALICE, BOB = new_key("alice"), new_key("bob")
PATH = "/v1/messages/batches"


@asynccontextmanager
async def gateway(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    keys = [{"id": key.id, "sha256": key.sha256} for key in (ALICE, BOB)]
    async with running_gateway(
        folder, [DEAD], {"keys": keys, **settings}, wait_ready=False
    ) as running:
        yield running


def client(running: Running, key: ApiKey = ALICE) -> AsyncAnthropic:
    return AsyncAnthropic(
        base_url=running.url,
        api_key=key.text,
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False, timeout=60.0),
    )


def request(name: str, **changed: Any) -> Any:
    params = {
        "model": "m",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": f"Say {name}"}],
    }
    return {"custom_id": name, "params": params | changed}


async def reaches(asker: AsyncAnthropic, id_: str, status: str, *, begun: bool = False) -> Any:
    async def look() -> MessageBatch | None:
        batch = await asker.messages.batches.retrieve(id_)
        counted = sum(batch.request_counts.to_dict().values()) > 0  # type: ignore[arg-type]
        return batch if batch.processing_status == status and (counted or not begun) else None

    return await eventually(look)


async def ask(
    running: Running, method: str, path: str = "", key: ApiKey = ALICE, **options: Any
) -> httpx.Response:
    headers = {"x-api-key": key.text} | options.pop("headers", {})
    return await running.client.request(method, PATH + path, headers=headers, **options)


def reason(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    return response.status_code, body["error"]["type"]


async def test_a_batch_is_created_shown_cancelled_read_and_deleted(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        batches = alice.messages.batches
        made = await batches.create(requests=[request("a"), request("b")])
        assert made.id.startswith("msgbatch_")
        assert (made.type, made.processing_status) == ("message_batch", "in_progress")
        counts = made.request_counts
        assert (counts.processing, counts.succeeded, counts.errored) == (2, 0, 0)
        assert made.expires_at - made.created_at == timedelta(hours=24)
        assert (made.ended_at, made.archived_at, made.results_url) == (None, None, None)
        assert made.cancel_initiated_at is None

        await reaches(alice, made.id, "in_progress", begun=True)
        early = await ask(running, "GET", f"/{made.id}/results")
        assert reason(early) == (404, "not_found_error")
        assert f"Message Batch {made.id} has no available results." in early.text
        partial = await ask(running, "GET", f"/{made.id}/results?partial=true")
        assert (partial.status_code, partial.content) == (200, b"")
        with pytest.raises(anthropic.BadRequestError, match="progress batches cannot be deleted"):
            await batches.delete(made.id)

        paused = (await ask(running, "POST", f"/{made.id}/pause")).json()
        assert paused["llama_gateway"]["paused"]["reason"]
        resumed = (await ask(running, "POST", f"/{made.id}/resume")).json()
        assert resumed["llama_gateway"]["paused"] is None

        cancelled = await batches.cancel(made.id)
        assert cancelled.processing_status in {"canceling", "ended"}
        assert cancelled.cancel_initiated_at is not None
        ended = await reaches(alice, made.id, "ended")
        assert ended.request_counts.canceled == 2
        assert ended.ended_at is not None
        assert (await batches.cancel(made.id)).to_dict() == ended.to_dict()
        assert ended.results_url == f"{PATH}/{made.id}/results"
        results = [one async for one in await batches.results(made.id)]
        assert [(one.custom_id, one.result.type) for one in results] == [
            ("a", "canceled"),
            ("b", "canceled"),
        ]
        gone = await batches.delete(made.id)
        assert (gone.id, gone.type) == (made.id, "message_batch_deleted")
        for asking in (batches.retrieve, batches.cancel, batches.delete, batches.results):
            with pytest.raises(anthropic.NotFoundError, match=f"Message Batch {made.id} not found"):
                await asking(made.id)
        await until(lambda: kept(tmp_path) == [], seen=lambda: kept(tmp_path))
        assert "Say" not in (tmp_path / "gateway.log").read_text()


async def test_requests_that_no_node_takes_are_errors_of_their_own(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        made = await alice.messages.batches.create(
            requests=[request("streams", stream=True), request("waits")]
        )
        counted = await reaches(alice, made.id, "in_progress", begun=True)
        assert (counted.request_counts.errored, counted.request_counts.processing) == (1, 1)
        partial = await ask(running, "GET", f"/{made.id}/results?partial=true")
        (line,) = partial.text.splitlines()
        result = json.loads(line)
        assert result["custom_id"] == "streams"
        assert result["result"]["type"] == "errored"
        assert result["result"]["error"]["error"]["type"] == "invalid_request_error"


async def test_a_list_is_read_in_both_directions(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        batches = alice.messages.batches
        made = [(await batches.create(requests=[request("a")])).id for _ in range(7)]
        made.reverse()
        page = await batches.list(limit=3)
        assert ([one.id for one in page.data], page.has_more) == (made[:3], True)
        assert (page.first_id, page.last_id) == (made[0], made[2])
        assert [one.id async for one in batches.list(limit=3)] == made
        before = await batches.list(limit=3, before_id=made[5])
        assert [one.id for one in before.data] == made[2:5]
        backwards = [one.id async for one in batches.list(limit=3, before_id=made[6])]
        assert sorted(backwards) == sorted(made[:6])
        empty = await batches.list(after_id=made[6])
        assert (empty.data, empty.first_id, empty.last_id) == ([], None, None)
        for query in ("limit=1001", "after_id=%00", f"after_id={made[0]}&before_id={made[1]}"):
            assert reason(await ask(running, "GET", f"?{query}")) == (400, "invalid_request_error")


async def test_a_batch_of_another_key_is_not_there(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        made = await alice.messages.batches.create(requests=[request("a")])
        for method, path in (
            *(("GET", path) for path in ("", "/results", "/results?partial=true")),
            *(("POST", path) for path in ("/cancel", "/pause", "/resume")),
            ("DELETE", ""),
        ):
            refused = await ask(running, method, f"/{made.id}{path}", BOB)
            assert reason(refused) == (404, "not_found_error")
            assert refused.json()["error"]["message"] == f"Message Batch {made.id} not found."
        # Nor does its body show as a file, to anybody.
        listed = await running.client.get("/v1/files", headers={"x-api-key": ALICE.text})
        assert listed.json()["data"] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "The request body is not valid JSON: it ends too early"),
        (b"{}", "requests: Field required"),
        (b'{"requests":[]}', "requests: List should have at least 1 item after validation, not 0"),
        (
            b'{"requests":[{"custom_id":"a b","params":{}}]}',
            "requests.0.custom_id: String should match pattern '^[a-zA-Z0-9_-]{1,64}$'",
        ),
        (
            b'{"requests":[{"custom_id":"a","params":{}},{"custom_id":"a","params":{}}]}',
            "requests: custom_id's must be unique within a batch. Duplicate custom_id found: a",
        ),
        (
            b'{"completion_window":"1s","requests":[{"custom_id":"a","params":{}}]}',
            "'completion_window' must be a time from 1m to 168h",
        ),
        (b'{"webhook_url":1,"requests":[{"custom_id":"a","params":{}}]}', "webhook_url"),
    ],
)
async def test_what_is_wrong_is_told_at_once_and_leaves_nothing(
    tmp_path: Path, content: bytes, message: str
) -> None:
    async with gateway(tmp_path) as running:
        refused = await ask(running, "POST", content=content)
        assert reason(refused) == (400, "invalid_request_error")
        assert message in refused.json()["error"]["message"]
        assert kept(tmp_path) == []
        assert (await ask(running, "GET")).json()["data"] == []


async def test_the_same_idempotency_key_makes_one_batch(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        asked, key = {"requests": [request("a")]}, {"idempotency-key": "k"}
        first = await ask(running, "POST", json=asked, headers=key)
        again = await ask(running, "POST", json=asked, headers=key)
        assert again.json()["id"] == first.json()["id"]
        refused = await ask(running, "POST", json={"requests": [request("b")]}, headers=key)
        assert reason(refused) == (422, "invalid_request_error")
        assert refused.headers["x-gateway-reason"] == "idempotency_key_reused"
        assert len(kept(tmp_path)) == 1
        assert len((await ask(running, "GET")).json()["data"]) == 1


async def test_a_key_that_keeps_as_much_as_it_may_is_told_without_being_asked_to_repeat_it(
    tmp_path: Path,
) -> None:
    limits = {"file_bytes": 5_000, "bytes_per_key": 5_000}
    async with (
        gateway(tmp_path, batches=limits) as running,
        client(running) as alice,
        client(running, BOB) as bob,
    ):
        requests = [request("a", metadata={"user_id": "x" * 3_000})]
        asked, key = {"requests": requests}, {"idempotency-key": "k"}
        first = await ask(running, "POST", json=asked, headers=key)
        assert first.status_code == 200
        # Asked again it is that one, whatever is kept.
        again = await ask(running, "POST", json=asked, headers=key)
        assert again.json()["id"] == first.json()["id"]
        before = kept(tmp_path)
        with pytest.raises(anthropic.RateLimitError, match="5000 bytes") as refused:
            await alice.messages.batches.create(requests=requests)
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert refused.value.response.headers["x-gateway-reason"] == "insufficient_quota"
        assert "retry-after" not in refused.value.response.headers
        assert kept(tmp_path) == before
        await bob.messages.batches.create(requests=requests)
        # Its lines have no node here: it ends by a cancellation, and leaves room.
        await alice.messages.batches.cancel(first.json()["id"])
        await reaches(alice, first.json()["id"], "ended")
        await until(lambda: not set(before) & set(kept(tmp_path)))

        async def created() -> str | None:
            # What the key keeps is counted anew some time after the files are gone.
            with contextlib.suppress(anthropic.RateLimitError):
                return (await alice.messages.batches.create(requests=requests)).id
            return None

        assert await eventually(created)


def head(*fields: str) -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", f"X-Api-Key: {ALICE.text}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def test_ten_gigabytes_are_refused_by_their_length_before_a_byte_is_stored(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as running, raw_connection(running.url) as wire:
        await wire.send(head(f"Content-Length: {10 << 30}", "Expect: 100-continue"))
        refused = await answer(wire)
        assert refused.status == 413
        assert b"batches.file_bytes" in refused.body
        assert not any("requests-" in name for name in kept(tmp_path))


async def test_a_chunked_body_is_refused_where_it_exceeds_the_limit(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, batches={"file_bytes": "4MiB"}) as running,
        raw_connection(running.url) as wire,
    ):
        begin = b'{"requests":['
        await wire.send(head("Transfer-Encoding: chunked") + b"%x\r\n%b\r\n" % (len(begin), begin))
        refused = asyncio.create_task(answer(wire))
        sent = 0
        while not refused.done():
            assert sent < 64 << 20
            one = json.dumps(request(f"n{sent}", system="x" * 60_000)).encode() + b","
            await wire.send(b"%x\r\n%b\r\n" % (len(one), one))
            sent += len(one)
            await asyncio.sleep(0)
        assert (await refused).status == 413
        await until(lambda: kept(tmp_path) == [])


async def test_a_client_that_leaves_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    body = json.dumps({"requests": [request(f"n{n}", system="x" * 900) for n in range(2000)]})
    async with gateway(tmp_path) as running:
        async with raw_connection(running.url) as wire:
            await wire.send(head(f"Content-Length: {len(body)}"))
            await wire.send(body.encode()[:1_000_000])
            await until(lambda: kept(tmp_path) != [])
        await until(lambda: kept(tmp_path) == [])
        assert "Exception in ASGI" not in (tmp_path / "gateway.log").read_text()


async def test_bodies_are_received_side_by_side_up_to_a_limit(tmp_path: Path) -> None:
    asked = {"requests": [request("a")]}
    async with gateway(tmp_path) as running:
        async with AsyncExitStack() as stack:
            for _ in range(8):
                wire = await stack.enter_async_context(raw_connection(running.url))
                await wire.send(head("Content-Length: 100000") + b'{"requests":[')
            await until(lambda: len(kept(tmp_path)) == 8)
            refused = await ask(running, "POST", json=asked)
            assert reason(refused) == (429, "rate_limit_error")
            assert (await ask(running, "POST", key=BOB, json=asked)).status_code == 200
        await until(lambda: len(kept(tmp_path)) == 1)
        assert (await ask(running, "POST", json=asked)).status_code == 200


async def test_a_compressed_body_is_415(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        refused = await ask(running, "POST", content=b"x", headers={"content-encoding": "gzip"})
        assert refused.status_code == 415


@pytest.mark.parametrize("state", list(BatchState))
@pytest.mark.parametrize("cancelling", [None, 5.25])
def test_states_have_anthropics_words(state: BatchState, cancelling: float | None) -> None:
    row = Batch(
        "msgbatch_1", "k", "anthropic", "/v1/messages", None, 1.5, 61.5, 99.0, "f",
        state=state, cancelling_at=cancelling, total=5, completed=2, failed=1, expired=1,
        ended_at=9.0 if state.ended else None,
    )  # fmt: skip
    shown = message_batch_object(row, None, None)
    wanted = "ended" if state.ended else "canceling" if cancelling else "in_progress"
    assert shown.processing_status == wanted
    assert shown.request_counts.processing == (0 if state.ended else 1)
    assert shown.created_at == "1970-01-01T00:00:01.500000Z"
    assert (shown.ended_at is None) == (not state.ended)
