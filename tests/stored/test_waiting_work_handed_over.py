"""A batch and a background response outlive their process: a hand-over, and an end with a start."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.callers.kills import rows_of
from tests.emulator import EmulatedNode
from tests.emulator.language_model import expected_text
from tests.emulator.request_body import expected_chat_text, render_chat
from tests.gateway_processes import LIMIT, Succession, serving
from tests.polling import eventually
from tests.stored.batch_gateway import HEADERS, ended, key, lines, output, show, submit
from tests.stored.following import Follower

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LINES = 300
TOKENS = 20
STORY = 200
"""Tokens of the background response."""


@dataclass
class Work:
    """A batch and a background response, and the client that asks for them."""

    client: httpx.AsyncClient
    batch: str = ""
    response: str = ""
    """Its path."""

    async def begin(self) -> None:
        body = {"input": "tell", "background": True, "temperature": 0, "max_output_tokens": STORY}
        made = await self.client.post("/v1/responses", json=body)
        assert made.status_code == 200, made.text
        self.response = f"/v1/responses/{made.json()['id']}"
        self.batch = await submit(self, lines(LINES, max_tokens=TOKENS))

    async def until_recorded(self, number: int) -> None:
        """Wait until so many lines have their results."""

        async def recorded() -> bool | None:
            shown = await show(self, self.batch)
            return shown["request_counts"]["completed"] >= number or None

        await eventually(recorded, LIMIT)


async def check_batch(work: Work) -> None:
    """Every line is in the output once, with the answer to its prompt."""
    found = await ended(work, work.batch, LIMIT)
    assert found["status"] == "completed", found
    assert found["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert found["error_file_id"] is None
    answers = await output(work, found["output_file_id"])
    assert Counter(one["custom_id"] for one in answers) == Counter(
        f"line-{number}" for number in range(LINES)
    )
    for one in answers:
        number = one["custom_id"].removeprefix("line-")
        messages = [{"role": "user", "content": f"write text {number}"}]
        text = one["response"]["body"]["choices"][0]["message"]["content"]
        assert text == expected_chat_text(messages, TOKENS)
    assert found["usage"]["output_tokens"] == LINES * TOKENS


async def check_response(work: Work, *followers: Follower) -> None:
    """Each follower has had every event once, and the response is whole."""
    text = expected_text(render_chat([{"role": "user", "content": "tell"}]), STORY)
    for one in followers:
        assert one.text == text
    assert len({one.data for one in followers}) == 1
    found = (await work.client.get(work.response)).json()
    assert found["status"] in {"completed", "incomplete"}
    assert found["output"][0]["content"][0]["text"] == text


def check_ledger(folder: Path) -> None:
    """The caller paid for each line once, and for its response."""
    rows, still_open = rows_of(f"sqlite:///{folder}/gateway.db")
    paths = Counter(row["path"] for row in rows)
    assert paths == {"/v1/chat/completions": LINES, "/v1/responses": 1}
    assert len({row["id"] for row in rows}) == len(rows)
    assert sum(row["completion_tokens"] for row in rows) == LINES * TOKENS + STORY
    assert not still_open


def a_node() -> EmulatedNode:
    return EmulatedNode(slots=8, decode_tps=40.0, prefill_tps=5000.0, answer_tokens=5000)


@contextlib.asynccontextmanager
async def a_gateway(
    folder: Path, node: EmulatedNode
) -> AsyncIterator[tuple[Succession, httpx.AsyncClient]]:
    settings = {
        "store": {"url": f"sqlite:///{folder}/gateway.db"},
        "keys": [key()],
    }
    async with (
        serving(folder, node, settings=settings) as line,
        httpx.AsyncClient(
            base_url=line.url, trust_env=False, timeout=LIMIT, headers=HEADERS
        ) as client,
    ):
        yield line, client
    wrong = [entry for entry in line.lines if entry.get("level") == "error"]
    assert not wrong, json.dumps(wrong, indent=1)


async def test_waiting_work_goes_on_over_handovers(tmp_path: Path) -> None:
    async with a_node() as node, a_gateway(tmp_path, node) as (line, client):
        await (work := Work(client)).begin()
        leaves, stays = Follower(work.response), Follower(work.response)
        await leaves.run(client, LIMIT, until_event=20)
        following = asyncio.create_task(stays.run(client, LIMIT))
        for number in (20, 80):
            await work.until_recorded(number)
            await line.succeed()
        # The others read what the first process writes.
        await leaves.run(client, LIMIT)
        await following
        await line.until("ended", 2)
        await check_batch(work)
        await check_response(work, leaves, stays)
        again = Follower(work.response)
        await again.run(client, LIMIT)
        assert again.data == stays.data
        # A process that is succeeded brings to an end what it runs: nothing ran twice.
        assert node.requests == LINES + 1
    check_ledger(tmp_path)
