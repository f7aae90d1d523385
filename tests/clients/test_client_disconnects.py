"""Clients that disconnect, and the load of a server with a single slot meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.clients.site import FIXED, HELLO, Site, broken_off, running_site, until_busy
from tests.gateways import NO_TLS, until

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

PATH = "/v1/chat/completions"
SHORT: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, **FIXED}
LONG = SHORT | {"max_tokens": 15_000, "stream": True}
# The silence timeout also limits how long a slot is held; on a slow machine the server needs long.
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


@pytest.mark.smoke
async def test_a_plain_request_that_is_left_frees_its_slot_at_once(
    narrow: Site, narrow_url: str
) -> None:
    # llama.cpp alone would finish a plain answer though its client has left.
    body = SHORT | {"max_tokens": 15_000}
    sent = asyncio.create_task(narrow.http.post(PATH, json=body))
    await until_busy(narrow_url, 1)
    await until(
        lambda: any(
            in_flight.attempt and in_flight.attempt.content_events > 5
            for in_flight in narrow.gateway.registry
        )
    )
    sent.cancel()
    await until_busy(narrow_url, 0)
    assert await broken_off(narrow_url)
    await until(lambda: narrow.records)
    assert narrow.records[0].status == 499
    assert (await narrow.http.post(PATH, json=SHORT)).status_code == 200
    assert the_node(narrow).failures == 0


@pytest.mark.slow
async def test_a_request_that_cannot_be_streamed_holds_its_slot_until_the_server_frees_it(
    narrow: Site, narrow_url: str
) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "well"}]
    body = SHORT | {"max_tokens": 1000, "messages": begun}
    sent = asyncio.create_task(narrow.http.post(PATH, json=body))
    await until_busy(narrow_url, 1)
    sent.cancel()
    await until(lambda: narrow.records)
    assert narrow.records[0].status == 499
    assert narrow.leased == {"node-0": 1}
    queued = asyncio.create_task(narrow.http.post(PATH, json=SHORT))
    await until(narrow.gateway.scheduler.queue_positions)
    # The server gets no request while it still works for the client that has left.
    while not queued.done():
        assert await deferred(narrow_url) == 0
    assert (await queued).status_code == 200
    assert narrow.records[1].queue_seconds > 0.1
    assert the_node(narrow).failures == 0


async def deferred(url: str) -> int:
    """Requests that wait in the server for a slot, by its own metrics."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_TLS, timeout=10) as client:
        metrics = (await client.get(f"{url}/metrics")).text
    found = re.search(r"^llamacpp:requests_deferred (\d+)", metrics, re.MULTILINE)
    assert found
    return int(found[1])
