"""A conversation stays on its node, as long as that is faster."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from gateway.request.prompt_key import VolatileLines, build_prompt_key
from gateway.request.routes import ROUTES
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
CALM: dict[str, Any] = {"health": {"interval": 30}, "heartbeat": "off"}
SYSTEM = {"role": "system", "content": "You answer at length and with care. " * 60}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"


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
async def test_every_message_of_a_conversation_goes_to_the_node_of_the_first(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize("turns", [1, 3])
@in_virtual_time
async def test_a_session_returns_to_its_node_though_another_has_more_free_slots(
    tmp_path: Path, turns: int
) -> None:
    nodes = [a_node(prefill_tps=500.0), a_node(prefill_tps=500.0)]
    async with a_site(tmp_path, *nodes) as site:
        talk = Talk(site, "bees")
        homes = [(await talk.turn())[0] for _ in range(turns)]
        home = homes[0]
        assert homes == [home] * turns
        there = nodes[int(home.removeprefix("node-"))]
        (other,) = {"node-0", "node-1"} - {home}
        # Other requests must go to this node, whose other slot stays free.
        site.gateway.fleet.drain(other)
        there.faults.next("hang", after_events=2)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1200}
        work = asyncio.create_task(site.client.post(CHAT, json=body))
        await until(lambda: there.busy == 1)
        site.gateway.fleet.resume(other)
        found, cached = await talk.turn()
        assert (found, cached > 200) == (home, True)
        assert not work.done()
        there.faults.release()
        assert (await work).status_code == 200


@in_virtual_time
async def test_a_stripped_line_does_not_reach_the_node_and_the_cache_is_used(
    tmp_path: Path,
) -> None:
    settings = {"prompts": {"strip": ["x-anthropic-billing-header:"]}}
    node = a_node()
    async with a_site(tmp_path, node, settings=settings) as site:
        cached = []
        for number in range(2):
            body = {
                "system": [
                    {"type": "text", "text": BILLING.format(number)},
                    {"type": "text", "text": SYSTEM["content"]},
                ],
                "messages": [{"role": "user", "content": "Go on."}],
                "max_tokens": 2,
            }
            reply = await site.client.post("/v1/messages", json=body)
            cached.append(reply.json()["usage"].get("cache_read_input_tokens", 0))
        assert cached[0] == 0
        assert cached[1] > 200
        assert all(b"billing" not in request.body for request in node.seen)


@in_virtual_time
async def test_a_restarted_node_has_an_empty_cache(tmp_path: Path) -> None:
    nodes = [a_node(), a_node()]
    quick = {"health": {"interval": 0.1, "fall": 1, "slow_start": 0}}
    async with a_site(tmp_path, *nodes, settings=quick) as site:
        talk = Talk(site, "bees")
        home, _ = await talk.turn()
        memory = site.gateway.scheduler.prompt_cache
        row = site.gateway.scheduler.dispatcher.placement_state.by_name[home]
        assert row.index in memory.lookup(_prompt(site, talk)).cached
        at_home = nodes[int(home.removeprefix("node-"))]
        await at_home.kill()
        await until(lambda: site.gateway.fleet.nodes[home].state.value == "down")
        assert row.index not in memory.lookup(_prompt(site, talk)).cached
        await at_home.revive()
        await until(lambda: site.gateway.fleet.nodes[home].state.value == "ready")
        assert row.index not in memory.lookup(_prompt(site, talk)).cached


def _prompt(site: Running, talk: Talk) -> Any:
    """The prompt key of the conversation so far."""
    site.gateway.bus.flush()
    body = json.dumps({"messages": talk.messages}).encode()
    keyed_hash = site.gateway.handler.config.rules.keyed_hash
    found = build_prompt_key(body, ROUTES[CHAT], "demo", VolatileLines(), keyed_hash)
    assert found is not None
    return found
