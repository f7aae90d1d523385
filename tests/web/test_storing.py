"""Which requests are stored, and which are served as usual."""

from __future__ import annotations

from pathlib import Path

from tests.emulator import EmulatedNode
from tests.gateways import running_gateway


async def test_requests_that_take_no_slot_are_served_at_once(tmp_path: Path) -> None:
    async with (
        EmulatedNode() as node,
        running_gateway(tmp_path, [node.url]) as running,
    ):
        body = {"messages": [{"role": "user", "content": "x"}], "content": "x"}
        answer = await running.client.post(
            "/tokenize", json=body, headers={"prefer": "respond-async"}
        )
        assert answer.status_code == 200
        assert "preference-applied" not in answer.headers
