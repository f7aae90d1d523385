"""Stored responses over emulated nodes: their logs, runs of them, and crashes between these."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gateway.api.json_values import JsonObject
from gateway.app.assembly import Gateway
from gateway.stored.folder import DiskThreads, Folder
from gateway.stored.response_events import ResponseEvents, queued_response
from gateway.stored.response_log import TERMINAL_TYPES, ResponseLogs, event_data, split_events
from gateway.stored.runner import Outcome
from tests.stored.stored_rows import to_run

RESPONSES = "/v1/responses"


class Kept(ResponseEvents):
    """A sink that keeps what it gets, without a log."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    async def write(self, events: bytes) -> None:
        await asyncio.sleep(0)
        self.writes.append(events)


@contextlib.asynccontextmanager
async def open_logs(path: Path, most: int = 1 << 26) -> AsyncIterator[ResponseLogs]:
    """The logs of a folder, with their loops."""
    folder = Folder(path / "folder", most_bytes=lambda: 1 << 30, spare_bytes=0)
    folder.open()
    threads = DiskThreads()
    logs = ResponseLogs(folder, threads, lambda: most)
    try:
        loop = asyncio.create_task(logs.run())
        try:
            yield logs
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
    finally:
        threads.close()


def a_body(**fields: Any) -> dict[str, Any]:
    body = {"input": "say something", "temperature": 0, "max_output_tokens": 40, "stream": True}
    return body | fields


def now() -> float:
    return 200.0


async def begin(logs: ResponseLogs, **fields: Any) -> ResponseEvents:
    response = queued_response("resp_00000000000aff", 100.0, a_body(**fields))
    return await ResponseEvents.create(logs, response, now)


async def run(app: Gateway, events: ResponseEvents, owner: str = "k1", **fields: Any) -> Outcome:
    row = to_run("resp_00000000000aff", owner, RESPONSES)
    return await app.background.runner.run(row, json.dumps(a_body(**fields)).encode(), events)


async def logged(logs: ResponseLogs, name: str) -> list[JsonObject]:
    """The data of all events of a log."""
    log = await logs.open(name)
    return [event_data(one) async for part in log.events() for one in split_events(part)]


def text_of(values: Sequence[JsonObject]) -> str:
    return "".join(v["delta"] for v in values if v["type"] == "response.output_text.delta")


def check_whole(values: Sequence[JsonObject], end: str = "response.completed") -> JsonObject:
    """Check all that clients rely on; returns the response at the end."""
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    assert values[0]["type"] == "response.created"
    kinds = [value["type"] for value in values]
    assert [kind for kind in kinds if kind in TERMINAL_TYPES] == [end], values[-1]
    assert kinds[-1] == end
    ids = {value["response"]["id"] for value in values if "response" in value}
    assert ids == {values[0]["response"]["id"]}
    items: dict[int, str] = {}
    for value in values:
        if value["type"] == "response.output_item.added":
            assert value["output_index"] == len(items)
            items[value["output_index"]] = value["item"]["id"]
        elif "item_id" in value:
            assert value["item_id"] == items[value["output_index"]]
        elif "item" in value:
            assert value["item"]["id"] == items[value["output_index"]]
    response: JsonObject = values[-1]["response"]
    assert [item["id"] for item in response["output"]] == list(items.values())
    if end != "response.failed":
        assert response["output"][-1]["content"][-1]["text"] == text_of(values)
    return response


async def finish(events: ResponseEvents, outcome: Outcome) -> None:
    """End the response of a run."""
    await events.finish(outcome.error_code, outcome.content)
