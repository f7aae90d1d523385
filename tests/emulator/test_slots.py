from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from tests.emulator import EmulatedNode
from tests.emulator.raw_connection import RawConnection, chat, post, raw_connection
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"


async def ask(stack: AsyncExitStack, node: EmulatedNode, text: str = "hello") -> RawConnection:
    wire = await stack.enter_async_context(raw_connection(node.url))
    await wire.send(post(CHAT, chat(text)))
    return wire


@in_virtual_time
async def test_the_head_comes_at_once_and_the_first_event_after_the_prefill() -> None:
    async with EmulatedNode(prefill_tps=100) as node, raw_connection(node.url) as wire:
        await wire.send(post(CHAT, chat("the " * 60, max_tokens=1)))  # some 70 tokens: 0.7 s
        began = now()
        assert b"text/event-stream" in await wire.head()
        head = now() - began
        await wire.until(b"\n\n")
        event = now() - began
    assert head == 0.0
    assert event == pytest.approx(0.7, abs=0.1)


@in_virtual_time
async def test_a_full_node_withholds_the_head_until_a_slot_is_free() -> None:
    async with (
        EmulatedNode(slots=2, answer_tokens=10**6, decode_tps=100) as node,
        AsyncExitStack() as stack,
    ):
        first, second, third = [await ask(stack, node) for _ in range(3)]
        await first.head()
        await second.head()
        await node.until(lambda: node.queued == 1)
        with pytest.raises(TimeoutError):
            await third.some(0.05)
        await first.leave()
        await third.head()
        assert (node.busy, node.peak_busy, node.queued) == (2, 2, 0)


@in_virtual_time
async def test_a_stream_s_slot_stays_taken_until_its_prompt_is_read() -> None:
    async with EmulatedNode(prefill_tps=100) as node, raw_connection(node.url) as wire:
        await wire.send(post(CHAT, chat("the " * 30)))
        await wire.head()
        await wire.leave()
        await node.until(lambda: node.connections == 0)
        assert node.busy == 1
        await node.until(lambda: node.busy == 0)
        assert node.engine.tokens == 0


@in_virtual_time
async def test_a_plain_request_holds_its_slot_to_the_end() -> None:
    async with EmulatedNode(decode_tps=100) as node, raw_connection(node.url) as wire:
        await wire.send(post(CHAT, chat(stream=False, max_tokens=30)))
        await node.until(lambda: node.busy == 1)
        await wire.leave()
        await node.until(lambda: node.busy == 0)
        assert node.engine.tokens == 30


@in_virtual_time
async def test_a_queued_stream_whose_client_left_still_has_its_prompt_read() -> None:
    async with (
        EmulatedNode(slots=1, answer_tokens=10**6, decode_tps=100) as node,
        AsyncExitStack() as stack,
    ):
        first = await ask(stack, node)
        await first.until(b"\n\n")
        read = node.engine.prompt_tokens
        second = await ask(stack, node)
        await node.until(lambda: node.queued == 1)
        await second.leave()
        await node.until(lambda: node.connections == 1)
        assert node.queued == 1
        await first.leave()
        await node.until(lambda: node.busy == 0)
        assert node.engine.prompt_tokens == 2 * read
