"""A killed gateway loses no more of its ledger than the last second, and doubles nothing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from gateway.local.server import claim_port, claimed_port
from tests.callers.kills import (
    BATCH,
    HOST,
    LAST_SECOND,
    LIMIT,
    Site,
    a_request,
    emulated_nodes,
    rows_of,
    run_once,
    send,
    store_urls,
    tally_of,
)
from tests.gateways import until
from tests.postgres import needs_postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STALLS = 4.0
"""Seconds for which the machine of a test may stand still between two flushes."""


@pytest.mark.smoke
@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgresql", marks=needs_postgres)])
async def test_the_ledger_of_a_killed_gateway_is_that_of_its_nodes(store: str) -> None:
    with store_urls(store) as new_url:
        found = await run_once(new_url(), 150, seed=11)
    assert found.wrong == []
    assert found.doubles == 0
    assert found.oldest_missing <= LAST_SECOND + STALLS
    assert found.rows >= found.requests - 60
    assert set(found.compared) >= {"complete: completion", "cut: completion", "lost: completion"}


async def test_a_gateway_that_stood_still_counts_what_nodes_have_read_meanwhile(
    tmp_path: Path,
) -> None:
    """It learns at once of several reports of progress, and that the client has left."""
    rng = random.Random(5)
    requests = (a_request(rng, number) for number in range(100))
    sent, body = next((sent, body) for sent, body in requests if sent.kind == "prefill")
    with claim_port(HOST) as claim:
        async with emulated_nodes() as nodes:
            url = f"sqlite:///{tmp_path}/gateway.db"
            site = Site(tmp_path, nodes, url, claimed_port(claim), nice=0)
            await site.start()
            try:
                sending = asyncio.create_task(send(site, rng, sent, body))
                await until(lambda: tally_of(nodes, sent.tag).read_tokens >= BATCH, LIMIT)
                site.halt(halted=True)
                await sending
                await until(lambda: tally_of(nodes, sent.tag).read_tokens >= 7 * BATCH, LIMIT)
                site.halt(halted=False)
                await until(lambda: all(one.busy == 0 for one in nodes), LIMIT)
            finally:
                site.halt(halted=False)
                await site.stop()
            ((row,), still_open) = await asyncio.to_thread(rows_of, url)
            read = tally_of(nodes, sent.tag).read_tokens
    assert (row["outcome"], still_open) == ("client_closed", 0)
    assert read - 2 * BATCH <= row["prompt_tokens"] <= read
