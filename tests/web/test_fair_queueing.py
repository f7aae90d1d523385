"""Fair shares, a reload's effect on the queue, and conversations that stay on their node."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.callers.keys import new_key
from gateway.terms import Priority
from tests.emulator import EmulatedNode
from tests.gateways import Running, running_gateway, until
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
CALM: dict[str, Any] = {"health": {"interval": 30}, "heartbeat": "off"}
CALM |= {"logging": {"access": False}}
NUMBERS = itertools.count()


async def ask(running: Running, tokens: int, text: str = "word", **headers: str) -> httpx.Response:
    """Send a prompt that no other request has sent."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    messages = [{"role": "user", "content": f"{next(NUMBERS)} {text}"}]
    body = {"messages": messages, "max_tokens": tokens}
    reply = await running.client.post(CHAT, json=body, headers=named)
    assert reply.status_code in {200, 429}
    return reply


@asynccontextmanager
async def a_site(folder: Path, *nodes: EmulatedNode, **settings: Any) -> AsyncIterator[Running]:
    async with running_gateway(folder, nodes, {**CALM, **settings}) as running:
        yield running
        await until(lambda: not running.held(), seen=running.held)
        board = running.gateway.scheduler.dispatcher.placement_state
        assert all(row.ours == 0 and not row.running for row in board.rows)


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@in_virtual_time
async def test_two_callers_get_equal_shares_of_unequal_requests(tmp_path: Path) -> None:
    """Answers count once both have requests in line: before, the first is served alone."""
    keys = {name: new_key() for name in ("much", "little")}
    specs = [{"id": key.id, "sha256": key.sha256} for key in keys.values()]
    nodes = [EmulatedNode(slots=2, decode_tps=150.0, close_after_stream=False) for _ in range(2)]
    rng, enough = random.Random(5), asyncio.Event()
    tokens, answers = Counter[str](), Counter[str]()
    async with a_site(tmp_path, *nodes, keys=specs) as running:
        scheduler = running.gateway.scheduler

        async def one(name: str) -> None:
            while not enough.is_set():
                key = f"Bearer {keys[name].text}"
                reply = await ask(running, rng.randint(5, 35), authorization=key)
                usage = reply.json()["usage"]
                tokens[name] += usage["prompt_tokens"] + usage["completion_tokens"]
                answers[name] += 1
                if all(answers[other] >= 120 for other in keys):
                    enough.set()

        def both_wait() -> bool:
            lines = Counter(one.request.caller.fairness_key for one in scheduler.waiters)
            return len(lines) == 2 and min(lines.values()) >= 10

        names = ["much"] * 200 + ["little"] * 20
        tasks = [asyncio.create_task(one(name)) for name in names]
        await until(both_wait)
        tokens.clear()
        answers.clear()
        async with asyncio.timeout(90):
            await enough.wait()
        found = dict(tokens)
        await ended(tasks)
    assert 0.9 <= found["much"] / found["little"] <= 1.1, found


async def test_a_reload_applies_to_queued_requests_too(tmp_path: Path) -> None:
    key, node = new_key(), EmulatedNode(slots=4, decode_tps=20, answer_tokens=3000)
    async with a_site(tmp_path, node) as running:
        scheduler = running.gateway.scheduler

        def begin() -> list[asyncio.Task[Any]]:
            return [asyncio.create_task(ask(running, 3000, x_priority="batch")) for _ in range(3)]

        def queued() -> tuple[int, int]:
            return len(scheduler.queue_positions()), node.busy

        tasks = begin()
        await until(lambda: queued() == (0, 3))
        classes = {"batch": {"reserve_slots": 0.25, "queue_share": 1, "patience": "7s"}}
        queue = {"max": 3, "latest_wins": False}
        keys = [{"id": key.id, "sha256": key.sha256, "trust_user_headers": True}]
        more = {"queue": queue, "classes": classes, "keys": keys, "allow_anonymous": True}
        running.write_settings({**CALM, **more, "prompts": {"volatile": ["Today is "]}})
        await until(lambda: scheduler.dispatcher.rules.overdue_after[Priority.BATCH] == 7.0)
        # The fourth slot is reserved from now on, and three may wait.
        tasks += begin()
        await until(lambda: queued() == (3, 3))
        full = await ask(running, 1, x_priority="batch")
        assert (full.status_code, full.headers["x-gateway-reason"]) == (429, "queue_full")
        running.write_settings({**CALM, "policy": "nothing"})
        await until(lambda: running.gateway.config_files.settings_error is not None)
        assert "least_finish" in str(running.gateway.config_files.settings_error)
        assert scheduler.dispatcher.rules.overdue_after[Priority.BATCH] == 7.0
        # Without the reserve the queued requests run.
        running.write_settings(CALM)
        await until(lambda: queued() == (2, 4))
        await ended(tasks)


@in_virtual_time
async def test_a_conversation_stays_on_the_node_of_its_first_message(tmp_path: Path) -> None:
    nodes = [
        EmulatedNode(slots=2, prefill_tps=2000.0, decode_tps=400.0, cache_ram=1 << 20)
        for _ in range(4)
    ]
    # What tells them apart is at the beginning, so that conversations share no prefix.
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": f"{number}: " + "You answer at length and with care. " * 60}]
        for number in range(8)
    ]
    async with a_site(tmp_path, *nodes) as running:

        async def turn(messages: list[dict[str, str]]) -> tuple[str, int]:
            """Send one more message; its node, and the prompt tokens that this had cached."""
            messages.append({"role": "user", "content": "More about it."})
            reply = await running.client.post(CHAT, json={"messages": messages, "max_tokens": 20})
            answer = reply.json()
            messages.append(answer["choices"][0]["message"])
            details = answer["usage"].get("prompt_tokens_details", {})
            return reply.headers["x-gateway-node"], details.get("cached_tokens", 0)

        homes = [node for node, _ in await asyncio.gather(*map(turn, talks))]
        assert Counter(homes) == {f"node-{number}": 2 for number in range(4)}
        for _ in range(3):
            found = await asyncio.gather(*map(turn, talks))
            assert [node for node, _ in found] == homes
            assert all(cached > 200 for _, cached in found)


@in_virtual_time
async def test_a_session_named_by_a_header_keeps_its_node(tmp_path: Path) -> None:
    """Though nothing in its prompts connects them."""
    nodes = [EmulatedNode(slots=2, prefill_tps=1000.0, decode_tps=50.0) for _ in range(4)]
    async with a_site(tmp_path, *nodes) as running:

        async def node_of(name: str) -> str:
            reply = await ask(running, 8, name, x_openwebui_chat_id=name)
            return reply.headers["x-gateway-node"]

        names = [f"chat-{number}" for number in range(6)]
        homes = await asyncio.gather(*map(node_of, names))
        assert len(set(homes)) > 1
        for _ in range(3):
            assert [await node_of(name) for name in names] == homes
