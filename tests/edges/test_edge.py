"""Requests through an edge: as through the gateway itself, though the brain decides."""

from __future__ import annotations

from pathlib import Path

from gateway.events import RequestRecord
from tests.edges.edge_beside import an_edge
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "say something"}]


def records_of(running: Running) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    running.gateway.bus.subscribe(RequestRecord, found.append)
    return found


@in_virtual_time
async def test_a_stream_goes_through_and_is_recorded_by_the_brain(tmp_path: Path) -> None:
    node = EmulatedNode(answer_tokens=8)
    async with running_gateway(tmp_path, [node]) as running, an_edge(running) as edge:
        records = records_of(running)
        answer = await edge.client.post(CHAT, json={"messages": MESSAGES, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: records)
        (record,) = records
        assert (record.status, record.node, record.attempts) == (200, "node-0", 1)
        assert record.completion_tokens == 8
        assert record.slot_seconds > 0.0
        assert record.ended_at > 0.0
        await until(lambda: not running.held())
        assert edge.session.streams == 0
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()
