from __future__ import annotations

from pathlib import Path

from tests.chaos.gateway_worker import REQUEST_OBJECTS, live_request_objects
from tests.emulator import EmulatedNode
from tests.gateways import running_gateway


async def test_the_leak_check_finds_the_objects_of_a_running_request(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with EmulatedNode() as node, running_gateway(tmp_path, [node.url]) as running:
        node.faults.next("hang", after_events=2)
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
            await anext(response.aiter_bytes())
            assert set(live_request_objects()) == set(REQUEST_OBJECTS)
