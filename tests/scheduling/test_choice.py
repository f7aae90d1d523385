"""Which node a request goes to."""

from __future__ import annotations

import random
from collections import Counter

from gateway.fleet.node import Node
from gateway.fleet.states import State
from gateway.scheduling.choice import fits, least_loaded, narrowed, to_avoid, to_hold
from tests.fleet.build import take
from tests.scheduling.build import a_request, node

RNG = random.Random(7)


def chosen(*nodes: Node, times: int = 200, **keys: object) -> Counter[str]:
    request = a_request(**keys)  # type: ignore[arg-type]
    found = Counter[str]()
    for _ in range(times):
        one = least_loaded(nodes, request, nodes[0].clock(), RNG)
        found[one.name if one else ""] += 1
    return found


def test_ties_are_broken_at_random() -> None:
    found = chosen(node("a"), node("b"), node("c"), times=600)
    assert set(found) == {"a", "b", "c"}
    assert min(found.values()) > 120


def test_the_least_loaded_gets_it_by_its_share_not_its_count() -> None:
    small, large = node("a", slots=2), node("b", slots=8)
    take(small)
    take(large, 2)
    assert chosen(small, large) == {"b": 200}


def test_a_faster_node_counts_as_less_loaded() -> None:
    slow, fast = node("a", slots=2), node("b", slots=2, speed_hint=3.0)
    take(fast)
    # (1+1)/(2*3) is less than (0+1)/(2*1).
    assert chosen(slow, fast) == {"b": 200}


def test_work_that_others_put_on_a_node_counts() -> None:
    ours, theirs = node("a", slots=2), node("b", slots=2)
    theirs.occupancy.foreign = 1
    assert chosen(ours, theirs) == {"a": 200}
    theirs.occupancy.foreign = 2
    take(ours, 2)
    assert chosen(ours, theirs) == {"": 200}


def test_a_full_node_gets_nothing() -> None:
    one = node("a", slots=2)
    take(one)
    assert chosen(one) == {"a": 200}
    assert chosen(one, slots=2) == {"": 200}
    take(one)
    assert chosen(one) == {"": 200}


def test_work_without_a_slot_goes_to_a_full_node_but_to_none_that_is_out() -> None:
    full = node("a", slots=1)
    take(full)
    assert chosen(full, slots=0) == {"a": 200}
    for state in (State.DOWN, State.LOADING, State.DRAINING, State.MUTE, State.STARTING):
        full.state = state
        assert chosen(full, slots=0) == {"": 200}


def test_nodes_that_failed_it_and_their_hosts_come_last() -> None:
    failed = node("a", host="one")
    same_host, other = node("b", host="one"), node("c", host="two")
    take(other)
    request = a_request(failed={"a"})

    def best(*nodes: Node) -> str | None:
        one = least_loaded(nodes, request, failed.clock(), RNG)
        return one.name if one else None

    assert best(failed, same_host, other) == "c"
    assert best(failed, same_host) == "b"
    assert best(failed) == "a"


def test_a_context_that_is_too_small_is_left_out_while_another_fits() -> None:
    small, large, silent = node("a", context=512), node("b", context=4096), node("c")
    request = a_request(prompt_tokens=1000)
    assert [fits(one, request) for one in (small, large, silent)] == [False, True, True]
    assert narrowed([small, large, silent], request) == [large, silent]
    assert narrowed([small, node("d", context=700)], request)[0].name == "d"
    assert narrowed([small, large], a_request(smallest_context=4096)) == [large]


def test_after_a_failure_other_nodes_are_waited_for_while_one_is_in() -> None:
    failed, other = node("a"), node("b")
    able = [("demo", [failed, other])]
    take(other, 2)
    assert to_avoid(able, {"a"}) == {"a"}
    other.state = State.MUTE
    assert to_avoid(able, {"a"}) == ()
    other.state = State.DOWN
    assert to_avoid(able, {"a"}) == ()


def test_after_a_failure_another_model_of_the_list_will_do() -> None:
    failed, other = node("a"), node("b", models=("second",))
    able = [("demo", [failed]), ("second", [other])]
    assert to_avoid(able, {"a"}) == {"a"}


def test_a_wide_request_waits_at_the_node_that_is_nearest_to_hold_it() -> None:
    idle_soon, busy = node("a", slots=2), node("b", slots=2)
    take(idle_soon)
    take(busy, 2)
    request = a_request(slots=2)
    assert to_hold([busy, idle_soon], request, 0.0) == "a"


def test_a_wide_request_never_waits_at_a_node_that_is_out_while_one_is_in() -> None:
    down, busy = node("a", slots=2, state=State.DOWN), node("b", slots=2)
    take(busy, 2)
    assert to_hold([down, busy], a_request(slots=2), 0.0) == "b"
