"""Each admitted request becomes one row, with what its record says when all of it is known."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.callers.ledger import ROW_COLUMNS, UsageRow
from gateway.callers.limits import LimitBook
from gateway.callers.meter import Meter
from gateway.config.keys import LimitSpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.events import EventBus, RequestRecord
from gateway.lease import AttemptCharge
from gateway.terms import Caller, Priority
from tests.lease_requests import a_lease_request
from tests.nodes.build import Clock

NOW = 1_780_000_000.0
ALICE = Caller("k1", "alice", Priority.NORMAL, group="team", trust_user_headers=True)


class World:
    """A meter, whose clock stands still."""

    def __init__(self) -> None:
        self.clock = Clock(NOW)
        self.rows: list[UsageRow] = []
        self.tokens: dict[str, tuple[int, int]] = {}
        self._timers: list[Any] = []
        self.bus = EventBus(lambda _, work: self._timers.append(work))
        self.book = LimitBook(Settings(), clock=self.clock, wall_clock=self.clock)
        self.meter = Meter(
            self.book,
            self.bus,
            process="p1",
            add_row=self.rows.append,
            tokens_so_far=lambda id_: self.tokens.get(id_, (0, 0)),
            slot_seconds_so_far=lambda id_: 2.0 if id_ == "old" else 0.0,
            cost_of_use=lambda node, _, completion, seconds: completion + seconds if node else 0.0,
            wall_clock=self.clock,
        )

    def admit(self, id_: str, record: RequestRecord, **request: Any) -> Any:
        accounts = self.book.accounts(ALICE, "bob")
        return self.meter.admit(accounts, a_lease_request(id_, **request), record)

    def row(self) -> dict[str, Any]:
        self.bus.flush()
        (row,) = self.rows
        return dict(zip(ROW_COLUMNS, row, strict=True))

    @property
    def open(self) -> list[str]:
        """The ids of open requests that are older than a second."""
        return [one.id for one in self.meter.open_requests(self.clock.now - 1.0, {})]


def a_record(**keys: Any) -> RequestRecord:
    return RequestRecord("x", "/v1/chat/completions", "demo", Priority.PREMIUM, "k1", **keys)


def test_a_request_that_ends_is_a_row() -> None:
    world = World()
    record = a_record()
    metered = world.admit("req_7", record)
    world.clock.passes(2.5)
    record.describe(stream=True, model="demo")
    record.waited(0.25)
    record.attempt_began("a", "gpu", None)
    record.first_content_sent(0.75)
    record.resumed()
    world.meter.ended(metered, record)
    # What it used is known a little later, here that of two attempts.
    record.count_tokens(100, 40, 20)
    record.charge(AttemptCharge(0.25, 1.0, prefill_seconds=0.25, decode_seconds=0.5))
    record.charge(AttemptCharge(0.5, 1.4, prefill_seconds=0.25, decode_seconds=1.0))
    assert world.row() == {
        "id": "req_7", "process": "p1", "started_at": NOW, "ended_at": NOW + 2.5, "key": "k1",
        "group_name": "team", "user": "bob", "model": "demo", "class": "premium", "tier": "gpu",
        "node": "a", "path": "/v1/chat/completions", "stream": True, "prompt_tokens": 100,
        "cached_tokens": 40, "completion_tokens": 20, "slot_seconds": 2.4, "cost": 0.75,
        "gpu_cost": None, "attempts": 1, "status": 200, "outcome": "ok", "wait_seconds": 0.25,
        "ttft_seconds": 0.75, "prefill_seconds": 0.5, "decode_seconds": 1.5, "resumptions": 1,
        "client_request_id": "x",
    }  # fmt: skip


def test_a_request_that_fails_is_a_row_and_one_that_a_limit_refuses_is_none() -> None:
    world = World()
    limited = Caller("k2", "bob", Priority.NORMAL, limits=LimitSpec(concurrency=1))
    accounts, record = world.book.accounts(limited), a_record(prompt_tokens=30, cached_tokens=10)
    metered = world.meter.admit(accounts, a_lease_request("x", slots=0), record)
    with pytest.raises(GatewayError, match="concurrency"):
        world.meter.admit(accounts, a_lease_request("req_2"), a_record())
    record.fail(503, "queue_timeout")
    world.meter.ended(metered, record)
    row = world.row()
    assert (row["id"], row["status"], row["outcome"]) == ("x", 503, "queue_timeout")
    assert (row["tier"], row["node"], row["attempts"]) == (None, None, 0)
    assert (row["prompt_tokens"], row["cached_tokens"]) == (0, 0), "it had no slot"
    for name in ("ttft_seconds", "prefill_seconds", "decode_seconds", "client_request_id"):
        assert row[name] is None, name


def test_the_row_of_a_stored_request_is_handed_over_and_no_journal_has_it() -> None:
    world, handed_over = World(), list[UsageRow]()
    record = a_record(prompt_tokens=30, completion_tokens=10)
    accounts = world.book.accounts(ALICE)
    metered = world.meter.admit_stored(accounts, a_lease_request("row_1"))
    world.clock.passes(5.0)
    assert world.open == []
    world.meter.ended_stored(metered, record, handed_over.append)
    world.bus.flush()
    assert world.rows == []
    (row,) = handed_over
    told = dict(zip(ROW_COLUMNS, row, strict=True))
    assert (told["id"], told["process"], told["prompt_tokens"]) == ("row_1", "p1", 30)
    assert (told["completion_tokens"], told["outcome"]) == (10, "ok")


def test_a_stored_request_without_a_result_costs_nothing() -> None:
    world = World()
    limits = LimitSpec(concurrency=1, tokens_per_day=3000)
    accounts = world.book.accounts(Caller("k2", "bob", Priority.NORMAL, limits=limits))
    for _ in range(10):
        metered = world.meter.admit_stored(accounts, a_lease_request("row_1"))
        with pytest.raises(GatewayError, match="concurrency"):
            world.meter.admit_stored(accounts, a_lease_request("row_2"))
        world.meter.dropped(metered)
        world.bus.flush()
    (account,) = accounts.tracked
    assert (account.open, account.running, account.reserved_tokens) == (0, 0, 0)
    assert world.rows == []


def test_a_row_waits_for_the_tokens_of_all_sub_requests() -> None:
    world = World()
    record, part = a_record(), a_record(prompt_tokens=5, completion_tokens=7, slot_seconds=1.0)
    metered = world.admit("req_1", record)
    record.sub_request_began()
    record.sub_request_began()
    world.meter.ended(metered, record)
    world.bus.flush()
    record.sub_request_ended(part)
    assert world.rows == []
    assert world.open == []
    record.sub_request_ended(part)
    row = world.row()
    assert (row["prompt_tokens"], row["completion_tokens"], row["slot_seconds"]) == (10, 14, 2.0)


def test_requests_are_open_from_their_admission_to_their_row() -> None:
    world = World()
    record = a_record()
    old = world.admit("old", record)
    world.clock.passes(1.0)
    world.admit("new", a_record())
    assert world.open == ["old"]
    world.tokens["old"] = 12, 34
    (one,) = world.meter.open_requests(NOW, {})
    assert (one.started_at, one.key, one.group, one.user) == (NOW, "k1", "team", "bob")
    assert (one.prompt_tokens, one.completion_tokens, one.class_) == (12, 34, "premium")
    assert (one.slot_seconds, one.cost) == (2.0, 0.0)
    record.attempt_began("a", "gpu", None)
    (one,) = world.meter.open_requests(NOW, {})
    assert one.cost == 36.0
    world.meter.ended(old, record)
    world.clock.passes(1.0)
    # Until its tokens are counted.
    assert world.open == ["old", "new"]
    world.bus.flush()
    assert world.open == ["new"]
