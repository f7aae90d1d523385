"""Responses of many rows: made, encoded and sent in steps."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from starlette.responses import StreamingResponse

from gateway.web.asgi import PIECE_BYTES, STEP_SECONDS, json_of_rows


async def answer(rows: int, rest: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[int]]:
    def row(number: int) -> dict[str, Any]:
        return {"number": number, "text": "x" * 1000}

    response = await json_of_rows("rows", range(rows), row, rest)
    assert isinstance(response, StreamingResponse)
    pieces = [bytes(piece) async for piece in response.body_iterator]  # type: ignore[arg-type]
    assert response.headers["content-length"] == str(sum(map(len, pieces)))
    found: dict[str, Any] = json.loads(b"".join(pieces))
    return found, [len(piece) for piece in pieces]


async def test_rows_and_what_stands_beside_them_are_one_object() -> None:
    for rows in (0, 1, 2):
        for rest in (None, {"hosts": {"h": 1}}):
            found, _ = await answer(rows, rest)
            assert [one["number"] for one in found.pop("rows")] == list(range(rows))
            assert found == (rest or {})


async def test_a_large_response_is_sent_in_pieces_and_other_work_runs_between_its_rows() -> None:
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def slow_row(number: int) -> int:
        until = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < until:
            pass
        return number

    other = asyncio.create_task(other_work())
    await json_of_rows("rows", range(5), slow_row)
    other.cancel()
    assert turns >= 4
    _, sizes = await answer(2500)
    assert sizes[:2] == [PIECE_BYTES] * 2
    assert len(sizes) == 3
