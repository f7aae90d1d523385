"""Files: every call, bad input, forms in pieces, and stored bytes as a response."""

from __future__ import annotations

import asyncio
import itertools
import stat
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.stored.folder import ID_FILE
from gateway.web.files import UNNAMED, UploadForm
from tests.each_case import each_case
from tests.emulator.raw_connection import raw_connection
from tests.gateway_processes import serving
from tests.gateways import Running, running_gateway, until
from tests.web.raw_client import answer
from tests.web.two_keys import ALICE, DEAD, KEYS, client, gateway, kept, reason, two_callers

pytestmark = pytest.mark.usefixtures("hurried")

LINES = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
FORM = "multipart/form-data; boundary=XX"
CRLF, END = b"\r\n", b"--XX--\r\n"


def a_part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + CRLF


def form(content: bytes, *, purpose: str = "batch") -> bytes:
    file = a_part("file", content, '; filename="a.jsonl"')
    return a_part("purpose", purpose.encode()) + file + END


def head(*fields: str) -> bytes:
    lines = [
        "POST /v1/files HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {ALICE.text}",
        f"Content-Type: {FORM}",
        *fields,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def post(running: Running, body: bytes, **headers: str) -> httpx.Response:
    given = {"authorization": f"Bearer {ALICE.text}", "content-type": FORM, **headers}
    return await running.client.post("/v1/files", content=body, headers=given)


async def test_the_official_client_uploads_reads_lists_and_deletes(tmp_path: Path) -> None:
    content = LINES * 20_000  # 1.6 MB
    async with gateway(tmp_path) as running, client(running) as alice:
        made = await alice.files.create(file=("Zeilen ä.jsonl", content), purpose="batch")
        assert (made.object, made.purpose, made.bytes) == ("file", "batch", len(content))
        assert (made.filename, made.status) == ("Zeilen ä.jsonl", "processed")
        assert made.expires_at == made.created_at + 30 * 86400
        assert await alice.files.retrieve(made.id) == made
        read = await alice.files.content(made.id)
        assert read.content == content
        told = read.response.headers
        assert told["content-type"] == "application/octet-stream"
        assert told["content-disposition"] == "attachment; filename*=UTF-8''Zeilen%20%C3%A4.jsonl"
        assert told["x-content-type-options"] == "nosniff"
        url, key = f"/v1/files/{made.id}/content", {"authorization": f"Bearer {ALICE.text}"}
        asked = await running.client.head(url, headers=key)
        assert (asked.status_code, asked.headers["content-length"]) == (200, str(len(content)))
        assert [one.id async for one in alice.files.list()] == [made.id]
        path = tmp_path / "state/batches" / made.id
        assert path.read_bytes() == content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        gone = await alice.files.delete(made.id)
        assert (gone.id, gone.object, gone.deleted) == (made.id, "file", True)
        assert kept(tmp_path) == []
        for ask in (alice.files.retrieve, alice.files.content, alice.files.delete):
            with pytest.raises(openai.NotFoundError, match="There is no file"):
                await ask(made.id)
        log = (tmp_path / "gateway.log").read_text()
    assert "custom_id" not in log


async def test_a_list_is_read_page_by_page_in_both_orders_and_by_purpose(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        made = []
        for number in range(7):
            purpose: Any = "batch" if number % 2 else "user_data"
            file = await alice.files.create(file=(f"{number}", b"x"), purpose=purpose)
            made.append(file.id)
        page = await alice.files.list(limit=3)
        assert ([one.id for one in page.data], page.has_more) == (made[:3:-1], True)
        assert [one.id async for one in alice.files.list(limit=3)] == made[::-1]
        assert [one.id async for one in alice.files.list(limit=2, order="asc")] == made
        batch = [one.id async for one in alice.files.list(purpose="batch", order="asc")]
        assert batch == made[1::2]
        # A page goes on behind a file that has been deleted meanwhile.
        await alice.files.delete(made[4])
        rest = await alice.files.list(limit=3, after=made[4])
        assert [one.id for one in rest.data] == made[3:0:-1]
        for wrong in ({"limit": 0}, {"limit": 10001}, {"order": "up"}, {"after": "x"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await alice.files.list(**wrong)


async def test_an_upload_may_ask_to_expire_earlier_but_not_later(tmp_path: Path) -> None:
    async with gateway(tmp_path, batches={"keep": "2h"}) as running, client(running) as alice:

        async def create(seconds: int) -> Any:
            after: Any = {"anchor": "created_at", "seconds": seconds}
            upload = alice.files.create(file=("a", b"x"), purpose="batch", expires_after=after)
            return await upload

        for seconds, wanted in ((3600, 3600), (86400, 7200)):
            file = await create(seconds)
            assert file.expires_at == file.created_at + wanted
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await create(5)
        assert len(kept(tmp_path)) == 2


async def test_local_callers_without_a_key_own_files_together(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [DEAD], wait_ready=False) as running:
        async with client(running, None) as anybody:
            made = await anybody.files.create(file=("a", LINES), purpose="user_data")
            assert (await anybody.files.content(made.id)).content == LINES
        # Not through a proxy, not from a page of another origin, and not by a name of its own.
        for headers, wanted in (
            ({"x-forwarded-for": "10.1.2.3"}, (401, "invalid_api_key")),
            ({"host": "evil.example"}, (403, "host_not_allowed")),
        ):
            asked = await running.client.get(f"/v1/files/{made.id}", headers=headers)
            assert reason(asked) == wanted
        foreign = {"origin": "https://evil.example"}
        deleted = await running.client.delete(f"/v1/files/{made.id}", headers=foreign)
        assert reason(deleted) == (403, "origin_not_allowed")
        posted = await running.client.post(
            "/v1/files", content=form(b"x"), headers={"content-type": FORM, **foreign}
        )
        assert reason(posted) == (403, "origin_not_allowed")
        assert kept(tmp_path) == [made.id]


async def test_without_a_store_nothing_is_kept_for_later(tmp_path: Path) -> None:
    async with gateway(tmp_path, store={"url": "off"}) as running:
        uploaded = await post(running, form(LINES))
        assert reason(uploaded) == (501, "not_supported")
        key = {"authorization": f"Bearer {ALICE.text}"}
        asked = {"model": "demo", "input": "x", "background": True}
        for path in ("/v1/batches", "/v1/responses"):
            refused = await running.client.post(path, json=asked, headers=key)
            assert reason(refused) == (501, "not_supported")


async def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wrong: list[tuple[bytes, str | None]] = [
        (form(b"x", purpose="fine-tune"), "purpose"),
        (form(b""), "file"),
        (form(b"x").replace(b'"purpose"', b'"other"'), "purpose"),
        (form(b"x")[:-8], None),
    ]
    async with gateway(tmp_path) as running:
        for body, param in wrong:
            response = await post(running, body)
            assert reason(response) == (400, "invalid_request"), body
            assert response.json()["error"]["param"] == param, body
            assert kept(tmp_path) == []
        for headers in ({"content-type": "application/json"}, {"content-encoding": "gzip"}):
            response = await post(running, form(b"x"), **headers)
            assert reason(response) == (415, "unsupported_media_type")
        for kind in ("", "; boundary=", f"; boundary={'x' * 71}"):
            response = await post(
                running, form(b"x"), **{"content-type": f"multipart/form-data{kind}"}
            )
            assert reason(response) == (400, "invalid_request")
        quoted = 'Multipart/Form-Data; charset=utf-8; boundary="XX"'
        assert (await post(running, form(b"x"), **{"content-type": quoted})).status_code == 200


async def test_ten_gigabytes_are_refused_before_a_byte_is_stored(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, raw_connection(running.url) as wire:
        await wire.send(head(f"Content-Length: {10 << 30}", "Expect: 100-continue"))
        refused = await answer(wire)
        assert (refused.status, refused.code) == (413, "request_too_large")
        assert b"batches.file_bytes" in refused.body
        # While the gateway starts, the folder has its own id in a temporary file.
        assert not any("file-" in name for name in kept(tmp_path))


@pytest.mark.parametrize("chunk", [1 << 16, 10 << 30], ids=["small chunks", "one of 10 GiB"])
async def test_a_chunked_upload_is_refused_at_the_limit(tmp_path: Path, chunk: int) -> None:
    limit = {"file_bytes": "4MiB"}
    async with gateway(tmp_path, batches=limit) as running, raw_connection(running.url) as wire:
        begin = form(b"x").partition(b"x\r\n")[0]
        await wire.send(head("Transfer-Encoding: chunked") + b"%x\r\n%b\r\n" % (len(begin), begin))
        refused, sent = asyncio.create_task(answer(wire)), 0
        while not refused.done():
            assert sent < 64 << 20
            # The end of the first chunk, or of the large one, is in what follows.
            await wire.send(b"%x\r\n" % chunk if sent % chunk == 0 else b"")
            await wire.send(bytes(1 << 16) + (b"\r\n" if chunk == 1 << 16 else b""))
            sent += 1 << 16
            await asyncio.sleep(0)
        response = await refused
        assert (response.status, response.code) == (413, "request_too_large")
        await until(lambda: kept(tmp_path) == [])


async def test_a_folder_that_is_full_takes_no_more(tmp_path: Path) -> None:
    limits = {"folder_bytes": 3_000_000, "file_bytes": 2_000_000}
    async with gateway(tmp_path, batches=limits) as running, client(running) as alice:
        first = await alice.files.create(file=("a", b"x" * 1_900_000), purpose="batch")
        with pytest.raises(openai.InternalServerError) as refused:
            await alice.files.create(file=("a", b"x" * 1_900_000), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (507, "storage_full")
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert len(kept(tmp_path)) == 1
        log = tmp_path / "gateway.log"
        await until(lambda: "raise batches.folder_bytes" in log.read_text())
        storage = running.gateway.storage()
        assert storage.is_full
        assert "raise batches.folder_bytes" in str(storage.error)
        await alice.files.delete(first.id)
        await until(lambda: running.gateway.storage().error is None)


async def test_a_client_that_leaves_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    body = form(bytes(3_000_000))
    async with gateway(tmp_path) as running:
        async with raw_connection(running.url) as wire:
            await wire.send(head(f"Content-Length: {len(body)}"))
            await wire.send(body[:2_000_000])
            await until(lambda: kept(tmp_path) != [])
        await until(lambda: kept(tmp_path) == [])
        assert "Exception in ASGI" not in (tmp_path / "gateway.log").read_text()


async def test_a_fast_sender_is_held_back_and_not_kept_in_memory(tmp_path: Path) -> None:
    """The folder's only disk thread is busy: what is sent meanwhile waits at the client."""
    async with gateway(tmp_path) as running, raw_connection(running.url) as wire:
        files = running.gateway.background.files
        assert files is not None
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        def busy() -> None:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(60)

        body = form(bytes(64 << 20))
        await wire.send(head(f"Content-Length: {len(body)}"))
        await wire.send(body[: 1 << 20])
        await until(lambda: kept(tmp_path) != [])
        blocked = [asyncio.create_task(files.storage.on_disk(busy)) for _ in range(8)]
        wire.writer.write(body[1 << 20 :])
        transport = wire.writer.transport
        # What the kernel and the gateway do not take stays with the sender.
        await until(lambda: transport.get_write_buffer_size() < 63 << 20)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert transport.get_write_buffer_size() > 32 << 20
        release.set()
        await asyncio.gather(*blocked)
        done = await answer(wire)
        assert done.status == 200
        assert kept(tmp_path)[0].startswith("file-")


async def test_uploads_run_side_by_side_up_to_a_limit(tmp_path: Path) -> None:
    async with two_callers(tmp_path) as (running, alice, bob):
        started = head("Content-Length: 100000") + form(b"x")[:150]
        async with AsyncExitStack() as stack:
            for _ in range(8):
                wire = await stack.enter_async_context(raw_connection(running.url))
                await wire.send(started)
            await until(lambda: len(kept(tmp_path)) == 8)
            with pytest.raises(openai.RateLimitError, match="uploads") as refused:
                await alice.files.create(file=("a", b"x"), purpose="batch")
            assert refused.value.code == "queue_full"
            await bob.files.create(file=("a", b"x"), purpose="batch")
        await until(lambda: len(kept(tmp_path)) == 1)
        await alice.files.create(file=("a", b"x"), purpose="batch")


def parsed(body: bytes, cuts: list[int] | None = None) -> tuple[UploadForm, bytes]:
    """Feed the body cut at these places; returns the form and the file's bytes."""
    file = bytearray()

    def write(data: bytes) -> None:
        file.extend(data)

    form = UploadForm(b"XX", write)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts or ())})
    for start, end in itertools.pairwise(places):
        form.feed(body[start:end])
    form.end()
    return form, bytes(file)


# Bytes that look like boundaries, and others.
NASTY = st.lists(
    st.sampled_from([b"\r", b"\n", b"-", b"--XX", b"\r\n--X", b"\r\n--", b"XX", b"a", b"\0"]),
    max_size=30,
).map(b"".join)


@given(NASTY, st.lists(st.integers(0, 10_000), max_size=20))
def test_the_file_is_read_alike_however_it_is_cut(content: bytes, cuts: list[int]) -> None:
    if b"\r\n--XX" in CRLF + content:
        return  # No client chooses a boundary that is in the file.
    body = a_part("purpose", b"batch") + a_part("file", content, '; filename="f"') + END
    form, file = parsed(body, cuts)
    assert file == content
    assert (form.values, form.file_name) == ({"purpose": "batch"}, "f")


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_what_mime_allows_about_boundaries_is_read(cuts: list[int]) -> None:
    plain = a_part("purpose", b"batch") + a_part("file", b"\r\n-\r\n", '; filename="f"') + END
    for body in (
        b"text before\r\nthat nobody reads\r\n" + plain,
        CRLF + plain,
        plain.replace(b"--XX\r", b"--XX \t\r"),
        plain.replace(b"; ", b";\r\n ").replace(b"Content-D", b"CONTENT-D"),
        plain.replace(b'name="purpose"', b"name=purpose"),
        plain.replace(b'name="file"; filename="f"', b'FileName=f; name="file"'),
        plain.removesuffix(CRLF) + b" \r\ntext behind\r\n--XX\r\n",
        plain.removesuffix(CRLF),
    ):
        form, file = parsed(body, cuts)
        assert (file, form.values) == (b"\r\n-\r\n", {"purpose": "batch"}), body
        assert form.file_name == "f"
    form, file = parsed(plain.replace(b"\r\n\r\nbatch", b"\r\n"), cuts)  # a part without a body
    assert (file, form.values) == (b"\r\n-\r\n", {"purpose": ""})


@given(st.binary(max_size=300), st.lists(st.integers(0, 10_000), max_size=5))
def test_nothing_but_the_gateways_errors_comes_of_any_bytes(body: bytes, cuts: list[int]) -> None:
    for begin in (b"", b"--XX\r\n", a_part("file", b"x")):
        try:
            parsed(begin + body, cuts)
        except GatewayError as error:
            assert error.status == 400  # noqa: PT017


@each_case(
    ("given_name", "kept"),
    [
        ("../../etc/passwd", "passwd"), ("C:\\dir\\a.txt", "a.txt"), ("Zeilen ä", "Zeilen ä"),
        ("a\tb\x7f.txt", "ab.txt"), ("", UNNAMED), ("..", ".."), ("n" * 300, "n" * 255),
    ],
)  # fmt: skip
def test_a_files_name_is_the_end_of_a_path_that_can_be_shown(given_name: str, kept: str) -> None:
    body = a_part("file", b"x", f'; filename="{given_name}"') + END
    assert parsed(body)[0].file_name == kept


@each_case(
    "body",
    [
        b"", b"XX\r\n", a_part("file", b"x"), a_part("purpose", b"batch") + END,
        a_part("file", b"x") + a_part("file", b"y") + END,
        a_part("purpose", b"a") + a_part("purpose", b"b") + a_part("file", b"x") + END,
        a_part("purpose", b"a" * 4097) + a_part("file", b"x") + END,
        b"".join(a_part(f"f{number}", b"") for number in range(65)) + a_part("file", b"x") + END,
        b"--XX\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END,
        a_part("file", b"x").replace(b"form-data", b"attachment") + END,
        a_part("file", b"x").replace(b"XX\r\n", b"XX\r\nContent-Transfer-Encoding: x\r\n") + END,
        b"--XX\r\n" + b"a: b\r\n" * 900 + b"\r\nx\r\n" + END,
        b"text before" + a_part("file", b"x") + END,
        a_part("file", b"x").replace(b"XX\r", b"XX" + b" " * 2000 + b"\r") + END,
        a_part("file", b"x").replace(b"XX\r", b"XX-\r") + END,
    ],
)  # fmt: skip
def test_a_form_that_is_wrong_or_too_large_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        parsed(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")


@pytest.mark.slow
async def test_after_a_kill_what_was_kept_is_there_and_no_more(tmp_path: Path) -> None:
    body, small = form(bytes(3_000_000)), form(b"small")
    nodes = [{"name": "a", "url": DEAD}]
    settings = {"keys": KEYS, "batches": {"folder": str(tmp_path / "state/batches")}}
    async with (
        serving(tmp_path, nodes, settings=settings) as line,
        raw_connection(line.url) as wire,
        raw_connection(line.url) as other,
    ):
        await other.send(head(f"Content-Length: {len(small)}") + small)
        assert (await answer(other)).status == 200
        (made,) = kept(tmp_path)
        await wire.send(head(f"Content-Length: {len(body)}"))
        await wire.send(body[:2_000_000])
        await until(lambda: len(kept(tmp_path)) == 2)
        await line.kill()
    assert len(kept(tmp_path)) == 2, "the kill came in the middle"
    async with (
        serving(tmp_path, nodes, settings=settings) as line,
        raw_connection(line.url) as wire,
    ):
        await until(lambda: kept(tmp_path) == [made])
        assert (tmp_path / "state/batches" / ID_FILE).is_file()
        ask = head().replace(b"POST /v1/files ", f"GET /v1/files/{made}/content ".encode())
        await wire.send(ask)
        content = await answer(wire)
        assert (content.status, content.body) == (200, b"small")
