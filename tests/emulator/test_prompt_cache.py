from __future__ import annotations

import httpx
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator import EmulatedNode
from tests.emulator.prompt_cache import common_prefix, pack
from tests.emulator.raw_connection import chat
from tests.virtual import in_virtual_time

CHAT = "/v1/chat/completions"
ids = st.lists(st.integers(0, 3), max_size=40)


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
