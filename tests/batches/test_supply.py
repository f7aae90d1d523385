"""What waits is divided by what may serve it, and counted down with each claim."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.batches.claims import Pick
from gateway.batches.feeder import IDLE_SECONDS, READ_SECONDS, Supply
from gateway.batches.feeding import Want
from gateway.batches.request_rows import RequestKind
from gateway.batches.runner import RequestTarget
from gateway.store.store import Store
from tests.batches.stored_rows import FOLDER, NOW, a_batch, a_line, begin, claim
from tests.store.stores import opened


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with opened(store_url) as made:
        yield made


class ByModel:
    """Each model is a target; `x` and `y` are names of one."""

    def target_of(self, owner: str, path: str, model: str | None) -> RequestTarget | None:
        if model == "refused":
            return None
        return RequestTarget(("xy" if model in {"x", "y"} else str(model),), "chat", ())


def target(name: str) -> RequestTarget:
    return RequestTarget((name,), "chat", ())


def supply_of(store: Store) -> Supply:
    return Supply(store, ByModel(), lambda: 0.0, lambda: NOW)


async def test_lines_are_divided_by_target(store: Store) -> None:
    models = ["x", "y", "x", "demo", "refused"]
    lines = [a_line(number, model=model) for number, model in enumerate(models, 1)]
    begin(store, a_batch(class_="normal"), lines, None)
    supply = supply_of(store)
    await supply.read(FOLDER, ())
    assert supply.read_at == pytest.approx(READ_SECONDS)
    assert set(supply.known_targets()) == {target("xy"), target("demo"), None}
    (work,) = supply.works_of(target("xy"))
    assert (work.batch, work.rows, work.deadline) == (a_batch().id, 3, a_batch().expires_at)
    assert supply.class_of(a_batch().id) == "normal"
    assert supply.class_of(None) == ""
    picks = supply.picks(target("xy"), [Want(a_batch().id, "alice", None, 4)])
    assert sorted(picks, key=lambda pick: pick.model or "") == [
        Pick(2, RequestKind.LINE, a_batch().id, model="x"),
        Pick(2, RequestKind.LINE, a_batch().id, model="y"),
    ]


async def test_nothing_that_waits_is_read_more_rarely(store: Store) -> None:
    supply = supply_of(store)
    assert (await supply.read(FOLDER, ())).groups == []
    assert supply.read_at == pytest.approx(IDLE_SECONDS)
    supply.read_soon(1.0)
    assert supply.read_at == 1.0


async def test_claims_count_down_what_waits(store: Store) -> None:
    begin(store, a_batch(), [a_line(number, prefix=7) for number in range(1, 11)])
    supply = supply_of(store)
    await supply.read(FOLDER, ())
    works = await supply.with_groups(supply.works_of(target("demo")), {})
    assert [(group.prefix, group.rows) for group in works[0].groups] == [(7, 10)]
    picks = supply.picks(target("demo"), [Want(a_batch().id, "alice", 7, 4)])
    assert picks == [Pick(4, RequestKind.LINE, a_batch().id, prefix=7)]
    supply.count_claimed(target("demo"), picks, claim(store, limit=4, prefix=7))
    works = await supply.with_groups(supply.works_of(target("demo")), {})
    assert [work.rows for work in works] == [6]
    assert [group.rows for group in works[0].groups] == [6]
    supply.count_claimed(target("demo"), picks, [])
    assert supply.works_of(target("demo")) == []
    assert supply.read_at < 1.0
