"""Clients that leave, and what a server with a single slot is given meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai as package
import pytest
import pytest_asyncio

from tests.api.site import FIXED, HELLO, Site, broken_off, busy, running_site, until_busy
from tests.gateways import NO_TLS, until

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

PATH = "/v1/chat/completions"
SHORT: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, **FIXED}
LONG = SHORT | {"max_tokens": 15_000, "stream": True}
# A slot is held for so many seconds at most, and on a slow machine the server needs many.
HELD = {"timeouts": {"silence": 600}}


@pytest_asyncio.fixture(loop_scope="session")
async def narrow(tmp_path: Path, narrow_url: str) -> AsyncIterator[Site]:
    """A gateway over one server with one slot, which is free before and after."""
    await until_busy(narrow_url, 0)
    async with running_site(tmp_path, [narrow_url], HELD) as site:
        yield site
    await until_busy(narrow_url, 0)


def the_node(site: Site) -> Any:
    return site.gateway.fleet.nodes["node-0"]


async def test_a_stream_that_is_left_frees_its_slot_at_once(narrow: Site, narrow_url: str) -> None:
    async with narrow.http.stream("POST", PATH, json=LONG) as answer:
        parts = answer.aiter_bytes()
        await anext(parts)
        assert await busy(narrow_url) == 1
        assert narrow.leased == {"node-0": 1}
    await until_busy(narrow_url, 0)
    assert await broken_off(narrow_url)
    await narrow.until_idle()
    [record] = narrow.records
    assert (record.status, record.reason, record.attempts) == (499, "client_closed", 1)
    assert record.completion_tokens > 0  # what was generated counts, though it was cut short
    assert the_node(narrow).failures == 0


async def test_a_plain_request_that_is_left_frees_its_slot_at_once(
    narrow: Site, narrow_url: str
) -> None:
    # By itself llama.cpp generates to the end of a plain request though nobody reads it any more.
    body = SHORT | {"max_tokens": 15_000}
    asked = asyncio.create_task(narrow.http.post(PATH, json=body))
    await until_busy(narrow_url, 1)
    await until(
        lambda: any(
            live.attempt and live.attempt.event_count > 5 for live in narrow.gateway.registry
        )
    )
    asked.cancel()
    await until_busy(narrow_url, 0)
    assert await broken_off(narrow_url)
    await until(lambda: narrow.records)
    assert narrow.records[0].status == 499
    assert (await narrow.http.post(PATH, json=SHORT)).status_code == 200
    assert the_node(narrow).failures == 0


@pytest.mark.slow
async def test_what_can_only_be_answered_plainly_holds_its_slot_until_the_server_has_let_go(
    narrow: Site, narrow_url: str
) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "well"}]
    body = SHORT | {"max_tokens": 1000, "messages": begun}
    asked = asyncio.create_task(narrow.http.post(PATH, json=body))
    await until_busy(narrow_url, 1)
    asked.cancel()
    await until(lambda: narrow.records)
    assert narrow.records[0].status == 499
    assert narrow.leased == {"node-0": 1}
    queued = asyncio.create_task(narrow.http.post(PATH, json=SHORT))
    await until(narrow.gateway.scheduler.queue_positions)
    # Nothing reaches the server while it is still at work for nobody.
    while not queued.done():
        assert await deferred(narrow_url) == 0
    assert (await queued).status_code == 200
    assert narrow.records[1].queue_seconds > 0.1
    assert the_node(narrow).failures == 0


async def test_a_client_that_gives_up_gets_its_own_error_and_frees_the_slot(
    narrow: Site, narrow_url: str
) -> None:
    # It has asked before it gives up, however slow this machine is; and it says that it will wait
    # longer than it does, else the gateway could be the first to give up.
    limits = httpx.Timeout(60.0, read=0.3)
    patient = {"X-Stainless-Read-Timeout": "600"}
    async with narrow.openai(timeout=limits, max_retries=0) as client:
        with pytest.raises(package.APITimeoutError):
            await client.chat.completions.create(
                model="demo", messages=HELLO, max_tokens=15_000, extra_headers=patient
            )
    await until(lambda: narrow.records)
    await narrow.until_idle()
    assert [record.status for record in narrow.records] == [499]


async def deferred(url: str) -> int:
    """Requests that wait inside the server, by its own count."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=10) as client:
        told = (await client.get(f"{url}/metrics")).text
    found = re.search(r"^llamacpp:requests_deferred (\d+)", told, re.MULTILINE)
    assert found
    return int(found[1])


async def test_a_server_is_never_given_more_than_it_has_slots(
    narrow: Site, narrow_url: str
) -> None:
    order: list[int] = []

    async def ask(number: int) -> None:
        answer = await narrow.http.post(PATH, json=SHORT | {"max_tokens": 400})
        assert answer.status_code == 200
        order.append(number)

    async with asyncio.TaskGroup() as group:
        asked = []
        async with narrow.http.stream("POST", PATH, json=LONG) as answer:
            parts = answer.aiter_bytes()
            await anext(parts)
            for number in range(3):
                asked.append(group.create_task(ask(number)))
                await until(lambda n=number: len(narrow.gateway.scheduler.queue_positions()) > n)
            await anext(parts)  # the slot is still taken
        looks = 0
        while not all(task.done() for task in asked):
            assert await deferred(narrow_url) == 0
            assert narrow.leased["node-0"] <= 1
            looks += 1
    assert looks > 3
    assert order == [0, 1, 2]  # first come, first served
    assert [record.queue_seconds > 0 for record in narrow.records] == [False, True, True, True]


async def test_who_leaves_the_queue_is_never_sent(narrow: Site, narrow_url: str) -> None:
    async with narrow.http.stream("POST", PATH, json=LONG) as answer:
        parts = answer.aiter_bytes()
        await anext(parts)
        waiting = asyncio.create_task(narrow.http.post(PATH, json=SHORT))
        await until(narrow.gateway.scheduler.queue_positions)
        waiting.cancel()
        await until(lambda: not narrow.gateway.scheduler.queue_positions())
        await until(lambda: narrow.records)
        [record] = narrow.records
        assert (record.status, record.attempts, record.node) == (499, 0, None)
        assert await deferred(narrow_url) == 0
        await anext(parts)  # the other one runs on
