"""`/v1/batches` of a whole gateway: every call, every state, and bad input.

No node is up but for clients in JavaScript, so no line runs: what a batch waits for, stays.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types import Batch, FileObject

from gateway.callers.keys import ApiKey
from gateway.stored.batch_rows import Batch as Row
from gateway.web.batches import batch_object
from tests.callers.kills import a_site
from tests.clients import npm
from tests.each_case import each_case
from tests.emulator import EmulatedNode, expected_chat_text
from tests.gateway_processes import Succession, serving
from tests.gateways import Running
from tests.polling import eventually
from tests.web.two_keys import ALICE, client, gateway, reason

pytestmark = pytest.mark.usefixtures("hurried")

CHAT: Final = "/v1/chat/completions"


def line(number: int, **changed: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"Say {number}"}]}
    return {"custom_id": f"id {number}", "method": "POST", "url": CHAT, "body": body} | changed


def jsonl(*lines: dict[str, Any] | bytes) -> bytes:
    return b"".join(
        (one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines
    )


async def uploaded(asker: AsyncOpenAI, *lines: dict[str, Any] | bytes) -> FileObject:
    content = jsonl(*lines or (line(1), line(2)))
    return await asker.files.create(file=("in.jsonl", content), purpose="batch")


async def created(asker: AsyncOpenAI, *lines: dict[str, Any] | bytes, **options: Any) -> Batch:
    file = await uploaded(asker, *lines)
    return await asker.batches.create(
        **{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **options}
    )


async def reaches(asker: AsyncOpenAI, id_: str, *statuses: str) -> Batch:
    async def look() -> Batch | None:
        batch = await asker.batches.retrieve(id_)
        return batch if batch.status in statuses else None

    return await eventually(look)


async def ask(
    running: Running, method: str, path: str, key: ApiKey | None = ALICE, **options: Any
) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key.text}"}
    headers |= options.pop("headers", {})
    return await running.client.request(method, path, headers=headers, **options)


async def test_a_batch_is_created_shown_paused_resumed_and_cancelled(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        after: Any = {"anchor": "created_at", "seconds": 3600}
        made = await created(alice, metadata={"night": "run ä"}, output_expires_after=after)
        assert (made.object, made.endpoint, made.metadata) == ("batch", CHAT, {"night": "run ä"})
        assert (made.status, made.completion_window) == ("validating", "24h")
        assert made.expires_at == made.created_at + 86400
        for name in (
            *("errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at"),
            *("completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
        ):
            assert made.to_dict()[name] is None

        runs = await reaches(alice, made.id, "in_progress")
        assert runs.request_counts is not None
        assert runs.request_counts.to_dict() == {"total": 2, "completed": 0, "failed": 0}
        assert (runs.in_progress_at is not None, runs.model) == (True, "m")
        own: Any = runs.to_dict()["llama_gateway"]
        unfinished = int(own["waiting"]) + int(own["running"])  # lines may have been claimed by now
        assert (unfinished, own["paused"], own["cost"]) == (2, None, 0)

        paused = (await ask(running, "POST", f"/v1/batches/{made.id}/pause")).json()
        assert paused["llama_gateway"]["paused"]["at"] >= made.created_at
        assert paused["status"] == "in_progress"
        resumed = (await ask(running, "POST", f"/v1/batches/{made.id}/resume")).json()
        assert resumed["llama_gateway"]["paused"] is None

        cancelled = await alice.batches.cancel(made.id)
        assert cancelled.status in {"cancelling", "cancelled"}
        assert cancelled.cancelling_at is not None
        ended = await reaches(alice, made.id, "cancelled")
        assert (ended.cancelled_at is not None, ended.output_file_id) == (True, None)
        assert (await alice.batches.cancel(made.id)).to_dict() == ended.to_dict()
        assert ended.error_file_id is not None
        errors = (await alice.files.content(ended.error_file_id)).text.splitlines()
        assert [json.loads(one)["error"]["code"] for one in errors] == ["batch_cancelled"] * 2
        kept = await alice.files.retrieve(ended.error_file_id)
        assert kept.expires_at == kept.created_at + 3600
        assert "Say" not in (tmp_path / "gateway.log").read_text()


async def test_broken_lines_have_errors_of_their_own_before_the_end_too(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        made = await created(alice, b"{not json", b"", line(1), line(1), line(4, method="GET"))
        runs = await reaches(alice, made.id, "in_progress")
        assert runs.request_counts is not None
        assert (runs.request_counts.total, runs.request_counts.failed) == (4, 3)
        assert (runs.errors, runs.error_file_id) == (None, None)
        found = await ask(running, "GET", f"/v1/batches/{made.id}/errors")
        assert found.headers["content-type"] == "application/x-jsonl"
        lines = [json.loads(one) for one in found.text.splitlines()]
        assert all(one["response"] is None and one["error"]["code"] for one in lines)
        assert [one["custom_id"] for one in lines] == [None, "id 1", "id 4"]
        output = await ask(running, "GET", f"/v1/batches/{made.id}/output")
        assert (output.status_code, output.content) == (200, b"")
        await alice.batches.cancel(made.id)
        ended = await reaches(alice, made.id, "cancelled")
        assert ended.error_file_id is not None
        whole = (await alice.files.content(ended.error_file_id)).content
        found = await ask(running, "GET", f"/v1/batches/{made.id}/errors")
        assert found.content == whole
        assert whole.count(b"\n") == 4
        head = await ask(running, "HEAD", f"/v1/batches/{made.id}/errors")
        assert head.headers["content-length"] == str(len(whole))


async def ended_batches(asker: AsyncOpenAI) -> dict[str, Batch]:
    """A batch in each state of the end."""
    cancelled = await created(asker)
    late = await created(asker, completion_window="0.3s")
    empty = await created(asker, b"")
    wrong = await created(asker, b"x")
    await asker.batches.cancel(cancelled.id)
    return {
        "cancelled": await reaches(asker, cancelled.id, "cancelled"),
        "expired": await reaches(asker, late.id, "expired"),
        "failed": await reaches(asker, empty.id, "failed"),
        "completed": await reaches(asker, wrong.id, "completed"),
    }


async def test_what_has_ended_stays_as_it_is(tmp_path: Path) -> None:
    windows = {"windows": {"shortest": "0.3s"}}
    async with gateway(tmp_path, batches=windows) as running, client(running) as alice:
        ended = await ended_batches(alice)
        for status, batch in ended.items():
            assert batch.to_dict()[f"{status}_at"] is not None
            for verb in ("pause", "resume", "cancel"):
                refused = await ask(running, "POST", f"/v1/batches/{batch.id}/{verb}")
                if (status, verb) == ("cancelled", "cancel"):
                    assert refused.status_code == 200
                    continue
                assert reason(refused) == (409, "batch_ended")
                assert refused.headers["x-should-retry"] == "false"
                told = refused.json()["error"]["message"]
                assert told == f"Cannot {verb} a batch with status '{status}'."
            assert await alice.batches.retrieve(batch.id) == batch
        failed, late = ended["failed"], ended["expired"]
        assert failed.to_dict()["errors"]["data"][0]["code"] == "empty_file"  # type: ignore[index]
        assert (failed.output_file_id, failed.error_file_id) == (None, None)
        assert ended["completed"].output_file_id is None
        assert late.error_file_id is not None
        lines = (await alice.files.content(late.error_file_id)).text.splitlines()
        assert [json.loads(one)["error"]["code"] for one in lines] == ["batch_expired"] * 2
        assert late.to_dict()["llama_gateway"]["expired"] == 2  # type: ignore[index]


ASKED = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}


HOUR = {"anchor": "created_at", "seconds": 3600}
WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    *(({"input_file_id": wrong}, "invalid_type", "input_file_id") for wrong in (None, 1)),
    ({"input_file_id": "file-\0"}, "invalid_value", "input_file_id"),
    ({"input_file_id": "ä/'--"}, "file_not_found", "input_file_id"),
    ({"endpoint": None}, "invalid_type", "endpoint"),
    *(({"endpoint": path}, "invalid_value", "endpoint") for path in ("/v1/x", "/tokenize")),
    *(({"completion_window": window}, "invalid_value", "completion_window")
      for window in ("10s", "8d", "soon", "-1h", "1e400", "", "9" * 400)),
    ({"completion_window": 24}, "invalid_type", "completion_window"),
    ({"metadata": []}, "invalid_type", "metadata"),
    ({"metadata": {"n": 1}}, "invalid_type", "metadata"),
    *(({"metadata": wrong}, "invalid_value", "metadata") for wrong in (
        {"a": "x" * 513}, {"x" * 65: "a"}, {str(n): "a" for n in range(17)})),
    ({"output_expires_after": 3600}, "invalid_type", "output_expires_after"),
    ({"output_expires_after": {"seconds": 3600}}, "missing_required_parameter",
     "output_expires_after"),
    ({"output_expires_after": HOUR | {"seconds": 3599}}, "invalid_value", "output_expires_after"),
    ({"output_expires_after": HOUR | {"seconds": True}}, "invalid_type", "output_expires_after"),
    ({"webhook_url": "http://x/\0"}, "invalid_request", "webhook_url"),
    ({"webhook_url": {}}, "invalid_request", "webhook_url"),
    ({"webhook_url": "https://x.example/hook"}, "webhook_url_not_allowed", "webhook_url"),
    ({"completion_windows": "24h"}, "unknown_parameter", None),
]  # fmt: skip


async def test_what_is_wrong_with_a_batch_is_told_at_once(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:

        @each_case(("changed", "code", "param"), WRONG)
        async def check(changed: dict[str, Any], code: str, param: str | None) -> None:
            refused = await ask(running, "POST", "/v1/batches", json=ASKED | changed)
            assert reason(refused) == (400, code), refused.text
            assert refused.json()["error"]["param"] == param

        await check()
        assert (await ask(running, "GET", "/v1/batches")).json()["data"] == []


async def test_the_same_idempotency_key_makes_one_batch(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running, client(running) as alice:
        asked = ASKED | {"input_file_id": (await uploaded(alice)).id}

        async def create(key: str | bytes, **metadata: str) -> httpx.Response:
            body, headers = asked | {"metadata": metadata}, {"idempotency-key": key}
            return await ask(running, "POST", "/v1/batches", json=body, headers=headers)

        first = await create('"night-1"', a="1", b="2")
        # In whatever order the fields are, and however the key is written.
        assert (await create("night-1", b="2", a="1")).json()["id"] == first.json()["id"]
        assert reason(await create("night-1")) == (422, "idempotency_key_reused")
        for value in ("", '""', "x" * 256, "ä".encode()):
            refused = await create(value)
            assert reason(refused) == (400, "invalid_request")
            assert refused.json()["error"]["param"] == "Idempotency-Key"


async def test_ids_that_no_batch_has_are_404_and_other_methods_405(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        for id_ in ("%00", "x" * 5000, "a%27--", "%F0%9F%98%80", "batch_"):
            refused = await ask(running, "GET", f"/v1/batches/{id_}")
            assert reason(refused) == (404, "batch_not_found")
            assert len(refused.content) < 500
        for path, allowed in (
            ("/v1/batches", "GET, HEAD, POST"),
            ("/v1/batches/x", "GET, HEAD"),
            ("/v1/batches/x/cancel", "POST"),
            ("/v1/files", "GET, HEAD, POST"),
            ("/v1/files/x", "DELETE, GET, HEAD"),
        ):
            wrong = await running.client.put(path)
            assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)


def test_what_was_cached_is_hidden_from_those_who_may_not_know() -> None:
    row = Row(
        "k", "openai", CHAT, "f", id="batch_1", created_at=0, expires_at=60, keep_until=90,
        folder="f", cached_tokens=7, prompt_tokens=9,
    )  # fmt: skip
    for shown, wanted in ((True, 7), (False, 0)):
        usage = batch_object(row, None, shows_cached=shown).usage
        assert usage["input_tokens_details"]["cached_tokens"] == wanted
        assert usage["total_tokens"] == 9


# Batches whose lines run, by the official clients in JavaScript.


@asynccontextmanager
async def running_lines(folder: Path) -> AsyncIterator[Succession]:
    """A gateway process over an emulated node."""
    settings = {"keys": [{"id": ALICE.id, "sha256": ALICE.sha256}]}
    async with (
        EmulatedNode(model="test", answer_tokens=900, slots=4, decode_tps=1000) as node,
        serving(folder / "gateway", node, settings=settings) as process,
    ):
        yield process


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me of the number {number}."}]


def chat_line(number: int) -> str:
    body = {"model": "test", "messages": messages(number), "max_tokens": 12}
    one = line(number, custom_id=f"näme {number}", body=body)
    return json.dumps(one, ensure_ascii=False) + "\n"


@pytest.fixture(scope="module")
def script(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in a folder where the clients can be imported."""
    return npm.install_script(pytestconfig, tmp_path_factory.mktemp("npm"), "batches.mjs")


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_openai_uploads_creates_polls_reads_lists_and_deletes(
    script: Path, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(chat_line(number) for number in range(5)))
    async with running_lines(tmp_path) as line:
        told = await npm.run_script(script, line.url, "batch", ALICE.text, file)
    batch = told["batch"]
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    found = {
        one["custom_id"]: one["response"] for one in map(json.loads, told["output"].splitlines())
    }
    for number in range(5):
        text = found[f"näme {number}"]["body"]["choices"][0]["message"]["content"]
        assert text == expected_chat_text(messages(number), 12)
    assert told["listed"] == [batch["id"]]
    assert (told["files"], told["filename"], told["conflict"]) == (True, "in.jsonl", 409)
    assert (told["deleted"], told["gone"]) == (True, 404)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_openai_follows_a_response_through_a_kill(script: Path, tmp_path: Path) -> None:
    node, store = EmulatedNode(decode_tps=20, answer_tokens=100_000), f"sqlite:///{tmp_path}/db"
    async with a_site(tmp_path, store, node) as site:
        await site.start()
        async with npm.running_script(script, site.url, "background", "unused") as process:
            assert await npm.script_line(process) == b"reading\n"
            await site.kill()
            await site.start()
            told: Any = await npm.script_result(process)
    assert told["cuts"] >= 1
    assert told["numbers"] == list(range(len(told["numbers"])))
    asked = [{"role": "user", "content": "tell me a story"}]
    assert told["text"] == told["stored"] == expected_chat_text(asked, 60)
    assert told["cancelled"] in {"cancelled", "in_progress", "queued"}
    assert told["gone"] == 404


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_anthropic_creates_polls_reads_and_deletes(script: Path, tmp_path: Path) -> None:
    async with running_lines(tmp_path) as line:
        told = await npm.run_script(script, line.url, "messageBatch", ALICE.text)
    counts = {"processing": 0, "succeeded": 3, "errored": 1, "canceled": 0, "expired": 0}
    assert told["counts"] == counts
    for number in range(3):
        result = told["results"][f"r-{number}"]
        assert result["message"]["content"][0]["text"] == expected_chat_text(messages(number), 12)
    failed = told["results"]["r-3"]
    assert (failed["type"], failed["error"]["error"]["type"]) == ("errored", "not_found_error")
    assert told["listed"] == [told["id"]]
    assert (told["cancelled"], told["deleted"]) == ("ended", "message_batch_deleted")
    assert told["gone"] == 404
