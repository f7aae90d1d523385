"""Many small bodies with very many objects are parsed in turns, so that others are served."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gateway.proxy.inbound.request import prepare
from tests.emulator import EmulatedNode
from tests.virtual import in_virtual_time
from tests.web.raw_client import HELLO, public, request

SHAPES = [
    {"messages": [{}] * 1500},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1500}]},
    {**HELLO, "tools": [{}] * 1500},
    {**HELLO, "a_url": 1, "x": [[]] * 1500},
]


@pytest.mark.parametrize("body", SHAPES, ids=["messages", "parts", "tools", "links"])
@in_virtual_time
async def test_one_slow_body_is_prepared_per_round_of_the_event_loop(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    rounds: Counter[int] = Counter()
    now = 0

    def count_calls(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is prepare.__code__:
            rounds[now] += 1

    async def count() -> None:
        nonlocal now
        while True:
            now += 1
            await asyncio.sleep(0)

    async with public(tmp_path, None, EmulatedNode(slots=20, context=1 << 20)) as gate:
        counting = asyncio.create_task(count())
        data = request({**body, "max_tokens": 1})
        sys.setprofile(count_calls)
        try:
            found = await asyncio.gather(*(gate.ask(data) for _ in range(20)))
        finally:
            sys.setprofile(None)
            counting.cancel()
    assert {one.status for one in found} <= {200, 400}
    assert sum(rounds.values()) >= 20
    assert max(rounds.values()) == 1
