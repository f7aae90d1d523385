"""What a gateway counts, from its start to the next one."""

from __future__ import annotations

from pathlib import Path

from gateway.app.metering import Metering
from tests.callers.metered_gateway import ALICE, chat, metered_gateway, recorded


def tokens_today(metering: Metering) -> float:
    """Of Alice, as her limit counts them."""
    caller = metering.key_ring.find(ALICE.text)
    assert caller is not None
    book = metering.limit_book
    standings = book.standings(book.accounts(caller).tracked)
    return next(one.used for one in standings if one.limit == "tokens_per_day")


async def test_what_was_used_counts_after_a_restart(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await chat(running, ALICE)
        await recorded(running, 1)
        used = tokens_today(running.gateway.metering)
    assert used > 8
    async with metered_gateway(tmp_path) as running:
        assert tokens_today(running.gateway.metering) == used


async def test_without_a_store_only_limits_and_keys_are_kept(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path, store={"url": "off"}) as running:
        metering = running.gateway.metering
        await chat(running, ALICE)
        assert (metering.store, metering.ledger, metering.reporter) == (None, None, None)
        assert not (tmp_path / "state" / "gateway.db").exists()


async def test_what_was_used_last_is_written_before_the_end(tmp_path: Path) -> None:
    async with metered_gateway(tmp_path) as running:
        await chat(running, ALICE)
        ledger = running.gateway.ledger
        assert ledger is not None
    assert (ledger.written, ledger.dropped) == (1, 0)
