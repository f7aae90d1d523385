"""Classes, fair shares, reserves and deadlines of the queue, over emulated nodes."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import ApiKey, new_key
from gateway.terms import Priority
from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway, until
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
CALM: dict[str, Any] = {
    "health": {"interval": 30},
    "heartbeat": "off",
    "logging": {"access": False},
}
WORDS = [f"word{number}" for number in range(12)]


@dataclass
class Site:
    """A gateway, and a client with any number of connections."""

    running: Running
    nodes: list[EmulatedNode]
    client: httpx.AsyncClient
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def body(self, tokens: int, words: int = 4, **more: Any) -> dict[str, Any]:
        """A prompt that no other request has sent."""
        text = " ".join(WORDS[i % len(WORDS)] for i in range(words))
        message = {"role": "user", "content": f"{next(self.numbers)} {text}"}
        return {"messages": [message], "max_tokens": tokens, **more}

    async def ask(self, tokens: int, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(CHAT, json=self.body(tokens), headers=named)

    @property
    def waiting(self) -> int:
        return len(self.running.gateway.scheduler.queue_positions())


@asynccontextmanager
async def a_site(
    folder: Path, *nodes: EmulatedNode, settings: dict[str, Any] | None = None
) -> AsyncIterator[Site]:
    many = httpx.Limits(max_connections=None)
    async with (
        running_gateway(folder, nodes, {**CALM, **(settings or {})}) as running,
        httpx.AsyncClient(
            base_url=running.url, timeout=60.0, trust_env=False, verify=NO_TLS, limits=many
        ) as client,
    ):
        yield Site(running, list(nodes), client)
        await until(lambda: not running.gateway.registry)
        assert running.gateway.scheduler.queue_positions() == []
        await until(lambda: all(n.leased == 0 for n in running.gateway.fleet.nodes.values()))
        board = running.gateway.scheduler.dispatcher.placement_state
        assert all(row.ours == 0 and not row.running for row in board.rows)


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def shares(site: Site, parties: dict[str, tuple[int, dict[str, str]]]) -> Counter[str]:
    """Tokens that each fairness key was served when the last of them has 120 responses.

    Each keeps so many requests under way; lengths are of one distribution. Answers count once all
    of them have requests in line: before, whoever has connected first is served alone.
    """
    rng = random.Random(5)
    tokens, answers = Counter[str](), Counter[str]()
    enough = asyncio.Event()
    scheduler = site.running.gateway.scheduler

    async def one(party: str, headers: dict[str, str]) -> None:
        while not enough.is_set():
            reply = await site.ask(rng.randint(5, 35), **headers)
            assert reply.status_code == 200
            if not enough.is_set():
                usage = reply.json()["usage"]
                tokens[party] += usage["prompt_tokens"] + usage["completion_tokens"]
                answers[party] += 1
            if all(answers[name] >= 120 for name in parties):
                enough.set()

    tasks = [
        asyncio.create_task(one(party, headers))
        for party, (count, headers) in parties.items()
        for _ in range(count)
    ]
    try:
        async with asyncio.timeout(90):
            few = min(count for count, _ in parties.values()) // 2
            while True:
                lines = Counter(one.request.caller.fairness_key for one in scheduler.waiters)
                if len(lines) == len(parties) and min(lines.values()) >= few:
                    break
                await asyncio.sleep(0.01)
            tokens.clear()
            answers.clear()
            await enough.wait()
    finally:
        await ended(tasks)
    return tokens


def fast() -> EmulatedNode:
    # Slow enough that a busy machine can send faster: else nothing would be queued.
    return EmulatedNode(slots=2, decode_tps=150.0, close_after_stream=False)


def key_of(key: ApiKey, **more: Any) -> dict[str, Any]:
    return {"id": key.id, "sha256": key.sha256, **more}


@pytest.mark.slow
@pytest.mark.timeout(300)
@in_virtual_time
async def test_two_callers_get_equal_shares_of_unequal_requests(tmp_path: Path) -> None:
    keys = [new_key(), new_key()]
    settings = {"keys": [key_of(key) for key in keys]}
    async with a_site(tmp_path, fast(), fast(), settings=settings) as site:
        much, little = ({"authorization": f"Bearer {key.text}"} for key in keys)
        found = await shares(site, {"much": (200, much), "little": (20, little)})
    assert 0.9 <= found["much"] / found["little"] <= 1.1, found


async def test_a_reload_applies_to_queued_requests_too(tmp_path: Path) -> None:
    key = new_key()
    async with a_site(tmp_path, EmulatedNode(slots=4, decode_tps=20, answer_tokens=3000)) as site:
        scheduler = site.running.gateway.scheduler
        tasks = [asyncio.create_task(site.ask(3000, x_priority="batch")) for _ in range(3)]
        await until(lambda: site.nodes[0].busy == 3)
        site.running.write_settings(
            {
                **CALM,
                "queue": {"max": 3, "latest_wins": False},
                "classes": {"batch": {"reserve_slots": 0.25, "queue_share": 1, "patience": "7s"}},
                "keys": [key_of(key, trust_user_headers=True)],
                "prompts": {"volatile": ["Today is "]},
                "allow_anonymous": True,
            }
        )
        await until(lambda: scheduler.dispatcher.rules.overdue_after[Priority.BATCH] == 7.0)
        # The fourth slot is reserved from now on, and three may wait.
        tasks += [asyncio.create_task(site.ask(3000, x_priority="batch")) for _ in range(3)]
        await until(lambda: site.waiting == 3)
        assert site.nodes[0].busy == 3
        full = await site.ask(1, x_priority="batch")
        assert (full.status_code, full.headers["x-gateway-reason"]) == (429, "queue_full")
        site.running.write_settings({**CALM, "policy": "nothing"})
        await until(lambda: site.running.gateway.config_files.settings_error is not None)
        assert "least_finish" in str(site.running.gateway.config_files.settings_error)
        assert scheduler.dispatcher.rules.overdue_after[Priority.BATCH] == 7.0
        # Without the reserve the queued requests run.
        site.running.write_settings(CALM)
        await until(lambda: (site.waiting, site.nodes[0].busy) == (2, 4))
        await ended(tasks)


SYSTEM = {"role": "system", "content": "You answer at length and with care. " * 60}


def a_node(prefill_tps: float = 2000.0) -> EmulatedNode:
    return EmulatedNode(slots=2, prefill_tps=prefill_tps, decode_tps=400.0, cache_ram=1 << 20)


def a_calm_site(
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
    async with a_calm_site(tmp_path, a_node(), a_node(), a_node(), a_node()) as site:
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
    async with a_calm_site(tmp_path, *nodes) as site:
        names = [f"chat-{number}" for number in range(6)]
        found = await asyncio.gather(*(ask(site, name, f"first {name}") for name in names))
        homes = dict(zip(names, found, strict=True))
        assert len(set(found)) > 1
        for turn in range(3):
            for name, home in homes.items():
                assert await ask(site, name, f"{turn} {name}") == home
