"""What a gateway counts, from its start to the next one."""

from __future__ import annotations

from pathlib import Path

from gateway.app.metering import Metering
from tests.callers.metered_gateway import ALICE, chat, metered_gateway


def tokens_today(metering: Metering) -> float:
    """Of Alice, as her limit counts them."""
    caller = metering.key_ring.find(ALICE.text)
    assert caller is not None
    book = metering.limit_book
    standings = book.standings(book.accounts(caller).tracked)
    return next(one.used for one in standings if one.limit == "tokens_per_day")


async def test_what_was_used_last_is_written_before_the_end_and_counts_after_a_restart(
    tmp_path: Path,
) -> None:
    async with metered_gateway(tmp_path) as running:
        await chat(running, ALICE)
        metering, ledger = running.gateway.metering, running.gateway.ledger
        assert ledger is not None
    assert (ledger.written, ledger.dropped) == (1, 0)
    used = tokens_today(metering)
    assert used > 8
    async with metered_gateway(tmp_path) as running:
        assert tokens_today(running.gateway.metering) == used
