"""Properties of fair shares, over any number of callers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.callers.fair_share import FairShare, soft_limit

PARTIES = [f"p{number}" for number in range(5)]
moves = st.lists(st.tuples(st.sampled_from(PARTIES), st.booleans()), max_size=200)


def ask(share: FairShare, caller: str, limit: int, user: str | None = None) -> bool:
    """Take one more unit, if everything can be evicted."""
    if share.total + 1 > soft_limit(limit):
        yielding = share.victims(caller, 1, soft_limit(limit), user)
        if not yielding:
            return False
        chosen = yielding[0]
        share.remove(chosen, 1, share.users_by_size(chosen)[0])
    share.add(caller, 1, user)
    return True


def filled(limit: int, callers: Sequence[str]) -> FairShare:
    share = FairShare()
    for caller in callers:
        ask(share, caller, limit)
    return share


@given(moves, st.integers(1, 40))
def test_nobody_is_evicted_for_a_larger_caller(wanted: list[tuple[str, bool]], limit: int) -> None:
    share = FairShare()
    for caller, more in wanted:
        if more:
            before = dict(share.by_caller)
            own = before.get(caller, 0)
            for other in share.victims(caller, 1, soft_limit(limit)):
                assert before[other] > own + 1
            ask(share, caller, limit)
        elif share.held_by(caller):
            share.remove(caller, 1)
        assert share.total == sum(share.by_caller.values()) <= soft_limit(limit)
        assert all(held > 0 for held in share.by_caller.values())


@given(st.integers(2, 60), st.sampled_from(PARTIES), st.lists(st.sampled_from(PARTIES)))
def test_an_evicted_caller_returns_in_vain(limit: int, asker: str, others: list[str]) -> None:
    share = filled(limit, others)
    before = dict(share.by_caller)
    if not ask(share, asker, limit):
        return
    for victim in [name for name, held in before.items() if share.held_by(name) < held]:
        held = share.held_by(asker)
        ask(share, victim, limit)
        assert share.held_by(asker) == held


@given(st.integers(8, 40), st.integers(2, 6))
def test_a_caller_with_many_users_has_one_share_and_they_divide_it(limit: int, count: int) -> None:
    share = FairShare()
    for user in range(count):
        for _ in range(limit):
            ask(share, "web", limit, f"web/{user}")
    assert share.held_by("web") == soft_limit(limit)
    users = share.by_user["web"].values()
    assert len(users) == min(count, soft_limit(limit))
    assert max(users) - min(users) <= 1
    # One after the other; this order is the worst for the last caller.
    for _ in range(limit):
        ask(share, "other", limit)
    assert abs(share.held_by("web") - share.held_by("other")) <= 1
