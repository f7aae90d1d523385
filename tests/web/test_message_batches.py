"""Message batches: every call, every state, and bodies in pieces."""

from __future__ import annotations

import asyncio
import itertools
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from anthropic import AsyncAnthropic
from anthropic.types.messages import MessageBatch
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers.keys import ApiKey
from gateway.errors import GatewayError
from gateway.stored.batch_rows import Batch
from gateway.stored.claims import BatchState
from gateway.web.message_batches import MessageBatchBody, message_batch_object
from tests.each_case import each_case
from tests.emulator.raw_connection import raw_connection
from tests.gateways import Running, until
from tests.polling import eventually
from tests.web.raw_client import answer
from tests.web.two_keys import ALICE, gateway, kept

pytestmark = pytest.mark.usefixtures("hurried")

PATH = "/v1/messages/batches"


def client(running: Running, key: ApiKey = ALICE) -> AsyncAnthropic:
    return AsyncAnthropic(
        base_url=running.url,
        api_key=key.text,
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False, timeout=60.0),
    )


def request(name: str, **changed: Any) -> Any:
    messages = [{"role": "user", "content": f"Say {name}"}]
    params = {"model": "m", "max_tokens": 8, "messages": messages}
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
        # Its body does not show as a file.
        listed = await running.client.get("/v1/files", headers={"x-api-key": ALICE.text})
        assert listed.json()["data"] == []
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
        ends = [(one.custom_id, one.result.type) for one in results]
        assert ends == [("a", "canceled"), ("b", "canceled")]
        gone = await batches.delete(made.id)
        assert (gone.id, gone.type) == (made.id, "message_batch_deleted")
        for asking in (batches.retrieve, batches.cancel, batches.delete, batches.results):
            with pytest.raises(anthropic.NotFoundError, match=f"Message Batch {made.id} not found"):
                await asking(made.id)
        await until(lambda: kept(tmp_path) == [], seen=lambda: kept(tmp_path))
        assert "Say" not in (tmp_path / "gateway.log").read_text()


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


async def test_what_is_wrong_is_told_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    line = b'"requests":[{"custom_id":"a","params":{}}]}'
    async with gateway(tmp_path) as running:
        for content, message in (
            (b"{}", "requests: Field required"),
            (b'{"completion_window":"1s",' + line, "must be a time from 1m to 168h"),
            (b'{"webhook_url":1,' + line, "webhook_url"),
        ):
            refused = await ask(running, "POST", content=content)
            assert reason(refused) == (400, "invalid_request_error")
            assert message in refused.json()["error"]["message"]
            assert kept(tmp_path) == []
        refused = await ask(running, "POST", content=b"x", headers={"content-encoding": "gzip"})
        assert refused.status_code == 415
        assert (await ask(running, "GET")).json()["data"] == []


def head(*fields: str) -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", f"X-Api-Key: {ALICE.text}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def large_requests(first: int, count: int) -> bytes:
    """So many requests of 60 kB each, with a comma behind each."""
    numbers = range(first, first + count)
    one = [json.dumps(request(f"n{number}", system="x" * 60_000)) for number in numbers]
    return "".join(f"{text}," for text in one).encode()


async def test_a_body_too_large_is_refused_at_once_or_at_the_limit(tmp_path: Path) -> None:
    async with gateway(tmp_path, batches={"file_bytes": "4MiB"}) as running:
        async with raw_connection(running.url) as wire:
            await wire.send(head(f"Content-Length: {5 << 20}", "Expect: 100-continue"))
            refused = await answer(wire)
            assert refused.status == 413
            assert b"batches.file_bytes" in refused.body
            assert not any("requests-" in name for name in kept(tmp_path))
        async with raw_connection(running.url) as wire:
            await wire.send(head("Transfer-Encoding: chunked") + b'd\r\n{"requests":[\r\n')
            refusal, sent = asyncio.create_task(answer(wire)), 0
            while not refusal.done():
                assert sent < 1000
                part = large_requests(sent, 1)
                await wire.send(b"%x\r\n%b\r\n" % (len(part), part))
                sent += 1
                await asyncio.sleep(0)
            assert (await refusal).status == 413
        await until(lambda: kept(tmp_path) == [])


@each_case("state", list(BatchState))
@each_case("cancelling", [None, 5.25])
def test_states_have_anthropics_words(state: BatchState, cancelling: float | None) -> None:
    row = Batch(
        id="msgbatch_1", owner="k", api="anthropic", endpoint="/v1/messages", created_at=1.5,
        expires_at=61.5, keep_until=99.0, folder="f",
        state=state, cancelling_at=cancelling, total=5, completed=2, failed=1, expired=1,
        ended_at=9.0 if state.ended else None,
    )  # fmt: skip
    shown = message_batch_object(row, None, None)
    wanted = "ended" if state.ended else "canceling" if cancelling else "in_progress"
    assert shown.processing_status == wanted
    assert shown.request_counts.processing == (0 if state.ended else 1)
    assert shown.created_at == "1970-01-01T00:00:01.500000Z"
    assert (shown.ended_at is None) == (not state.ended)


TEXTS = ["", "a", 'q"\\', "{[", "]}", "ä\u2028\x7f", "\\u0041", "\n\t", "x" * 300, '\\"', "😀"]


def split(*pieces: bytes, most_lines: int = 100, line_bytes: int = 4096) -> list[bytes]:
    written: list[bytes] = []
    body = MessageBatchBody(written.append, most_lines=most_lines, line_bytes=line_bytes)
    for piece in pieces:
        body.feed(piece)
    body.end()
    lines = b"".join(written).splitlines(keepends=True) if written else []
    assert body.count == b"".join(written).count(b"\n")
    return lines


def refused(*pieces: bytes, **bounds: int) -> str:
    with pytest.raises(GatewayError) as found:
        split(*pieces, **bounds)
    assert found.value.status == 400
    return found.value.message


def one(**fields: Any) -> bytes:
    return json.dumps({"requests": [fields]}).encode()


def test_requests_become_lines_of_files() -> None:
    given = b"""
    {"requests" : [ {"custom_id": "a-1", "params": {"max_tokens": 1.50e2,
        "messages": [ {"role": "user", "content": "Hi\\n \\u00e4 {["} ] } },
      {"params":{},"custom_id":"b"}] }
    """
    line = b'{"custom_id":"%b","method":"POST","url":"/v1/messages","body":%b}\n'
    body = b'{"max_tokens":1.50e2,"messages":[{"role":"user","content":"Hi\\n \\u00e4 {["}]}'
    assert split(given) == [line % (b"a-1", body), line % (b"b", b"{}")]


def test_fields_of_ours_are_kept_in_any_order() -> None:
    body = MessageBatchBody(lambda _: None, most_lines=2, line_bytes=100)
    body.feed(b'{"webhook_url":"http://x/\\u00e4","requests":[{"custom_id":"a","params":{}}],')
    body.feed(b'"completion_window":null}')
    body.end()
    assert body.fields == {"webhook_url": "http://x/ä", "completion_window": None}
    assert body.count == 1


VALUES = st.recursive(
    st.sampled_from([*TEXTS, True, None]) | st.integers(-9, 10**12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner),
    max_leaves=12,
)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(one % (len(data) + 1) for one in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.lists(VALUES, min_size=1, max_size=8), st.sampled_from([None, 0, "\t"]), st.booleans(), CUTS
)
def test_any_requests_in_any_cuts_come_out_as_they_went_in(
    values: list[Any], indent: Any, ascii_only: bool, cuts: list[int]
) -> None:
    requests = [
        {"custom_id": f"id_{number}", "params": {"v": value}} for number, value in enumerate(values)
    ]
    text = json.dumps({"requests": requests}, ensure_ascii=ascii_only, indent=indent)
    found = [json.loads(line) for line in split(*cut(text.encode(), cuts), line_bytes=1 << 20)]
    assert [{"custom_id": one["custom_id"], "params": one["body"]} for one in found] == requests


BREAKS = st.lists(st.sampled_from(list(b'{}[]",:\\ 0ant\xff\n')), max_size=2).map(bytes)
PLACES = st.tuples(st.integers(0, 10_000), st.integers(0, 2), BREAKS)


@given(VALUES, st.lists(PLACES, min_size=1, max_size=3), st.lists(CUTS, min_size=1, max_size=4))
def test_broken_bytes_are_refused_where_json_is_and_in_every_cut_alike(
    value: Any, edits: list[tuple[int, int, bytes]], several_cuts: list[list[int]]
) -> None:
    requests = [{"custom_id": f"{number}", "params": {"v": value}} for number in range(3)]
    given = bytearray(json.dumps({"requests": requests}).encode())
    for at, count, put_in in edits:
        given[at % len(given) : at % len(given) + count] = put_in

    def outcome(pieces: list[bytes]) -> list[bytes] | str:
        try:
            return split(*pieces)
        except GatewayError as error:
            return error.message

    whole = outcome([bytes(given)])
    for cuts in several_cuts:
        assert outcome(cut(bytes(given), cuts)) == whole
    if not isinstance(whole, str):
        parsed = msgspec.json.decode(bytes(given))
        assert [msgspec.json.decode(line)["body"] for line in whole] == [
            request["params"] for request in parsed["requests"]
        ]


DEEP = b'{"a":' * 90000 + b"1" + b"}" * 90000


@each_case(
    ("given", "message"),
    [
        (b"", "it ends too early"), (b"[]", "it must be an object"),
        (b'{"requests":[{"custom_id":"a","params":{}}]} x', "something follows its end"),
        (b'{"requests":[{"custom_id":"a","params":{}},]}', "requests.1 can't be read"),
        (b'{"requests":[{"custom_id":"a","params":{}}],}', "a key is expected"),
        (b'{"requests":[{"custom_id":"a","params":{}}] "x":1}', "',' or '}' is expected"),
        (b'{"requests":[{"custom_id":"a","params":{}} {}]}', "',' or ']' is expected"),
        (b'{"requests" [1]}', "':' is expected"), (b'{"requests":[],"requests":[]}', "twice"),
        (b'{"requests":[{"custom_id":"a","params":{"a":"\xff"}}]}', "requests.0 can't be read"),
        (b'{"webhook_url":tru,"requests":[]}', "a field can't be read"),
        (b'{"requests":[]}', "requests: List should have at least 1 item after validation, not 0"),
        (b'{"requests":{}}', "requests: Input should be a valid list"),
        (b'{"requests":[1]}', "requests.0: Expected `object`, got `int`"),
        (b'{"request":[]}', "request: Extra inputs are not permitted"),
        (one(params={}), "requests.0: Object missing required field `custom_id`"),
        (one(custom_id="a\n", params={}), "matching regex"),
        (one(custom_id="", params={}), "matching regex"),
        (one(custom_id="a" * 65, params={}), "matching regex"),
        (one(custom_id="a"), "requests.0: Object missing required field `params`"),
        (one(custom_id="a", params=[]), "requests.0.params: Input should be a valid dictionary"),
        (one(custom_id="a", params={}, x=1), "requests.0: Object contains unknown field `x`"),
        (b'{"requests":[{"custom_id":"dup","params":{}},{"custom_id":"dup","params":{}}]}',
         "requests: custom_id's must be unique within a batch. Duplicate custom_id found: dup"),
        (b'{"requests":[{"custom_id":"a","params":' + DEEP + b"}]}", "requests.0 can't be read"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(given: bytes, message: str) -> None:
    told = refused(given, line_bytes=1 << 20)
    assert message in told
    pieces = [given[at : at + 1] for at in range(len(given))]
    assert refused(*pieces[:1000], given[1000:], line_bytes=1 << 20) == told


def test_what_is_too_long_is_refused_before_it_has_come() -> None:
    assert len(split(one(custom_id="a" * 64, params={}))) == 1
    begun = b'{"requests":[{"custom_id":"a","params":{"x":"'
    assert "requests.0: It is longer than 1000 bytes ('batches.line_bytes')" in refused(
        begun, *[b"x" * 100] * 11, line_bytes=1000
    )
    assert "webhook_url: It is longer" in refused(b'{"webhook_url":"', *[b"x" * 1000] * 5)
    assert "It is longer" in refused(b'{"', *[b"x" * 1000] * 5)
    requests = ",".join(f'{{"custom_id":"{n}","params":{{}}}}' for n in range(4))
    assert "requests: List should have at most 3 items" in refused(
        f'{{"requests":[{requests}]}}'.encode(), most_lines=3
    )
