"""Batches whose lines run, by the official clients: OpenAI's in Python, both in JavaScript."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.callers.keys import new_key
from gateway.local.server import claim_port, claimed_port
from tests.callers.kills import HOST, Site
from tests.clients import npm
from tests.emulator import EmulatedNode, expected_chat_text
from tests.gateway_processes import Succession, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHAT: Final = "/v1/chat/completions"
KEY = new_key("alice")


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Succession]:
    """A gateway process over an emulated node."""
    settings = {"keys": [{"id": KEY.id, "sha256": KEY.sha256}]}
    async with (
        EmulatedNode(model="test", answer_tokens=900, slots=4, decode_tps=1000) as node,
        serving(folder / "gateway", node, settings=settings) as process,
    ):
        yield process


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me of the number {number}."}]


def chat_line(number: int, **changed: Any) -> str:
    body = {"model": "test", "messages": messages(number), "max_tokens": 12} | changed
    one = {"custom_id": f"näme {number}", "method": "POST", "url": CHAT, "body": body}
    return json.dumps(one, ensure_ascii=False) + "\n"


@pytest.fixture(scope="module")
def script(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in a folder where the clients can be imported."""
    return npm.install_script(pytestconfig, tmp_path_factory.mktemp("npm"), "batches.mjs")


async def test_openai_uploads_creates_polls_reads_lists_and_deletes(
    script: Path, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(chat_line(number) for number in range(5)))
    async with gateway(tmp_path) as line:
        told = await npm.run_script(script, line.url, "batch", KEY.text, file)
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
    async with EmulatedNode(decode_tps=20, answer_tokens=100_000) as node:
        with claim_port(HOST) as claim:
            store = f"sqlite:///{tmp_path}/store.db"
            site = Site(tmp_path, [node], store, claimed_port(claim), nice=0)
            await site.start()
            try:
                url = f"http://{HOST}:{site.port}"
                async with npm.running_script(script, url, "background", "unused") as process:
                    assert await npm.script_line(process) == b"reading\n"
                    await site.kill()
                    await site.start()
                    told: Any = await npm.script_result(process)
            finally:
                await site.stop()
    assert told["cuts"] >= 1
    assert told["numbers"] == list(range(len(told["numbers"])))
    asked = [{"role": "user", "content": "tell me a story"}]
    assert told["text"] == told["stored"] == expected_chat_text(asked, 60)
    assert told["cancelled"] in {"cancelled", "in_progress", "queued"}
    assert told["gone"] == 404


async def test_anthropic_creates_polls_reads_and_deletes(script: Path, tmp_path: Path) -> None:
    async with gateway(tmp_path) as line:
        told = await npm.run_script(script, line.url, "messageBatch", KEY.text)
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
