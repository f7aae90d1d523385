from __future__ import annotations

from dataclasses import dataclass, field

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator import EmulatedNode
from tests.emulator.prompt_cache import PromptCache, Tokens, common_prefix, pack, reusable
from tests.emulator.raw_connection import chat
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
ids = st.lists(st.integers(0, 3), max_size=40)


@dataclass
class SlotStub:
    contents: Tokens = b""
    used_at: int = 0


@dataclass
class Server:
    """A server whose slots are always free and serve one request at a time."""

    cache: PromptCache
    slots: list[SlotStub] = field(default_factory=lambda: [SlotStub(), SlotStub()])
    uses: int = 0

    def ask(self, prompt: Tokens) -> tuple[int, int]:
        """Serve a prompt. Returns the slot's index and the cached tokens."""
        slot = self.cache.choose(self.slots, prompt)
        self.uses += 1
        slot.used_at = self.uses
        cached = reusable(slot.contents, prompt)
        slot.contents = prompt
        return self.slots.index(slot), cached


def text(kind: int, length: int) -> Tokens:
    return pack([kind] * length)


@given(ids, ids, ids)
def test_a_common_prefix_ends_at_the_first_different_token(
    both: list[int], first: list[int], second: list[int]
) -> None:
    one, other = both + first, both + second
    expected = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_prefix(pack(one), pack(other)) == expected


def test_a_prompt_goes_to_the_most_similar_slot_and_else_to_the_least_recently_used() -> None:
    server = Server(PromptCache(0))
    assert server.ask(text(1, 100)) == (0, 0)
    assert server.ask(text(2, 100)) == (1, 0)
    assert server.ask(text(1, 120)) == (0, 100)
    assert server.ask(text(3, 100)) == (1, 0)  # no slot is similar: it replaces 2
    assert server.ask(text(2, 100)) == (0, 0)


def test_a_tenth_in_common_is_not_similar_enough() -> None:
    for shared, expected in ((10, (0, 0)), (11, (1, 11))):
        server = Server(PromptCache(0))
        server.ask(text(1, 20))
        server.ask(text(2, 20))
        assert server.ask(text(2, shared) + text(3, 100 - shared)) == expected


def test_an_evicted_prompt_is_loaded_from_host_memory() -> None:
    server = Server(PromptCache(1000))
    for kind in (1, 2, 3, 4):
        assert server.ask(text(kind, 100))[1] == 0
    assert server.ask(text(1, 150))[1] == 100
    assert server.ask(text(2, 100))[1] == 99  # the last token is always read


@pytest.mark.parametrize(("kind", "cached"), [(2, 0), (3, 100)])
def test_host_memory_is_bounded_and_evicts_the_oldest_entry(kind: int, cached: int) -> None:
    server = Server(PromptCache(250))
    for other in (1, 2, 3, 4, 5):
        server.ask(text(other, 100))
    assert server.cache.evicted == [text(3, 100), text(4, 100)]  # 4 is in its slot, too
    assert server.ask(text(kind, 101))[1] == cached


def test_a_shared_prefix_serves_a_second_conversation_and_the_rest_of_the_first_is_lost() -> None:
    server = Server(PromptCache(1000))
    system = text(9, 150)
    first, second = system + text(1, 50), system + text(2, 50)
    server.ask(first)
    assert server.ask(second) == (0, 150)  # more than half of the slot stays: nothing is exchanged
    assert server.cache.evicted == []
    assert server.ask(first)[1] == 150


def test_the_contents_of_an_idle_slot_can_be_loaded_while_it_is_busy() -> None:
    server = Server(PromptCache(1000))
    system = text(9, 150)
    first, second = system + text(1, 50), system + text(2, 50)
    server.ask(first)
    server.ask(text(3, 100))  # begins in the other slot: the first is copied
    slot = server.slots[0]
    server.slots = [server.slots[1]]  # the first is at work
    assert server.ask(second)[1] == 150
    assert slot.contents == first


def test_a_slot_that_would_lose_more_than_half_of_its_contents_is_saved() -> None:
    server = Server(PromptCache(1000))
    system = text(9, 60)
    first, second = system + text(1, 140), system + text(2, 140)
    server.ask(first)
    assert server.ask(second) == (0, 60)
    assert server.ask(first)[1] == 199


@in_virtual_time
async def test_a_conversation_continues_from_its_cached_prefix() -> None:
    turns = [{"role": "user", "content": "the " * 200}]
    async with (
        EmulatedNode(cache_ram=0) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        first = (await client.post(CHAT, json={"messages": turns, "max_tokens": 20})).json()
        turns += [first["choices"][0]["message"], {"role": "user", "content": "and of it"}]
        second = (await client.post(CHAT, json={"messages": turns, "max_tokens": 20})).json()
        metrics = (await client.get("/metrics")).text
    assert first["timings"]["cache_n"] == 0
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    held = first["usage"]["total_tokens"] - 1  # the last token of the answer was never put in
    cached = second["timings"]["cache_n"]
    assert cached == held
    assert second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"] - cached
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert f"prompt_tokens_cached_total {cached}\n" in metrics


@in_virtual_time
async def test_cached_tokens_take_no_time() -> None:
    async with (
        EmulatedNode(cache_ram=0, prefill_tps=400, prefill_stalls=True) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        body = chat("the " * 200, stream=False, max_tokens=1)
        cold = (await client.post(CHAT, json=body)).json()["timings"]
        warm = (await client.post(CHAT, json=body)).json()["timings"]
    assert cold["prompt_ms"] > 500
    assert (warm["prompt_n"], warm["cache_n"]) == (1, cold["prompt_n"] - 1)
    assert warm["prompt_ms"] < 250


@in_virtual_time
async def test_a_killed_node_has_lost_its_cache() -> None:
    async with (
        EmulatedNode(cache_ram=1000) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        body = chat("the " * 50, stream=False, max_tokens=1)
        await client.post(CHAT, json=body)
        await node.kill()
        await node.revive()
        assert (await client.post(CHAT, json=body)).json()["timings"]["cache_n"] == 0
