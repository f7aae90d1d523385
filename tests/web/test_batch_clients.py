"""Batches whose lines run, by the official clients: OpenAI's in Python, both in JavaScript."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai import AsyncOpenAI

from gateway.callers.keys import new_key
from tests.callers.kills import a_site
from tests.clients import npm
from tests.emulator import EmulatedNode, expected_chat_text
from tests.gateway_processes import serving
from tests.polling import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHAT: Final = "/v1/chat/completions"
KEY = new_key("alice")


@asynccontextmanager
async def gateway(folder: Path, **node_options: Any) -> AsyncIterator[str]:
    """The URL of a gateway over an emulated node."""
    options = {"model": "test", "answer_tokens": 900, "slots": 4, "decode_tps": 1000}
    settings = {"keys": [{"id": KEY.id, "sha256": KEY.sha256}]}
    async with (
        EmulatedNode(**{**options, **node_options}) as node,
        serving(folder / "gateway", node, settings=settings) as process,
    ):
        yield process.url


def openai_client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=KEY.text,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60.0),
    )


ENDS = ("completed", "failed", "cancelled", "expired")


async def reached(client: AsyncOpenAI, id_: str, *statuses: str) -> Any:
    """The batch once it has one of these statuses; before its end it shows no output."""

    async def look() -> Any:
        found = await client.batches.retrieve(id_)
        if found.status not in ENDS:
            assert (found.output_file_id, found.error_file_id) == (None, None)
        return found if found.status in statuses else None

    return await eventually(look, 120)


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me of the number {number}."}]


def chat_line(number: int, **changed: Any) -> str:
    body = {"model": "test", "messages": messages(number), "max_tokens": 12} | changed
    one = {"custom_id": f"näme {number}", "method": "POST", "url": CHAT, "body": body}
    return json.dumps(one, ensure_ascii=False) + "\n"


async def test_openai_uploads_creates_polls_reads_and_lists(tmp_path: Path) -> None:
    lines = [chat_line(number) for number in range(20)]
    lines[7] = '{"custom_id": "broken"\n'
    lines[8] = chat_line(8, model="unknown")
    (tmp_path / "in.jsonl").write_text("".join(lines))
    async with gateway(tmp_path) as url, openai_client(url) as client:
        with (tmp_path / "in.jsonl").open("rb") as opened:
            file = await client.files.create(file=opened, purpose="batch")
        file = await client.files.wait_for_processing(file.id)
        asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT}
        asked |= {"completion_window": "24h", "metadata": {"run": "1"}}
        asked |= {"extra_headers": {"Idempotency-Key": "run-1"}}
        batch = await client.batches.create(**asked)

        done = await reached(client, batch.id, *ENDS)
        assert done.status == "completed"
        assert done.request_counts.to_dict() == {"total": 20, "completed": 18, "failed": 2}
        assert done.usage is not None
        assert done.usage.output_tokens == 18 * 12
        assert done.metadata == {"run": "1"}

        output = await client.files.content(done.output_file_id)
        found = {one["custom_id"]: one for one in map(json.loads, output.text.splitlines())}
        assert sorted(found) == sorted(f"näme {number}" for number in {*range(20)} - {7, 8})
        for number in (0, 19):
            one = found[f"näme {number}"]
            assert one["error"] is None
            assert one["response"]["status_code"] == 200
            text = one["response"]["body"]["choices"][0]["message"]["content"]
            assert text == expected_chat_text(messages(number), 12)
        errors = await client.files.content(done.error_file_id)
        broken, unknown = map(json.loads, errors.text.splitlines())
        assert (broken["custom_id"], broken["response"]) == (None, None)
        assert (broken["error"]["code"], broken["error"]["line"]) == ("invalid_json_line", 8)
        assert (unknown["custom_id"], unknown["error"]) == ("näme 8", None)
        assert unknown["response"]["status_code"] == 404
        assert unknown["response"]["body"]["error"]["code"] == "model_not_found"

        assert (await client.batches.create(**asked)).id == batch.id
        with pytest.raises(openai.ConflictError, match="status 'completed'"):
            await client.batches.cancel(batch.id)
        assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
        await client.files.delete(file.id)


@pytest.fixture(scope="module")
def script(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in a folder where the clients can be imported."""
    return npm.install_script(pytestconfig, tmp_path_factory.mktemp("npm"), "batches.mjs")


async def test_openai_uploads_creates_polls_reads_lists_and_deletes(
    script: Path, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(chat_line(number) for number in range(5)))
    async with gateway(tmp_path) as url:
        told = await npm.run_script(script, url, "batch", KEY.text, file)
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


async def test_anthropic_creates_polls_reads_and_deletes(script: Path, tmp_path: Path) -> None:
    async with gateway(tmp_path) as url:
        told = await npm.run_script(script, url, "messageBatch", KEY.text)
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
