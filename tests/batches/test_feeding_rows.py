"""The feeder learns what waits, and which prompts begin alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.batches.batch_rows import pause_batch
from gateway.batches.feeder import ReadPrefixes, ReadWaiting
from gateway.batches.feeding import PrefixGroup
from gateway.store.store import Store
from tests.batches.stored_rows import FOLDER, NOW, a_batch, a_line, begin, claim, do
from tests.store.stores import opened


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


def test_what_waits_is_counted_by_batch_and_state(store: Store) -> None:
    assert store.run_now(ReadWaiting(FOLDER, NOW)).groups == []
    for number, lines in ((1, 3), (2, 2)):
        batch = a_batch(number, created_at=NOW + number)
        begin(store, batch, [a_line(index + 1, batch) for index in range(lines)])
    waiting = store.run_now(ReadWaiting(FOLDER, NOW))
    assert {group.batch: group.rows for group in waiting.groups} == {
        a_batch(1).id: 3, a_batch(2).id: 2
    }  # fmt: skip
    assert (waiting.batches, waiting.oldest) == ({"in_progress": 2}, NOW + 1)
    assert store.run_now(ReadWaiting("g" * 32, NOW)).batches == {}
    do(store, pause_batch, "alice", a_batch(1).id, NOW, "asked")
    (group,) = store.run_now(ReadWaiting(FOLDER, NOW)).groups
    assert group.batch == a_batch(2).id


def test_groups_are_lines_whose_prompts_begin_alike(store: Store) -> None:
    prefixes = {1: 7, 2: 7, 3: 8, 4: 9, 5: 9, 6: 0}
    lines = [a_line(n, prefix=prefix, max_tokens=10 * n) for n, prefix in prefixes.items()]
    begin(store, a_batch(), lines)
    read = ReadPrefixes(a_batch().id, NOW)
    assert store.run_now(read) == (
        PrefixGroup(0, 1, 60, 60), PrefixGroup(9, 2, 50, 90), PrefixGroup(7, 2, 20, 30)
    )  # fmt: skip
    assert len(store.run_now(ReadPrefixes(a_batch().id, NOW, most=1))) == 1
    claim(store, limit=2, prefix=9)
    assert [group.prefix for group in store.run_now(read)] == [0, 7]
