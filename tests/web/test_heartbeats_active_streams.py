"""Active streams, in virtual time: the machine's speed makes no difference."""

from __future__ import annotations

from pathlib import Path

from tests.virtual import in_virtual_time, now
from tests.web.raw_client import HELLO, public, request


@in_virtual_time
async def test_an_active_stream_gets_no_heartbeats(tmp_path: Path) -> None:
    settings = {"heartbeat": 1.0, "health": {"interval": 0.2}}
    async with public(tmp_path, settings) as gate:
        # Two seconds and more, with some 50 ms from one event to the next.
        gate.node.faults.next("trickle", size=100, seconds=0.02)
        began = now()
        found = await gate.ask(request({**HELLO, "stream": True, "max_tokens": 50}))
        assert now() - began > 2.0
        assert b"\n:" not in found.body
        assert found.body.endswith(b"data: [DONE]\n\n")
