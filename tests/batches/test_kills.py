"""A batch over a gateway that is killed again and again: every line once, and paid once."""

from __future__ import annotations

import pytest

from tests.batches.kills import a_store, run_once
from tests.postgres import needs_postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=needs_postgres)])
async def test_every_line_has_one_result_though_the_gateway_is_killed(kind: str) -> None:
    with a_store(kind) as (url, server):
        found = await run_once(
            url, lines=400, kill_every=5.0, seconds=300.0, server=server, decode_tps=10.0
        )
    assert found.wrong == []
    assert (found.status, found.missing, found.doubles) == ("completed", 0, 0)
    assert (found.output, found.errors, found.ledger_rows) == (396, 4, 400)
    assert found.kills
    assert found.executions >= 400
    assert found.store_restarts == (0 if server is None else 2)
