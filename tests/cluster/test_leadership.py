"""What a member does with the row, by its own clock. No clock runs here."""

from __future__ import annotations

import copy
import time

from gateway.cluster.leadership import (
    Change,
    LeaderRow,
    Member,
    boot_clock,
    holder_name,
    parse_holder,
)
from tests.known import known

TERM = 2.0
OTHER = LeaderRow("other", 3, 7)


def watch(member: Member, row: LeaderRow, since: float, until: float) -> float:
    """Let the member see this row again and again, and return when it last did."""
    now = since
    while now <= until:
        member.saw(row, now, now)
        now += 0.25
    return now - 0.25


def role(member: Member, now: float) -> str:
    if member.leads(now):
        return "leader"
    return "follower" if copy.copy(member).next_step(now) is None else "challenger"


def new_leader(now: float = 100.0) -> Member:
    member = Member("me", TERM)
    asked_at = watch(member, OTHER, now - TERM, now)
    step = known(member.next_step(asked_at))
    assert step.is_claim
    member.done(step, asked_at, asked_at)
    return member


def renew(member: Member, asked_at: float, answered_at: float) -> Change:
    """Let the leader renew its term, and return the step by which it has."""
    step = known(member.next_step(asked_at))
    assert not step.is_claim
    member.done(step, asked_at, answered_at)
    return step


def test_a_row_is_claimed_only_after_the_term_of_its_holder_if_that_is_longer() -> None:
    member = Member(holder_name("a/1", TERM), TERM)
    row = LeaderRow(holder_name("b/2", 30.0), 3, 7)
    now = watch(member, row, 10.0, 39.75)
    assert (role(member, now), member.knows_leader(now), member.pause(now)) == (
        ("follower", True, 0.25)
    )
    watch(member, row, now, 40.0)
    assert role(member, 40.0) == "challenger"
    assert not member.knows_leader(40.0)
    assert parse_holder(row.holder) == ("b/2", 30.0)


def test_a_time_without_looks_does_not_count() -> None:
    member = Member("me", TERM)
    watch(member, OTHER, 10.0, 11.0)
    # The row may have been another one, and have come back from an old state.
    member.saw(OTHER, 11.8, 11.8)
    watch(member, OTHER, 11.8, 13.7)
    assert role(member, 13.7) == "follower"
    watch(member, OTHER, 13.8, 13.8)
    assert role(member, 13.8) == "challenger"


def test_a_term_counts_from_the_sending_of_the_update_that_succeeded() -> None:
    member = new_leader(100.0)
    assert member.leads(101.9)
    step = renew(member, 100.5, 100.9)
    row = LeaderRow("me", 4, 1)
    assert step == Change(LeaderRow("me", 4, 0), row, is_claim=False)
    assert member.leads(102.4)
    assert not member.leads(102.5)
    # Then it is a challenger as any other.
    assert member.next_step(102.5) is None
    watch(member, row, 102.5, 104.5)
    assert member.next_step(104.5) == Change(row, LeaderRow("me", 5, 0), is_claim=True)


def test_a_leader_that_is_refused_stops_at_once() -> None:
    member = new_leader(100.0)
    member.next_step(100.5)
    member.refused()
    assert not member.leads(100.5)
    assert member.next_step(100.5) is None
    # By the clock that counts a suspended machine and is never set.
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= boot_clock() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_an_answer_that_got_lost_is_written_by_no_later_step() -> None:
    member = new_leader(100.0)
    first, second = known(member.next_step(100.5)), known(member.next_step(101.0))
    assert not first.is_claim
    assert not second.is_claim
    assert (first.wanted.counter, second.wanted.counter) == (1, 2)
    assert first.old == second.old, "the condition does not need the counter"
    follower = Member("other", TERM)
    watch(follower, OTHER, 10.0, 12.0)
    claims = [known(follower.next_step(12.0)), known(follower.next_step(12.1))]
    assert [(claim.is_claim, claim.wanted.epoch) for claim in claims] == [(True, 4), (True, 5)]


def test_a_claim_that_took_too_long_gives_no_term() -> None:
    member = Member("me", TERM)
    asked_at = watch(member, OTHER, 10.0, 12.0)
    step = known(member.next_step(12.1))
    assert step.is_claim
    member.done(step, 12.1, asked_at + 0.8)
    assert role(member, asked_at + 0.8) == "follower"


def test_a_leader_that_hears_of_a_later_epoch_raises_its_own() -> None:
    member = new_leader(100.0)
    member.heard(9, 100.2)
    step = renew(member, 100.5, 100.6)
    assert step == Change(LeaderRow("me", 4, 0), LeaderRow("me", 10, 1), is_claim=False)
    assert (member.won_at, member.may_grant(100.6)) == (100.6, False)


def test_a_follower_that_hears_of_a_later_epoch_knows_that_the_row_is_outdated() -> None:
    member = Member("me", TERM)
    watch(member, OTHER, 10.0, 11.0)
    member.heard(5, 11.0)
    watch(member, OTHER, 11.0, 12.9)
    assert role(member, 12.9) == "follower"
    watch(member, OTHER, 13.0, 13.0)
    assert member.next_step(13.0) == Change(OTHER, LeaderRow("me", 6, 0), is_claim=True)
