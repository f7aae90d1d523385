"""Files, batches and background responses by the official JavaScript clients, as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tools.local.server import claim_port, claimed_port
from tests.api import npm
from tests.emulator import EmulatedNode, expected_chat_text
from tests.usage.kills import HOST, Site
from tests.web.test_batch_clients import KEY, chat_line, gateway, messages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


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


async def test_openai_follows_a_background_response_through_a_killed_gateway(
    script: Path, tmp_path: Path
) -> None:
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
