from __future__ import annotations

import math
from collections import Counter

import pytest

from gateway.request import Priority
from gateway.scheduling.matching import MOST_DECLINES, DispatchRules
from tests.scheduling.rows import Desk


def test_what_finds_a_free_slot_goes_at_once_and_the_next_waits() -> None:
    desk = Desk((1,))
    _, first = desk.arrive()
    second, placement = desk.arrive()
    assert first is not None
    assert placement is None
    assert desk.dispatcher.waiting == 1
    (next_one,) = desk.finish(first, 2.0)
    assert next_one.queued is second


def test_place_never_puts_in_line() -> None:
    desk = Desk((1,))
    desk.fill()
    assert desk.dispatcher.place(desk.ask(), 0.0) is None
    assert desk.dispatcher.waiting == 0


def test_who_waits_goes_before_who_comes_when_a_slot_is_free_but_not_given_out() -> None:
    desk = Desk((1,))
    (running,) = desk.fill()
    waits, _ = desk.arrive()
    desk.dispatcher.released(running, 1.0)
    late, placement = desk.arrive(1.0)
    assert placement is None
    (given,) = desk.match(1.0)
    assert given.queued is waits
    assert desk.dispatcher.queued_requests() == [late]


def test_a_slot_freed_while_nobody_waited_holds_nobody_up() -> None:
    desk = Desk((1, 1))
    other = ((desk.board.candidate_set([desk.board.add("other", total=1)]),),)
    desk.arrive(groups=other)
    for placement in desk.fill():
        desk.dispatcher.released(placement, 1.0)
    desk.arrive(1.0, groups=other)
    assert desk.arrive(1.0)[1] is not None


def test_a_better_class_goes_first() -> None:
    desk = Desk((1,))
    (running,) = desk.fill()
    for priority in (Priority.BATCH, Priority.NORMAL, Priority.URGENT, Priority.PREMIUM):
        desk.arrive(priority=priority)
    order = []
    for now in range(4):
        (running,) = desk.finish(running, float(now))
        order.append(running.queued.priority)
    assert order == sorted(Priority)


def test_of_one_caller_the_one_that_fits_the_free_node_goes() -> None:
    desk = Desk((1,))
    (running,) = desk.fill()
    desk.arrive(prompt_tokens=5000.0)
    warm, _ = desk.arrive(prompt_tokens=5000.0, cached={0: 4900.0})
    assert desk.finish(running, 1.0)[0].queued is warm


def test_a_fall_back_is_only_for_when_no_node_of_the_first_name_is_alive() -> None:
    desk = Desk((1, 1))
    first, second = (desk.board.candidate_set([row]) for row in desk.rows)
    groups = ((first,), (second,))
    _, placement = desk.arrive(groups=groups)
    assert placement is not None
    assert placement.group == 0
    waits, none = desk.arrive(groups=groups)
    assert none is None
    desk.board.set_slots(desk.rows[0], 1, 0, 0, alive=False)
    (given,) = desk.match(1.0)
    assert (given.queued, given.group, given.row) == (waits, 1, desk.rows[1])


def test_a_tier_without_room_is_passed_over() -> None:
    desk = Desk((1, 1))
    gpu, cpu = (desk.board.candidate_set([row]) for row in desk.rows)
    rows = [desk.arrive(groups=((gpu, cpu),))[1] for _ in range(2)]
    assert [placement and placement.row for placement in rows] == desk.rows


def test_batch_leaves_the_reserve_alone() -> None:
    desk = Desk((4,), DispatchRules(batch_reserve=0.5))
    placed = [desk.arrive(priority=Priority.BATCH)[1] for _ in range(4)]
    assert [placement is not None for placement in placed] == [True, True, False, False]
    assert desk.arrive()[1] is not None


def test_a_node_that_failed_it_is_avoided_while_another_is_alive() -> None:
    desk = Desk((1, 1))
    other = desk.rows[1]
    _, placement = desk.arrive(failed={0})
    assert placement is not None
    assert placement.row is other
    waits, none = desk.arrive(failed={0})
    assert none is None
    desk.board.set_slots(other, 1, 0, 0, alive=False)
    assert [one.queued for one in desk.match(1.0)] == [waits]


def test_a_closed_node_is_never_used() -> None:
    desk = Desk((2,))
    ask, placement = desk.arrive(excluded={0})
    assert placement is None
    assert desk.match(1.0) == []
    assert desk.dispatcher.withdraw(ask)


def test_those_who_find_no_node_hold_nobody_up() -> None:
    desk = Desk((1, 1))
    running = desk.fill()
    for _ in range(50):
        desk.arrive(excluded={0, 1})
    able, _ = desk.arrive()
    assert desk.finish(running[0], 1.0)[0].queued is able


def test_what_needs_no_slot_goes_to_a_full_node() -> None:
    desk = Desk((1,))
    desk.fill()
    assert desk.arrive(slots=0)[1] is not None


def test_a_node_gets_few_at_once_that_need_no_slot_and_of_one_caller_half() -> None:
    desk = Desk((1, 1), DispatchRules(slotless_limit=3))
    owners = ["a"] * 9 + ["b"] * 9
    placed = [
        desk.arrive(slots=0, slotless_caller=owner, fairness_key=owner)[1] for owner in owners
    ]
    assert [number for number, one in enumerate(placed) if one is not None] == [0, 1, 2, 3, 9, 10]
    assert [row.slotless_running for row in desk.rows] == [3, 3]
    assert desk.dispatcher.waiting == 12
    assert desk.dispatcher.depths()[Priority.NORMAL] == 12
    served = [
        one.queued.slotless_caller for _ in range(8) for one in desk.finish(desk.running[0], 1.0)
    ]
    assert min(Counter(served).values()) >= 3, "in turn"
    while desk.running:
        desk.finish(desk.running[0], 2.0)
    assert desk.dispatcher.waiting == 0
    assert [(row.slotless_running, row.slotless_by_caller) for row in desk.rows] == [(0, {})] * 2


def test_neither_slots_nor_what_needs_none_wait_for_the_other() -> None:
    desk = Desk((1,), DispatchRules(slotless_limit=1))
    full, none = desk.fill()[0], desk.arrive(slots=0)[1]
    assert none is not None
    narrow, _ = desk.arrive()
    slotless, _ = desk.arrive(slots=0)
    wait = desk.dispatcher.predicted_wait(desk.ask(), 0.0)
    for _ in range(50):
        desk.arrive(slots=0, priority=Priority.URGENT)
    assert desk.dispatcher.predicted_wait(desk.ask(), 0.0) == wait
    assert [one.queued for one in desk.finish(full, 1.0)] == [narrow]
    assert [one.queued.slots for one in desk.finish(none, 1.0)] == [0]
    assert desk.dispatcher.withdraw(slotless)
    assert {wait for ask, wait in desk.dispatcher.predicted_waits(1.0) if not ask.slots} == {
        math.inf
    }


def test_what_needs_no_slot_leaves_the_estimates_of_those_who_wait_for_one_alone() -> None:
    desk = Desk((1,), DispatchRules(slotless_limit=1))
    desk.fill()
    desk.arrive(slots=0)
    desk.arrive(prompt_tokens=500.0)
    before = [list(queued) for queued in desk.pool.queued_tokens]
    ask, placement = desk.arrive(slots=0, prompt_tokens=500.0)
    assert placement is None
    assert [list(queued) for queued in desk.pool.queued_tokens] == before
    desk.dispatcher.withdraw(ask)
    assert [list(queued) for queued in desk.pool.queued_tokens] == before


def test_a_wide_request_is_not_starved_by_narrow_ones() -> None:
    desk = Desk((2,))
    running = desk.fill()
    wide, _ = desk.arrive(1.0, slots=2)
    for i in range(20):
        desk.arrive(1.0 + i / 100)
    assert desk.finish(running[0], 2.0) == []
    assert [one.queued for one in desk.finish(running[1], 3.0)] == [wide]


def test_a_node_that_is_kept_for_a_wide_request_is_open_to_the_classes_above() -> None:
    desk = Desk((2,))
    running = desk.fill()
    desk.arrive(1.0, slots=2)
    assert desk.finish(running[0], 2.0) == []
    assert desk.arrive(2.0)[1] is None
    assert desk.arrive(2.0, priority=Priority.URGENT)[1] is not None


def test_a_warm_request_waits_for_its_node_if_it_ends_sooner_there() -> None:
    desk = Desk((1, 1))
    (_, first) = desk.arrive(excluded={1}, prompt_tokens=100.0, completion_tokens=10.0)
    assert first is not None
    warm, none = desk.arrive(prompt_tokens=5000.0, cached={0: 4900.0})
    assert none is None
    assert warm.deferred_to is desk.rows[0]
    cold, placement = desk.arrive(prompt_tokens=100.0)
    assert placement is not None, "the free slot is for others meanwhile"
    assert placement.row is desk.rows[1]
    assert cold.deferred_to is None
    assert desk.finish(first, 2.0)[0].queued is warm


def test_a_warm_request_goes_elsewhere_if_that_is_sooner() -> None:
    desk = Desk((1, 1))
    desk.arrive(excluded={1}, prompt_tokens=9000.0, completion_tokens=10.0)
    _, placement = desk.arrive(prompt_tokens=5000.0, cached={0: 4900.0})
    assert placement is not None
    assert placement.row is desk.rows[1]


def test_no_more_wait_for_a_node_than_it_has_slots() -> None:
    desk = Desk((2, 4))
    for _ in range(2):
        desk.arrive(excluded={1}, prompt_tokens=10.0, completion_tokens=10.0)
    rows = [desk.arrive(prompt_tokens=9000.0, cached={0: 8990.0})[1] for _ in range(4)]
    assert [placement is None for placement in rows] == [True, True, False, False]


def test_a_hold_ends_when_its_time_has_passed() -> None:
    desk = Desk((1, 1))
    desk.arrive(excluded={1}, prompt_tokens=100.0, completion_tokens=10.0)
    warm, _ = desk.arrive(prompt_tokens=5000.0, cached={0: 4900.0})
    wake = desk.dispatcher.wake_at(0.0)
    assert wake is not None
    assert desk.match(wake - 0.01) == []
    (placement,) = desk.match(wake)
    assert (placement.queued, placement.row) == (warm, desk.rows[1])


def test_a_slot_that_many_declined_is_taken_all_the_same() -> None:
    desk = Desk((1, 20))
    last = next(one for one in desk.fill() if one.row is desk.rows[1])
    for _ in range(3 * MOST_DECLINES):
        desk.arrive(prompt_tokens=5000.0, cached={0: 4900.0}, completion_tokens=1.0)
    assert len(desk.finish(last, 0.5)) == 1


def test_a_waiting_request_is_looked_up_again_when_slots_have_come_free() -> None:
    desk = Desk((1, 1))
    first, second = desk.fill()
    ask, _ = desk.arrive(prompt_tokens=5000.0)
    other, _ = desk.arrive(prompt_tokens=4000.0)
    looked = []

    def recall(one: object) -> None:
        looked.append(one)
        if one is ask:
            ask.cached = {second.row.index: 4990.0}

    desk.dispatcher.refresh_cached = recall
    assert desk.finish(second, 1.0)[0].queued is ask
    assert set(looked) == {ask, other}
    desk.finish(first, 2.0)


def test_a_cancelled_placement_costs_its_caller_nothing() -> None:
    desk = Desk((1,))
    _, placement = desk.arrive()
    assert placement is not None
    account = placement.account
    assert account is not None
    assert account.counter > 0
    for _ in range(2):
        desk.dispatcher.cancelled(placement, 1.0)
    assert account.counter == 0
    assert (desk.rows[0].ours, account.running) == (0, 0)


def test_the_first_token_moves_what_is_expected() -> None:
    desk = Desk((1,))
    _, placement = desk.arrive(prompt_tokens=100.0, completion_tokens=10.0)
    assert placement is not None
    assert placement.ends == pytest.approx(2.0)
    desk.dispatcher.prefill_done(placement, 3.0)
    assert placement.ends == pytest.approx(4.0)


def test_places_and_expected_starts_tell_of_turns() -> None:
    desk = Desk((1,))
    desk.fill()
    asks = [desk.arrive(fairness_key="greedy")[0] for _ in range(5)]
    modest, _ = desk.arrive(fairness_key="modest")
    urgent, _ = desk.arrive(priority=Priority.URGENT)
    places = list(desk.dispatcher.predicted_waits(0.0))
    order = [ask for ask, _ in places]
    assert order[0] is urgent
    assert order.index(modest) <= 2
    assert [ask for ask in order if ask.fairness_key == "greedy"] == asks
    assert [desk.dispatcher.count_ahead(ask) for ask in order] == list(range(7))
    starts = [desk.dispatcher.expected_start(ask, 0.0) for ask in order]
    assert starts == sorted(starts) == [wait for _, wait in places]


def test_a_newcomer_does_not_wait_for_all_that_another_caller_has_in_line() -> None:
    desk = Desk((1,))
    desk.fill()
    for _ in range(50):
        desk.arrive(fairness_key="greedy")
    ahead, wait = desk.dispatcher.count_ahead, desk.dispatcher.predicted_wait
    modest, greedy = desk.ask(fairness_key="modest"), desk.ask(fairness_key="greedy")
    assert ahead(modest) <= 1
    assert ahead(greedy) == 50
    assert wait(modest, 0.0) < wait(greedy, 0.0) / 10
    assert ahead(desk.ask(fairness_key="modest", priority=Priority.BATCH)) == 50
    assert ahead(desk.ask(fairness_key="greedy", priority=Priority.URGENT)) == 0


def test_what_has_been_measured_counts_at_once_for_all_that_waits() -> None:
    desk = Desk((2, 2))
    for row in desk.rows:
        desk.board.set_speed(row, 100.0, 0.1, 0.0)
    desk.fill()
    for _ in range(50):
        desk.arrive()
    guessed = desk.dispatcher.predicted_wait(desk.ask(), 0.0)
    running = desk.dispatcher._outlook._first(desk.ask(), desk.pool, 0.0)
    for row in desk.rows:
        desk.board.set_speed(row, 1000.0, 0.01, 0.0)
    measured = desk.dispatcher.predicted_wait(desk.ask(), 0.0)
    assert measured - running == pytest.approx((guessed - running) / 10)


def test_batch_is_told_of_the_wait_that_the_reserve_makes() -> None:
    desk = Desk((4,), DispatchRules(batch_reserve=0.5))
    for row in desk.rows:
        desk.board.set_speed(row, 1000.0, 0.1, 0.0)
    for tokens in (100.0, 200.0, 300.0, 400.0):
        desk.arrive(prompt_tokens=1.0, completion_tokens=tokens, priority=Priority.URGENT)
    urgent = desk.dispatcher.predicted_wait(desk.ask(priority=Priority.URGENT), 0.0)
    batch = desk.dispatcher.predicted_wait(desk.ask(priority=Priority.BATCH), 0.0)
    assert urgent == pytest.approx(10.0, rel=0.05)
    assert batch == pytest.approx(30.0, rel=0.05)
    desk.dispatcher.set_rules(DispatchRules())
    batch = desk.dispatcher.predicted_wait(desk.ask(priority=Priority.BATCH), 0.0)
    assert batch == pytest.approx(urgent)


def test_no_start_is_expected_while_every_node_is_out() -> None:
    desk = Desk((1,))
    desk.fill()
    ask, _ = desk.arrive()
    desk.board.set_slots(desk.rows[0], 1, 0, 0, alive=False)
    assert desk.dispatcher.expected_start(ask, 0.0) == math.inf


def test_there_is_no_wait_where_there_is_room() -> None:
    desk = Desk((1,))
    assert desk.dispatcher.predicted_wait(desk.ask(), 0.0) == 0.0


def test_what_was_used_as_expected_changes_no_count_though_tokens_are_weighed_anew() -> None:
    desk = Desk((1,))
    _, placement = desk.arrive(fairness_key="one", prompt_tokens=10.0, completion_tokens=20.0)
    assert placement is not None
    account = placement.account
    assert account is not None
    counted = account.counter
    row = placement.row
    desk.dispatcher.placement_state.set_speed(
        row, 30 * row.prefill_tps, row.token_base, row.token_step
    )
    for _ in range(300):
        _, other = desk.arrive(fairness_key="two", slots=0)
        if other is not None:
            desk.finish(other, 0.0)
    desk.dispatcher.settled(placement, 10.0, 0.0, 20.0)
    assert account.counter == counted
