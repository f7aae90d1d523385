"""A killed gateway loses no more of its ledger than the last second, and doubles nothing."""

from __future__ import annotations

import pytest

from tests.callers.kills import LAST_SECOND, run_once, store_urls
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
