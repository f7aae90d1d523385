"""A router (`llama-server --models-dir`) whose server of a model dies in the middle of a request.

It ends the stream as if it were whole, with a line of text that is no event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.emulator.raw_connection import chat
from tests.emulator.router import EmulatedRouter
from tests.gateways import running_gateway
from tests.virtual import in_virtual_time


@in_virtual_time
async def test_a_stream_that_its_router_ended_is_told_as_an_error(tmp_path: Path) -> None:
    async with lost(tmp_path, stream=True) as text:
        assert "proxy error" not in text
        assert "[DONE]" not in text
        assert '"code":"node_failed"' in text.rstrip().rpartition("\n")[2]


@in_virtual_time
async def test_a_plain_request_is_sent_again_when_its_router_lost_the_model(
    tmp_path: Path,
) -> None:
    async with lost(tmp_path, stream=False) as text:
        assert '"completion_tokens":200' in text


@asynccontextmanager
async def lost(folder: Path, *, stream: bool) -> AsyncIterator[str]:
    """The answer of a gateway to a chat during which the model's server died."""
    async with EmulatedRouter(["a"], decode_tps=50) as router:
        node = {"name": "router", "url": router.url, "slots": 2, "context": 4096, "model": "a"}
        async with running_gateway(folder, [node]) as gateway:
            body = chat(stream=stream, model="a", ignore_eos=True, max_tokens=200)
            asked = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=body))
            await router.until(lambda: router.models["a"].node.engine.tokens > 5)
            await router.kill_model("a")
            yield (await asked).text
