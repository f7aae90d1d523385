"""A conversation stays on its node, as long as that is faster."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
CALM: dict[str, Any] = {"health": {"interval": 30}, "heartbeat": "off"}
SYSTEM = {"role": "system", "content": "You answer at length and with care. " * 60}


def a_node(prefill_tps: float = 2000.0) -> EmulatedNode:
    return EmulatedNode(slots=2, prefill_tps=prefill_tps, decode_tps=400.0, cache_ram=1 << 20)


def a_site(
    folder: Path, *nodes: EmulatedNode, settings: dict[str, Any] | None = None
) -> AbstractAsyncContextManager[Running]:
    return running_gateway(folder, nodes, {**CALM, **(settings or {})})


class Talk:
    """A conversation."""

    def __init__(self, site: Running, subject: str) -> None:
        self._site = site
        self._subject = subject
        # At the beginning, so that conversations share no prefix.
        self.messages = [{"role": "system", "content": f"{subject}: {SYSTEM['content']}"}]

    async def turn(self, tokens: int = 20) -> tuple[str, int]:
        """Send one more message; returns the node, and the prompt tokens that it had cached."""
        self.messages.append({"role": "user", "content": f"More about {self._subject}."})
        body = {"messages": self.messages, "max_tokens": tokens}
        reply = await self._site.client.post(CHAT, json=body)
        assert reply.status_code == 200
        answer = reply.json()
        self.messages.append(answer["choices"][0]["message"])
        cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return reply.headers["x-gateway-node"], cached


@in_virtual_time
async def test_a_conversation_stays_on_the_node_of_its_first_message(tmp_path: Path) -> None:
    async with a_site(tmp_path, a_node(), a_node(), a_node(), a_node()) as site:
        talks = [Talk(site, f"subject {number}") for number in range(8)]
        homes = [node for node, _ in await asyncio.gather(*(talk.turn() for talk in talks))]
        assert Counter(homes) == {f"node-{number}": 2 for number in range(4)}
        for _ in range(3):
            found = await asyncio.gather(*(talk.turn() for talk in talks))
            assert [node for node, _ in found] == homes
            assert all(cached > 200 for _, cached in found)


@in_virtual_time
async def test_a_session_named_by_a_header_keeps_its_node(tmp_path: Path) -> None:
    """Though nothing in its prompts connects them."""

    async def ask(site: Running, name: str, text: str) -> str:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
        reply = await site.client.post(CHAT, json=body, headers={"X-OpenWebUI-Chat-Id": name})
        assert reply.status_code == 200
        return reply.headers["x-gateway-node"]

    nodes = [EmulatedNode(slots=2, prefill_tps=1000.0, decode_tps=50.0) for _ in range(4)]
    async with a_site(tmp_path, *nodes) as site:
        names = [f"chat-{number}" for number in range(6)]
        found = await asyncio.gather(*(ask(site, name, f"first {name}") for name in names))
        homes = dict(zip(names, found, strict=True))
        assert len(set(found)) > 1
        for turn in range(3):
            for name, home in homes.items():
                assert await ask(site, name, f"{turn} {name}") == home
