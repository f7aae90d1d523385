"""Tenants of one gateway: whose prompts draw their requests to a node, and what they are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.access.keys import ApiKey, new_key
from tests.emulator import EmulatedNode
from tests.gateways import until
from tests.proxy.proxy_over_nodes import GENERATION_PATHS, ProxyOverNodes, prompt_field, proxy_over
from tests.virtual import in_virtual_time

ALICE, BOB, CAROL = new_key("alice"), new_key("bob"), new_key("carol")
LONG = "What nobody else may know, " * 150


@asynccontextmanager
async def tenants(
    folder: Path, *nodes: EmulatedNode, cache: dict[str, Any], **settings: Any
) -> AsyncIterator[ProxyOverNodes]:
    """Alice is of one group, Bob and Carol are of another; `cache` holds for all."""
    groups = {ALICE.id: "one", BOB.id: "other", CAROL.id: "other"}
    keys = [
        {"id": key.id, "sha256": key.sha256, "group": groups[key.id]} for key in (ALICE, BOB, CAROL)
    ]
    alike = ({"speed_hint": 1.0},) * len(nodes)  # There is nothing to explore.
    async with proxy_over(folder, *nodes, nodes=alike, keys=keys, cache=cache, **settings) as proxy:
        yield proxy


def caching(**more: Any) -> EmulatedNode:
    return EmulatedNode(
        **{"slots": 4, "prefill_tps": 500.0, "decode_tps": 100.0, "cache_ram": 1 << 20, **more}
    )


def as_(key: ApiKey, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key.text}", **more}


async def is_drawn(proxy: ProxyOverNodes, first: ApiKey, second: ApiKey, subject: str) -> bool:
    """Whether the second's request follows the first's equal prompt to its node."""
    messages = [{"role": "system", "content": f"{subject}: {LONG}"}]
    reply = await proxy.ask(headers=as_(first), messages=messages, max_tokens=4)
    home = proxy.attempts[-1].node
    other = await proxy.ask(headers=as_(second), messages=messages, max_tokens=4)
    assert reply.status_code == other.status_code == 200
    return proxy.attempts[-1].node == home


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isolate", "alice_and_bob", "bob_and_carol"),
    [("off", True, True), ("group", False, True), ("key", False, False)],
)
@in_virtual_time
async def test_only_prompts_of_the_same_scope_draw_a_request_to_their_node(
    tmp_path: Path, isolate: str, alice_and_bob: bool, bob_and_carol: bool
) -> None:
    async with tenants(
        tmp_path, *(caching() for _ in range(4)), cache={"isolate": isolate}
    ) as proxy:

        async def are_drawn(first: ApiKey, second: ApiKey) -> bool:
            for number in range(8):  # By chance it is sent there every fourth time.
                if not await is_drawn(proxy, first, second, f"{first.id}{number}"):
                    return False
            return True

        assert await are_drawn(ALICE, BOB) is alice_and_bob
        assert await are_drawn(BOB, CAROL) is bob_and_carol
        assert await are_drawn(BOB, BOB)


@pytest.mark.parametrize("path", GENERATION_PATHS)
@in_virtual_time
async def test_a_resumed_stream_hides_what_was_cached(tmp_path: Path, path: str) -> None:
    nodes = [caching() for _ in range(3)]
    async with tenants(tmp_path, *nodes, cache={"hide": True}) as proxy:
        asked = {
            **prompt_field(path, LONG),
            "temperature": 0,
            "max_tokens": 30,
            "n_predict": 30,
            "timings_per_token": True,
            "return_progress": True,
        }
        if path in {"/v1/chat/completions", "/v1/completions"}:
            asked["stream_options"] = {"include_usage": True}
        whole = await proxy.stream(path, headers=as_(BOB), **asked)
        for node in nodes:
            node.faults.next("reset", after_events=8)
        reply = await proxy.stream(path, headers=as_(BOB, **{"x-gateway-progress": "1"}), **asked)
        await proxy.settled()
        assert path == "/v1/responses" or proxy.finished[-1].attempts > 1
        assert proxy.finished[0].prompt_tokens > 500
        for found in (whole, reply):
            for word in (b"cache_n", b"prompt_n", b"prompt_progress", b"id_slot", b"processed="):
                assert word not in found.body
            for value in found.values:
                text = json.dumps(value)
                assert '"cached_tokens": 0' in text or '"cached_tokens"' not in text
                assert '"cache_read_input_tokens": 0' in text or "cache_read" not in text


@in_virtual_time
async def test_a_hidden_client_learns_its_place_in_the_queue_but_no_progress(
    tmp_path: Path,
) -> None:
    slow = caching(slots=1, prefill_tps=200.0, decode_tps=10.0)
    for hide in (True, False):
        folder = tmp_path / str(hide)
        await asyncio.to_thread(folder.mkdir)
        async with tenants(folder, slow, cache={"hide": hide}) as proxy:
            first = asyncio.create_task(proxy.ask(headers=as_(ALICE), max_tokens=40))
            await until(lambda: slow.busy == 1)
            body = {**prompt_field("/v1/chat/completions", LONG), "max_tokens": 2}
            reply = await proxy.stream(headers=as_(BOB, **{"x-gateway-progress": "1"}), **body)
            assert b": queued position=1" in reply.body
            assert (b": prefill percent=" in reply.body) is not hide
            assert (await first).status_code == 200


@in_virtual_time
async def test_without_a_prompt_cache_nodes_are_told_so_and_no_prompt_draws_a_request(
    tmp_path: Path,
) -> None:
    nodes = [caching() for _ in range(3)]
    async with tenants(tmp_path, *nodes, cache={"prompt_cache": False}) as proxy:
        for path in GENERATION_PATHS:
            for node in nodes:
                node.faults.next("reset", after_events=5)
            body = {**prompt_field(path, LONG), "max_tokens": 20, "n_predict": 20}
            reply = await proxy.stream(path, headers=as_(BOB), cache_prompt=True, **body)
            assert reply.status == 200
        await proxy.settled()
        generating = {"/completion", "/v1/chat/completions", "/v1/completions", "/v1/responses"}
        seen = [request for node in nodes for request in node.seen if request.path in generating]
        assert {request.path for request in seen} == generating
        assert all(json.loads(request.body)["cache_prompt"] is False for request in seen)
        assert not any(request.path == "/v1/messages" for node in nodes for request in node.seen)
        for node in nodes:
            node.faults.clear()
        drawn = [await is_drawn(proxy, BOB, BOB, f"bob{i}") for i in range(8)]
        assert not all(drawn)
